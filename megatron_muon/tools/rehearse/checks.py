"""Compares what ranks recorded: with each other, with the layout, and with the plan.

Where only some ranks were rehearsed, those are compared that were.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_muon.core.layout import Ints
from megatron_muon.tools.plan.estimate import KindPlan
from megatron_muon.tools.rehearse.trace import Call, Members, RankTrace, Wait

TOLERANCE, SLACK_BYTES = 1.10, 2**20
"""A rank may take this much more memory than its plan says: places of elements and such are not in the plan."""
_SHOWN = 3
"""Pairs of ranks of a collective that are reported."""


class Finding(NamedTuple):
    """A disagreement: the check that found it, the ranks that it is about, and what is wrong."""

    check: str
    ranks: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Recorded:
    """A rehearsal's traces, by rank, beside what was planned.

    `has_memory` is false where the plans lack some of a step's memory: momentum that is staged or stored rounded.
    """

    traces: dict[int, RankTrace]
    plans: Sequence[KindPlan]
    world_size: int
    has_memory: bool = True

    @property
    def steps(self) -> range:
        """Numbers of the steps."""
        return range(min(len(trace.steps) for trace in self.traces.values()))

    def calls(self) -> Iterator[tuple[int, Members, dict[int, list[Call]]]]:
        """The collectives of each step and process group, by the rank in the world."""
        for step in self.steps:
            found: dict[Members, dict[int, list[Call]]] = defaultdict(dict)
            for rank, trace in self.traces.items():
                by_group: dict[int, list[Call]] = defaultdict(list)
                for call in trace.steps[step].calls:
                    by_group[call.group].append(call)
                for index, members in enumerate(trace.groups):
                    found[members][rank] = by_group[index]
            for members, by_rank in found.items():
                yield step, members, by_rank


def check(recorded: Recorded) -> list[Finding]:
    """All disagreements; of ranks that did not finish, only that."""
    found = []
    for rank, trace in recorded.traces.items():
        for what, count in Counter(trace.synchronizations).items():
            found.append(Finding("host", (rank,), f"the host waits for the device ({count}x): {what}"))
        if trace.failure and not trace.synchronizations:
            found.append(Finding("step", (rank,), f"the rank did not finish: {trace.failure}"))
    if any(trace.failure for trace in recorded.traces.values()):
        return found
    return [*found, *order(recorded), *pairs(recorded), *each_rank(recorded), *blocks(recorded)]


def order(recorded: Recorded) -> Iterator[Finding]:
    """On each process group the members start the same collectives in the same order."""
    for step, _, by_rank in recorded.calls():
        first, *others = by_rank
        for rank in others:
            calls = itertools.zip_longest(by_rank[first], by_rank[rank])
            for number, (one, other) in enumerate(calls):
                if one is None or other is None or one.signature != other.signature:
                    text = (
                        f"step {step}, collective {number} of their group: rank {first} starts {_said(one)}, rank "
                        f"{rank} {_said(other)}"
                    )
                    yield Finding("order", (first, rank), text)
                    break


def _said(call: Call | None) -> str:
    if call is None:
        return "none"
    root = f" from {call.root}" if call.root >= 0 else ""
    return f"{call.op} of {call.dtype}{f', {call.nbytes:,} bytes' if call.nbytes else ''}{root} in {call.phase}"


def pairs(recorded: Recorded) -> Iterator[Finding]:
    """What one rank sends to another in an all-to-all is what the other expects of it."""
    for step, members, by_rank in recorded.calls():
        for number, calls in enumerate(zip(*by_rank.values(), strict=False)):
            if any(call.sent is None or call.received is None for call in calls):
                continue
            of_places = dict(zip(map(members.ranks.index, by_rank), calls, strict=True))
            for source, target, sent, expected in itertools.islice(_unlike(of_places, len(members.ranks)), _SHOWN):
                ranks = members.ranks[source], members.ranks[target]
                text = (
                    f"step {step}, collective {number} of their group, {calls[0].phase}: rank {ranks[0]} sends "
                    f"{sent:,} bytes to rank {ranks[1]}, which expects {expected:,}"
                )
                yield Finding("bytes", ranks, text)


def _unlike(calls: dict[int, Call], size: int) -> Iterator[tuple[int, int, int, int]]:
    """`(source, target, bytes sent, bytes expected)` where the two differ, of ranks in the group that are recorded."""
    sent = [(place * size + call.sent.peers, call.sent.sizes) for place, call in calls.items() if call.sent]
    expected = [
        (call.received.peers * size + place, call.received.sizes) for place, call in calls.items() if call.received
    ]
    keys, sizes = (np.concatenate(column) for column in zip(*sent, *expected, strict=True))
    count = sum(len(peers) for peers, _ in sent)
    pairs, numbers = np.unique(keys, return_inverse=True)
    there, here = (
        np.bincount(numbers[part], weights=sizes[part], minlength=len(pairs)).astype(np.int64)
        for part in (slice(count, None), slice(count))
    )
    known = np.isin(pairs // size, list(calls)) & np.isin(pairs % size, list(calls))
    for at in np.nonzero(known & (here != there))[0]:
        yield int(pairs[at] // size), int(pairs[at] % size), int(here[at]), int(there[at])


def blocks(recorded: Recorded) -> Iterator[Finding]:
    """Every part of every block is orthogonalised once in a step, by whatever ranks of its process group."""
    for kind, step in itertools.product(recorded.plans, recorded.steps):
        for group in kind.members.tolist():
            if not recorded.traces.keys() >= set(group):
                continue  # others, who are not recorded, may have it
            done: dict[tuple[str, int], list[tuple[int, int, int]]] = defaultdict(list)
            for rank in group:
                for part, times in recorded.traces[rank].steps[step].orthogonalized.items():
                    done[part.name, part.block] += [(part.place, part.parts, rank)] * times
            for matrix, owner in zip(kind.group.layout.matrices, kind.of(group[0]).plan.owners, strict=True):
                for block in range(len(matrix.blocks)):
                    parts = sorted(done[matrix.name, block])
                    count = parts[0][1] if parts else 1
                    if [part[:2] for part in parts] != [(place, count) for place in range(count)]:
                        by = [f"part {place + 1} of {of} by rank {rank}" for place, of, rank in parts]
                        text = (
                            f"step {step}: {matrix.name}, block {block}, is orthogonalised: {', '.join(by) or 'never'}"
                        )
                        ranks = sorted({rank for *_, rank in parts}) or [group[owner]]
                        yield Finding("blocks", tuple(ranks), text)


def each_rank(recorded: Recorded) -> Iterator[Finding]:
    """Each rank has the plan of `megatron-muon plan`, waits for what it starts, and takes what the plan says."""
    bytes_planned = planned_bytes(recorded)
    memory_planned = np.max([kind.of_ranks(lambda item: item.extra) for kind in recorded.plans], axis=0)  # one by one
    for rank, trace in recorded.traces.items():
        last, own = trace.steps[-1], (rank,)
        digests = [kind.of(rank).digest for kind in recorded.plans]
        if trace.plans and trace.plans != digests:
            other = next((one for one, its in recorded.traces.items() if its.plans == digests), None)
            whose = "the planner" if other is None else f"rank {other}"
            text = f"rank {rank} has plan {'-'.join(trace.plans)}, {whose} has {'-'.join(digests)}"
            yield Finding("plan", own if other is None else (other, rank), text)
        for step in recorded.steps:
            waited = {event.call for event in trace.steps[step].events if isinstance(event, Wait)}
            for number, call in enumerate(trace.steps[step].calls):
                if number not in waited:
                    text = f"step {step}, collective {number} of the rank is never waited for: {_said(call)}"
                    yield Finding("wait", own, text)
        if (received := received_bytes(trace, -1)) != bytes_planned[rank]:
            text = f"the rank receives {received:,} bytes in a step, the plan says {bytes_planned[rank]:,}"
            yield Finding("bytes", own, text)
        if kept := last.end_bytes - last.begin_bytes:
            yield Finding("leak", own, f"each step leaves {kept:,} bytes more in use")
        for kind in recorded.plans:
            allowed, taken = kind.of(rank).plan.buffer_bytes, last.taken_bytes(kind.group.name)
            if taken > allowed + SLACK_BYTES:
                text = f"the step of the {kind.group.name} matrices takes {taken:,} bytes, and may take {allowed:,}"
                yield Finding("memory", own, text)
        if recorded.has_memory and last.extra_bytes > TOLERANCE * memory_planned[rank] + SLACK_BYTES:
            text = (
                f"the step takes {last.extra_bytes:,} bytes beyond weights, gradients and state, in {last.peak_phase}; "
                f"the plan says at most {memory_planned[rank]:,}"
            )
            yield Finding("memory", own, text)


def planned_bytes(recorded: Recorded) -> Ints:
    """Bytes that each rank of the run receives in a step by its plans."""
    return np.sum([kind.of_ranks(lambda item: item.plan.exchanged_bytes()) for kind in recorded.plans], axis=0)


def received_bytes(trace: RankTrace, step: int) -> int:
    """Bytes that a rank receives from others in a step's all-to-alls, broadcasts and gatherings."""
    total = 0
    for call in trace.steps[step].calls:
        members = trace.groups[call.group].ranks
        here = members.index(trace.rank)
        if call.received is not None:
            total += int(call.received.sizes[call.received.peers != here].sum())
        elif call.op == "broadcast" and call.root != here:
            total += call.nbytes
        elif call.op == "all_gather":
            total += call.nbytes * (len(members) - 1)
    return total
