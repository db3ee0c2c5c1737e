"""Waves and batches: matrices that travel, or are whole on their owner, in parts that fit a step."""

from __future__ import annotations

import functools
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from megatron_muon.core.buffers import AUTO_BYTES, Buffers, Contents, Sizes, WaveBytes
from megatron_muon.core.layout import Ints, Layout, Matrix
from megatron_muon.core.slices import BlockKind, Team
from megatron_muon.core.traffic import owned_elements

MIN_WAVES = 7
"""Least number of waves if matrices are small enough: one arrives and one leaves while a third is
processed, and the first rows and the last updates, which overlap nothing, are a small part."""

SMALL_BYTES = 2**22
"""Bytes that travel in one wave if they are no more: a collective's own time is longer than what it
could overlap (hidden size 16, 64 layers, two ranks over gloo: one wave instead of four)."""

Parts = tuple[tuple[int, ...], ...]
"""Matrices that are worked on together."""


InLane = tuple[Ints, Ints]
"""Elements of a matrix in lanes: the ranks in whose lanes it is, each once, and for these
`(ranks, 3)` elements in the regions of rows and of owned matrices, and in stacks."""


class Packed(NamedTuple):
    """Waves, batches of each rank, and the bytes of a step with them on the busiest rank."""

    waves: Parts
    batches: tuple[Parts, ...]
    nbytes: int


class Packing:
    """Cuts matrices with these owners into waves and batches, and counts their bytes.

    Attributes:
        travelling: by index, the matrices that are not whole on their owner.
        local: the others, by rank.
    """

    def __init__(
        self,
        layout: Layout,
        teams: Sequence[Team],
        sizes: Sizes,
    ) -> None:
        self._ranks = layout.world_size
        self._matrices = layout.matrices
        self._teams = teams
        self._sizes = sizes
        self._bytes_of = functools.cache(sizes.of)
        self._wave_bytes = functools.cache(self._add_wave)
        self._batch_bytes = functools.cache(self._add_batch)
        self._kinds: list[list[tuple[int, BlockKind]]] = []
        known: dict[Any, list[tuple[int, BlockKind]]] = {}
        self.travelling: dict[int, InLane] = {}
        self.local: list[list[int]] = [[] for _ in range(self._ranks)]
        for index, (matrix, team) in enumerate(
            zip(layout.matrices, teams, strict=True),
        ):
            key = team, matrix.shape, matrix.split, matrix.steps
            if key not in known:
                slots = team.slices(index, matrix)
                known[key] = [
                    (
                        each.rank,
                        sizes.method.kind(each),
                    )
                    for each in slots
                ]
            self._kinds.append(known[key])
            if team.has_whole(matrix):
                self.local[team.ranks[0]].append(index)
            else:
                self.travelling[index] = self._in_lane(matrix, team)

    def _in_lane(self, matrix: Matrix, team: Team) -> InLane:
        """The elements of a matrix in lanes.

        A rank's rows leave and their updates come back; an owner gets the rows of others, and sends
        updates to all of these.
        """
        shards = matrix.shards
        others = [rank for rank in team.ranks if rank not in shards.by_rank]
        ranks = np.append(shards.ranks, others).astype(np.int64)
        found = np.zeros((len(ranks), 3), dtype=np.int64)
        found[: len(shards.ranks), 0] = shards.elements[shards.numbers]
        for owner, elements in owned_elements(matrix, team):
            found[ranks == owner, 2] += elements.sum()
            if not self._sizes.broadcast:
                sent = elements[shards.numbers]
                found[ranks == owner, 1] += sent[shards.ranks != owner].sum()
        return ranks, found

    def fit(self, buffer_bytes: int | None) -> tuple[Packed, int]:
        """Waves and batches of a step of at most so many bytes, or the fewest of all lanes tried.

        With None it may take `AUTO_BYTES`, or as many as it needs where every rank owns a matrix as
        large as the largest and serves as many rows to others. The second result is the limit.
        """
        size = self._sizes.dtype.itemsize
        smallest = 0
        busy = 0
        filled = np.zeros(self._ranks, dtype=np.int64)
        for ranks, elements in self.travelling.values():
            taken = size * elements[:, :2].sum(axis=1)
            filled[ranks] += taken
            smallest = max(smallest, int(taken.max()))
            busy = max(
                busy,
                smallest,
                2 * size * int(elements[:, 2].max()),
            )
        if buffer_bytes is None:
            smallest = busy
            buffer_bytes = max(AUTO_BYTES, self._packed(busy, 0).nbytes)
        # Batches take the rest: they launch more kernels for their bytes than waves do.
        lane = max(buffer_bytes // 6, busy)
        most = int(filled.max())
        if most > min(SMALL_BYTES, lane):
            lane = min(lane, max(math.ceil(most / MIN_WAVES), busy))
        best = packed = self._packed(lane, buffer_bytes)
        while best.nbytes > buffer_bytes and lane > smallest:
            # the same lanes are tried below `busy` whatever the limit is, to name the least for all
            lane = max(busy if lane > busy else smallest, int(0.9 * lane))
            packed = self._packed(lane, buffer_bytes)
            best = min(best, packed, key=attrgetter("nbytes"))
        return best, buffer_bytes

    def _packed(self, lane: int, buffer_bytes: int) -> Packed:
        """Waves with lanes of so many bytes, and batches that fit the rest of the buffer."""
        waves = self._cut_waves(lane)
        batches = []
        for rank, buffers in enumerate(self.buffers(waves)):
            # where nothing travels, more than that would save few kernels
            free = min(buffer_bytes - buffers.scratch_start, 3 * buffer_bytes // 4)
            batches.append(
                self._cut_batches(rank, free, math.ceil(len(waves) / 2)),
            )
        nbytes = max(buffers.nbytes for buffers in self.buffers(waves, batches))
        return Packed(waves, tuple(batches), nbytes)

    def _cut_waves(self, lane: int) -> Parts:
        """Cut the matrices into waves: lanes of at most so many bytes, stacks of two thirds of that.

        Both are larger where one matrix needs more.
        """
        most = lane // self._sizes.dtype.itemsize
        waves: list[list[int]] = [[]]
        filled = np.zeros((self._ranks, 3), dtype=np.int64)
        for index in self._interleaved:
            ranks, elements = self.travelling[index]
            rows, owned, stacks = (filled[ranks] + elements).T
            if waves[-1] and np.maximum(rows + owned, 1.5 * stacks).max() > most:
                waves.append([])
                filled[:] = 0
            waves[-1].append(index)
            filled[ranks] += elements
        return tuple(map(tuple, waves))

    @functools.cached_property
    def _interleaved(self) -> list[int]:
        """Matrices, ordered so that each wave has even work for owners and rows from all ranks.

        Sorted by cost alone, matrices of one shape, whose rows are on the same ranks in each layer,
        would travel together.
        """
        rows = {}
        work = {}
        for index in self.travelling:
            shards = self._matrices[index].shards
            rows[index] = shards.ranks, shards.elements[shards.numbers]
            team = self._teams[index]
            work[index] = np.array(team.ranks), np.array(team.loads)
        order = sorted(
            self.travelling,
            key=lambda index: (-work[index][1].max(), self._matrices[index].shape),
        )
        for held in rows, work:
            order = self._evened(order, held)
        return order

    def _evened(
        self,
        order: Sequence[int],
        held: Mapping[int, tuple[Ints, Any]],
    ) -> list[int]:
        """Sort matrices by progress: the largest share of a rank's total before a matrix's middle.

        `held` maps each matrix to its ranks and their amounts, of rows or of work.
        """
        total = np.full(self._ranks, 1e-9)  # avoids division by zero
        middles = {}
        for index in order:
            ranks, parts = held[index]
            middles[index] = total[ranks] + parts / 2
            total[ranks] += parts
        return sorted(
            order,
            key=lambda index: float((middles[index] / total[held[index][0]]).max()),
        )

    def _cut_batches(self, rank: int, free: int, at_least: int) -> Parts:
        """A rank's own matrices in so many batches, or as many more as fit so many bytes.

        Batches have equal numbers of elements, and equal shapes together. There are more of them if
        stacks are full then: a partial stack (`Method.together`) launches as many kernels.
        """
        order = sorted(
            self.local[rank],
            key=lambda index: self._matrices[index].shape,
        )
        numels = np.array([self._matrices[index].numel for index in order])
        middles = 2 * numels.cumsum() - numels

        def cut(count: int) -> Parts:
            numbers = middles * count // (2 * numels.sum())
            starts = np.flatnonzero(np.diff(numbers)) + 1
            return tuple(tuple(part.tolist()) for part in np.split(order, starts))

        def fits(count: int) -> bool:
            return all(self._batch_bytes(part).scratch <= free for part in cut(count))

        count = at_least + bisect_left(range(at_least, len(order)), True, key=fits)
        if count >= len(order):
            return tuple((index,) for index in order)
        kinds = Counter(kind for index in order for _, kind in self._kinds[index])
        full = 0
        for kind, blocks in kinds.items():
            full += -(-blocks // self._sizes.method.together(kind))
        more = -(-full // max(1, full // count))
        return cut(more if more > count and fits(more) else count)

    def buffers(
        self,
        waves: Parts,
        batches: Sequence[Parts] = (),
    ) -> list[Buffers]:
        """The buffers of a step on each rank."""
        by_wave = map(self._wave_bytes, waves)
        found = []
        for rank, of_rank in enumerate(zip(*by_wave, strict=True)):
            own = map(self._batch_bytes, batches[rank] if batches else ())
            found.append(
                Buffers.of(of_rank, list(own), apart=self._sizes.apart),
            )
        return found

    def _add_wave(self, wave: tuple[int, ...]) -> list[WaveBytes]:
        """Bytes of a wave on each rank."""
        sums, most = np.zeros(
            (2, self._ranks, 3),
            dtype=np.int64,
        )
        blocks = [Counter[BlockKind]() for _ in range(self._ranks)]
        for index in wave:
            ranks, elements = self.travelling[index]
            sums[ranks] += elements
            most[ranks] = np.maximum(most[ranks], elements)
            for rank, kind in self._kinds[index]:
                blocks[rank][kind] += 1
        rows, owned, _ = sums.T.tolist()
        shards, _, matrices = most.T.tolist()
        kinds = [tuple(sorted(each.items())) for each in blocks]
        return list(
            map(
                self._bytes_of,
                map(Contents, rows, shards, kinds, matrices, owned),
            ),
        )

    def _add_batch(self, batch: tuple[int, ...]) -> WaveBytes:
        """Bytes of a batch on its rank."""
        numels = [self._matrices[index].numel for index in batch]
        blocks = Counter(kind for index in batch for _, kind in self._kinds[index])
        kinds = tuple(sorted(blocks.items()))
        return self._bytes_of(
            Contents(sum(numels), max(numels), kinds, max(numels)),
        )
