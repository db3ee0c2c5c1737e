"""The flags that say where momentum lives, and what they do not combine with.

Plain values in, so that the command line can ask before torch is imported, and a config that a script has built too.
"""

from __future__ import annotations

from typing import Any

from megatron_muon.errors import UserError

OFFLOADS = ("none", "cpu", "nvme")
DTYPES = ("fp32", "bf16", "int8")
NS_DEVICES = ("auto", "accelerator", "cpu")
DEFAULTS: dict[str, Any] = {
    "muon_offload": "none",
    "muon_offload_dir": None,
    "muon_offload_fraction": 1.0,
    "muon_offload_buffer_mb": 24.0,
    "muon_offload_keep": False,
    "muon_ns_device": "auto",
    "muon_momentum_dtype": "fp32",
}


def add_offload_arguments(group: Any) -> None:
    """Add the flags to an argument group."""
    group.add_argument(
        "--muon-offload",
        choices=OFFLOADS,
        default=DEFAULTS["muon_offload"],
        help="where Muon's momentum lives between steps: on the device, in host memory (cpu), or in files on a local "
        "disk (nvme); the updates are the same to the last bit",
    )
    group.add_argument("--muon-offload-dir", metavar="DIR", help="with --muon-offload nvme: a directory on a fast disk")
    group.add_argument(
        "--muon-offload-fraction",
        type=float,
        default=DEFAULTS["muon_offload_fraction"],
        metavar="F",
        help="with --muon-offload: the share of each rank's momentum that leaves the device, largest shards first",
    )
    group.add_argument(
        "--muon-offload-buffer-mb",
        type=float,
        default=DEFAULTS["muon_offload_buffer_mb"],
        metavar="MIB",
        help="with --muon-offload: what momentum on its way may fill on a rank, in host memory and on a GPU alike, at "
        "least three times the largest shard",
    )
    group.add_argument(
        "--muon-offload-keep",
        action="store_true",
        help="with --muon-offload nvme: leave the files at the end, to look at; no run reads them again",
    )
    group.add_argument(
        "--muon-ns-device",
        choices=NS_DEVICES,
        default=DEFAULTS["muon_ns_device"],
        help="with --muon-offload on a machine with a GPU: orthogonalise there, with momentum streamed through, or on "
        "the CPU, with only gradients and updates on their way; auto: there",
    )
    group.add_argument(
        "--muon-momentum-dtype",
        choices=DTYPES,
        default=DEFAULTS["muon_momentum_dtype"],
        help="how momentum is stored: bf16 takes a half and int8 a quarter of fp32's bytes, rounded stochastically; "
        "computed with in fp32",
    )


def given_flag(values: Any) -> str | None:
    """The first of these flags that is not at its default, for refusals; None if all are."""
    for name, default in DEFAULTS.items():
        if getattr(values, name) != default:
            return "--" + name.replace("_", "-")
    return None


def check_offload(values: Any, *, on_cpu: bool, plain: bool) -> None:
    """Check these flags.

    Args:
        values: parsed flags, or a MuonOptimizerConfig.
        on_cpu: the run's device is the CPU.
        plain: the ranks hold whole matrices, and Muon is megatron-core's own.

    Raises:
        UserError: names the value and the remedy.
    """
    for name, choices in (("muon_offload", OFFLOADS), ("muon_momentum_dtype", DTYPES), ("muon_ns_device", NS_DEVICES)):
        if getattr(values, name) not in choices:
            flag = "--" + name.replace("_", "-")
            raise UserError(f"{flag} {getattr(values, name)} does not exist; use {', '.join(choices)}")
    if plain and (ours := given_flag(values)):
        raise UserError(
            f"{ours} needs momentum that this package keeps: with --data-parallel-sharding-strategy no_shard Muon is "
            "megatron-core's own; use optim, optim_grads or optim_grads_params, or --muon-share-replicated"
        )
    if values.muon_offload == "nvme" and not values.muon_offload_dir:
        raise UserError("--muon-offload nvme needs --muon-offload-dir DIR, a directory on a fast local disk")
    given = {name: getattr(values, name) != default for name, default in DEFAULTS.items()}
    for flag, is_given, needs in (
        ("--muon-offload-dir", given["muon_offload_dir"], ("nvme",)),
        ("--muon-offload-keep", given["muon_offload_keep"], ("nvme",)),
        ("--muon-offload-fraction", given["muon_offload_fraction"], ("cpu", "nvme")),
        ("--muon-offload-buffer-mb", given["muon_offload_buffer_mb"], ("cpu", "nvme")),
        ("--muon-ns-device", given["muon_ns_device"], ("cpu", "nvme")),
    ):
        if is_given and values.muon_offload not in needs:
            raise UserError(
                f"{flag} needs --muon-offload {' or '.join(needs)}, and it is {values.muon_offload}; change that, or "
                f"leave {flag} out"
            )
    if values.muon_ns_device == "accelerator" and on_cpu:
        raise UserError("--muon-ns-device accelerator: this run has none; use --muon-ns-device cpu, or leave it out")
    if values.muon_ns_device == "cpu" and values.optimizer == "adaptive_muon" and not on_cpu:
        raise UserError(
            "--muon-ns-device cpu is not supported with --optimizer adaptive_muon, whose second moment stays on the "
            "GPU; use --muon-ns-device accelerator, or leave it out"
        )
