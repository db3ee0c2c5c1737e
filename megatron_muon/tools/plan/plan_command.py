"""`megatron-muon plan`: plans a run without ranks; shows its memory, time and exchange.

Figures have the form of the JSON file.
"""

from __future__ import annotations

import argparse
import functools
import gc
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megatron_muon import shipped
from megatron_muon.core.layout import MAX_RANKS
from megatron_muon.core.memory import Memory, moment_bytes
from megatron_muon.errors import UserError, quiet_imports
from megatron_muon.megatron.flags.refusals import needs_whole_updates
from megatron_muon.settings import iteration_of
from megatron_muon.tools.parser import CommandParser, positive, write_json
from megatron_muon.tools.plan import planned_shards, training_step
from megatron_muon.tools.plan.estimate import (
    HARDWARE,
    Group,
    GroupPlan,
    Hardware,
    KindPlan,
    PlanSettings,
    plan_kinds,
)

DESCRIPTION = """\
Plans a run with Muon without running it: whether it fits a GPU, how long a step takes, what is
exchanged.

With --config, memory and the time of a training step come first, with Adam and with Muon. Times
are arithmetic on the hardware profile: they rank configurations; python -m benchmarks.train
measures.
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

_MEMORY = {
    "weights": "weights and fp32 main weights",
    "gradients": "gradients",
    "state": "optimizer state",
    "activations": "activations",
    "step": "Muon's step",
    "total": "total",
}
"""Labels of the parts of a GPU's memory."""

_TO_FIT = {
    "weights": "more ranks, or --data-parallel-sharding-strategy optim_grads_params",
    "gradients": "more ranks, or --grad-reduce-in-bf16",
    "state": "more ranks, --muon-offload cpu, or --muon-momentum-dtype bf16",
    "activations": "a smaller --micro-batch-size, or --recompute-granularity full",
    "step": "a smaller --muon-exchange-buffer-mb",
}
"""Changes that shrink each part."""


def configure(parser: CommandParser) -> None:
    """Add the arguments of `megatron-muon plan`."""
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--config", type=Path, metavar="FILE.yaml", help="experiment file")
    hf = model.add_argument("--hf", type=Path, metavar="MODEL")
    hf.help = "a transformers folder or config.json, for megatron_muon.Muon under FSDP2"
    ep = parser.add_argument("--ep", type=positive, metavar="N")
    ep.help = "with --hf: ranks over which a layer's experts are spread before fully_shard (1)"
    add_run(parser, tuple(HARDWARE))
    mfu = parser.add_argument("--mfu", type=float, default=training_step.MFU, metavar="SHARE")
    mfu.help = f"share of the peak rate in forward and backward ({training_step.MFU:g})"
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")


def add_run(parser: CommandParser, machines: Sequence[str]) -> None:
    """Add the arguments that describe the run: its ranks, its machine, flags of Megatron."""
    add = parser.add_argument
    add("--world-size", type=positive, metavar="N", required=True, help="ranks of the run")
    machine = functools.partial(_machine, machines)
    hardware = add("--hardware", type=machine, default=machines[0], metavar="NAME")
    hardware.help = (
        f"{', '.join(machines)} (the first), or the FILE.yaml that"
        " megatron-muon doctor --gpu --write-profile wrote on the machine"
    )
    node_ranks = add("--node-ranks", type=positive, metavar="N")
    node_ranks.help = "ranks of a node, the run's LOCAL_WORLD_SIZE (gb300: 72, a whole rack)"
    parser.take_megatron_flags(
        "any flag of pretrain_gpt.py, instead of the file's: --global-batch-size 256"
    )


def _machine(machines: Sequence[str], text: str) -> Hardware:
    """A machine by its name or its file, for argparse."""
    if text in machines:
        return HARDWARE[text]
    if not text.endswith(".yaml"):
        raise argparse.ArgumentTypeError(
            f"unknown: {text!r}; choose from {', '.join(machines)}, or give a FILE.yaml"
        )
    import yaml

    try:
        fields = yaml.safe_load(Path(text).read_text("utf-8"))
        usual = asdict(HARDWARE[machines[0]])
        for name, value in usual.items():
            _check_field(name, fields[name], value)
        return Hardware(**{name: fields[name] for name in usual})
    except (OSError, TypeError, KeyError, ValueError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())
        raise argparse.ArgumentTypeError(
            f"{text} does not describe a machine ({type(error).__name__}: {why})"
        ) from None


def _check_field(name: str, value: Any, usual: Any) -> None:
    if isinstance(usual, str | bool):
        is_valid = type(value) is type(usual)
    else:
        is_valid = value >= 0 if name in ("memory_gb", "rack_ranks") else value > 0
    if not is_valid:
        raise ValueError(f"{name} is {value!r}")


def hardware_of(args: argparse.Namespace) -> Hardware:
    """The machine of `args`, with nodes as the run has them."""
    if args.world_size > MAX_RANKS:
        raise UserError(f"--world-size must be at most {MAX_RANKS:,}, got {args.world_size}")
    hardware: Hardware = args.hardware
    return hardware if args.node_ranks is None else replace(hardware, node_ranks=args.node_ranks)


def run(args: argparse.Namespace) -> int:
    """Plan, write the figures as JSON where requested, and print them."""
    hardware = hardware_of(args)
    if not 0 < args.mfu <= 1:
        raise UserError(
            f"--mfu must be above 0 and at most 1, got {args.mfu:g}; {training_step.MFU:g} is usual"
        )
    figures = _plan_config(args, hardware) if args.config else _plan_transformers(args, hardware)
    write_json(args.json, figures)
    show(figures, str(args.config or args.hf))
    return 0


def _plan_config(args: argparse.Namespace, hardware: Hardware) -> Figures:
    if args.ep is not None:
        raise UserError(
            f"--ep is for --hf; with --config give --expert-model-parallel-size {args.ep}"
        )
    config, groups, model = read_config(args.config, args.world_size, hardware, args.flags)
    settings = settings_of(config, hardware)
    figures = _plan(groups, settings, args.world_size, hardware)
    if hardware.processor:
        return figures
    figures["memory"] = training_step.memory(model, config, figures["extra_bytes"], hardware)
    if model.global_batch is not None:
        figures["training_step"], warnings = training_step.simulate(
            model, figures, settings=settings, hardware=hardware, mfu=args.mfu
        )
        figures["notes"] += warnings
    return figures


def _plan_transformers(args: argparse.Namespace, hardware: Hardware) -> Figures:
    if args.flags:
        raise UserError(
            f"--hf plans with the defaults of megatron_muon.Muon; leave {' '.join(args.flags)} out"
        )
    settings, groups = planned_shards.read_transformers(
        args.hf, args.world_size, hardware, args.ep or 1
    )
    return _plan(groups, settings, args.world_size, hardware)


def _plan(
    groups: list[Group], settings: PlanSettings, world_size: int, hardware: Hardware
) -> Figures:
    kinds, unmet = plan_kinds(groups, settings, hardware)
    return {**figures_of(kinds, world_size, settings, hardware), "notes": unmet}


def read_config(
    config: Path, world_size: int, hardware: Hardware, flags: Sequence[str] = ()
) -> tuple[Any, list[Group], training_step.TrainedModel]:
    """Read an experiment file by `planned_model.read_model`; the CPU then stands in for a GPU."""
    shipped.require(config)
    gc.disable()  # collections during imports take half a second
    try:
        with quiet_imports():
            from megatron_muon import cpu

            cpu.install(force=True)
            from megatron_muon.tools.plan.planned_model import read_model
        return read_model(config, world_size, flags, device="cpu" if hardware.processor else "cuda")
    finally:
        gc.enable()


def settings_of(config: Any, hardware: Hardware) -> PlanSettings:
    """The settings of a `MuonOptimizerConfig` that `check_supported` has accepted, on a machine."""
    iteration = hardware.iterate(iteration_of(config))
    is_adaptive = config.optimizer == "adaptive_muon"
    method = config.adaptive_muon_moment2_method if is_adaptive else None
    in_bf16 = {"auto": iteration.half, "bf16": True, "fp32": False}[config.muon_exchange_dtype]
    moment = moment_bytes(method, cautious=config.muon_cautious_weight_decay)
    team_size = "1" if needs_whole_updates(config) else config.muon_team_size
    memory = Memory(2 if in_bf16 else 4, iteration, moment)
    return PlanSettings(config.muon_exchange_buffer_mb, memory, team_size)


_SUMS = (
    "matrices",
    "travelling",
    "parameters",
    "waves",
    "ns_ms",
    "exchange_ms",
    "step_ms",
)
"""Figures of a group that add up, as groups step one by one."""


def figures_of(
    kinds: Sequence[KindPlan], world_size: int, settings: PlanSettings, hardware: Hardware
) -> Figures:
    """The figures of rank 0's groups, and of all of them together."""
    plans = [kind.of(0) for kind in kinds]
    groups = [_group_figures(kind, item) for kind, item in zip(kinds, plans, strict=True)]
    iteration = settings.memory.iteration
    figures = {
        "digest": "-".join(item.digest for item in plans),
        "world_size": world_size,
        "hardware": hardware.name,
        "node_ranks": hardware.node_ranks,
        "settings": {
            "buffer_mb": settings.buffer_mb,
            "exchange_dtype": "bf16" if settings.memory.element_bytes == 2 else "fp32",
            "team_size": settings.team_size,
            "ns": iteration.method,
            "ns_dtype": "bf16" if iteration.half else "fp32",
            "ns_steps": iteration.steps,
        },
    }
    for name in _SUMS:
        figures[name] = sum(group[name] for group in groups)
    for name in ("extra_bytes", "buffer_bytes", "peers"):
        figures[name] = max(group[name] for group in groups)
    loads = [item.plan.loads for item in plans]
    mean = sum(sum(each) / len(each) for each in loads)
    figures["exchange_bytes"] = _received(kinds, world_size)
    figures["max_over_mean"] = sum(map(max, loads)) / mean if mean else 1.0
    figures["groups"] = groups
    return figures


def _received(kinds: Sequence[KindPlan], world_size: int) -> int:
    """The most bytes that a rank receives in a step of all of its groups."""
    received = [0] * world_size
    for kind in kinds:
        left = set(range(world_size))
        while left:
            members = kind.group.members(min(left))
            left -= set(members)
            for rank, count in zip(members, kind.of(members[0]).received, strict=True):
                received[rank] += count
    return max(received, default=0)


def _group_figures(kind: KindPlan, item: GroupPlan) -> Figures:
    layout = item.plan.layout
    return {
        "name": kind.group.name,
        "ranks": layout.world_size,
        **item.plan.figures(),
        "parameters": sum(matrix.numel for matrix in layout.matrices),
        "extra_bytes": int(item.extra.max(initial=0)),
        "ns_ms": item.ns_ms,
        "exchange_ms": item.exchange_ms,
        "step_ms": item.step_ms,
    }


def show(figures: Figures, source: str) -> None:
    """Print the page."""
    ranks = f"{figures['world_size']:,} ranks"
    print_line(f"Plan of {source} at {ranks}, {figures['hardware']}", "bold")
    if "memory" in figures:
        _show_memory(figures["memory"])
    if "training_step" in figures:
        _show_time(figures["training_step"])
    rows = [
        ("step, overlapped", duration(figures["step_ms"])),
        ("Newton-Schulz", duration(figures["ns_ms"])),
        ("exchange", duration(figures["exchange_ms"])),
        ("extra memory, at most", size(figures["extra_bytes"])),
        ("matrices, exchanged", f"{figures['matrices']:,}, {figures['travelling']:,}"),
        ("most received by a rank", size(figures["exchange_bytes"])),
        ("owners' load, max / mean", f"{figures['max_over_mean']:.3f}"),
    ]
    print_table(("Muon's step", "a rank"), rows)
    settings = figures["settings"]
    print_line(
        f"Newton-Schulz {settings['ns']}, {settings['ns_dtype']}, {settings['ns_steps']} steps;"
        f" exchange in {settings['exchange_dtype']}; nodes of {figures['node_ranks']} ranks; digest"
        f" {figures['digest']}"
    )
    for note in figures["notes"]:
        print_line(f"warning: {note}", "yellow")


def _show_memory(memory: Figures) -> None:
    adam, muon = memory["adam"], memory["muon"]
    rows = []
    for part, label in _MEMORY.items():
        rows.append((label, size(adam[part]), size(muon[part])))
    print_table(("memory of a GPU", "with Adam", "with Muon"), rows)
    capacity = f"a GPU has {size(memory['capacity'])}"
    if memory["fits"]:
        print_line(f"with Muon it fits: {capacity}\n", "green")
        return
    largest = max(_TO_FIT, key=muon.__getitem__)
    print_line(f"with Muon it DOES NOT FIT: {capacity}", "red")
    print_line(f"most is {_MEMORY[largest]}; try {_TO_FIT[largest]}\n", "red")


def _show_time(step: Figures) -> None:
    adam, muon = step["adam_ms"], step["muon_ms"]
    waiting = [f"{each['communication'] / each['total']:.0%}" for each in (adam, muon)]
    rows = [
        ("training step", duration(adam["total"]), duration(muon["total"])),
        ("share waiting for communication", *waiting),
        ("Muon / Adam", "1", f"{step['muon_over_adam']:.4f}"),
    ]
    print_table((f"a step of {step['tokens']:,} tokens", "with Adam", "with Muon"), rows)
    print_line("")


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table of figures, with labels in its first column."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False).print(table)


def print_line(text: str, style: str = "dim") -> None:
    """Print a line without wrapping it."""
    from rich.console import Console
    from rich.text import Text

    Console(highlight=False).print(Text(text, style=style), soft_wrap=True)


def size(count: float) -> str:
    """Bytes in a readable unit."""
    power = min((max(int(count), 1).bit_length() - 1) // 10, 3)
    unit = ("B", "KiB", "MiB", "GiB")[power]
    return f"{count / 1024**power:,.{min(power, 1)}f} {unit}"


def duration(ms: float) -> str:
    """Milliseconds in a readable unit."""
    return f"{ms / 1e3:,.2f} s" if ms >= 1e4 else f"{ms:,.1f} ms"
