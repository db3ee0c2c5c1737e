"""Plays a recorded step over a machine's rates: when each rank computes, what it waits for, and for whom.

A rank has a host, which enqueues in order and takes the profile's time for each launch, view, allocation and call of a
collective; a stream of products, and a stream for each process group's collectives. Nothing starts before the host has
enqueued it, nor a collective before all of its recorded members have issued it and the one before it on the group is
over. At the start of a step the streams are idle: Megatron reads the gradient norm on the host before it. Left out, as
in the plan's estimate: elementwise work, and that collectives of several groups share links.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from megatron_muon.tools.plan.estimate import Hardware
from megatron_muon.tools.rehearse.trace import COUNTED, Call, Event, Members, Products, RankTrace, Split, Wait


class Span(NamedTuple):
    """What a stream does from `start_s` to `end_s`."""

    name: str
    start_s: float
    end_s: float
    stream: int
    """0 has the products, 1 and up the collectives of the rank's process groups."""
    note: str = ""


@dataclass
class Played:
    """One rank of a played step.

    Attributes:
        end_s: when the rank is done, in seconds from the step's start.
        products_s: what it has computed.
        host_s: when its host is.
        waits: seconds that its products have waited, by phase and reason, the reason naming a rank or the link.
        spans: of the timeline.
    """

    end_s: float = 0.0
    products_s: float = 0.0
    host_s: float = 0.0
    waits: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    spans: list[Span] = field(default_factory=list)


@dataclass
class _Collective:
    """A collective that members have begun to issue."""

    issued: dict[int, tuple[float, Call]] = field(default_factory=dict)
    start_s: float = 0.0
    end_s: float | None = None
    reason: str = ""


class StuckError(Exception):
    """Ranks wait for each other.

    Attributes:
        ranks: two of them.
    """

    def __init__(self, ranks: tuple[int, ...], text: str) -> None:
        super().__init__(text)
        self.ranks = ranks


def play(traces: dict[int, RankTrace], step: int, hardware: Hardware) -> dict[int, Played]:
    """Play a step of all traces, by rank.

    Raises:
        StuckError: a rank waits for a collective that another one never issues.
    """
    return _Player(traces, step, hardware).play()


class _Player:
    def __init__(self, traces: dict[int, RankTrace], step: int, hardware: Hardware) -> None:
        self._traces, self._hardware = traces, hardware
        self._events: dict[int, Sequence[Event]] = {rank: trace.steps[step].events for rank, trace in traces.items()}
        self._played = {rank: Played() for rank in traces}
        self._next = dict.fromkeys(traces, 0)
        self._numbers: dict[tuple[int, int], int] = defaultdict(int)  # collectives by rank and its group
        self._calls: dict[int, list[tuple[Members, int]]] = {rank: [] for rank in traces}  # in the order of issue
        self._collectives: dict[tuple[Members, int], _Collective] = defaultdict(_Collective)
        self._expected: dict[Members, list[int]] = {}
        self._waiting: dict[tuple[Members, int], list[int]] = defaultdict(list)
        self._nodes: dict[Members, np.ndarray[tuple[int], np.dtype[np.int64]]] = {}

    def play(self) -> dict[int, Played]:
        ready = deque(self._traces)
        while ready:
            rank = ready.popleft()
            ready.extend(self._run(rank))
        stuck = {rank: key for key, ranks in self._waiting.items() for rank in ranks}
        if stuck:
            rank, (members, number) = next(iter(stuck.items()))
            missing = [one for one in self._of(members) if one not in self._collectives[members, number].issued]
            raise StuckError(
                (rank, missing[0]),
                f"rank {rank} waits for collective {number} of their group, which rank {missing[0]} does not start: "
                + ("it waits too" if missing[0] in stuck else "its step is over"),
            )
        return self._played

    def _of(self, members: Members) -> list[int]:
        """The members that are played."""
        if members not in self._expected:
            self._expected[members] = [rank for rank in members.ranks if rank in self._traces]
        return self._expected[members]

    def _run(self, rank: int) -> list[int]:
        """Play a rank until it waits for what others have not issued; the ranks that can go on by what it issued."""
        played, events, freed = self._played[rank], self._events[rank], []
        while self._next[rank] < len(events):
            event = events[self._next[rank]]
            if isinstance(event, Products):
                self._multiply(played, event)
            elif isinstance(event, Call):
                freed += self._issue(rank, event)
            elif not self._wait(rank, event):
                return freed
            self._next[rank] += 1
        return freed

    def _multiply(self, played: Played, event: Products) -> None:
        """Enqueue and run: products begin behind the first launch, and end no earlier than the last."""
        host, tflops = self._hardware.host, self._hardware.bf16_tflops if event.half else self._hardware.fp32_tflops
        seconds = event.flops / (tflops * 1e12)
        begun = max(played.end_s, played.host_s + host.seconds({"kernels": min(event.kernels, 1)}))
        played.host_s += host.seconds({name: getattr(event, name) for name in COUNTED})
        if event.kernels or event.flops:
            end = max(begun + seconds, played.host_s)
            if end - played.end_s > seconds:
                played.waits[event.phase, "the host"] += end - played.end_s - seconds
            played.end_s = end
        if event.flops:
            played.spans.append(Span(event.phase, begun, played.end_s, 0))
            played.products_s += seconds

    def _issue(self, rank: int, call: Call) -> list[int]:
        members = self._traces[rank].groups[call.group]
        number = self._numbers[rank, call.group]
        self._numbers[rank, call.group] += 1
        self._calls[rank].append((members, number))
        collective = self._collectives[members, number]
        played = self._played[rank]
        played.host_s += self._hardware.host.seconds({"collectives": 1})
        collective.issued[rank] = max(played.end_s, played.host_s), call
        if len(collective.issued) < len(self._of(members)):
            return []
        late, (issued_s, _) = max(collective.issued.items(), key=lambda item: item[1][0])
        before = self._collectives[members, number - 1].end_s or 0.0 if number else 0.0
        collective.start_s = max(issued_s, before)
        collective.reason = "the collective before it" if before > issued_s else f"rank {late}"
        collective.end_s = collective.start_s + self._seconds(members, collective)
        for one, (_, its) in collective.issued.items():
            stream = 1 + self._traces[one].groups.index(members)
            span = Span(f"{its.op} ({its.phase})", collective.start_s, collective.end_s, stream, collective.reason)
            self._played[one].spans.append(span)
        return self._waiting.pop((members, number), [])

    def _wait(self, rank: int, wait: Wait) -> bool:
        key = self._calls[rank][wait.call]
        collective, played = self._collectives[key], self._played[rank]
        if collective.end_s is None:
            self._waiting[key].append(rank)
            return False
        if collective.end_s > played.end_s:
            begun = max(played.end_s, collective.start_s)
            if begun > played.end_s:
                reason = "itself" if collective.reason == f"rank {rank}" else collective.reason
                played.waits[wait.phase, reason] += begun - played.end_s
            played.waits[wait.phase, "the transfer"] += collective.end_s - begun
            played.end_s = collective.end_s
        return True

    def _seconds(self, members: Members, collective: _Collective) -> float:
        if members not in self._nodes:
            self._nodes[members] = np.array(members.ranks, dtype=np.int64) // self._hardware.joined_ranks
        nodes = self._nodes[members]
        places = {rank: place for place, rank in enumerate(members.ranks)}
        calls = [(places[rank], call) for rank, (_, call) in collective.issued.items()]
        links = self._hardware.links
        near, far = links.near_gb_per_s * 1e9, links.far_gb_per_s * 1e9
        _, first = calls[0]
        if first.sent is not None:
            return max(
                links.message_us * 1e-6 * int((split.peers != place).sum())
                + _split_seconds(split, place, nodes, near, far)
                for place, call in calls
                for split in (call.sent, call.received)
                if split is not None
            )
        ranks = len(members.ranks)
        return ROUNDS[first.op](ranks) * first.nbytes / (near if (nodes == nodes[0]).all() else far)


ROUNDS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "all_gather": lambda ranks: ranks - 1,
    "reduce_scatter": lambda ranks: ranks - 1,
    "broadcast": lambda ranks: float(ranks > 1),
    "barrier": lambda ranks: 0.0,
}
"""How often a rank's bytes pass its link, by the ring algorithms; nbytes as `Call` has it."""


def _split_seconds(
    split: Split, here: int, nodes: np.ndarray[tuple[int], np.dtype[np.int64]], near: float, far: float
) -> float:
    """Seconds in which a rank's link passes its part of an all-to-all, within its node and beyond at the same time."""
    others = split.peers != here
    beyond = nodes[split.peers] != nodes[here]
    return max(
        float(split.sizes[others & ~beyond].sum()) / near,
        float(split.sizes[others & beyond].sum()) / far,
    )
