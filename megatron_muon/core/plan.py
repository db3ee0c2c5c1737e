"""Owners of matrices, and the waves in which their rows travel.

A plan is made once, before the first step, from a layout and the cost of each matrix; every rank
makes the same plan by itself. `assignment` gives owners, `packing` cuts matrices that travel into
waves, and those that are whole on their owner into batches, which fill the time.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from megatron_muon.core.assignment import TeamRules, assign
from megatron_muon.core.buffers import Buffers, Shares, Sizes, WaveBytes
from megatron_muon.core.layout import Ints, Layout
from megatron_muon.core.packing import Needs, auto_bytes, cut_waves, make_batches
from megatron_muon.core.route import make_stacks
from megatron_muon.core.slices import BlockSlice, Team
from megatron_muon.core.traffic import Traffic, Transfers
from megatron_muon.errors import SettingError

STATE_BYTES = 4
"""Bytes of an element of a method's state, fp32."""

DIGEST_LENGTH = 12
"""Hexadecimal digits: they fit an int64."""


@dataclass(frozen=True)
class Plan:
    """Owners and waves of a layout.

    Attributes:
        teams: the ranks that orthogonalize each matrix.
        waves: matrices that travel together, in the order of the step.
        loads: cost owned by each rank, in the unit of the given costs.
        sizes: what decides the bytes of waves.
        buffer_bytes: the most that a step may take on a rank beyond weights, gradients and state.
        batches: for each rank, matrices that are whole on it, their owner, in parts that are
            orthogonalized together.
        by_pairs: messages go to those ranks alone for which there are bytes.
    """

    layout: Layout
    teams: tuple[Team, ...]
    waves: tuple[tuple[int, ...], ...]
    loads: tuple[float, ...]
    sizes: Sizes
    buffer_bytes: int
    batches: tuple[tuple[tuple[int, ...], ...], ...] = ()
    by_pairs: bool = False

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """The first owner of each matrix: the only one where there are no teams."""
        return tuple(team.ranks[0] for team in self.teams)

    def beside(
        self,
        rank: int,
        wave: int,
    ) -> tuple[tuple[int, ...], ...]:
        """The batches of a rank that fill the time in which a wave travels."""
        batches = self.batches[rank]
        count = len(self.waves)
        first = math.ceil(wave * len(batches) / count)
        end = math.ceil((wave + 1) * len(batches) / count)
        return batches[first:end]

    def slices(self, indices: Sequence[int]) -> Iterator[BlockSlice]:
        """The slices of matrices that ranks orthogonalize."""
        for index in indices:
            yield from self.teams[index].slices(
                index,
                self.layout.matrices[index],
            )

    def digest(self) -> str:
        """A short hash of who does what, equal for equal plans on any machine."""
        matrices = self.layout.matrices
        content = [
            [matrix.shape for matrix in matrices],
            [(matrix.split.groups, matrix.split.parts) for matrix in matrices],
            [matrix.steps for matrix in matrices],
            [(team.ranks, team.cuts) for team in self.teams],
            self.waves,
            self.batches,
            self.by_pairs,
        ]
        return hashlib.sha256(
            json.dumps(content).encode(),
        ).hexdigest()[:DIGEST_LENGTH]

    @cached_property
    def all_to_alls(self) -> list[tuple[Transfers, Transfers]]:
        """The transfers of each wave: its rows, and its updates."""
        traffic = Traffic(self.layout, self.teams)
        return [
            (
                traffic.gathered(wave),
                traffic.returned(wave),
            )
            for wave in self.waves
        ]

    @cached_property
    def step_bytes(self) -> Ints:
        """Bytes of the buffers of a step on each rank."""
        waves = [self._wave_bytes(number) for number in range(len(self.waves))]
        found = []
        for rank, of_rank in enumerate(zip(*waves, strict=True)):
            batches = list(map(self._batch_bytes, self.batches[rank]))
            found.append(Buffers.of(of_rank, batches, apart=self.sizes.apart).nbytes)
        return np.array(found)

    @cached_property
    def state_bytes(self) -> Ints:
        """Bytes of the method's state on each rank."""
        found = np.zeros(self.layout.world_size, dtype=np.int64)
        for owner, matrix in zip(self.owners, self.layout.matrices, strict=True):
            numels = self.sizes.method.state_numels(matrix)
            found[owner] += STATE_BYTES * numels.total()
        return found

    def _wave_bytes(self, number: int) -> list[WaveBytes]:
        """Bytes of a wave on each rank."""
        ranks = self.layout.world_size
        numel, largest = np.zeros((2, ranks), dtype=np.int64)
        for index in self.waves[number]:
            shards = self.layout.matrices[index].shards
            elements = shards.elements[shards.numbers]
            numel[shards.ranks] += elements
            largest[shards.ranks] = np.maximum(largest[shards.ranks], elements)
        slots: dict[int, list[BlockSlice]] = defaultdict(list)
        for slot in self.slices(self.waves[number]):
            slots[slot.rank].append(slot)
        rows, updates = self.all_to_alls[number]
        owned = np.maximum(rows.received(ranks), updates.sent(ranks))
        if self.sizes.broadcast:
            owned[:] = 0
        found = []
        for rank in range(ranks):
            shares = Shares(int(numel[rank]), int(largest[rank]))
            stacks = make_stacks(slots[rank], self.sizes.method.scale)
            used = self.sizes.wave(
                shares.numel,
                int(owned[rank]),
                shares,
                stacks,
            )
            found.append(used)
        return found

    def _batch_bytes(self, batch: Sequence[int]) -> WaveBytes:
        """Bytes of a batch on its rank."""
        numels = [self.layout.matrices[index].numel for index in batch]
        stacks = make_stacks(
            list(self.slices(batch)),
            self.sizes.method.scale,
        )
        return self.sizes.batch(
            Shares(sum(numels), max(numels)),
            stacks,
        )


def make_plan(
    layout: Layout,
    costs: Sequence[float],
    *,
    sizes: Sizes,
    buffer_bytes: int | None = None,
    rules: TeamRules | None = None,
) -> Plan:
    """Plan a layout: the same on every rank that has the same arguments.

    Args:
        costs: work of orthogonalizing each matrix, in any unit.
        buffer_bytes: limit of a step on a rank; None is `AUTO_BYTES`, or as much as whole blocks
            need.
        rules: of teams; None forms none, on one node.

    Raises:
        SettingError: the buffer is too small.
    """
    rules = rules or TeamRules(
        sizes.method.cost,
        [0] * layout.world_size,
        size=1,
    )
    needs = _fitting_needs(layout, costs, rules, sizes, buffer_bytes)
    loads = np.zeros(layout.world_size)
    for team in needs.teams:
        loads[list(team.ranks)] += team.loads
    if buffer_bytes is None:
        buffer_bytes = auto_bytes(needs)
    waves, left = cut_waves(needs, buffer_bytes - needs.gaps)
    plan = Plan(
        layout,
        tuple(needs.teams),
        waves,
        tuple(loads.tolist()),
        sizes,
        buffer_bytes,
        make_batches(needs, left, math.ceil(len(waves) / 2)),
    )
    largest = max(waves, key=len)
    peers = Traffic(layout, needs.teams).gathered(largest).peers(layout.world_size)
    return replace(
        plan,
        by_pairs=2 * int(peers.max()) < layout.world_size - 1,
    )


def _fitting_needs(
    layout: Layout, costs: Sequence[float], rules: TeamRules, sizes: Sizes, buffer_bytes: int | None
) -> Needs:
    """Owners with whom a step fits its buffer; if the fastest do not fit, others that take less."""

    def of(rules: TeamRules, allowed: int | None) -> Needs:
        return Needs(layout, assign(layout, costs, rules, sizes, allowed), sizes)

    needs = of(rules, buffer_bytes)
    if buffer_bytes is None or needs.smallest <= buffer_bytes:
        return needs
    needs = of(rules, buffer_bytes // 2)
    if needs.smallest <= buffer_bytes:
        return needs
    smaller = [rules]
    if not rules.size:
        smaller += [replace(rules, size=size) for size in rules.sizes]
    needs = min(
        (of(each, 1) for each in smaller),
        key=lambda each: each.smallest,
    )
    if needs.smallest <= buffer_bytes:
        return needs
    largest = max(layout.matrices, key=lambda matrix: matrix.numel)
    rows, cols = largest.shape
    needed = math.ceil(needs.smallest * 1000 / 2**20) / 1000
    raise SettingError(
        "muon_exchange_buffer_mb",
        buffer_bytes / 2**20,
        f"is too small: {largest.name} of {rows} x {cols} needs {needed:.3f}",
        "give at least that, or leave it out",
    )
