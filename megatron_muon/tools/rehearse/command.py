"""`megatron-muon rehearse`: the real optimizers of every rank take a step on fake tensors, and are compared."""

from __future__ import annotations

import argparse
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_muon.core.layout import MAX_RANKS
from megatron_muon.errors import ExitStatus, UserError
from megatron_muon.tools.parser import positive, write_json
from megatron_muon.tools.plan.command import add_machine, hardware_of, read_config, settings_of
from megatron_muon.tools.plan.estimate import HARDWARE, Hardware, plan_kinds
from megatron_muon.tools.plan.page import duration, print_line, print_table, size
from megatron_muon.tools.progress import progress

if TYPE_CHECKING:
    from megatron_muon.tools.rehearse.checks import Finding, Recorded
    from megatron_muon.tools.rehearse.playback import Played

GPUS = tuple(name for name, machine in HARDWARE.items() if not machine.processor)
_NOT_REHEARSED = {
    "muon_exchange": "allgather",
    "muon_offload": "nvme",
    "muon_ns_device": "cpu",
    "muon_offload_state": "all",
}
"""What every rank does alike, what needs files, what makes the host wait by intent, what needs a model's buffers."""
SHOWN = 8
"""Findings of a check, and reasons of a rank to wait, that are printed."""

EXAMPLES = """\
examples:
  megatron-muon rehearse --config configs/llama3-8b.yaml --world-size 64 --timeline step.json
  megatron-muon rehearse --config configs/moe-large.yaml --world-size 1024 --ranks 0 1 512 1023
"""

DESCRIPTION = """\
Rehearse a Muon step without a GPU: the optimizers of every rank, as training makes them, take two steps on fake
tensors. What they send, expect, multiply and keep in memory is recorded, compared, and played over the hardware
profile. Exit status 1 where anything disagrees.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `megatron-muon rehearse`."""
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add("--config", type=Path, metavar="FILE.yaml", required=True, help="experiment file, as for megatron-muon plan")
    add("--world-size", type=positive, metavar="N", required=True, help="ranks of the run")
    add("--ranks", type=int, nargs="+", metavar="R",
        help="rehearse these alone; what they do is compared among them (all)")  # fmt: skip
    add_machine(parser, GPUS)
    add("--processes", type=positive, metavar="P", help="processes that rehearse (one for each core)")
    add("--json", type=Path, metavar="FILE", help="also write the figures of each rank, and what disagrees, to FILE")
    add("--timeline", type=Path, metavar="FILE",
        help="write the step of the slowest ranks to FILE, for chrome://tracing or ui.perfetto.dev")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Rehearses, writes figures and timeline where asked, and prints what was found."""
    if args.world_size > MAX_RANKS:
        raise UserError(f"--world-size must be at most {MAX_RANKS:,}, got {args.world_size}")
    ranks = sorted(set(args.ranks or range(args.world_size)))
    if wrong := [rank for rank in ranks if not 0 <= rank < args.world_size]:
        raise UserError(
            f"--ranks {wrong[0]} is not a rank of {args.world_size}; they go from 0 to {args.world_size - 1}"
        )
    hardware = hardware_of(args)
    from megatron_muon import cpu

    try:
        settings, groups, _ = read_config(args.config, args.world_size, hardware)
    finally:
        cpu.uninstall()  # fake tensors are on a device that the CPU must not stand in for

    from megatron_muon.tools.rehearse import checks, playback
    from megatron_muon.tools.rehearse.rank import Rehearsal, rehearse

    for name, value in _NOT_REHEARSED.items():
        if getattr(settings, name) == value:
            raise UserError(f"{args.config}: --{name.replace('_', '-')} {value} is not rehearsed; leave it out")
    settings.lr = settings.lr or 0.0  # a plan needs none, and no shape hangs on it
    plans, _ = plan_kinds(groups, settings_of(settings, hardware), hardware, args.world_size)
    with progress("rehearsing", "ranks") as show_done, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch, about what it calls by an older name
        rehearsal = Rehearsal(settings, groups, args.world_size, hardware)
        traces = rehearse(rehearsal, ranks, processes=args.processes, done=lambda done: show_done(done, len(ranks)))
    plain = (settings.muon_offload, settings.muon_momentum_dtype) == ("none", "fp32")
    recorded = checks.Recorded(traces, plans, args.world_size, has_memory=plain)
    findings = checks.check(recorded)
    played: dict[int, playback.Played] = {}
    if not any(trace.failure for trace in traces.values()):
        try:
            played = playback.play(traces, -1, hardware)
        except playback.StuckError as stuck:
            findings.append(checks.Finding("order", stuck.ranks, str(stuck)))
    figures = {"config": str(args.config), "hardware": hardware.name, **report(recorded, findings, played)}
    show(figures, hardware)  # before a file that cannot be written
    write_json(args.json, figures)
    if args.timeline is not None and played:
        playback.write_timeline(args.timeline, played)
    return ExitStatus.FAILURE if findings else ExitStatus.OK


_COUNTS = ("kernels", "views", "allocations")
"""Of a step of a rank, as CUDA launches them."""
_TIMES = {"products_ms": "products_s", "host_ms": "host_s", "step_ms": "end_s"}
"""Figures of a played rank."""


def report(recorded: Recorded, findings: Sequence[Finding], played: dict[int, Played]) -> dict[str, Any]:
    """The figures, in the form of the JSON file: of the plan, of all ranks together, of the slowest, of each."""
    from megatron_muon.tools.rehearse.checks import planned_bytes, received_bytes

    traces = recorded.traces
    ranks: list[dict[str, Any]] = [
        {
            "rank": rank,
            "received_bytes": received_bytes(trace, -1),
            "extra_bytes": trace.steps[-1].extra_bytes,
            "flops": trace.steps[-1].flops,
            **{name: trace.steps[-1].counts[name] for name in ("collectives", *_COUNTS)},
            "momentum_bytes": trace.state_bytes,
            **{name: getattr(played[rank], of) * 1e3 for name, of in _TIMES.items() if played},
        }
        for rank, trace in traces.items()
        if trace.steps
    ]
    most = ("received_bytes", "extra_bytes", "collectives", *_COUNTS, *_TIMES)
    states = [trace.state_bytes for trace in traces.values()]
    slowest = max(played, key=lambda rank: played[rank].end_s, default=None)
    waits = [] if slowest is None else sorted(played[slowest].waits.items(), key=lambda item: -item[1])
    worst = [kind.worst for kind in recorded.plans]
    return {
        "world_size": recorded.world_size,
        "ranks": len(traces),
        "digest": "-".join(kind.of(0).digest for kind in recorded.plans),
        "planned": {
            "received_bytes": int(planned_bytes(recorded)[list(traces)].max()),
            "extra_bytes": max(int(item.extra.max(initial=0)) for item in worst),
            "products_ms": sum(item.ns_ms for item in worst),
            "host_ms": sum(item.host_ms for item in worst),
            "step_ms": sum(item.step_ms for item in worst),
            "buffer_bytes": max(item.plan.buffer_bytes for item in worst),
        },
        "rehearsed": {
            **{name: max((rank.get(name, 0) for rank in ranks), default=0) for name in most},
            **{f"{where}_bytes": max(state.get(where, 0) for state in states) for where in ("device", "host")},
        },
        "slowest": {
            "rank": slowest,
            "waits": [{"phase": phase, "for": reason, "ms": seconds * 1e3} for (phase, reason), seconds in waits],
        },
        "findings": [finding._asdict() for finding in findings],
        "by_rank": ranks,
    }


def show(figures: dict[str, Any], hardware: Hardware) -> None:
    """Print plan and rehearsal side by side, what the slowest rank waits for, and what does not agree."""
    count, world_size, slowest = figures["ranks"], figures["world_size"], figures["slowest"]
    print_line(f"Rehearsal of {figures['config']}: {count:,} of {world_size:,} ranks, two steps", "bold")
    columns = figures["planned"], figures["rehearsed"]
    rows = [(label, *(text(of[name]) if name in of else "" for of in columns)) for label, name, text in _ROWS]
    print_table(("", "plan", "rehearsed"), rows)
    print_line(f"{hardware.name}: {hardware.source}; without elementwise work")
    if slowest["rank"] is not None:
        waits = [f"{duration(wait['ms'])} in {wait['phase']} for {wait['for']}" for wait in slowest["waits"][:SHOWN]]
        print_line(f"rank {slowest['rank']} is the last; it waits {', '.join(waits) or '0 ms'}")
    if count < world_size:
        print_line("what the other ranks send, own and are late with is not checked, and missing in the times")
    found = Counter[str]()
    for finding in figures["findings"]:
        found[finding["check"]] += 1
        if found[finding["check"]] <= SHOWN:
            who = ", ".join(map(str, finding["ranks"][:SHOWN]))
            print_line(f"{finding['check']}, ranks {who}: {finding['text']}", "red")
    for name, number in found.items():
        if number > SHOWN:
            print_line(f"{name}: {number - SHOWN:,} more", "red")
    if not found:
        print_line("ranks, layout and plan agree", "green")


_ROWS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("most received by a rank", "received_bytes", size),
    ("extra memory, at most", "extra_bytes", size),
    ("  a step may take", "buffer_bytes", size),
    ("momentum on the device, at most", "device_bytes", size),
    ("  in host memory", "host_bytes", size),
    ("collectives of a rank", "collectives", "{:,}".format),
    ("kernels that it launches, at most", "kernels", "{:,}".format),
    ("  views that it makes", "views", "{:,}".format),
    ("  tensors that it allocates", "allocations", "{:,}".format),
    ("Newton-Schulz", "products_ms", duration),
    ("host, enqueuing", "host_ms", duration),
    ("step, overlapped", "step_ms", duration),
)
"""The rows of the table: label, figure, how it is written."""
