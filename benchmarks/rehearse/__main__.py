"""`python -m benchmarks.rehearse`: steps all ranks' real optimizers on fake tensors."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_muon import cli
from megatron_muon.errors import ExitStatus, UserError
from megatron_muon.tools.parser import CommandParser, write_json
from megatron_muon.tools.plan import plan_command as plan

if TYPE_CHECKING:
    from benchmarks.rehearse.checks import Finding, Recorded

REHEARSED = {"muon_exchange": "owner", "muon_offload": "none", "muon_momentum_dtype": "fp32"}
"""The only values with which a step moves nothing but what is planned, on the device."""
MAX_SHOWN = 20
"""Findings, and ranks of one, that are printed."""


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:,.1f}"


ROWS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "received_bytes": ("received, MiB", _mebibytes),
    "extra_bytes": ("extra memory, MiB", _mebibytes),
    "flops": ("floating-point operations", "{:.4g}".format),
    "collectives": ("collectives", "{:,}".format),
    "launches": ("launches, without products", "{:,}".format),
    "moved_bytes": ("memory traffic likewise, MiB", _mebibytes),
}
"""The table by figure: label, and how a value is written."""

DESCRIPTION = """\
Rehearse a Muon step without a GPU: the optimizers of every rank, built as training builds them,
take two steps on fake tensors. Messages, products and memory are recorded, and compared between
ranks and with the plan. Exit status 1 if anything disagrees.
"""

EXAMPLES = """\
examples:
  python -m benchmarks.rehearse --config configs/llama3-8b.yaml --world-size 64
  python -m benchmarks.rehearse --config configs/moe-large.yaml --world-size 1024 --ranks 0 1023
"""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the arguments."""
    program = "python -m benchmarks.rehearse"
    parser = CommandParser(prog=program, description=DESCRIPTION, epilog=EXAMPLES)
    add = parser.add_argument
    add("--config", type=Path, metavar="FILE.yaml", required=True, help="experiment file")
    plan.add_run(parser)
    add("--ranks", type=int, nargs="+", metavar="R", help="rehearse only these ranks (all)")
    add("--json", type=Path, metavar="FILE", help="also write figures and findings to FILE")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Rehearses, prints and writes the findings, and returns the exit status."""
    return cli.reported(lambda: _run(parse(argv)))


def _run(args: argparse.Namespace) -> int:
    hardware = plan.hardware_of(args)
    if hardware.processor:
        raise UserError(f"--hardware {hardware.name} is not rehearsed; choose a GPU")
    world_size: int = args.world_size
    ranks = sorted(set(args.ranks or range(world_size)))
    for rank in ranks:
        if not 0 <= rank < world_size:
            valid = f"choose from 0 to {world_size - 1}"
            raise UserError(f"--ranks {rank} is not a rank of {world_size}; {valid}")
    from megatron_muon import cpu

    try:
        config, groups, _ = plan.read_config(args.config, world_size, hardware, args.flags)
    finally:
        cpu.uninstall()  # fake tensors are on a device that the CPU must not stand in for
    from benchmarks.rehearse.checks import KindPlan, Recorded, check
    from benchmarks.rehearse.rank import Rehearsal, rehearse

    for name, value in REHEARSED.items():
        given = getattr(config, name)
        if given != value:
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{flag} {given} is not rehearsed; add {flag} {value}")
    config.lr = config.lr or 0.0  # the plan does not depend on it
    print(f"rehearsing {len(ranks):,} ranks ...", file=sys.stderr)
    settings = plan.settings_of(config, hardware)
    plans = [KindPlan(group, settings, hardware) for group in groups]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        traces = rehearse(Rehearsal(config, groups, world_size, hardware), ranks)
    recorded = Recorded(traces, plans)
    findings = check(recorded)
    figures = {"config": str(args.config), "hardware": hardware.name, "world_size": world_size}
    figures |= figures_of(recorded, findings)
    show(figures)  # before a file that cannot be written
    write_json(args.json, figures)
    return ExitStatus.FAILURE if findings else ExitStatus.OK


def figures_of(recorded: Recorded, findings: Sequence[Finding]) -> dict[str, Any]:
    """The figures of the JSON file: maxima over ranks, planned and rehearsed, and findings."""
    planned = [recorded.planned(rank) for rank in recorded.traces]
    rehearsed = [trace.figures() for trace in recorded.traces.values() if trace.steps]
    return {
        "digest": recorded.planned(0)["digest"],
        "planned": {name: max(of[name] for of in planned) for name in ROWS if name in planned[0]},
        "rehearsed": {name: max((of[name] for of in rehearsed), default=0) for name in ROWS},
        "findings": [finding._asdict() for finding in findings],
        "ranks": list(recorded.traces),
    }


def show(figures: dict[str, Any]) -> None:
    """Prints plan and rehearsal side by side, and the disagreements."""
    count, world_size = len(figures["ranks"]), figures["world_size"]
    title = f"Rehearsal of {figures['config']}: {count:,} of {world_size:,} ranks, two steps"
    print(title)
    print(f"{'maximum over ranks':<32}{'plan':>16}{'rehearsed':>16}")
    for name, (label, text) in ROWS.items():
        planned = text(figures["planned"][name]) if name in figures["planned"] else ""
        print(f"{label:<32}{planned:>16}{text(figures['rehearsed'][name]):>16}")
    print(f"digest {figures['digest']}")
    if count < world_size:
        print("the other ranks' messages and matrices are not checked")
    found = figures["findings"]
    for finding in found[:MAX_SHOWN]:
        who = ", ".join(map(str, finding["ranks"][:MAX_SHOWN]))
        print(f"{finding['check']}, ranks {who}: {finding['text']}")
    if found:
        each = Counter(finding["check"] for finding in found)
        counts = ", ".join(f"{name}: {number:,}" for name, number in each.items())
        print(f"in all, {counts}")
    else:
        print("ranks, layout and plan agree")


if __name__ == "__main__":
    sys.exit(main())
