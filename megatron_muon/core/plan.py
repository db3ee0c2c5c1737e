"""Owners of matrices, and the waves in which their rows travel.

A plan is made once, before the first step, from a layout and the cost of each matrix; every rank
makes the same plan by itself. `assignment` gives owners, `packing` cuts matrices that travel into
waves, and those that are whole on their owner into batches, which fill the time.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from megatron_muon.core.assignment import TeamRules, assign
from megatron_muon.core.buffers import Sizes
from megatron_muon.core.layout import Ints, Layout
from megatron_muon.core.packing import Packing
from megatron_muon.core.slices import Team
from megatron_muon.core.traffic import transfers
from megatron_muon.errors import SettingError

DIGEST_LENGTH = 12
"""Hexadecimal digits: they fit an int64."""


@dataclass(frozen=True)
class Plan:
    """Owners and waves of a layout.

    Attributes:
        teams: the ranks that orthogonalize each matrix.
        waves: matrices that travel together, in the order of the step.
        sizes: what decides the bytes of waves.
        buffer_bytes: the most that a step may take on a rank beyond weights, gradients and state.
        batches: for each rank, matrices that are whole on it, their owner, in parts that are
            orthogonalized together.
        by_pairs: messages go to those ranks alone for which there are bytes.
    """

    layout: Layout
    teams: tuple[Team, ...]
    waves: tuple[tuple[int, ...], ...]
    sizes: Sizes
    buffer_bytes: int
    batches: tuple[tuple[tuple[int, ...], ...], ...] = ()
    by_pairs: bool = False

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
        if self.sizes.method.products:
            content.append(self.sizes.method.products)
        digest = hashlib.sha256(json.dumps(content).encode())
        return digest.hexdigest()[:DIGEST_LENGTH]

    @cached_property
    def step_bytes(self) -> Ints:
        """Bytes of the buffers of a step on each rank."""
        packing = Packing(self.layout, self.teams, self.sizes)
        buffers = packing.buffers(self.waves, self.batches)
        return np.array([each.nbytes for each in buffers])


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
    rules = rules or TeamRules(sizes.method.cost, [0] * layout.world_size, size=1)
    attempts = [(rules, buffer_bytes)]
    if buffer_bytes is not None and not rules.size:
        # the last divides matrices as finely as teams allow
        attempts += [(rules, buffer_bytes // 2), (rules, 0)]
        attempts += [(replace(rules, size=size), None) for size in rules.sizes]
    least = math.inf
    for each, allowed in attempts:
        teams = assign(layout, costs, each, sizes.dtype.itemsize, allowed)
        packing = Packing(layout, teams, replace(sizes, apart=False))
        packed, limit = packing.fit(buffer_bytes)
        if packed.nbytes <= limit:
            waves, batches, _ = packed
            busiest = max(waves, key=len)
            rows, _ = transfers(layout, teams, busiest)
            peers = rows.peers(layout.world_size)
            by_pairs = 2 * int(peers.max()) < layout.world_size - 1
            return Plan(layout, tuple(teams), waves, sizes, limit, batches, by_pairs)
        if each.size or not allowed:  # owners do not depend on the limit
            least = min(least, packed.nbytes)
    largest = max(layout.matrices, key=lambda matrix: matrix.numel)
    shape = " x ".join(map(str, largest.shape))
    needed = math.ceil(least * 1000 / 2**20) / 1000
    raise SettingError(
        "muon_exchange_buffer_mb",
        limit / 2**20,
        f"is too small: {largest.name} of {shape} needs {needed:.3f}",
        "give at least that, or leave it out",
    )
