"""`megatron-muon rehearse`: the real optimizers of every rank take a step on fake tensors, and are compared.

Where `plan` says what ranks ought to do, this runs what they will do: no GPU, no other machine, the same code as in
training. What does not agree is named with its ranks, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_muon import shipped
from megatron_muon.core.layout import MAX_RANKS
from megatron_muon.errors import ExitStatus, UserError, quiet_imports
from megatron_muon.tools.parser import positive, write_json
from megatron_muon.tools.plan.asked import check_unmet
from megatron_muon.tools.plan.command import add_node_ranks, duration, hardware_of, settings_of, size
from megatron_muon.tools.plan.estimate import HARDWARE, Hardware, plan_kind
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
  an 8B model on 64 GPUs, with a timeline for https://ui.perfetto.dev:
    megatron-muon rehearse --config configs/llama3-8b.yaml --world-size 64 --timeline step.json
  a sample of the ranks of a larger run:
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
    add("--hardware", choices=GPUS, default=GPUS[0], metavar="NAME",
        help=f"machine to rehearse for: {', '.join(GPUS)} (the first)")  # fmt: skip
    add_node_ranks(parser)
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
    shipped.require(args.config)
    hardware = hardware_of(args)
    with quiet_imports():
        from megatron_muon import cpu

        cpu.install(force=True)
        from megatron_muon.tools.plan.matrices import read_model
    try:
        settings, groups, _ = read_model(args.config, args.world_size)
    finally:
        cpu.uninstall()  # fake tensors are on a device that the CPU must not stand in for

    from megatron_muon.tools.rehearse import all_ranks, checks, playback, timeline
    from megatron_muon.tools.rehearse.rank import Rehearsal

    for name, value in _NOT_REHEARSED.items():
        if getattr(settings, name) == value:
            raise UserError(f"{args.config}: --{name.replace('_', '-')} {value} is not rehearsed; leave it out")
    settings.lr = settings.lr or 0.0  # a plan needs none, and no shape hangs on it
    planned = settings_of(settings, hardware)
    plans = [plan_kind(group, planned, hardware, args.world_size) for group in groups]
    check_unmet(plans)
    rehearsal = Rehearsal(settings, groups, args.world_size, hardware)
    with progress("rehearsing", "ranks") as show_done, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch, about what it calls by an older name
        traces = all_ranks.rehearse(
            rehearsal, ranks, processes=args.processes, done=lambda done: show_done(done, len(ranks))
        )
    plain = (settings.muon_offload, settings.muon_momentum_dtype) == ("none", "fp32")
    recorded = checks.Recorded(traces, plans, args.world_size, has_memory=plain)
    findings = checks.check(recorded)
    played: dict[int, playback.Played] = {}
    if not any(trace.failure for trace in traces.values()):
        try:
            played = playback.play(traces, -1, hardware)
        except playback.StuckError as stuck:
            findings.append(checks.Finding("order", stuck.ranks, str(stuck)))
    figures = {
        "config": str(args.config),
        "hardware": hardware.name,
        **report(recorded, findings, played),
    }
    show(figures, str(args.config), hardware)  # before a file that cannot be written
    write_json(args.json, figures)
    if args.timeline is not None and played:
        timeline.write_timeline(args.timeline, played)
    return ExitStatus.FAILURE if findings else ExitStatus.OK


_COUNTS = ("kernels", "views", "allocations")
"""Of a step of a rank, as CUDA launches them."""


def report(recorded: Recorded, findings: Sequence[Finding], played: dict[int, Played]) -> dict[str, Any]:
    """The figures, in the form of the JSON file: of the plan, of all ranks together, of the slowest, of each."""
    from megatron_muon.tools.rehearse.checks import planned_bytes, received_bytes

    last = {rank: trace.steps[-1] for rank, trace in recorded.traces.items() if trace.steps}
    ranks: list[dict[str, Any]] = [
        {
            "rank": rank,
            "received_bytes": received_bytes(recorded.traces[rank], -1),
            "extra_bytes": step.extra_bytes,
            "flops": step.flops,
            "collectives": len(step.calls),
            **{name: step.counts[name] for name in _COUNTS},
            "momentum_bytes": recorded.traces[rank].state_bytes,
            **{name: getattr(played[rank], of) * 1e3 for name, of in _TIMES.items() if played},
        }
        for rank, step in last.items()
    ]
    most = {name: max((rank[name] for rank in ranks), default=0) for name in ("received_bytes", "extra_bytes")}
    for where in ("device", "host"):
        states = [trace.state_bytes.get(where, 0) for trace in recorded.traces.values()]
        most[f"{where}_bytes"] = max(states, default=0)
    times = {name: max((rank.get(name, 0.0) for rank in ranks), default=0.0) for name in _TIMES}
    slowest = max(played, key=lambda rank: played[rank].end_s, default=None)
    waits = [] if slowest is None else sorted(played[slowest].waits.items(), key=lambda item: -item[1])
    return {
        "world_size": recorded.world_size,
        "ranks": len(recorded.traces),
        "digest": "-".join(kind.of(0).plan.digest() for kind in recorded.plans),
        "planned": {
            "received_bytes": int(planned_bytes(recorded)[list(recorded.traces)].max()),
            "extra_bytes": max(kind.worst.extra_bytes for kind in recorded.plans),
            "products_ms": sum(kind.worst.ns_ms for kind in recorded.plans),
            "host_ms": sum(kind.worst.host_ms for kind in recorded.plans),
            "step_ms": sum(kind.worst.step_ms for kind in recorded.plans),
            "buffer_bytes": max(kind.worst.plan.buffer_bytes for kind in recorded.plans),
        },
        "rehearsed": {
            **most,
            **times,
            **{name: max((rank[name] for rank in ranks), default=0) for name in ("collectives", *_COUNTS)},
        },
        "slowest": {
            "rank": slowest,
            "waits": [{"phase": phase, "for": reason, "ms": seconds * 1e3} for (phase, reason), seconds in waits],
        },
        "findings": [dataclasses.asdict(finding) for finding in findings],
        "by_rank": ranks,
    }


def show(figures: dict[str, Any], source: str, hardware: Hardware) -> None:
    """Print plan and rehearsal side by side, what the slowest rank waits for, and what does not agree."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("", "plan", "rehearsed"):
        table.add_column(heading, justify="right" if heading else "left")
    for label, name, text in _ROWS:
        table.add_row(
            label, *(text(figures[of][name]) if name in figures[of] else "" for of in ("planned", "rehearsed"))
        )
    count, world_size = figures["ranks"], figures["world_size"]
    console.print(
        Text(f"Rehearsal of {source}: {count:,} of {world_size:,} ranks, two steps", style="bold"), soft_wrap=True
    )
    console.print(table)
    lines = [f"a step may take {size(figures['planned']['buffer_bytes'])}"]
    lines += [f"{hardware.name}: {hardware.source}; without elementwise work"]
    if figures["slowest"]["rank"] is not None:
        waits = [f"{duration(wait['ms'])} in {wait['phase']} for {wait['for']}" for wait in figures["slowest"]["waits"]]
        more = f" and {len(waits) - SHOWN} more" if len(waits) > SHOWN else ""
        lines.append(
            f"rank {figures['slowest']['rank']} is the last; it waits {', '.join(waits[:SHOWN]) or '0 ms'}{more}"
        )
    if count < world_size:
        lines.append("what the other ranks send, own and are late with is not checked, and missing in the times")
    for line in lines:
        console.print(Text(line, style="dim"), soft_wrap=True)
    found = Counter[str]()
    for finding in figures["findings"]:
        found[finding["check"]] += 1
        if found[finding["check"]] <= SHOWN:
            who = f"rank{'s' * (len(finding['ranks']) > 1)} {', '.join(map(str, finding['ranks'][:SHOWN]))}"
            console.print(Text(f"{finding['check']}, {who}: {finding['text']}", style="red"), soft_wrap=True)
    for name, number in found.items():
        if number > SHOWN:
            console.print(Text(f"{name}: {number - SHOWN:,} more", style="red"))
    if not found:
        console.print(Text("ranks, layout and plan agree", style="green"))


_TIMES = {"products_ms": "products_s", "host_ms": "host_s", "step_ms": "end_s"}
"""Figures of a played rank."""

_ROWS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("most received by a rank", "received_bytes", size),
    ("extra memory, at most", "extra_bytes", size),
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
