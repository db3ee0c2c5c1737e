"""Who orthogonalises which matrix, and in which waves the rows travel.

A plan is made once, before the first step, from a layout and the cost of each matrix; every rank makes the same plan by
itself. It gives every matrix one owner so that the ranks' work is even and few bytes move, then cuts the matrices that
travel into waves that fit a buffer. Nothing here sends anything.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_muon.core.layout import Layout, Matrix

UPDATE_BYTES = 4
"""Room for each element that an owner iterates over, twice, beside the assembled matrix: what the temporaries of the
iteration take. For square blocks on a processor they take up to 14 bytes an element, of a few blocks at a time."""

DIGEST_LENGTH = 12
"""Hexadecimal digits: they fit an int64."""

_Ints = np.ndarray[Any, np.dtype[np.int64]]

MIN_WAVES = 3
"""So many waves that one can arrive and one can leave while one is worked on."""


@dataclass(frozen=True)
class Plan:
    """Owners and waves of a layout.

    Attributes:
        layout: what is planned.
        owners: the rank that orthogonalises each matrix, by matrix index.
        whole: for each rank, the matrices that lie whole on it and that it owns: they need no wire.
        waves: matrix indices that travel together, in the order of the step.
        loads: cost owned by each rank, in the unit of the given costs.
        oversized: matrices that fill more than a wave's buffer by themselves.
        wave_bytes: what a wave, or a part of the matrices that need no wire, may fill on a rank.
    """

    layout: Layout
    owners: tuple[int, ...]
    whole: tuple[tuple[int, ...], ...]
    waves: tuple[tuple[int, ...], ...]
    loads: tuple[float, ...]
    oversized: tuple[int, ...]
    wave_bytes: int

    @property
    def imbalance(self) -> float:
        """Largest load over the mean load; 1.0 is even."""
        mean = sum(self.loads) / len(self.loads)
        return max(self.loads) / mean if mean else 1.0

    def digest(self) -> str:
        """A short hash of who does what: equal for equal shapes, blocks, owners and waves, on any machine."""
        shapes = [matrix.shape for matrix in self.layout.matrices]
        blocks = [(matrix.split.groups, matrix.split.parts) for matrix in self.layout.matrices]
        content = json.dumps([shapes, blocks, self.owners, self.whole, self.waves, self.wave_bytes])
        return hashlib.sha256(content.encode()).hexdigest()[:DIGEST_LENGTH]

    def fillers(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """The whole matrices of `rank` in parts: one beside each wave, or more where they would overfill the buffer."""
        whole = self.whole[rank]
        filled = sum(2 * self.layout.matrices[index].numel * UPDATE_BYTES for index in whole)
        parts = min(max(len(self.waves), 1, math.ceil(filled / self.wave_bytes)), len(whole))
        return tuple(whole[k::parts] for k in range(parts))

    def exchanged_bytes(self, element_bytes: int) -> tuple[int, ...]:
        """Bytes that each rank receives in a step: rows for its own matrices, and its update rows of the others."""
        received = [0] * self.layout.world_size
        for index in itertools.chain(*self.waves):
            owner = self.owners[index]
            for shard in self.layout.matrices[index].shards:
                # Each holder but the owner gets its update rows, and the owner the rows unless it holds them.
                for rank in {*shard.holders} ^ {owner}:
                    received[rank] += shard.numel * element_bytes
        return tuple(received)

    def footprints(self, element_bytes: int) -> Iterator[_Ints]:
        """Bytes that each rank holds for a wave, wave by wave: what it sends, what it assembles, what it returns."""
        for wave in self.waves:
            filled = np.zeros(self.layout.world_size, dtype=np.int64)
            for index in wave:
                ranks, sizes = _footprint(self.layout.matrices[index], self.owners[index], element_bytes)
                filled[ranks] += sizes
            yield filled

    def buffer_bytes(self, element_bytes: int) -> int:
        """The most bytes that a rank holds for one wave."""
        return max((int(filled.max()) for filled in self.footprints(element_bytes)), default=0)


def all_gather_bytes(layout: Layout, element_bytes: int) -> tuple[int, ...]:
    """Bytes that each rank receives in a step of the all-gather scheme: all of every matrix but its own part."""
    missing = [sum(matrix.numel for matrix in layout.matrices)] * layout.world_size
    for shard in itertools.chain(*(matrix.shards for matrix in layout.matrices)):
        for holder in shard.holders:
            missing[holder] -= shard.numel
    return tuple(elements * element_bytes for elements in missing)


def make_plan(layout: Layout, costs: Sequence[float], *, buffer_bytes: int, element_bytes: int) -> Plan:
    """Plan a layout.

    Args:
        layout: all matrices of the group.
        costs: the work of orthogonalising each matrix, in any unit.
        buffer_bytes: what the waves that are under way at a time may fill on a rank.
        element_bytes: of an element on the wire.

    Raises:
        ValueError: a cost for each matrix is missing, or the buffer is not positive.
    """
    if len(costs) != len(layout.matrices):
        raise ValueError(f"{len(layout.matrices)} matrices need as many costs, got {len(costs)}")
    if buffer_bytes <= 0:
        raise ValueError(f"--muon-exchange-buffer-mb must be positive, got {buffer_bytes / 2**20:g}")
    owners = _assign(layout, costs)
    loads = [0.0] * layout.world_size
    whole: list[list[int]] = [[] for _ in range(layout.world_size)]
    travelling = []
    for index, (matrix, owner) in enumerate(zip(layout.matrices, owners, strict=True)):
        loads[owner] += costs[index]
        if len(matrix.shards) == 1 and matrix.shards[0].holders == (owner,):
            whole[owner].append(index)
        else:
            travelling.append(index)
    wave_bytes = max(buffer_bytes // MIN_WAVES, 1)
    waves, oversized = _waves(layout, owners, costs, travelling, wave_bytes, element_bytes)
    return Plan(layout, tuple(owners), tuple(map(tuple, whole)), waves, tuple(loads), oversized, wave_bytes)


def _assign(layout: Layout, costs: Sequence[float]) -> list[int]:
    """An owner for each matrix: the most even of a few longest-first assignments, then the one that moves least.

    Each assignment lets a matrix stay with the rank that holds most of it as long as that rank's load stays below a
    cap, and otherwise gives it to the least loaded rank. A cap of zero is the classical longest-processing-time rule.
    """
    order = sorted(range(len(costs)), key=lambda index: (-costs[index], index))
    held = [sorted((-s.numel, rank) for s in matrix.shards for rank in s.holders) for matrix in layout.matrices]
    holders = [tuple(rank for _, rank in largest_first) for largest_first in held]
    fair = max(sum(costs) / layout.world_size, max(costs, default=0.0))
    best: tuple[float, int] | None = None
    chosen: list[int] = []
    for cap in (0.0, fair, 1.01 * fair, 1.03 * fair):
        owners, heaviest = _assign_under(cap, order, costs, holders, layout.world_size)
        moved = sum(
            matrix.numel - sum(s.numel for s in matrix.shards if owner in s.holders)
            for matrix, owner in zip(layout.matrices, owners, strict=True)
        )
        # Loads within 3 % of the even share count as equal: below that, bytes decide.
        merit = (max(heaviest / fair, 1.03) if fair else 0.0, moved)
        if best is None or merit < best:
            best, chosen = merit, owners
    return chosen


def _assign_under(
    cap: float, order: list[int], costs: Sequence[float], holders: list[tuple[int, ...]], world_size: int
) -> tuple[list[int], float]:
    """Owners, and the largest load."""
    loads = np.zeros(world_size)
    owners = [0] * len(order)
    for index in order:
        cost = costs[index]
        owner = next((rank for rank in holders[index] if loads[rank] + cost <= cap), -1)
        if owner < 0:
            owner = int(loads.argmin())
            least = loads[owner]
            owner = next((rank for rank in holders[index] if loads[rank] <= least), owner)
        loads[owner] += cost
        owners[index] = owner
    return owners, float(loads.max())


def _waves(
    layout: Layout,
    owners: Sequence[int],
    costs: Sequence[float],
    travelling: list[int],
    wave_bytes: int,
    element_bytes: int,
) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Cut the travelling matrices into waves in which every owner has its share of work and no rank's buffer overflows.

    Owners' matrices are interleaved by the share of the owner's work that lies before them, equal shapes together, so
    that any prefix of the sequence is even over owners. A wave ends where the next matrix would overflow a buffer, or
    where it has its share of all bytes.

    Where a matrix is larger than the buffer, every wave may fill what the largest one and its rows take, whatever the
    number of layers: that memory is needed anyway, and alone in a wave a matrix would leave every other rank idle.
    """
    footprint = {index: _footprint(layout.matrices[index], owners[index], element_bytes) for index in travelling}
    oversized = tuple(index for index, (_, sizes) in footprint.items() if sizes.max() > wave_bytes)
    peak = np.zeros(layout.world_size, dtype=np.int64)
    for ranks, sizes in footprint.values():
        peak[ranks] += sizes
    # A limit smaller than the largest matrix would put every matrix into a wave of its own: a rank has to own it while
    # it serves as many rows to other owners.
    largest = max((layout.matrices[index].numel for index in travelling), default=0)
    least = 2 * largest * (2 * element_bytes + UPDATE_BYTES)
    room = max(wave_bytes, least) if oversized else wave_bytes
    limit = min(room, max(math.ceil(int(peak.max(initial=0)) / MIN_WAVES), least))
    waves: list[list[int]] = []
    filled = np.zeros(layout.world_size, dtype=np.int64)
    for index in _interleave(travelling, owners, costs, layout):
        ranks, sizes = footprint[index]
        if not waves or (filled[ranks] + sizes).max() > limit:
            waves.append([])
            filled[:] = 0
        waves[-1].append(index)
        filled[ranks] += sizes
    return tuple(map(tuple, waves)), oversized


def _interleave(indices: Sequence[int], owners: Sequence[int], costs: Sequence[float], layout: Layout) -> list[int]:
    """The matrices ordered by the share of their owner's work that lies before them, costly ones first."""
    by_owner: dict[int, list[int]] = {}
    for index in sorted(indices, key=lambda i: (-costs[i], layout.matrices[i].shape, i)):
        by_owner.setdefault(owners[index], []).append(index)
    sequence = []
    for owned in by_owner.values():
        total = sum(costs[index] for index in owned) or 1.0
        before = 0.0
        for index in owned:
            sequence.append((before / total, index))
            before += costs[index]
    sequence.sort()
    return [index for _, index in sequence]


def _footprint(matrix: Matrix, owner: int, element_bytes: int) -> tuple[_Ints, _Ints]:
    """The ranks on which a matrix takes memory while its wave is under way, and how many bytes on each."""
    parts = {rank: 2 * shard.numel * element_bytes for shard in matrix.shards for rank in shard.holders}
    parts[owner] = 2 * matrix.numel * (element_bytes + UPDATE_BYTES)
    return np.fromiter(parts.keys(), np.int64), np.fromiter(parts.values(), np.int64)
