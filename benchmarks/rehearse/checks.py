"""Compares the recordings of ranks with each other, with the layout, and with the plan."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from benchmarks.rehearse.rank import STEPS
from benchmarks.rehearse.recorder import Call, Members, RankTrace
from megatron_muon.megatron.plan_figures import loads_of
from megatron_muon.tools.plan.estimate import (
    Group,
    GroupPlan,
    Hardware,
    PlanSettings,
    node_pattern,
    plan_group,
)

SLACK_BYTES = 2**20
"""A step may take this much memory beside its buffers: for small tensors, such as factors."""
MAX_PAIRS = 3
"""Pairs of ranks of a collective that are reported."""

type CallsByRank = dict[int, list[Call]]
type Transfers = dict[tuple[int, int], int]
"""Bytes by sender and receiver."""


@dataclass
class KindPlan:
    """The plans of all groups of a kind, made on request: one for each placement in nodes."""

    group: Group
    settings: PlanSettings
    hardware: Hardware
    _plans: dict[tuple[int, ...], GroupPlan] = field(default_factory=dict)

    def of(self, rank: int) -> GroupPlan:
        """The plan of a rank's group."""
        pattern = node_pattern(self.group.members(rank), self.hardware)
        if pattern not in self._plans:
            self._plans[pattern] = plan_group(self.group, self.settings, self.hardware, rank)
        return self._plans[pattern]


class Finding(NamedTuple):
    """A disagreement: the check that found it, the ranks concerned, and a description."""

    check: str
    ranks: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Recorded:
    """The traces of a rehearsal by rank, and the plans to compare them with."""

    traces: dict[int, RankTrace]
    plans: Sequence[KindPlan]

    def planned(self, rank: int) -> dict[str, Any]:
        """Planned figures of a rank over its groups, which step one after the other."""
        digests = []
        received = extra = moved = 0
        flops = 0.0
        for kind in self.plans:
            item = kind.of(rank)
            place = kind.group.members(rank).index(rank)
            digests.append(item.plan.digest())
            received += item.received[place]
            extra = max(extra, int(item.plan.step_bytes[place]))
            flops += loads_of(item.plan)[place]
            moved += int(item.moved[place])
        return {
            "digest": "-".join(digests),
            "received_bytes": received,
            "extra_bytes": extra,
            "flops": flops,
            "moved_bytes": moved,
        }

    def calls(self, step: int) -> dict[Members, CallsByRank]:
        """A step's collectives by process group and global rank."""
        found: dict[Members, CallsByRank] = defaultdict(dict)
        for rank, trace in self.traces.items():
            for members in trace.groups:
                found[members][rank] = []
            for call in trace.steps[step].calls:
                found[trace.groups[call.group]][rank].append(call)
        return found


def check(recorded: Recorded) -> list[Finding]:
    """All disagreements; if a rank did not finish, only the reasons for that."""
    found = []
    for rank, trace in recorded.traces.items():
        for wait, count in Counter(trace.synchronizations).items():
            text = f"the host waits for the device ({count}x): {wait}"
            found.append(Finding("host", (rank,), text))
        if trace.failure and not trace.synchronizations:
            found.append(Finding("step", (rank,), f"the rank did not finish: {trace.failure}"))
    if any(trace.failure for trace in recorded.traces.values()):
        return found
    for step in range(STEPS):
        for members, by_rank in recorded.calls(step).items():
            found += order(step, by_rank)
            found += pairs(step, members, by_rank)
        found += stuck(recorded, step)
        for kind in recorded.plans:
            found += blocks(recorded, step, kind.group)
    for rank, trace in recorded.traces.items():
        found += waits(rank, trace)
        found += totals(recorded, rank)
        found += memory(recorded, rank)
    return found


def order(step: int, by_rank: CallsByRank) -> Iterator[Finding]:
    """Members of a process group that do not start the same collectives in the same order."""
    first, *others = by_rank
    for rank in others:
        both = itertools.zip_longest(by_rank[first], by_rank[rank])
        for number, (one, other) in enumerate(both):
            if one is None or other is None or one.signature != other.signature:
                text = f"rank {first} starts {_name(one)}, rank {rank} {_name(other)}"
                text = f"step {step}, collective {number} of their group: {text}"
                yield Finding("order", (first, rank), text)
                break


def _name(call: Call | None) -> str:
    if call is None:
        return "none"
    size = f", {call.nbytes:,} bytes" if call.nbytes else ""
    return f"{call.op} of {call.dtype}{size}"


def stuck(recorded: Recorded, step: int) -> Iterator[Finding]:
    """Ranks that wait for a collective that another rank does not start."""
    events = {rank: iter(trace.steps[step].events) for rank, trace in recorded.traces.items()}
    # a collective is known by its group and its number in that group
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
        text = f"rank {rank} waits for collective {number} of their group"
        text = f"step {step}: {text}, which {other} does not start"
        yield Finding("order", (rank, other), text)


def pairs(step: int, members: Members, by_rank: CallsByRank) -> Iterator[Finding]:
    """Pairs of ranks of an all-to-all of which one sends other bytes than the other expects."""
    for number, calls in enumerate(zip(*by_rank.values(), strict=False)):
        sent: Transfers = {}
        expected: Transfers = {}
        for rank, call in zip(by_rank, calls, strict=True):
            for peer, size in call.sent:
                sent[rank, members.ranks[peer]] = size
            for peer, size in call.received:
                expected[members.ranks[peer], rank] = size
        unlike = sorted(dict(sent.items() ^ expected.items()))
        known = [pair for pair in unlike if by_rank.keys() >= set(pair)]
        for source, target in known[:MAX_PAIRS]:
            counts = sent.get((source, target), 0), expected.get((source, target), 0)
            text = f"rank {source} sends {counts[0]:,} bytes to rank {target}"
            text = f"step {step}, collective {number} of their group: {text}"
            yield Finding("bytes", (source, target), f"{text}, which expects {counts[1]:,}")


def blocks(recorded: Recorded, step: int, group: Group) -> Iterator[Finding]:
    """Blocks, or parts of blocks, that a process group does not orthogonalize exactly once."""
    for ranks in {tuple(group.members(rank)): None for rank in recorded.traces}:
        if not recorded.traces.keys() >= set(ranks):
            continue  # a rank that is not recorded may have it
        done: dict[tuple[str, int], list[tuple[int, int, int]]] = defaultdict(list)
        for rank in ranks:
            for part, times in recorded.traces[rank].steps[step].orthogonalized.items():
                key = part.matrix, part.block
                done[key] += [(part.place, part.parts, rank)] * times
        for matrix in group.layout.matrices:
            for block in range(len(matrix.blocks)):
                parts = sorted(done[matrix.name, block])
                count = parts[0][1] if parts else 1
                once = [(place, count) for place in range(count)]
                if [part[:2] for part in parts] != once:
                    each = [f"part {at + 1} of {of} by rank {rank}" for at, of, rank in parts]
                    text = f"step {step}: {matrix.name}, block {block}, is orthogonalized"
                    who = tuple(sorted({rank for *_, rank in parts}))
                    text = f"{text}: {', '.join(each) or 'never'}"
                    yield Finding("blocks", who or ranks, text)


def waits(rank: int, trace: RankTrace) -> Iterator[Finding]:
    """Collectives that the rank never waits for."""
    for number, step in enumerate(trace.steps):
        waited = set(step.waits)
        for at, call in enumerate(step.calls):
            if at not in waited:
                text = f"step {number}, collective {at} of the rank is never waited for"
                yield Finding("wait", (rank,), f"{text}: {_name(call)}")


def totals(recorded: Recorded, rank: int) -> Iterator[Finding]:
    """A plan or a number of received bytes other than that of `megatron-muon plan`."""
    trace = recorded.traces[rank]
    planned = recorded.planned(rank)
    if trace.digest != planned["digest"]:
        text = f"rank {rank} has plan {trace.digest}, the planner has {planned['digest']}"
        yield Finding("plan", (rank,), text)
    received, expected = trace.received_bytes, planned["received_bytes"]
    if received != expected:
        text = f"the rank receives {received:,} bytes in a step, the plan says {expected:,}"
        yield Finding("bytes", (rank,), text)


def memory(recorded: Recorded, rank: int) -> Iterator[Finding]:
    """Memory that a step keeps, or takes beyond its plan."""
    last = recorded.traces[rank].steps[-1]
    kept = last.end_bytes - last.begin_bytes
    if kept:
        yield Finding("leak", (rank,), f"each step leaves {kept:,} bytes more in use")
    for kind in recorded.plans:
        name = kind.group.name
        item = kind.of(rank)
        allowed = item.plan.buffer_bytes
        taken = last.taken[name]
        if taken > allowed + SLACK_BYTES:
            text = f"the step of the {name} matrices takes {taken:,} bytes"
            yield Finding("memory", (rank,), f"{text}, and may take {allowed:,}")
        buffers = last.buffers[name]
        planned = int(item.plan.step_bytes[kind.group.members(rank).index(rank)])
        if buffers != planned:
            text = f"the buffers of the {name} matrices have {buffers:,} bytes"
            yield Finding("memory", (rank,), f"{text}, the plan says {planned:,}")
        if taken > buffers + SLACK_BYTES:
            text = f"the step of the {name} matrices takes {taken - buffers:,} bytes"
            yield Finding("memory", (rank,), f"{text} beside its buffers")
