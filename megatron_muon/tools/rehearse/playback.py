"""Plays a recorded step over a machine's rates: when each rank computes, what it waits for, and for whom.

A rank has a host, which enqueues in order, a stream of products, and a stream for each process group's collectives.
Nothing starts before the host has enqueued it, nor a collective before all recorded members have issued it. At the
start the streams are idle: Megatron reads the gradient norm on the host. Elementwise work is left out, as in the plan.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_muon.core.layout import Ints
from megatron_muon.errors import UserError
from megatron_muon.tools.plan.estimate import Hardware
from megatron_muon.tools.rehearse.trace import Call, Members, Products, RankTrace, Split

SHOWN = 64
"""Most ranks of a timeline: those whose steps end last."""

ROUNDS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "all_gather": lambda ranks: ranks - 1,
    "reduce_scatter": lambda ranks: ranks - 1,
    "broadcast": lambda ranks: float(ranks > 1),
    "barrier": lambda ranks: 0.0,
}
"""How often a rank's bytes pass its link, by the ring algorithms; nbytes as `Call` has it."""


class Span(NamedTuple):
    """Work of a stream from `start_s` to `end_s`: 0 has the products, 1 and up the rank's process groups."""

    name: str
    start_s: float
    end_s: float
    stream: int
    note: str = ""


@dataclass
class Played:
    """One rank of a played step, in seconds from its start; `waits` by phase and reason, a rank or the link."""

    end_s: float = 0.0
    products_s: float = 0.0
    host_s: float = 0.0
    waits: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    spans: list[Span] = field(default_factory=list)


@dataclass
class _Collective:
    """A collective that members have begun to issue, and the ranks that wait for it."""

    issued: dict[int, tuple[float, Call]] = field(default_factory=dict)
    start_s: float = 0.0
    end_s: float | None = None
    reason: str = ""
    waiting: list[int] = field(default_factory=list)


class StuckError(Exception):
    """Ranks wait for each other; `ranks` are two of them."""

    def __init__(self, ranks: tuple[int, ...], text: str) -> None:
        super().__init__(text)
        self.ranks = ranks


def play(traces: dict[int, RankTrace], step: int, hardware: Hardware) -> dict[int, Played]:
    """Play a step of all traces, by rank.

    Raises:
        StuckError: a rank waits for a collective that another one never issues.
    """
    return _Player(traces, hardware).play(step)


class _Player:
    def __init__(self, traces: dict[int, RankTrace], hardware: Hardware) -> None:
        self._traces, self._hardware = traces, hardware
        self._played = {rank: Played() for rank in traces}
        self._collectives: dict[tuple[Members, int], _Collective] = defaultdict(_Collective)
        self._ready = deque(traces)
        self._recorded: dict[Members, list[int]] = {}
        self._nodes: dict[Members, Ints] = {}

    def play(self, step: int) -> dict[int, Played]:
        running = {rank: self._run(rank, step) for rank in self._traces}
        while self._ready:
            next(running[self._ready.popleft()], None)
        for (members, number), collective in self._collectives.items():
            for rank in collective.waiting:
                missing = next(one for one in self._recorded[members] if one not in collective.issued)
                is_stuck = any(missing in other.waiting for other in self._collectives.values())
                raise StuckError(
                    (rank, missing),
                    f"rank {rank} waits for collective {number} of their group, which rank {missing} does not start: "
                    + ("it waits too" if is_stuck else "its step is over"),
                )
        return self._played

    def _run(self, rank: int, step: int) -> Iterator[None]:
        """Play a rank; yields where it waits for a collective that others have not issued."""
        trace, played = self._traces[rank], self._played[rank]
        numbers: dict[int, int] = defaultdict(int)
        calls: list[_Collective] = []
        for event in trace.steps[step].events:
            if isinstance(event, Products):
                self._multiply(played, event)
            elif isinstance(event, Call):
                calls.append(self._issue(rank, event, numbers[event.group]))
                numbers[event.group] += 1
            else:
                collective = calls[event.call]
                if collective.end_s is None:
                    collective.waiting.append(rank)
                    yield
                self._wait(rank, collective, event.phase)

    def _multiply(self, played: Played, event: Products) -> None:
        """Enqueue and run: products begin behind the first launch, and end no earlier than the last."""
        host_s, tflops = self._hardware.host_s, self._hardware.bf16_tflops if event.half else self._hardware.fp32_tflops
        seconds = event.flops / (tflops * 1e12)
        begun = max(played.end_s, played.host_s + host_s({"kernels": min(event.kernels, 1)}))
        played.host_s += host_s(vars(event))
        if event.kernels or event.flops:
            end = max(begun + seconds, played.host_s)
            if end - played.end_s > seconds:
                played.waits[event.phase, "the host"] += end - played.end_s - seconds
            played.end_s = end
        if event.flops:
            played.spans.append(Span(event.phase, begun, played.end_s, 0))
            played.products_s += seconds

    def _issue(self, rank: int, call: Call, number: int) -> _Collective:
        members, played = self._traces[rank].groups[call.group], self._played[rank]
        if members not in self._recorded:
            self._recorded[members] = [one for one in members.ranks if one in self._traces]
            self._nodes[members] = np.array(members.ranks, dtype=np.int64) // self._hardware.joined_ranks
        collective = self._collectives[members, number]
        played.host_s += self._hardware.host_s({"collectives": 1})
        collective.issued[rank] = max(played.end_s, played.host_s), call
        if len(collective.issued) < len(self._recorded[members]):
            return collective
        late, (issued_s, _) = max(collective.issued.items(), key=lambda item: item[1][0])
        before = self._collectives[members, number - 1].end_s or 0.0 if number else 0.0
        collective.start_s = max(issued_s, before)
        collective.reason = "the collective before it" if before > issued_s else f"rank {late}"
        collective.end_s = collective.start_s + self._seconds(members, collective)
        for one, (_, its) in collective.issued.items():
            stream = 1 + self._traces[one].groups.index(members)
            span = Span(f"{its.op} ({its.phase})", collective.start_s, collective.end_s, stream, collective.reason)
            self._played[one].spans.append(span)
        self._ready.extend(collective.waiting)
        collective.waiting.clear()
        return collective

    def _wait(self, rank: int, collective: _Collective, phase: str) -> None:
        played = self._played[rank]
        assert collective.end_s is not None
        if collective.end_s > played.end_s:
            begun = max(played.end_s, collective.start_s)
            if begun > played.end_s:
                reason = "itself" if collective.reason == f"rank {rank}" else collective.reason
                played.waits[phase, reason] += begun - played.end_s
            played.waits[phase, "the transfer"] += collective.end_s - begun
            played.end_s = collective.end_s

    def _seconds(self, members: Members, collective: _Collective) -> float:
        nodes, links = self._nodes[members], self._hardware.links
        near, far = links.near_gb_per_s * 1e9, links.far_gb_per_s * 1e9

        def split_s(split: Split, here: int) -> float:
            """Of a rank's part of an all-to-all, within its node and beyond at the same time."""
            others, beyond = split.peers != here, nodes[split.peers] != nodes[here]
            near_s = float(split.sizes[others & ~beyond].sum()) / near
            far_s = float(split.sizes[others & beyond].sum()) / far
            return links.message_us * 1e-6 * int(others.sum()) + max(near_s, far_s)

        first = next(call for _, call in collective.issued.values())
        if first.sent is None:
            ranks = len(members.ranks)
            return ROUNDS[first.op](ranks) * first.nbytes / (near if (nodes == nodes[0]).all() else far)
        places = {rank: place for place, rank in enumerate(members.ranks)}
        return max(
            split_s(split, places[rank])
            for rank, (_, call) in collective.issued.items()
            for split in (call.sent, call.received)
            if split is not None
        )


def write_timeline(path: Path, played: dict[int, Played]) -> None:
    """Write the ranks that end last as a trace for chrome://tracing or https://ui.perfetto.dev.

    Raises:
        UserError: the file cannot be written.
    """
    latest = sorted(played, key=lambda rank: (-played[rank].end_s, rank))[:SHOWN]
    events = [event for rank in sorted(latest) for event in _events(rank, played[rank])]
    try:
        path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}), "utf-8")
    except OSError as error:
        raise UserError(f"--timeline: cannot write {str(path)!r}: {error.strerror}") from None


def _events(rank: int, played: Played) -> Iterator[dict[str, Any]]:
    """In the trace event format: microseconds; a process is a rank, a thread one of its streams."""
    yield {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
    for stream in sorted({span.stream for span in played.spans}):
        name = f"collectives of group {stream - 1}" if stream else "products"
        yield {"name": "thread_name", "ph": "M", "pid": rank, "tid": stream, "args": {"name": name}}
    for span in played.spans:
        times = {"ts": span.start_s * 1e6, "dur": (span.end_s - span.start_s) * 1e6}
        yield {
            **{"name": span.name, "cat": "collective" if span.stream else "products", "ph": "X", **times},
            **{"pid": rank, "tid": span.stream, "args": {"starts after": span.note} if span.note else {}},
        }
