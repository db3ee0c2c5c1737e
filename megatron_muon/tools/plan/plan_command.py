"""`megatron-muon plan`: plans a run without ranks; shows its memory, time and exchange.

Figures have the form of the JSON file.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from megatron_muon.core.methods.newton_schulz import NewtonSchulz
from megatron_muon.core.rules import RULES
from megatron_muon.errors import UserError, quiet_imports, reason_of
from megatron_muon.megatron import plan_figures
from megatron_muon.megatron.flags.refusals import needs_whole_updates
from megatron_muon.settings import word_as_flags
from megatron_muon.tools.parser import CommandParser, positive, write_json
from megatron_muon.tools.plan.estimate import (
    HARDWARE,
    Group,
    GroupPlan,
    Hardware,
    PlanSettings,
    plan_groups,
)

DESCRIPTION = """\
Plans a Muon run without starting it: the optimizer's memory per rank, its step time, and its
communication.

Times are computed from the hardware profile. Use them to rank configurations; to measure, use
python -m benchmarks.train. For the memory of all of training, see Megatron's theoretical memory
report.
"""

EXAMPLES = """\
examples:
  megatron-muon plan --config configs/llama3-8b.yaml --world-size 64
  megatron-muon plan --config configs/llama3-8b.yaml --world-size 64 --muon-exchange-buffer-mb 512
  megatron-muon plan --config configs/moe-large.yaml --world-size 4096 --hardware gb300
  megatron-muon plan --hf configs/transformers/llama3-8b.json --world-size 64
  megatron-muon plan --hf configs/transformers/qwen3-30b-a3b.json --world-size 64 --ep 8
"""

Figures = dict[str, Any]

STORED_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1 + 4 / 128}
"""Momentum of an element by --muon-momentum-dtype; int8 has a scale for 128 columns."""


def configure(parser: CommandParser) -> None:
    """Add the arguments of `megatron-muon plan`."""
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--config", type=Path, metavar="FILE.yaml", help="experiment file")
    model.add_argument(
        "--hf",
        type=Path,
        metavar="MODEL",
        help="a transformers folder or config.json, for megatron_muon.Muon under FSDP2",
    )
    parser.add_argument(
        "--ep",
        type=positive,
        metavar="N",
        help="with --hf: ranks to spread each layer's experts over before fully_shard (default: 1)",
    )
    add_run(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results to FILE")


def add_run(parser: CommandParser) -> None:
    """Add the arguments that describe the run: its ranks, its machine, flags of Megatron."""
    add = parser.add_argument
    add("--world-size", type=positive, metavar="N", required=True, help="number of ranks")
    add(
        "--hardware",
        type=_machine,
        default=HARDWARE["h100-sxm"],
        metavar="NAME",
        help=f"{', '.join(HARDWARE)} (default: the first), or the FILE.yaml that"
        " megatron-muon doctor --gpu --write-profile wrote on the machine",
    )
    add(
        "--node-ranks",
        type=positive,
        metavar="N",
        help="ranks per node, the run's LOCAL_WORLD_SIZE (gb300: 72, a whole rack)",
    )
    parser.take_megatron_flags(
        "any flag of pretrain_gpt.py; overrides the file: --global-batch-size 256"
    )


def _machine(text: str) -> Hardware:
    """A machine by its name or its file, for argparse."""
    if text in HARDWARE:
        return HARDWARE[text]
    import yaml

    try:
        profile = yaml.safe_load(Path(text).read_text("utf-8"))
        return Hardware(**{field.name: profile[field.name] for field in fields(Hardware)})
    except (OSError, TypeError, KeyError, ValueError, yaml.YAMLError) as error:
        why = reason_of(error)
        raise argparse.ArgumentTypeError(
            f"{text} does not describe a machine ({why}); choose from {', '.join(HARDWARE)}"
        ) from None


def hardware_of(args: argparse.Namespace) -> Hardware:
    """The machine of `args`, with nodes as the run has them."""
    hardware: Hardware = args.hardware
    return hardware if args.node_ranks is None else replace(hardware, node_ranks=args.node_ranks)


def run(args: argparse.Namespace) -> int:
    """Plan, write the figures as JSON where requested, and print them."""
    hardware = hardware_of(args)
    settings, groups, others = _read(args, hardware)
    plans, notes = plan_groups(groups, settings, hardware)
    figures = figures_of(plans, args.world_size, settings, hardware)
    figures["adam_bytes"] = round(settings.adam_bytes * others)
    figures["notes"] = notes
    write_json(args.json, figures)
    show(figures, str(args.config or args.hf))
    return 0


def _read(args: argparse.Namespace, hardware: Hardware) -> tuple[PlanSettings, list[Group], float]:
    """The settings, the matrices, and the elements of the scalar optimizer on a rank."""
    if args.config:
        if args.ep is not None:
            raise UserError(
                f"--ep is for --hf; with --config give --expert-model-parallel-size {args.ep}"
            )
        config, groups, others = read_config(args.config, args.world_size, hardware, args.flags)
        return settings_of(config, hardware), groups, others
    if args.flags:
        raise UserError(
            f"--hf plans with the defaults of megatron_muon.Muon; leave {' '.join(args.flags)} out"
        )
    from megatron_muon.tools.plan.planned_shards import read_transformers

    return read_transformers(args.hf, args.world_size, hardware, args.ep or 1)


def read_config(
    config: Path, world_size: int, hardware: Hardware, flags: Sequence[str] = ()
) -> tuple[Any, list[Group], float]:
    """Read an experiment file by `planned_model.read_model`; the CPU then stands in for a GPU."""
    gc.disable()  # collections during imports take half a second
    try:
        with quiet_imports():
            from megatron_muon import cpu

            cpu.install(force=True)
            from megatron_muon.tools.plan.planned_model import read_model
        return read_model(config, world_size, flags, device="cpu" if hardware.processor else "cuda")
    finally:
        gc.freeze()  # nor is anything imported collected later
        gc.enable()


def settings_of(config: Any, hardware: Hardware) -> PlanSettings:
    """The settings of a `MuonOptimizerConfig` that `check_supported` has accepted, on a machine."""
    from megatron_muon.megatron.builder import method_of

    is_adaptive = config.optimizer == "adaptive_muon"
    moment2 = config.adaptive_muon_moment2_method if is_adaptive else None
    with word_as_flags():
        method = method_of(config)
    names = [] if moment2 is None else [moment2]
    if config.muon_cautious_weight_decay:
        names.append("cautious")
    rules = [RULES[name] for name in names]
    sizes = hardware.sizes(method, config.muon_exchange_dtype, rules)
    team_size = "1" if needs_whole_updates(config) else config.muon_team_size
    kept = 1.0  # share of momentum on the device
    if config.muon_offload != "none":
        kept -= config.muon_offload_fraction
    sizes = replace(sizes, apart=method.takes_momentum and kept < 1 and not hardware.processor)
    momentum = STORED_BYTES[config.muon_momentum_dtype] * kept * method.takes_momentum
    if moment2 == "adamuon":
        momentum += 4
    adam = 8.0 * kept if config.muon_offload_state == "all" else 8.0
    return PlanSettings(config.muon_exchange_buffer_mb, sizes, team_size, momentum, adam)


_BYTES = {
    "momentum, on the device": "momentum_bytes",
    "Adam's moments, on the device": "adam_bytes",
    "buffers of a step": "extra_bytes",
    "received by a rank, at most": "exchange_bytes",
}
_TIMES = {
    "Muon's step": "step_ms",
    "  Newton-Schulz": "ns_ms",
    "  exchange": "exchange_ms",
    "  hidden by overlap": "hidden_ms",
    "elementwise passes, in addition": "elementwise_ms",
}
"""Labels and figures of the page."""

_SUMS = """\
matrices travelling parameters waves exchange_bytes momentum_bytes
ns_ms exchange_ms step_ms elementwise_ms"""
"""Figures of a group that add up, as groups step one by one."""


def figures_of(
    plans: Sequence[GroupPlan], world_size: int, settings: PlanSettings, hardware: Hardware
) -> Figures:
    """The figures of rank 0's groups, and of all of them together."""
    groups = [_group_figures(item, settings) for item in plans]
    method = settings.sizes.method
    of_method: Figures = {"optimizer": method.products}
    if isinstance(method, NewtonSchulz):
        of_method = {
            "ns": method.iteration.method,
            "ns_dtype": "bf16" if method.iteration.half else "fp32",
            "ns_steps": method.iteration.steps,
        }
    figures: Figures = {
        "digest": "-".join(item.plan.digest() for item in plans),
        "world_size": world_size,
        "hardware": hardware.name,
        "settings": {
            "node_ranks": hardware.node_ranks,
            "buffer_mb": settings.buffer_mb,
            "exchange_dtype": "bf16" if settings.sizes.dtype.itemsize == 2 else "fp32",
            "team_size": settings.team_size,
            **of_method,
        },
    }
    for name in _SUMS.split():
        figures[name] = sum(group[name] for group in groups)
    alone_ms = figures["ns_ms"] + figures["exchange_ms"]
    figures["hidden_ms"] = max(alone_ms - figures["step_ms"], 0.0)
    for name in ("extra_bytes", "buffer_bytes"):
        figures[name] = max(group[name] for group in groups)
    loads = [plan_figures.loads_of(item.plan) for item in plans]
    figures["max_over_mean"] = _imbalance(loads)
    states = [plan_figures.state_bytes(item.plan).tolist() for item in plans]
    if any(map(any, states)):
        figures["state_max_over_mean"] = _imbalance(states)
    figures["groups"] = groups
    return figures


def _imbalance(of_groups: Sequence[Sequence[float]]) -> float:
    """Largest over mean of what ranks have, of groups that step one by one."""
    mean = sum(sum(each) / len(each) for each in of_groups)
    return sum(map(max, of_groups)) / mean if mean else 1.0


def _group_figures(item: GroupPlan, settings: PlanSettings) -> Figures:
    layout = item.plan.layout
    state_bytes = settings.momentum_bytes * item.held
    if not settings.sizes.method.keeps_on_host:
        state_bytes = state_bytes + plan_figures.state_bytes(item.plan)
    return {
        "name": item.name,
        "ranks": layout.world_size,
        **plan_figures.figures(item.plan),
        "parameters": sum(matrix.numel for matrix in layout.matrices),
        "momentum_bytes": round(state_bytes.max()),
        "extra_bytes": int(item.plan.step_bytes.max()),
        **asdict(item.times),
    }


def show(figures: Figures, source: str) -> None:
    """Print the page."""
    print(f"Plan of {source} at {figures['world_size']:,} ranks, {figures['hardware']}")
    optimizer = figures["settings"].get("optimizer", "Muon")
    for label, name in _BYTES.items():
        if optimizer != "Muon":
            label = label.replace("momentum", "state of matrices")
        print(f"{label:<32}{figures[name] / 2**20:>12,.1f} MiB")
    for label, name in _TIMES.items():
        if optimizer != "Muon":
            label = label.replace("Newton-Schulz", "products, factors").replace("Muon", optimizer)
        print(f"{label:<32}{figures[name]:>12,.1f} ms")
    print(f"{'load of owners, max / mean':<32}{figures['max_over_mean']:>13.2f}")
    if "state_max_over_mean" in figures:
        print(f"{'state of owners, max / mean':<32}{figures['state_max_over_mean']:>13.2f}")
    for group in figures["groups"]:
        print(
            f"{group['name']}: {group['matrices']:,} matrices, {group['travelling']:,} exchanged;"
            f" {group['owners']:,} of {group['ranks']:,} ranks own them;"
            f" matrices by size of team: {group['matrices_of_teams']}"
        )
    settings = ", ".join(f"{name} {value}" for name, value in figures["settings"].items())
    print(f"{settings}; digest {figures['digest']}")
    for note in figures["notes"]:
        print(f"warning: {note}")
