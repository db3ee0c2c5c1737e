"""Compares what ranks recorded: with each other, with the layout, and with the plan.

Each check yields findings; none of them knows how ranks were recorded. Where only some ranks were rehearsed, those are
compared that were.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_muon.core.traffic import Ints
from megatron_muon.tools.plan.estimate import KindPlan
from megatron_muon.tools.rehearse.trace import Call, Members, Part, RankTrace, Wait

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
    unfinished = list(_unfinished(recorded))
    if any(trace.failure for trace in recorded.traces.values()):
        return unfinished
    return unfinished + [finding for check in CHECKS for finding in check(recorded)]


def _unfinished(recorded: Recorded) -> Iterator[Finding]:
    """No host waits for its device within a step, and every rank takes its steps."""
    for rank, trace in recorded.traces.items():
        for what, count in Counter(trace.synchronizations).items():
            yield Finding("host", (rank,), f"the host waits for the device: {what}" + f" ({count} times)" * (count > 1))
        if trace.failure and not trace.synchronizations:
            yield Finding("step", (rank,), f"the rank did not finish: {trace.failure}")


def plans(recorded: Recorded) -> Iterator[Finding]:
    """Every rank has the plan that `megatron-muon plan` makes."""
    for rank, trace in recorded.traces.items():
        digests = [kind.of(rank).digest for kind in recorded.plans]
        if trace.plans and trace.plans != digests:
            other = next((one for one, its in recorded.traces.items() if its.plans == digests), None)
            whose = "the planner" if other is None else f"rank {other}"
            text = f"rank {rank} has plan {'-'.join(trace.plans)}, {whose} has {'-'.join(digests)}"
            yield Finding("plan", (rank,) if other is None else (other, rank), text)


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
    """Every part of every matrix is orthogonalised once in a step, by whatever ranks of its process group."""
    for kind, step in itertools.product(recorded.plans, recorded.steps):
        for group in kind.members:
            members = [int(rank) for rank in group]
            if not recorded.traces.keys() >= set(members):
                continue  # others, who are not recorded, may have it
            done: dict[tuple[str, int], dict[Part, list[int]]] = defaultdict(lambda: defaultdict(list))
            for member in members:
                for part, times in recorded.traces[member].steps[step].orthogonalized.items():
                    done[part.name, part.block][part] += [member] * times
            for index, matrix in enumerate(kind.group.layout.matrices):
                for block in range(len(matrix.blocks)):
                    wrong = _not_once(done[matrix.name, block])
                    if wrong is not None:
                        what, by = wrong
                        name = matrix.name + f", block {block}," * (len(matrix.blocks) > 1)
                        by_whom = f", by ranks {', '.join(map(str, by))}" if by else "; its owner does not"
                        owner = members[kind.of(members[0]).plan.owners[index]]
                        yield Finding("blocks", by or (owner,), f"step {step}: {name} {what}{by_whom}")


def _not_once(done: dict[Part, list[int]]) -> tuple[str, tuple[int, ...]] | None:
    """What is wrong with how a block has been orthogonalised, and the ranks that did it."""
    cut = {part.parts for part in done} or {1}
    if len(cut) > 1:
        ranks = sorted({rank for ranks in done.values() for rank in ranks})
        return f"is orthogonalised in {' and in '.join(map(str, sorted(cut)))} parts", tuple(ranks)
    (count,) = cut
    by_place = {part.place: ranks for part, ranks in done.items()}
    for place in range(count):
        by = by_place.get(place, [])
        if len(by) != 1:
            which = f"part {place} of {count} " if count > 1 else ""
            return f"{which}is orthogonalised {len(by)} times", tuple(sorted(set(by)))
    return None


def waits(recorded: Recorded) -> Iterator[Finding]:
    """Every collective is waited for in the step in which it starts: before that, its buffers are not to be read."""
    for rank, trace in recorded.traces.items():
        for step in recorded.steps:
            waited = {event.call for event in trace.steps[step].events if isinstance(event, Wait)}
            for number, call in enumerate(trace.steps[step].calls):
                if number not in waited:
                    text = f"step {step}, collective {number} of the rank is never waited for: {_said(call)}"
                    yield Finding("wait", (rank,), text)


def leaks(recorded: Recorded) -> Iterator[Finding]:
    """The last step leaves as much memory in use as it found."""
    for rank, trace in recorded.traces.items():
        if kept := trace.steps[-1].end_bytes - trace.steps[-1].begin_bytes:
            yield Finding("leak", (rank,), f"each step leaves {kept:,} bytes more in use")


def memory(recorded: Recorded) -> Iterator[Finding]:
    """No rank takes more memory than --muon-exchange-buffer-mb allows, nor than the plan says where it has all."""
    planned = np.max([kind.of_ranks(lambda item: item.extra) for kind in recorded.plans], axis=0)  # one by one
    for rank, trace in recorded.traces.items():
        last = trace.steps[-1]
        for kind in recorded.plans:
            allowed, taken = kind.of(rank).plan.buffer_bytes, last.taken_bytes(kind.group.name)
            if taken > allowed + SLACK_BYTES:
                text = f"the step of the {kind.group.name} matrices takes {taken:,} bytes, and may take {allowed:,}"
                yield Finding("memory", (rank,), text)
        if recorded.has_memory and last.extra_bytes > TOLERANCE * planned[rank] + SLACK_BYTES:
            text = (
                f"the step takes {last.extra_bytes:,} bytes beyond weights, gradients and state, in {last.peak_phase}; "
                f"the plan says at most {planned[rank]:,}"
            )
            yield Finding("memory", (rank,), text)


def traffic(recorded: Recorded) -> Iterator[Finding]:
    """Every rank receives as many bytes as the plan says."""
    planned = planned_bytes(recorded)
    for rank, trace in recorded.traces.items():
        if (received := received_bytes(trace, -1)) != planned[rank]:
            text = f"the rank receives {received:,} bytes in a step, the plan says {planned[rank]:,}"
            yield Finding("bytes", (rank,), text)


CHECKS: tuple[Callable[[Recorded], Iterator[Finding]], ...] = (
    *(plans, order, pairs, waits, traffic, blocks, leaks, memory),
)
"""Of traces that are complete."""


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
