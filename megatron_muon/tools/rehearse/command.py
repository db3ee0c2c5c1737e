"""`megatron-muon rehearse`: the real optimizers of every rank take a step on fake tensors, and are compared."""

from __future__ import annotations

import argparse
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_muon.errors import ExitStatus, UserError
from megatron_muon.tools.parser import CommandParser, write_json
from megatron_muon.tools.plan import plan_command as plan
from megatron_muon.tools.plan.estimate import HARDWARE, plan_kinds
from megatron_muon.tools.screen import progress

if TYPE_CHECKING:
    from megatron_muon.tools.rehearse.checks import Finding, Recorded

GPUS = tuple(name for name, machine in HARDWARE.items() if not machine.processor)
_REHEARSED = {"muon_exchange": "owner", "muon_offload": "none", "muon_momentum_dtype": "fp32"}
"""The values with which a step moves nothing but what is planned, on the device."""
_MAX_SHOWN = 8
"""Findings of a check that are printed."""
_ROWS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "received": ("received_bytes", plan.size),
    "extra memory": ("extra_bytes", plan.size),
    "floating-point operations": ("flops", "{:.4g}".format),
    "collectives": ("collectives", "{:,}".format),
    "other operations of torch": ("operations", "{:,}".format),
}
"""The rows of the table: label, figure, how it is written."""

EXAMPLES = """\
examples:
  megatron-muon rehearse --config configs/llama3-8b.yaml --world-size 64
  megatron-muon rehearse --config configs/moe-large.yaml --world-size 1024 --ranks 0 1 512 1023
"""

DESCRIPTION = """\
Rehearse a Muon step without a GPU: the optimizers of every rank, as training makes them, take two steps on fake
tensors. What they send, expect, multiply and keep in memory is recorded, and compared among them and with the plan.
Exit status 1 where anything disagrees.
"""


def configure(parser: CommandParser) -> None:
    """Adds the arguments of `megatron-muon rehearse`."""
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add(
        "--config",
        type=Path,
        metavar="FILE.yaml",
        required=True,
        help="experiment file, as for megatron-muon plan",
    )
    plan.add_run(parser, GPUS)
    add(
        "--ranks",
        type=int,
        nargs="+",
        metavar="R",
        help="rehearse these alone; what they do is compared among them (all)",
    )
    add(
        "--json",
        type=Path,
        metavar="FILE",
        help="also write the figures of each rank, and what disagrees, to FILE",
    )


def run(args: argparse.Namespace) -> int:
    """Rehearses, prints what was found, and writes the figures where asked."""
    hardware = plan.hardware_of(args)
    ranks = sorted(set(args.ranks or range(args.world_size)))
    if wrong := [rank for rank in ranks if not 0 <= rank < args.world_size]:
        raise UserError(
            f"--ranks {wrong[0]} is not a rank of {args.world_size}; they go from 0 to"
            f" {args.world_size - 1}"
        )
    from megatron_muon import cpu

    try:
        config, groups, _ = plan.read_config(args.config, args.world_size, hardware, args.flags)
    finally:
        cpu.uninstall()  # fake tensors are on a device that the CPU must not stand in for

    from megatron_muon.tools.rehearse import checks
    from megatron_muon.tools.rehearse.rank import Rehearsal, rehearse

    for name, value in _REHEARSED.items():
        if getattr(config, name) != value:
            flag = f"--{name.replace('_', '-')}"
            raise UserError(
                f"{args.config}: {flag} {getattr(config, name)} is not rehearsed; add {flag}"
                f" {value}"
            )
    config.lr = config.lr or 0.0  # a plan needs none, and no shape hangs on it
    plans, _ = plan_kinds(groups, plan.settings_of(config, hardware), hardware)
    with progress("rehearsing", "ranks") as show_done, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        rehearsal = Rehearsal(config, groups, args.world_size, hardware)
        traces = rehearse(rehearsal, ranks, lambda count: show_done(count, len(ranks)))
    recorded = checks.Recorded(traces, plans)
    findings = checks.check(recorded)
    figures = {
        "config": str(args.config),
        "hardware": hardware.name,
        "world_size": args.world_size,
        **report(recorded, findings),
    }
    show(figures)  # before a file that cannot be written
    write_json(args.json, figures)
    return ExitStatus.FAILURE if findings else ExitStatus.OK


def report(recorded: Recorded, findings: Sequence[Finding]) -> dict[str, Any]:
    """The figures, in the form of the JSON file: the most of any rank, as planned and as rehearsed, and of each."""
    planned = [recorded.planned(rank) for rank in recorded.traces]
    by_rank = [
        {
            "rank": rank,
            "received_bytes": trace.received_bytes,
            "extra_bytes": trace.steps[-1].extra_bytes,
            "flops": trace.steps[-1].flops,
            "collectives": len(trace.steps[-1].calls),
            "operations": trace.steps[-1].operations,
        }
        for rank, trace in recorded.traces.items()
        if trace.steps
    ]
    return {
        "digest": recorded.planned(0)["digest"],
        "planned": {
            name: max(rank[name] for rank in planned)
            for name, _ in _ROWS.values()
            if name in planned[0]
        },
        "rehearsed": {
            name: max((rank[name] for rank in by_rank), default=0) for name, _ in _ROWS.values()
        },
        "findings": [finding._asdict() for finding in findings],
        "by_rank": by_rank,
    }


def show(figures: dict[str, Any]) -> None:
    """Print plan and rehearsal side by side, and what does not agree."""
    count, world_size = len(figures["by_rank"]), figures["world_size"]
    plan.print_line(
        f"Rehearsal of {figures['config']}: {count:,} of {world_size:,} ranks, two steps", "bold"
    )
    columns = figures["planned"], figures["rehearsed"]
    rows = [
        (label, *(text(of[name]) if name in of else "" for of in columns))
        for label, (name, text) in _ROWS.items()
    ]
    plan.print_table(("most of any rank", "plan", "rehearsed"), rows)
    plan.print_line(f"digest {figures['digest']}")
    if count < world_size:
        plan.print_line("what the other ranks send and own is not checked")
    found = Counter[str]()
    for finding in figures["findings"]:
        found[finding["check"]] += 1
        if found[finding["check"]] <= _MAX_SHOWN:
            who = ", ".join(map(str, finding["ranks"][:_MAX_SHOWN]))
            plan.print_line(f"{finding['check']}, ranks {who}: {finding['text']}", "red")
    for name, number in found.items():
        plan.print_line(f"{name}: {number:,} in all", "red")
    if not found:
        plan.print_line("ranks, layout and plan agree", "green")
