"""The part of a matrix that each owner orthogonalizes: its blocks, or in a team even parts of them.

A block that a team cuts lies wide in the iteration, `(m, n)` with m <= n, and each member has some
of its n columns: of a tall block these are rows, which is how FSDP cuts it anyway. Plain
arithmetic, for planner, exchange and estimates.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from megatron_muon.core.layout import Ints, Matrix, Shard

TEAM_SIZES = (1, 2, 4, 8)
"""Ranks that may own a matrix together: powers of two, so that of two teams that share a rank one holds the other."""

Cuts = tuple[tuple[int, int], ...]
"""How a team divides the blocks of a matrix: for each `(first, count)`, the ranks that cut it; see `Team`."""

_UNIT = 8
"""Parts of long sides are multiples of this, as kernels like them."""


class BlockKind(NamedTuple):
    """Properties that the blocks of a stack share. Ranks of a team sort the kinds that they share alike."""

    smaller: int
    longer: int  # of the whole block
    scale: float  # of the update
    steps: int  # of the matrix
    ranks: tuple[int, ...]  # that cut the block; none where it is whole
    length: int  # of this rank's part of the longer side
    is_tall: bool = False  # of methods that take tall blocks apart from wide ones

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
    """The rectangle of a block that one rank orthogonalizes: all of it, or a part."""

    index: int  # of the matrix
    matrix: Matrix
    block: int  # number in its split
    of: tuple[int, int]  # shape of the block
    rows: range  # of the block
    cols: range
    ranks: tuple[int, ...]  # that cut the block
    rank: int

    @property
    def numel(self) -> int:
        """Number of elements of the slice."""
        return len(self.rows) * len(self.cols)

    @property
    def is_tall(self) -> bool:
        """True if the block has more rows than columns, so that its rows are cut."""
        return self.of[0] > self.of[1]

    def kind(self, scale: float) -> BlockKind:
        """The kind of its stack; `scale` is the factor of the block's update."""
        smaller, longer = sorted(self.of)
        ranks = self.ranks if len(self.ranks) > 1 else ()
        return BlockKind(
            smaller,
            longer,
            scale,
            self.matrix.steps,
            ranks,
            self.numel // smaller,
        )

    def runs(self, shard: Shard) -> list[Piece]:
        """The rectangles of the slice that `shard` has, by rows; equal ones of consecutive groups are one.

        Interleaved rows would else be a piece each.
        """
        left = max(self.cols.start, shard.col_start)
        right = min(self.cols.stop, shard.col_start + shard.cols)
        if left >= right:
            return []
        ends = np.array([shard.row_start, shard.row_start + shard.rows])
        split = self.matrix.split
        above = split.rows_above(self.block, ends).tolist()
        top = max(self.rows.start, above[0])
        bottom = min(self.rows.stop, above[1])
        part = split.parts[self.block]
        # Whole groups are between the two inner edges.
        edges = [top, -(-top // part) * part, bottom // part * part, bottom]
        if edges[1] > edges[2]:
            edges = [top, bottom]
        found = []
        for start, end in pairwise(edges):
            if start < end:
                repeats = max((end - start) // part, 1)
                found.append(
                    Piece(
                        split.row(self.block, start),
                        (end - start) // repeats,
                        left,
                        right - left,
                        start - self.rows.start,
                        left - self.cols.start,
                        repeats,
                        split.stride,
                    )
                )
        return found

    def overlaps(self, rectangles: Ints) -> Ints:
        """Elements of the slice in each of `rectangles`, rows of `(row_start, rows, col_start, cols)`."""
        row, rows, col, cols = rectangles.T
        above = self.matrix.split.rows_above(self.block, row)
        below = self.matrix.split.rows_above(self.block, row + rows)
        common_rows = _common(self.rows, above, below)
        return common_rows * _common(self.cols, col, col + cols)


@dataclass(frozen=True)
class Team:
    """The owners of a matrix, one rank, or several of one node, ascending, and the work of each.

    `cuts` has for each block `(first, count)`: it is cut over `count` ranks from place `first` of
    `ranks` on; None has all blocks orthogonalized by the one owner.
    """

    ranks: tuple[int, ...]
    loads: tuple[float, ...]
    cuts: Cuts | None = None

    def has_whole(self, matrix: Matrix) -> bool:
        """True if a matrix lies whole on its one owner, and nowhere else."""
        alone = self.cuts is None and len(matrix.shards) == 1
        return alone and matrix.shards[0].holders == self.ranks

    def slices(self, index: int, matrix: Matrix) -> list[BlockSlice]:
        """The slices of a matrix with this index: by block, and within a block by rank."""
        found = []
        blocks = matrix.blocks
        cuts = self.cuts or ((0, 1),) * len(blocks)
        for block, (first, count) in enumerate(cuts):
            ranks = self.ranks[first : first + count]
            for place, rank in enumerate(ranks):
                rows, cols = _part(blocks[block], place, count)
                found.append(
                    BlockSlice(
                        index,
                        matrix,
                        block,
                        blocks[block],
                        rows,
                        cols,
                        ranks,
                        rank,
                    )
                )
        return found


def _part(
    shape: tuple[int, int],
    place: int,
    count: int,
) -> tuple[range, range]:
    """Rows and columns of an even part of a block, whose longer side is cut."""
    longer = max(shape)
    unit = _UNIT if longer >= 2 * _UNIT * count else 1
    units = -(-longer // unit)
    start = units * place // count * unit
    end = units * (place + 1) // count * unit
    part = range(start, min(end, longer))
    rows, cols = shape
    if rows > cols:
        return part, range(cols)
    return range(rows), part


def _common(span: range, starts: Ints, ends: Ints) -> Ints:
    """Count the numbers of `span` in each of several ranges."""
    common: Ints = np.minimum(ends, span.stop) - np.maximum(starts, span.start)
    return np.maximum(common, 0, out=common)
