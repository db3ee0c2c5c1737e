"""What one rank does in a rehearsed step, as plain data that processes hand to each other.

A step is a list of events in the order in which the host enqueues them: products, collectives, and waits for them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_muon.core.layout import Ints

COUNTED = ("kernels", "views", "allocations")
"""Counts of `Products`; kernels are as CUDA launches them."""


class Members(NamedTuple):
    """A process group, the same on each of its ranks: their global ranks, and how many such groups came before it."""

    ranks: tuple[int, ...]
    number: int


class Split(NamedTuple):
    """Bytes for peers, or from them: the peers' ranks in the group, ascending, and the bytes of each, never zero."""

    peers: Ints
    sizes: Ints


@dataclass
class Products:
    """What the host enqueues in one phase of the step, and what it makes meanwhile."""

    phase: str
    flops: int
    half: bool  # of bf16 operands, not of fp32
    kernels: int = 0
    views: int = 0
    allocations: int = 0


class Call(NamedTuple):
    """A collective that has been started.

    `nbytes` is the size of the tensor that is reduced or broadcast, or of this rank's part of what is gathered or
    scattered, the same on every rank. An all-to-all has `sent` and `received` instead.
    """

    group: int  # index in the trace's groups
    op: str
    dtype: str
    nbytes: int
    root: int  # the rank in the group that broadcasts, else -1
    phase: str
    sent: Split | None = None
    received: Split | None = None

    @property
    def signature(self) -> tuple[str, str, int, int]:
        """What must be the same on every member."""
        return self.op, self.dtype, self.nbytes, self.root


class Wait(NamedTuple):
    """The stream of products waits for a collective, by its number among the step's."""

    call: int
    phase: str


Event = Products | Call | Wait


class Part(NamedTuple):
    """A part of a block of a matrix, counted from 0; a block that is not cut is one part."""

    name: str
    block: int
    place: int
    parts: int


@dataclass
class StepTrace:
    """One step, and the memory of tensors on the device in it."""

    events: list[Event] = field(default_factory=list)  # in the order of the host
    orthogonalized: Counter[Part] = field(default_factory=Counter)  # how often this rank has done which part
    begin_bytes: int = 0
    end_bytes: int = 0
    peak_bytes: int = 0
    peak_phase: str = ""
    peaks: dict[str, int] = field(default_factory=dict)  # while each group of matrices steps, by the group's name
    kept: dict[str, int] = field(default_factory=dict)  # of its buffers between steps, which are in no other figure

    @property
    def calls(self) -> list[Call]:
        """The collectives."""
        return [event for event in self.events if isinstance(event, Call)]

    @property
    def counts(self) -> dict[str, int]:
        """Kernels, views, allocations and collectives that the host has enqueued."""
        found = {name: sum(getattr(event, name, 0) for event in self.events) for name in COUNTED}
        return found | {"collectives": len(self.calls)}

    @property
    def flops(self) -> int:
        """Operations of all products."""
        return sum(event.flops for event in self.events if isinstance(event, Products))

    @property
    def extra_bytes(self) -> int:
        """The most memory beyond weights, gradients and state: buffers, and what is made within the step."""
        return max([self.peak_bytes - self.begin_bytes, *map(self.taken_bytes, self.kept)])

    def taken_bytes(self, name: str) -> int:
        """The same while a group of matrices steps."""
        return self.kept.get(name, 0) + max(self.peaks.get(name, 0) - self.begin_bytes, 0)


@dataclass
class RankTrace:
    """One rank: its process groups, the digests of its plans, its steps, optimizer state by place.

    `failure` says in a line why it did not finish, `synchronizations` where the host waited for the device in a step.
    """

    rank: int
    groups: list[Members] = field(default_factory=list)
    plans: list[str] = field(default_factory=list)
    steps: list[StepTrace] = field(default_factory=list)
    state_bytes: dict[str, int] = field(default_factory=dict)
    failure: str = ""
    synchronizations: list[str] = field(default_factory=list)
