"""Compares what ranks recorded, all or some: with each other, with the layout, and with the plan."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from megatron_muon.tools.plan.estimate import KindPlan
from megatron_muon.tools.rehearse.rank import STEPS
from megatron_muon.tools.rehearse.recorder import Call, Members, RankTrace

TOLERANCE, SLACK_BYTES = 1.10, 2**20
"""A rank may take this much more memory than its plan says: places of elements and such are not in the plan."""
_MAX_PAIRS = 3
"""Pairs of ranks of a collective that are reported."""


class Finding(NamedTuple):
    """A disagreement: the check that found it, the ranks that it is about, and what is wrong."""

    check: str
    ranks: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Recorded:
    """A rehearsal's traces, by rank, beside what was planned."""

    traces: dict[int, RankTrace]
    plans: Sequence[KindPlan]

    def planned(self, rank: int) -> dict[str, Any]:
        """What the plans of a rank's groups, which step one by one, say of it."""
        each = [(kind.of(rank), kind.group.members(rank).index(rank)) for kind in self.plans]
        return {
            "digest": "-".join(item.digest for item, _ in each),
            "received_bytes": sum(item.received[place] for item, place in each),
            "extra_bytes": max(int(item.extra[place]) for item, place in each),
            "flops": sum(item.plan.loads[place] for item, place in each),
        }

    def calls(self, step: int) -> dict[Members, dict[int, list[Call]]]:
        """A step's collectives of each process group, by the rank in the world."""
        found: dict[Members, dict[int, list[Call]]] = defaultdict(dict)
        for rank, trace in self.traces.items():
            calls = trace.steps[step].calls
            for index, members in enumerate(trace.groups):
                found[members][rank] = [call for call in calls if call.group == index]
        return found


def check(recorded: Recorded) -> list[Finding]:
    """All disagreements; of ranks that did not finish, only that."""
    found = []
    for rank, trace in recorded.traces.items():
        for what, count in Counter(trace.synchronizations).items():
            found.append(
                Finding("host", (rank,), f"the host waits for the device ({count}x): {what}")
            )
        if trace.failure and not trace.synchronizations:
            found.append(Finding("step", (rank,), f"the rank did not finish: {trace.failure}"))
    if any(trace.failure for trace in recorded.traces.values()):
        return found
    for step in range(STEPS):
        calls = recorded.calls(step)
        found += [
            *order(step, calls),
            *pairs(step, calls),
            *stuck(recorded, step),
            *blocks(recorded, step),
        ]
    return [*found, *each_rank(recorded)]


def order(step: int, calls: dict[Members, dict[int, list[Call]]]) -> Iterator[Finding]:
    """On each process group the members start the same collectives in the same order."""
    for by_rank in calls.values():
        first, *others = by_rank
        for rank in others:
            for number, (one, other) in enumerate(
                itertools.zip_longest(by_rank[first], by_rank[rank])
            ):
                if one is None or other is None or one.signature != other.signature:
                    both = f"rank {first} starts {_said(one)}, rank {rank} {_said(other)}"
                    yield Finding(
                        "order",
                        (first, rank),
                        f"step {step}, collective {number} of their group: {both}",
                    )
                    break


def _said(call: Call | None) -> str:
    if call is None:
        return "none"
    return f"{call.op} of {call.dtype}{f', {call.nbytes:,} bytes' if call.nbytes else ''}"


def stuck(recorded: Recorded, step: int) -> Iterator[Finding]:
    """No rank waits for a collective that another one does not start, as where two take their groups in two orders."""
    events = {rank: iter(trace.steps[step].events) for rank, trace in recorded.traces.items()}
    # with their numbers in the group
    started: dict[int, list[tuple[Members, int]]] = {rank: [] for rank in events}
    counts = Counter[tuple[int, Members]]()
    absent: dict[tuple[Members, int], set[int]] = {}  # recorded members that have not started it
    waiting: dict[int, tuple[Members, int]] = {}
    running = set(events)
    while running:
        for rank in running:
            for event in events[rank]:
                if isinstance(event, int):
                    waiting[rank] = started[rank][event]
                    break
                members = recorded.traces[rank].groups[event.group]
                key = members, counts[rank, members]
                counts[rank, members] += 1
                started[rank].append(key)
                if key not in absent:
                    absent[key] = events.keys() & set(members.ranks)
                absent[key].discard(rank)
        running = {rank for rank, key in waiting.items() if not absent[key]}
        for rank in running:
            del waiting[rank]
    for rank, (members, number) in waiting.items():
        other = min(absent[members, number])
        text = (
            f"step {step}: rank {rank} waits for collective {number} of their group, which {other}"
            " does not start"
        )
        yield Finding("order", (rank, other), text)


def pairs(step: int, calls: dict[Members, dict[int, list[Call]]]) -> Iterator[Finding]:
    """What one rank sends to another in an all-to-all is what the other expects of it."""
    for members, by_rank in calls.items():
        for number, each in enumerate(zip(*by_rank.values(), strict=False)):
            of_places = dict(zip(map(members.ranks.index, by_rank), each, strict=True))
            for source, target, sent, expected in itertools.islice(
                _unlike(of_places, sorted(of_places)), _MAX_PAIRS
            ):
                ranks = members.ranks[source], members.ranks[target]
                both = (
                    f"rank {ranks[0]} sends {sent:,} bytes to rank {ranks[1]}, which expects"
                    f" {expected:,}"
                )
                yield Finding(
                    "bytes", ranks, f"step {step}, collective {number} of their group: {both}"
                )


def _unlike(calls: dict[int, Call], places: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """`(source, target, bytes sent, bytes expected)` where the two differ, of ascending places that are recorded."""
    sent, expected = np.zeros((2, len(places), len(places)), dtype=np.int64)
    for number, place in enumerate(places):
        for split, column in (
            (calls[place].sent, sent[number]),
            (calls[place].received, expected[:, number]),
        ):
            if split is not None:
                known = np.isin(split.peers, places)
                column[np.searchsorted(places, split.peers[known])] = split.sizes[known]
    for source, target in np.argwhere(sent != expected):
        yield (
            places[source],
            places[target],
            int(sent[source, target]),
            int(expected[source, target]),
        )


def blocks(recorded: Recorded, step: int) -> Iterator[Finding]:
    """Every part of every block is orthogonalised once in a step, by whatever ranks of its process group."""
    for kind in recorded.plans:
        for group in dict.fromkeys(tuple(kind.group.members(rank)) for rank in recorded.traces):
            if not recorded.traces.keys() >= set(group):
                continue  # others, who are not recorded, may have it
            done: dict[tuple[str, int], list[tuple[int, int, int]]] = defaultdict(list)
            for rank in group:
                for (name, block, place, count), times in (
                    recorded.traces[rank].steps[step].orthogonalized.items()
                ):
                    done[name, block] += [(place, count, rank)] * times
            every = (
                (matrix.name, block)
                for matrix in kind.group.layout.matrices
                for block in range(len(matrix.blocks))
            )
            for name, block in every:
                parts = sorted(done[name, block])
                count = parts[0][1] if parts else 1
                if [part[:2] for part in parts] != [(place, count) for place in range(count)]:
                    by = [f"part {place + 1} of {of} by rank {rank}" for place, of, rank in parts]
                    text = (
                        f"step {step}: {name}, block {block}, is orthogonalised:"
                        f" {', '.join(by) or 'never'}"
                    )
                    yield Finding(
                        "blocks", tuple(sorted({rank for *_, rank in parts})) or group, text
                    )


def each_rank(recorded: Recorded) -> Iterator[Finding]:
    """Each rank has the plan of `megatron-muon plan`, waits for what it starts, and takes what the plan says."""
    for rank, trace in recorded.traces.items():
        last, planned, own = trace.steps[-1], recorded.planned(rank), (rank,)
        if trace.digest != planned["digest"]:
            yield Finding(
                "plan",
                own,
                f"rank {rank} has plan {trace.digest}, the planner has {planned['digest']}",
            )
        for step in range(STEPS):
            waits, calls = trace.steps[step].waits, trace.steps[step].calls
            for number in sorted(set(range(len(calls))) - set(waits)):
                text = (
                    f"step {step}, collective {number} of the rank is never waited for:"
                    f" {_said(calls[number])}"
                )
                yield Finding("wait", own, text)
        if (received := trace.received_bytes) != planned["received_bytes"]:
            text = (
                f"the rank receives {received:,} bytes in a step, the plan says"
                f" {planned['received_bytes']:,}"
            )
            yield Finding("bytes", own, text)
        if kept := last.end_bytes - last.begin_bytes:
            yield Finding("leak", own, f"each step leaves {kept:,} bytes more in use")
        for kind in recorded.plans:
            allowed, taken = kind.of(rank).plan.buffer_bytes, last.taken[kind.group.name]
            if taken > allowed + SLACK_BYTES:
                text = (
                    f"the step of the {kind.group.name} matrices takes {taken:,} bytes, and may"
                    f" take {allowed:,}"
                )
                yield Finding("memory", own, text)
        if last.extra_bytes > TOLERANCE * planned["extra_bytes"] + SLACK_BYTES:
            text = f"the step takes {last.extra_bytes:,} bytes beyond weights, gradients and state"
            yield Finding(
                "memory", own, f"{text}; the plan says at most {planned['extra_bytes']:,}"
            )
