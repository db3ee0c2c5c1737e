"""What each rank orthogonalises of a matrix: all of it, or, in a team, even parts of its blocks.

A block that a team cuts lies wide in the iteration, `(m, n)` with m <= n, and each member has some of its n columns: of
a tall block these are rows, which is how FSDP cuts it anyway. This module is plain arithmetic on rectangles, without
torch; the planner, the exchange and the estimates all ask here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_muon.core.layout import Matrix, RowSplit, Shard

TEAM_SIZES = (1, 2, 4, 8)
"""Ranks that may own a matrix together: powers of two, so that of two teams that share a rank one holds the other."""

Cuts = tuple[tuple[int, int], ...]
"""How a team divides the blocks of a matrix: for each `(first, count)`, the ranks that cut it; see `Team`."""

_UNIT = 8
"""Parts of long sides are multiples of this, as kernels like them."""


def chunks(nodes: Sequence[int], size: int) -> list[tuple[int, ...]]:
    """The ranks of each node in teams of `size`, of which the last of a node may be smaller.

    Args:
        nodes: the node of each rank.
        size: one of `TEAM_SIZES`.
    """
    by_node: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        by_node.setdefault(node, []).append(rank)
    return [tuple(ranks[k : k + size]) for ranks in by_node.values() for k in range(0, len(ranks), size)]


@dataclass(frozen=True)
class Team:
    """The owners of a matrix: one rank, or several of one node.

    Attributes:
        ranks: ascending.
        cuts: for each block `(first, count)`: it is cut over `count` ranks from place `first` of `ranks` on. None has
            all blocks orthogonalised by the one owner.
        loads: what each of the ranks has to do.
    """

    ranks: tuple[int, ...]
    loads: tuple[float, ...]
    cuts: Cuts | None = None

    def slices(self, index: int, matrix: Matrix) -> list[BlockSlice]:
        """What the ranks have of a matrix with this index: by block, and within a block by rank."""
        if self.cuts is None:
            return [BlockSlice(index, None, matrix.shape, matrix.split, self.ranks, 0, matrix.steps)]
        return [
            BlockSlice(index, block, shape, matrix.split, self.ranks[first : first + count], place, matrix.steps)
            for block, (shape, (first, count)) in enumerate(zip(matrix.blocks, self.cuts, strict=True))
            for place in range(count)
        ]


@dataclass(frozen=True)
class Piece:
    """A rectangle that a shard and a slice have in common.

    Attributes:
        row, col: its first element in the matrix.
        rows, cols: its size.
        slice_row, slice_col: its first element in the slice.
    """

    row: int
    rows: int
    col: int
    cols: int
    slice_row: int
    slice_col: int

    @property
    def numel(self) -> int:
        """Number of its elements."""
        return self.rows * self.cols


@dataclass(frozen=True)
class BlockSlice:
    """What one rank orthogonalises of a matrix, a rectangle: the whole matrix, a block, or a part of one.

    Attributes:
        index: of the matrix.
        block: number of the block; None is the whole matrix.
        of: shape of the block, or of the matrix.
        split: of the matrix.
        ranks: those that cut the block.
        place: of this block_slice's rank among them.
        steps: of the matrix.
    """

    index: int
    block: int | None
    of: tuple[int, int]
    split: RowSplit
    ranks: tuple[int, ...]
    place: int
    steps: int = 0

    @property
    def rank(self) -> int:
        """Whose it is."""
        return self.ranks[self.place]

    @property
    def shape(self) -> tuple[int, int]:
        """Of the slice."""
        (_, rows), (_, cols) = self._rows, self._cols
        return rows, cols

    @property
    def numel(self) -> int:
        """Number of its elements."""
        rows, cols = self.shape
        return rows * cols

    @property
    def is_tall(self) -> bool:
        """Whether the block is, so that its rows are cut."""
        return self.of[0] > self.of[1]

    @property
    def _rows(self) -> tuple[int, int]:
        """First row in the block, and number of rows."""
        return _part(self.of[0], self.place, len(self.ranks)) if self.is_tall else (0, self.of[0])

    @property
    def _cols(self) -> tuple[int, int]:
        return (0, self.of[1]) if self.is_tall else _part(self.of[1], self.place, len(self.ranks))

    def _spans(self) -> Iterator[tuple[int, int, int]]:
        """Rows that lie together in the matrix: the first there, how many, and the first in the slice."""
        start, count = self._rows
        if self.block is None or self.split.groups == 1:
            before = 0 if self.block is None else sum(self.split.parts[: self.block])
            yield before + start, count, 0
            return
        part, stride = self.split.parts[self.block], sum(self.split.parts)
        before = sum(self.split.parts[: self.block])
        for group in range(start // part, -(-(start + count) // part)):
            low, high = max(start, group * part), min(start + count, (group + 1) * part)
            yield group * stride + before + low - group * part, high - low, low - start

    def pieces(self, shard: Shard) -> list[Piece]:
        """What `shard` has of it, by rows."""
        first_col, cols = self._cols
        left, right = max(first_col, shard.col_start), min(first_col + cols, shard.col_start + shard.cols)
        found = []
        for row, rows, slice_row in self._spans() if left < right else ():
            top, bottom = max(row, shard.row_start), min(row + rows, shard.row_start + shard.rows)
            if top < bottom:
                found.append(Piece(top, bottom - top, left, right - left, slice_row + top - row, left - first_col))
        return found

    def overlaps(self, shards: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """How many elements each of `shards`, rows of `(row_start, rows, col_start, cols)`, has of it."""
        rows, cols = (np.zeros(len(shards), dtype=np.int64) for _ in range(2))
        for row, count, _ in self._spans():
            rows += _common(shards[:, 0], shards[:, 1], row, count)
        cols += _common(shards[:, 2], shards[:, 3], *self._cols)
        return rows * cols


def rectangles(shards: Sequence[Shard]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Shards as `BlockSlice.overlaps` takes them."""
    numbers = itertools.chain.from_iterable((s.row_start, s.rows, s.col_start, s.cols) for s in shards)
    return np.fromiter(numbers, np.int64, 4 * len(shards)).reshape(-1, 4)


def _part(side: int, place: int, count: int) -> tuple[int, int]:
    """First element and length of an even part of a side."""
    unit = _UNIT if side >= 2 * _UNIT * count else 1
    units = -(-side // unit)
    start, end = (min(units * number // count * unit, side) for number in (place, place + 1))
    return start, end - start


def _common(
    starts: np.ndarray[Any, np.dtype[np.int64]], counts: np.ndarray[Any, np.dtype[np.int64]], start: int, count: int
) -> np.ndarray[Any, np.dtype[np.int64]]:
    ends: np.ndarray[Any, np.dtype[np.int64]] = np.minimum(starts + counts, start + count)
    common: np.ndarray[Any, np.dtype[np.int64]] = np.maximum(ends - np.maximum(starts, start), 0)
    return common
