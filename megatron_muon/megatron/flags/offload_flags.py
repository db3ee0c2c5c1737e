"""What the flags that say where momentum lives do not combine with.

Plain values in, so that the command line can ask before torch is imported, and a config that a script has built too.
"""

from __future__ import annotations

from typing import Any

from megatron_muon.errors import UserError
from megatron_muon.megatron.flags.fields import DTYPES, NS_DEVICES, OFFLOADS, MuonSettings

_FIELDS = (
    "muon_offload",
    "muon_offload_dir",
    "muon_offload_fraction",
    "muon_offload_buffer_mb",
    "muon_offload_keep",
    "muon_ns_device",
    "muon_momentum_dtype",
)
DEFAULTS: dict[str, Any] = {name: getattr(MuonSettings, name) for name in _FIELDS}


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
