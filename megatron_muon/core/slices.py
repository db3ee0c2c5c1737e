"""What each rank orthogonalises of a matrix: all of it, or, in a team, even parts of its blocks.

A block that a team cuts lies wide in the iteration, `(m, n)` with m <= n, and each member has some
of its n columns: of a tall block these are rows, which is how FSDP cuts it anyway. Plain
arithmetic, for planner, exchange and estimates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from megatron_muon.core.layout import Ints, Matrix, RowSplit, Shard

TEAM_SIZES = (1, 2, 4, 8)
"""Ranks that may own a matrix together: powers of two, so that of two teams that share a rank one holds the other."""

Cuts = tuple[tuple[int, int], ...]
"""How a team divides the blocks of a matrix: for each `(first, count)`, the ranks that cut it; see `Team`."""

_UNIT = 8
"""Parts of long sides are multiples of this, as kernels like them."""


def chunks(nodes: Sequence[int], size: int) -> list[tuple[int, ...]]:
    """The ranks of each node, `nodes[rank]`, in teams of `size`; the last of a node may be smaller."""
    by_node: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        by_node.setdefault(node, []).append(rank)
    teams = []
    for ranks in by_node.values():
        for first in range(0, len(ranks), size):
            teams.append(tuple(ranks[first : first + size]))
    return teams


class BlockKind(NamedTuple):
    """What blocks of a stack have in common. Ranks of a team sort the kinds that they share alike."""

    smaller: int
    longer: int  # of the whole block
    scale: float  # of the update
    steps: int  # of the matrix
    ranks: tuple[int, ...]  # that cut the block; none where it is whole
    length: int  # of this rank's part of the longer side

    @property
    def team(self) -> int:
        """Ranks that iterate over a block together."""
        return len(self.ranks) or 1


class Piece(NamedTuple):
    """A rectangle that a shard and a slice have in common, by its first element in the matrix and in the slice.

    `repeats` of them begin `stride` rows apart in the matrix, and follow each other in the slice.
    """

    row: int
    rows: int
    col: int
    cols: int
    slice_row: int
    slice_col: int
    repeats: int = 1
    stride: int = 0


@dataclass(frozen=True)
class BlockSlice:
    """What one rank orthogonalises of a matrix, a rectangle: the whole matrix, a block, or a part of one."""

    index: int  # of the matrix
    block: int | None  # its number; None is the whole matrix
    of: tuple[int, int]  # shape of the block, or of the matrix
    split: RowSplit  # of the matrix
    ranks: tuple[int, ...]  # those that cut the block
    place: int  # of this slice's rank among them
    steps: int = 0  # of the matrix

    @property
    def rank(self) -> int:
        """Whose it is."""
        return self.ranks[self.place]

    @property
    def shape(self) -> tuple[int, int]:
        """Of the slice."""
        return self._rows[1], self._cols[1]

    @property
    def numel(self) -> int:
        """Number of its elements."""
        return self._rows[1] * self._cols[1]

    @property
    def is_tall(self) -> bool:
        """Whether the block is, so that its rows are cut."""
        return self.of[0] > self.of[1]

    def kind(self, scale: float) -> BlockKind:
        """Of the stack that it belongs to; `scale` is of the update of its block."""
        ranks = self.ranks if len(self.ranks) > 1 else ()
        return BlockKind(
            min(self.of),
            max(self.of),
            scale,
            self.steps,
            ranks,
            self.shape[0 if self.is_tall else 1],
        )

    @property
    def _rows(self) -> tuple[int, int]:
        """First row in the block, and number of rows."""
        return (
            _part(
                self.of[0],
                self.place,
                len(self.ranks),
            )
            if self.is_tall
            else (0, self.of[0])
        )

    @property
    def _cols(self) -> tuple[int, int]:
        return (
            (0, self.of[1])
            if self.is_tall
            else _part(
                self.of[1],
                self.place,
                len(self.ranks),
            )
        )

    def _spans(self, groups: Iterable[int] | None = None) -> Iterator[tuple[int, int, int]]:
        """Rows that are consecutive in the matrix: the first there, how many, and the first in the slice.

        Args:
            groups: of the split, those to take; None takes all.
        """
        start, count = self._rows
        before = sum(self.split.parts[: self.block or 0])
        if self.block is None or self.split.groups == 1:
            yield before + start, count, 0
            return
        part, stride = self.split.parts[self.block], sum(self.split.parts)
        all_groups = range(start // part, -(-(start + count) // part))
        for group in all_groups if groups is None else groups:
            low, high = max(start, group * part), min(start + count, (group + 1) * part)
            yield group * stride + before + low - group * part, high - low, low - start

    def pieces(self, shard: Shard) -> list[Piece]:
        """The rectangles of it that `shard` has, by rows."""
        return self._pieces(shard, self._spans())

    def runs(self, shard: Shard) -> list[Piece]:
        """As `pieces`, with those of consecutive groups of the split as one, and in any order.

        Interleaved rows would else be a piece each.
        """
        if self.block is None or self.split.groups == 1:
            return self.pieces(shard)
        start, count = self._rows
        part, stride = self.split.parts[self.block], sum(self.split.parts)
        before = sum(self.split.parts[: self.block])
        first_row, end_row = shard.row_start - before, shard.row_start + shard.rows - before
        # Groups whose rows the slice has, and the shard, all of them.
        first = max(-(-start // part), -(-first_row // stride))
        end = min((start + count) // part, (end_row - part) // stride + 1)
        if end - first < 2:
            return self.pieces(shard)
        neighbours = [
            group
            for group in (first - 1, end)
            if start < (group + 1) * part and group * part < start + count
        ]
        at_edges = self._pieces(shard, self._spans(neighbours))
        repeated = self._pieces(shard, self._spans([first]))
        return [
            *at_edges,
            *(piece._replace(repeats=end - first, stride=stride) for piece in repeated),
        ]

    def _pieces(self, shard: Shard, spans: Iterable[tuple[int, int, int]]) -> list[Piece]:
        first_col, cols = self._cols
        left, right = (
            max(first_col, shard.col_start),
            min(first_col + cols, shard.col_start + shard.cols),
        )
        found = []
        for row, rows, slice_row in spans if left < right else ():
            top, bottom = max(row, shard.row_start), min(row + rows, shard.row_start + shard.rows)
            if top < bottom:
                found.append(
                    Piece(
                        top,
                        bottom - top,
                        left,
                        right - left,
                        slice_row + top - row,
                        left - first_col,
                    )
                )
        return found

    def overlaps(self, rectangles: Ints) -> Ints:
        """How many elements each of `rectangles`, rows of `(row_start, rows, col_start, cols)`, has of it."""
        rows = np.zeros(len(rectangles), dtype=np.int64)
        for row, count, _ in self._spans():
            rows += _common(rectangles[:, 0], rectangles[:, 1], row, count)
        return rows * _common(rectangles[:, 2], rectangles[:, 3], *self._cols)


@dataclass(frozen=True)
class Team:
    """The owners of a matrix: one rank, or several of one node, ascending, and what each has to do.

    `cuts` has for each block `(first, count)`: it is cut over `count` ranks from place `first` of
    `ranks` on; None has all blocks orthogonalised by the one owner.
    """

    ranks: tuple[int, ...]
    loads: tuple[float, ...]
    cuts: Cuts | None = None

    def slices(self, index: int, matrix: Matrix) -> list[BlockSlice]:
        """What the ranks have of a matrix with this index: by block, and within a block by rank."""
        if self.cuts is None:
            return [
                BlockSlice(index, None, matrix.shape, matrix.split, self.ranks, 0, matrix.steps)
            ]
        return [
            BlockSlice(
                index,
                block,
                shape,
                matrix.split,
                self.ranks[first : first + count],
                place,
                matrix.steps,
            )
            for block, (shape, (first, count)) in enumerate(
                zip(matrix.blocks, self.cuts, strict=True)
            )
            for place in range(count)
        ]

    def slots(self, index: int, matrix: Matrix) -> list[BlockSlice]:
        """Like `slices`, but one slice for each block even if the matrix has one owner."""
        return replace(
            self,
            cuts=self.cuts or ((0, 1),) * len(matrix.blocks),
        ).slices(index, matrix)


def _part(side: int, place: int, count: int) -> tuple[int, int]:
    """First element and length of an even part of a side."""
    unit = _UNIT if side >= 2 * _UNIT * count else 1
    units = -(-side // unit)
    start, end = (min(units * number // count * unit, side) for number in (place, place + 1))
    return start, end - start


def _common(starts: Ints, counts: Ints, start: int, count: int) -> Ints:
    """How many numbers each range has in common with one."""
    ends = np.minimum(starts + counts, start + count)
    common: Ints = np.maximum(ends - np.maximum(starts, start), 0)
    return common
