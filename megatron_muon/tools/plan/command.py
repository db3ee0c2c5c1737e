"""`megatron-muon plan`: what the owner scheme would do at a size, on paper.

Takes a config and a number of ranks, or the layout of a real run, makes the plan that training would make, and says how
even it is, what travels, what memory it takes and what a step may cost on a named machine. Needs no GPU and no ranks.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_muon import shipped
from megatron_muon.core.cost import AUTO, Iteration
from megatron_muon.core.layout import MAX_RANKS
from megatron_muon.core.memory import moment_bytes
from megatron_muon.core.numbers import check_number
from megatron_muon.errors import UserError, quiet_imports
from megatron_muon.megatron.flags.refusals import needs_whole_updates
from megatron_muon.megatron.layout_file import read_captured
from megatron_muon.settings import TEAM_SIZES, MuonSettings
from megatron_muon.tools.parser import positive, write_json
from megatron_muon.tools.plan import training_step
from megatron_muon.tools.plan.asked import check_unmet, flags_as_typed
from megatron_muon.tools.plan.estimate import HARDWARE, Group, Hardware, Settings, plan_kind
from megatron_muon.tools.plan.figures import report

EVEN = 1.05
"""Loads whose maximum is within this factor of the mean count as even."""

EXAMPLES = """\
examples:
  an 8B model on 64 GPUs:
    megatron-muon plan --config configs/llama3-8b.yaml --world-size 64
  a mixture of experts on 4,096, with figures as JSON:
    megatron-muon plan --config configs/moe-large.yaml --world-size 4096 --hardware gb300 --json plan.json
  a Hugging Face model under FSDP2, for megatron_muon.Muon:
    megatron-muon plan --hf configs/transformers/llama3-8b.json --world-size 64
  a training step of 8 M tokens, with Adam and with Muon:
    megatron-muon plan --config configs/llama3-8b.yaml --world-size 1024 --tokens 8388608
  the layout of a real run, captured with --muon-dump-layout:
    megatron-muon plan --layout layout.json
"""

DESCRIPTION = """\
Plan a Muon step on paper: who orthogonalises what, how even that is, what travels, how long it may take.

Times are arithmetic on the hardware profile: Newton-Schulz, exchange and what the host enqueues, overlapped, with 2
microseconds for each peer of an all-to-all and 5 for a kernel, without elementwise work. With --config, a whole
training step of the config's batch (or --tokens) on GPUs follows, with Adam and with Muon, and what that assumes. They
rank configurations; measure with python -m benchmarks.train.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `megatron-muon plan`."""
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add("--config", type=Path, metavar="FILE.yaml", help="experiment file; its model and parallel flags count")
    add("--world-size", type=int, metavar="N", help="ranks of the run; needed with --config and --hf")
    add("--hf", type=Path, metavar="MODEL",
        help="a transformers folder or config.json, under FSDP2 over all ranks with megatron_muon.Muon")  # fmt: skip
    add("--layout", type=Path, metavar="FILE.json", help="a captured layout instead of a model")
    add("--buffer-mb", type=float, metavar="MIB",
        help="what a step may take on a rank (the config's --muon-exchange-buffer-mb)")  # fmt: skip
    add("--exchange-dtype", choices=("auto", "fp32", "bf16"),
        help="what travels; auto: as Newton-Schulz starts (the config's --muon-exchange-dtype, or auto)")  # fmt: skip
    add("--team-size", choices=TEAM_SIZES,
        help="ranks that own a matrix together (the config's --muon-team-size, or auto)")  # fmt: skip
    add("--ns", choices=("auto", "standard", "gram"), help="the iteration (the config's --muon-ns, or auto)")
    add("--ns-dtype", choices=("bf16", "fp32"),
        help="its precision (the config's --muon-fp32-matmul-prec: bf16 for medium and without it)")  # fmt: skip
    add("--hardware", choices=tuple(HARDWARE), default="h100-sxm", metavar="NAME",
        help=f"machine to estimate for: {', '.join(HARDWARE)} (the first)")  # fmt: skip
    add_node_ranks(parser)
    add("--tokens", type=positive, metavar="N",
        help="of a training step (the config's --global-batch-size times --seq-length)")  # fmt: skip
    add("--mfu", type=float, default=training_step.MFU, metavar="SHARE",
        help=f"of the peak rate, that model FLOPs of forward and backward reach ({training_step.MFU:g})")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="also write the figures to FILE")


def add_node_ranks(parser: argparse.ArgumentParser) -> None:
    """Adds the flag that `hardware_of` reads."""
    parser.add_argument("--node-ranks", type=positive, metavar="N",
        help="ranks of a node, the run's LOCAL_WORLD_SIZE (those of the machine; gb300: 72, a whole rack)")  # fmt: skip


def hardware_of(args: argparse.Namespace) -> Hardware:
    """The machine that is asked for, with nodes as the run has them."""
    hardware = HARDWARE[args.hardware]
    return hardware if args.node_ranks is None else replace(hardware, node_ranks=args.node_ranks)


def run(args: argparse.Namespace) -> int:
    """Plans, writes the figures as JSON where asked, and prints them."""
    hardware = hardware_of(args)
    _check_training_step(args, hardware)
    config, groups, world_size, model = _read(args)
    settings = _settings(args, config, hardware)
    with flags_as_typed(args):
        plans = [plan_kind(group, settings, hardware, world_size) for group in groups]
        unmet = check_unmet(plans, alone=bool(args.team_size))
    figures = {**report(plans, world_size, settings, hardware), "unmet": unmet}
    tokens = args.tokens or (model.tokens if model is not None and not hardware.processor else None)
    if model is not None and tokens is not None:
        figures["training_step"] = training_step.simulate(
            model,
            tokens,
            world_size=world_size,
            muon_step_ms=figures["estimated_ms"]["step"],
            imbalance=figures["ns_load"]["max_over_mean"],
            settings=settings,
            hardware=hardware,
            mfu=args.mfu,
        )
    write_json(args.json, figures)
    show(figures, str(args.config or args.hf or args.layout), hardware)
    return 0


def _check_training_step(args: argparse.Namespace, hardware: Hardware) -> None:
    if not 0 < args.mfu <= 1:
        raise UserError(f"--mfu must be above 0 and at most 1, got {args.mfu:g}; {training_step.MFU:g} is usual")
    if args.tokens is not None and args.config is None:
        raise UserError(f"--tokens {args.tokens} needs --config FILE.yaml, which says what the whole model computes")
    if args.tokens is not None and hardware.processor:
        raise UserError(
            f"--tokens {args.tokens} with --hardware {hardware.name}: training steps are estimated for GPUs alone; "
            "measure with python -m benchmarks.train"
        )


def _read(args: argparse.Namespace) -> tuple[MuonSettings, list[Group], int, training_step.Model | None]:
    """Muon's settings, what is planned, the number of ranks, and what else a training step takes, if it is known."""
    if [args.config, args.hf, args.layout].count(None) != 2:
        raise UserError("give --config FILE.yaml or --hf MODEL, with --world-size N, or --layout FILE.json")
    if args.layout is not None:
        layout, of_world = read_captured(args.layout)
        ranks = layout.world_size
        if args.world_size not in (None, ranks):
            raise UserError(
                f"{args.layout} holds a layout of {ranks} ranks, not {args.world_size}; leave --world-size out"
            )
        if not layout.matrices:
            raise UserError(f"{args.layout} holds no matrices")
        return MuonSettings(), [Group("layout", layout, ranks=of_world)], ranks, None
    if args.world_size is None:
        source = f"--config {args.config}" if args.config else f"--hf {args.hf}"
        raise UserError(f"how many ranks? add --world-size, as in {source} --world-size 64")
    if not 1 <= args.world_size <= MAX_RANKS:
        raise UserError(f"--world-size must be at least 1 and at most {MAX_RANKS:,}, got {args.world_size}")
    if args.hf is not None:
        from megatron_muon.fsdp.arguments import iteration_of
        from megatron_muon.tools.plan import transformers_model

        settings = MuonSettings()
        iteration = iteration_of()
        vars(settings).update(muon_coefficient_type=iteration.coefficient_type, muon_num_ns_steps=iteration.steps)
        return settings, [transformers_model.read_model(args.hf, args.world_size)], args.world_size, None
    shipped.require(args.config)
    with quiet_imports():
        from megatron_muon import cpu

        cpu.install(force=True)
        from megatron_muon.tools.plan.matrices import read_model

        device = "cpu" if HARDWARE[args.hardware].processor else "cuda"
        planned = read_model(args.config, args.world_size, device=device)
    return planned.settings, planned.groups, args.world_size, planned.model


def _settings(args: argparse.Namespace, config: Any, hardware: Hardware) -> Settings:
    return settings_of(
        config,
        hardware,
        buffer_mb=args.buffer_mb,
        exchange_dtype=args.exchange_dtype,
        team_size=args.team_size,
        ns=args.ns,
        ns_dtype=args.ns_dtype,
    )


def settings_of(
    config: Any,
    hardware: Hardware,
    *,
    buffer_mb: float | None = None,
    exchange_dtype: str | None = None,
    team_size: str | None = None,
    ns: str | None = None,
    ns_dtype: str | None = None,
) -> Settings:
    """What is given, else the config's; `MuonSettings` alone lacks the settings that `OptimizerConfig` has."""
    precision = getattr(config, "muon_fp32_matmul_prec", "medium")
    if ns_dtype is not None:
        precision = "medium" if ns_dtype == "bf16" else "highest"
    exchange = exchange_dtype or config.muon_exchange_dtype
    buffer = config.muon_exchange_buffer_mb if buffer_mb is None else buffer_mb
    if buffer is not None:
        check_number("muon_exchange_buffer_mb", buffer, flag=None if buffer_mb is None else "--buffer-mb")
    iteration = Iteration(
        getattr(config, "muon_coefficient_type", Iteration.coefficient_type),
        getattr(config, "muon_num_ns_steps", Iteration.steps),
        precision,
        ns or config.muon_ns,
    )
    iteration.check()
    half = iteration.half
    size = team_size or config.muon_team_size
    if hasattr(config, "optimizer") and needs_whole_updates(config):
        if size not in (AUTO, "1"):
            raise UserError(f"--team-size {size}: NorMuon has no teams; use 1, or leave it out")
        size = "1"
    iteration = replace(iteration, products=hardware.products(half=half))
    adaptive = getattr(config, "optimizer", "muon") == "adaptive_muon"
    travels = ("bf16" if half else "fp32") if exchange == "auto" else exchange
    return Settings(
        buffer,
        travels,
        iteration,
        size,
        getattr(config, "muon_nesterov", True),
        moment_bytes(
            config.adaptive_muon_moment2_method if adaptive else None, cautious=config.muon_cautious_weight_decay
        ),
        config.muon_cautious_weight_decay,
        config.muon_hyperball,
    )


def show(figures: dict[str, Any], source: str, hardware: Hardware) -> None:
    """Print the figures as a table, a column for each group and one for a rank in all."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    columns = {f"{group['name']}, {group['ranks']:,} ranks": group for group in figures["groups"]}
    if len(columns) > 1:
        columns["a rank in all"] = figures
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("")
    for heading in columns:
        table.add_column(heading, justify="right")
    for label, shown in _ROWS.items():
        table.add_row(label, *map(shown, columns.values()))
    settings = figures["settings"]
    others = "".join(f", {count:,} matrices {steps}" for steps, count in figures["matrices_of_steps"].items())
    console.print(Text(f"Plan of {source} at {figures['world_size']:,} ranks", style="bold"), soft_wrap=True)
    console.print(table)
    for line in (
        f"Newton-Schulz {settings['ns']}, {settings['ns_dtype']}, {settings['ns_steps']} steps{others}; exchange in "
        f"{settings['exchange_dtype']}; at most {size(figures['buffer_bytes'])} for a step; digest {figures['digest']}",
        f"{hardware.name}: {hardware.source}",
        f"nodes of {hardware.node_ranks} ranks: the run's LOCAL_WORLD_SIZE, else --node-ranks",
        *figures["unmet"],
        *notes(figures),
    ):
        console.print(Text(line, style="dim"), soft_wrap=True)
    if (step := figures.get("training_step")) is not None:
        console.print(Text(f"\nA training step of {step['tokens']:,} tokens", style="bold"), soft_wrap=True)
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        for number, heading in enumerate(("", "with Adam", "with Muon")):
            table.add_column(heading, justify="right" if number else "left")
        for row in training_step.rows(step):
            table.add_row(*row)
        console.print(table)
        for line in step["notes"]:
            style = "yellow" if line.startswith(training_step.WARNING) else "dim"
            console.print(Text(line, style=style), soft_wrap=True)


def notes(figures: dict[str, Any]) -> list[str]:
    """What the figures do not say by themselves."""
    lines = []
    for group in figures["groups"]:
        load, least = group["ns_load"].values()
        why = f"{group['matrices'] / group['ranks']:.1f} matrices a rank, of few sizes, leave little choice"
        if load <= EVEN * least:
            why = f"one matrix, or a team's part of it, is {least:.2f} times a rank's even share"
        if load > EVEN:
            lines.append(f"{group['name']}, uneven: {why}")
        if group["plans"] > 1:
            lines.append(
                f"{group['name']}: {group['plans']} plans, as groups lie in nodes differently; the slowest is shown"
            )
    if figures["exchange_bytes"]["max_per_rank"] and not HARDWARE[figures["hardware"]].processor:
        lines.append(
            "not counted: NCCL's point-to-point buffers, which the first all-to-all allocates (on 8 H100 memory in use "
            "went from 1.06 to 4.34 GB, NVIDIA/nccl#1685); NCCL_MAX_P2P_NCHANNELS bounds them"
        )
    return lines


def size(count: int) -> str:
    """Bytes for people."""
    power = min((max(count, 1).bit_length() - 1) // 10, 3)
    return f"{count / 1024**power:,.{min(power, 1)}f} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def duration(ms: float) -> str:
    """Milliseconds for people."""
    return f"{ms / 1e3:,.2f} s" if ms >= 1e4 else f"{ms:,.1f} ms"


def _saving(column: dict[str, Any]) -> str:
    ours, theirs = column["exchange_bytes"].values()
    return f"{theirs / ours:,.1f} times less" if ours else "nothing travels" if theirs else "-"


_ROWS: dict[str, Callable[[dict[str, Any]], str]] = {
    "matrices": lambda c: f"{c['matrices']:,}",
    "parameters in them": lambda c: f"{c['parameters'] / 1e6:,.1f} M",
    "owners' load, max / mean": lambda c: f"{c['ns_load']['max_over_mean']:.3f}",
    "matrices that teams own": lambda c: (
        ", ".join(f"{count:,} of {members} ranks" for members, count in c["matrices_of_teams"].items()) or "none"
    ),
    "most received by a rank": lambda c: size(c["exchange_bytes"]["max_per_rank"]),
    "  by all-gather": lambda c: size(c["exchange_bytes"]["allgather_per_rank"]),
    "  owner scheme": _saving,
    "peers in an all-to-all, at most": lambda c: f"{c['peers']:,}",
    "waves": lambda c: f"{c['waves']:,}",
    "extra memory, at most": lambda c: size(c["extra_bytes_max"]),
    "Newton-Schulz": lambda c: duration(c["estimated_ms"]["ns"]),
    "exchange": lambda c: duration(c["estimated_ms"]["exchange"]),
    "host, enqueuing": lambda c: duration(c["estimated_ms"]["host"]),
    "step, overlapped": lambda c: duration(c["estimated_ms"]["step"]),
    "planned in": lambda c: f"{c['plan_seconds']:.2f} s",
}
"""The rows of the table, from the figures of a group or of a rank in all."""
