"""Waves and batches: matrices that travel, or are whole on their owner, in parts that fit a step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from megatron_muon.core.buffers import AUTO_BYTES, LANES, OwnerBytes, Sizes
from megatron_muon.core.layout import Ints, Layout
from megatron_muon.core.slices import Team
from megatron_muon.core.traffic import Traffic

MIN_WAVES = 7
"""Waves with which one can arrive and one can leave while one is worked on, and in which the first
rows and the last updates, which travel alone, are a small part."""

SMALL_BYTES = 2**22
"""Bytes that travel in one wave if they are no more: a collective's own time is longer than what it
could overlap (hidden size 16, 64 layers, two ranks over gloo: one wave instead of four)."""

Parts = tuple[tuple[int, ...], ...]
"""Matrices that are worked on together."""


class InLane(NamedTuple):
    """The ranks in whose lane a matrix takes bytes, each once.

    `taken` are bytes `(ranks, 3)`: of the lane, of rows, and of stacks.
    """

    ranks: Ints
    taken: Ints


class Needs:
    """Bytes that matrices with these owners take.

    Attributes:
        travelling: by index, the matrices that are not whole on their owner.
        local: the others, by rank.
        single: bytes of a lane with the largest matrix.
        busy: bytes of a lane in which every rank owns a matrix as large as the largest and serves
            as many rows to others.
        scratch: bytes of the scratch with one matrix on each rank.
        work, most_work: the method's buffers, as a share of the stacks, and at most.
        row_bytes: bytes of a chunk for a byte of rows on the wire.
        gaps: at most so many bytes are between aligned positions.
        smallest: bytes of a step with waves of one matrix.
    """

    def __init__(
        self,
        layout: Layout,
        teams: Sequence[Team],
        sizes: Sizes,
    ) -> None:
        self.matrices = layout.matrices
        self.teams = teams
        self.sizes = sizes
        self.travelling: dict[int, InLane] = {}
        self.local: list[list[int]] = [[] for _ in range(layout.world_size)]
        traffic = Traffic(layout, teams)
        owned: set[OwnerBytes] = set()
        whole: set[OwnerBytes] = set()
        kinds = set[Any]()
        for index, (matrix, team) in enumerate(
            zip(layout.matrices, teams, strict=True),
        ):
            kind = tuple(matrix.blocks), team.cuts, len(team.ranks), matrix.steps
            kinds |= {(block, kind) for block in matrix.blocks}
            taken = sizes.of_owners(*kind)
            if team.has_whole(matrix):
                whole.add(taken)
                self.local[team.ranks[0]].append(index)
            else:
                owned.add(taken)
                self.travelling[index] = self._in_lane(traffic, index)
        self._add_up(owned, whole)
        self.gaps = sizes.most_gaps(len(kinds))
        self.smallest = self.gaps + self.step_bytes(
            self.single,
            self.single,
        )

    def _add_up(
        self,
        owned: set[OwnerBytes],
        whole: set[OwnerBytes],
    ) -> None:
        every = owned | whole
        self.row_bytes = self.sizes.chunk_bytes(1) / self.sizes.dtype.itemsize
        self.work = max(
            (each.work / each.stacks for each in every),
            default=0.0,
        )
        self.most_work = max(
            (each.most_work for each in every),
            default=0,
        )
        scratches = [each.stacks + each.behind for each in owned]
        for each in whole:
            chunk = math.ceil(each.stacks * self.row_bytes)
            scratches.append(each.stacks + max(chunk, each.work))
        self.scratch = max(scratches, default=0)
        self.single = 0
        for held in self.travelling.values():
            self.single = max(
                self.single,
                int(held.taken[:, 0].max()),
            )
        self.busy = max(
            [self.single, *(2 * each.stacks for each in owned)],
        )

    def step_bytes(self, lane: int, rows: int) -> int:
        """Bytes of a step with lanes of so many bytes, some of them of rows."""
        chunk = self.sizes.chunk_bytes(
            rows // self.sizes.dtype.itemsize,
        )
        return LANES * lane + max(self.scratch, chunk)

    def scratch_with(self, taken: Ints) -> Any:
        """At most so many bytes of the scratch on ranks with waves of these bytes, `(ranks, 3)`."""
        lane, rows, stacks = taken.T
        work = np.minimum(self.work * stacks, self.most_work)
        most = self.sizes.chunk_bytes(self.sizes.chunk_numel)
        chunk = np.minimum(rows * self.row_bytes, most)
        return np.maximum(
            stacks + np.maximum(work - lane, 0.0),
            chunk,
        )

    def _in_lane(self, traffic: Traffic, index: int) -> InLane:
        """The bytes of a matrix in lanes.

        A rank's rows leave and their updates come back; an owner gets the rows of others, and sends
        updates to all of these.
        """
        held = self.matrices[index].shards
        others = [rank for rank in self.teams[index].ranks if rank not in held.by_rank]
        ranks = np.append(held.ranks, others).astype(np.int64)
        taken = np.zeros(
            (len(ranks), 3),
            dtype=np.int64,
        )
        taken[: len(held.ranks), :2] = held.elements[held.numbers, None]
        for owner, elements in traffic.owned(index):
            own = 0
            if owner in held.by_rank:
                own = elements[held.by_rank[owner]]
            owned = elements.sum()
            moved = owned
            if not self.sizes.broadcast:
                moved = max(owned, elements[held.numbers].sum())
            taken[ranks == owner] += (moved - own, 0, owned)
        return InLane(ranks, taken * self.sizes.dtype.itemsize)


def auto_bytes(needs: Needs) -> int:
    """Bytes of a step where none are given."""
    return max(
        AUTO_BYTES,
        needs.step_bytes(needs.busy, needs.busy // 2),
    )


def cut_waves(
    needs: Needs,
    buffer_bytes: int,
) -> tuple[Parts, Ints]:
    """The matrices in waves in which owners have their share of work and no lane overflows.

    A wave ends where the next matrix would overflow a lane, or where it has its share of all bytes,
    unless that is little, or leaves no room for one of the largest matrices on every rank: alone,
    it would leave every other rank idle. The second result is what is left for batches of each
    rank.
    """
    limit = _lane_limit(needs, buffer_bytes)
    scratch = buffer_bytes - LANES * limit
    waves: list[list[int]] = []
    filled = np.zeros(
        (len(needs.local), 3),
        dtype=np.int64,
    )
    lanes = np.zeros(
        (LANES, len(filled)),
        dtype=np.int64,
    )
    for index in _interleaved(needs):
        ranks, taken = needs.travelling[index]
        after = filled[ranks] + taken
        is_full = after[:, 0].max() > limit
        is_full |= needs.scratch_with(after).max() > scratch
        if not waves or is_full:
            waves.append([])
            filled[:] = 0
        waves[-1].append(index)
        filled[ranks] += taken
        lane = lanes[len(waves) % LANES]
        np.maximum(lane, filled[:, 0], out=lane)
    left: Ints = buffer_bytes - lanes.sum(axis=0)
    return tuple(map(tuple, waves)) or ((),), left


def _lane_limit(needs: Needs, buffer_bytes: int) -> int:
    """Bytes that a lane may take."""
    filled = np.zeros(
        len(needs.local),
        dtype=np.int64,
    )
    for held in needs.travelling.values():
        filled[held.ranks] += held.taken[:, 0]
    most = int(filled.max())
    limit = (buffer_bytes - needs.scratch) // LANES
    even = max(buffer_bytes // (LANES + 1), needs.busy)
    limit = min(limit, even)
    if most > min(SMALL_BYTES, limit):
        share = max(math.ceil(most / MIN_WAVES), needs.busy)
        limit = min(limit, share)
    return limit


def _interleaved(needs: Needs) -> list[int]:
    """Matrices by the share of their owners' work that lies before them, costly ones first."""
    teams = needs.teams
    order = sorted(
        needs.travelling,
        key=lambda index: (
            -max(teams[index].loads),
            needs.matrices[index].shape,
            index,
        ),
    )
    total = np.zeros(len(needs.local))
    for index in order:
        total[list(teams[index].ranks)] += teams[index].loads
    total[total == 0] = 1.0
    before = np.zeros_like(total)
    shares = {}
    for index in order:
        owners = list(teams[index].ranks)
        shares[index] = float(
            (before[owners] / total[owners]).max(),
        )
        before[owners] += teams[index].loads
    return sorted(
        shares,
        key=lambda index: (shares[index], index),
    )


def make_batches(
    needs: Needs,
    left: Ints,
    at_least: int,
) -> tuple[Parts, ...]:
    """Each rank's own matrices in so many batches, or as many more as fit so many bytes."""
    found = []
    for indices, scratch in zip(
        needs.local,
        left.tolist(),
        strict=True,
    ):
        stacks = max(
            scratch / (1 + max(needs.row_bytes, needs.work)),
            (scratch - needs.most_work) / (1 + needs.row_bytes),
        )
        most = stacks / needs.sizes.dtype.itemsize
        found.append(_parts(needs, indices, most, at_least))
    return tuple(found)


def _parts(
    needs: Needs,
    indices: Sequence[int],
    most: float,
    at_least: int,
) -> Parts:
    """Matrices in parts of as many elements, at most so many, equal shapes together."""
    matrices = needs.matrices
    order = sorted(
        indices,
        key=lambda index: (matrices[index].shape, index),
    )
    numels = np.array(
        [matrices[index].numel for index in order],
        dtype=np.int64,
    )
    middles = 2 * numels.cumsum() - numels
    numbers = np.arange(len(order))
    count = min(at_least, len(order))
    while count < len(order):
        even = middles * count // (2 * numels.sum())
        if np.bincount(even, numels).max() <= most:
            numbers = even
            break
        count += 1 + count // 8
    parts = itertools.groupby(
        zip(numbers.tolist(), order, strict=True),
        itemgetter(0),
    )
    return tuple(tuple(index for _, index in part) for _, part in parts)
