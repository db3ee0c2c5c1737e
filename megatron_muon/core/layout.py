"""Who holds which part of which matrix.

A *matrix* is a parameter as Muon sees it, a *shard* the rectangle of it that one rank of the group holds. Layouts are
frozen, checked once for tiling, and known to every rank alike. This module does not decide who orthogonalises what.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_muon.core.blocks import RowSplit


class LayoutError(ValueError):
    """A layout whose shards do not tile its matrices."""


@dataclass(frozen=True)
class Shard:
    """The rectangle of a matrix that one rank holds, or several ranks alike.

    Attributes:
        rank: the lowest rank in the group that holds it.
        row_start: first row, and so for `col_start`.
        rows: number of rows, and so for `cols`.
        replicas: further ranks that hold the same rectangle, in ascending order.
    """

    rank: int
    row_start: int
    rows: int
    col_start: int
    cols: int
    replicas: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements of the rectangle."""
        return self.rows * self.cols

    @property
    def holders(self) -> tuple[int, ...]:
        """All ranks that hold the rectangle, in ascending order."""
        return (self.rank, *self.replicas)

    def source(self, owner: int, world_size: int) -> int:
        """The holder from which `owner` has the elements: itself if it holds them.

        Owner r reads from holder r * H // W of H holders and W ranks, which spreads requests over the replicas; where
        replicas are blocks of consecutive ranks, each owner reads within its own block.
        """
        holders = self.holders
        return owner if owner in holders else holders[owner * len(holders) // world_size]


@dataclass(frozen=True)
class Matrix:
    """A named matrix, its global shape `(rows, cols)` and its non-empty shards, which tile it, ordered by rank."""

    name: str
    shape: tuple[int, int]
    shards: tuple[Shard, ...]

    @property
    def numel(self) -> int:
        """Number of elements of the whole matrix."""
        return math.prod(self.shape)

    def shard_of(self, rank: int) -> Shard | None:
        """The shard that `rank` holds, or None where it holds nothing."""
        return next((shard for shard in self.shards if rank == shard.rank or rank in shard.replicas), None)

    def check_tiling(self) -> None:
        """Check that the shards cover every element exactly once.

        Raises:
            LayoutError: names the matrix and the first gap, overlap or overhang.
        """
        rows, cols = self.shape
        starting: dict[int, list[Shard]] = {}  # by first row
        for shard in self.shards:
            if min(shard.rows, shard.cols) < 1:
                raise LayoutError(f"{self.name}: rank {shard.rank} has an empty shard; leave empty shards out")
            if min(shard.row_start, shard.col_start) < 0 or (
                shard.row_start + shard.rows > rows or shard.col_start + shard.cols > cols
            ):
                raise LayoutError(f"{self.name}: the shard of rank {shard.rank} leaves the matrix {rows} x {cols}")
            starting.setdefault(shard.row_start, []).append(shard)
        edges = sorted({0, rows, *starting, *(shard.row_start + shard.rows for shard in self.shards)})
        band: list[Shard] = []  # those with rows between two edges
        for top, bottom in itertools.pairwise(edges):
            band = [shard for shard in band if shard.row_start + shard.rows > top] + starting.get(top, [])
            reached = 0
            for shard in sorted(band, key=lambda shard: shard.col_start):
                if shard.col_start != reached:
                    fault = "no rank holds" if shard.col_start > reached else "several ranks hold"
                    first, last = sorted((reached, shard.col_start))
                    raise LayoutError(f"{self.name}: {fault} rows {top} to {bottom - 1}, columns {first} to {last - 1}")
                reached = shard.col_start + shard.cols
            if reached != cols:
                raise LayoutError(
                    f"{self.name}: no rank holds rows {top} to {bottom - 1}, columns {reached} to {cols - 1}"
                )


MAX_RANKS = 1 << 20
"""Most ranks of a group: a plan counts for each of them. No machine has so many."""

MAX_NUMEL = 1 << 40
"""Most elements of a matrix, so that sums over matrices and bytes stay in 64 bits. None is so large."""


def check_ranks(world_size: int) -> None:
    """Check that a plan can count for each rank.

    Raises:
        LayoutError: there are more than `MAX_RANKS`.
    """
    if world_size > MAX_RANKS:
        raise LayoutError(f"{world_size:,} ranks are too many; at most {MAX_RANKS:,} can be planned")


@dataclass(frozen=True)
class Layout:
    """All matrices of one process group of `world_size` ranks.

    Raises:
        LayoutError: more ranks or elements than can be planned, two matrices share a name, a shard names a rank outside
            the group, or a matrix is not tiled.
    """

    world_size: int
    matrices: tuple[Matrix, ...]

    def __post_init__(self) -> None:
        check_ranks(self.world_size)
        seen: set[str] = set()
        for matrix in self.matrices:
            if matrix.numel > MAX_NUMEL:
                raise LayoutError(f"{matrix.name}: {matrix.numel:,} elements are too many; at most {MAX_NUMEL:,}")
            if matrix.name in seen:
                raise LayoutError(f"{matrix.name}: this name stands for two matrices")
            seen.add(matrix.name)
            holders = [rank for shard in matrix.shards for rank in shard.holders]
            for rank in holders:
                if not 0 <= rank < self.world_size:
                    raise LayoutError(f"{matrix.name}: rank {rank} is not in a group of {self.world_size}")
            if len(set(holders)) < len(holders):
                twice = next(rank for rank in holders if holders.count(rank) > 1)
                raise LayoutError(
                    f"{matrix.name}: rank {twice} holds two shards; a rank holds one rectangle of a matrix"
                )
            matrix.check_tiling()

    def held(self, rank: int) -> list[Shard]:
        """What `rank` holds of each matrix; a shard without rows where it holds nothing."""
        return [matrix.shard_of(rank) or Shard(rank, 0, 0, 0, matrix.shape[1]) for matrix in self.matrices]


@dataclass(frozen=True)
class BlockedLayout:
    """A layout, and how the rows of each matrix make blocks.

    Raises:
        LayoutError: the blocks of a matrix do not add up to its rows.
    """

    layout: Layout
    splits: tuple[RowSplit, ...]

    def __post_init__(self) -> None:
        for matrix, split in zip(self.layout.matrices, self.splits, strict=True):
            if split.rows != matrix.shape[0]:
                raise LayoutError(
                    f"{matrix.name}: blocks of {split.groups} x {list(split.parts)} rows do not make its "
                    f"{matrix.shape[0]} rows"
                )

    def block_shapes(self, index: int) -> list[tuple[int, int]]:
        """Shapes of the blocks that are orthogonalised alone, of the matrix with this index."""
        return self.splits[index].block_shapes(self.layout.matrices[index].shape[1])


def from_rectangles(name: str, shape: tuple[int, int], rectangles: Sequence[tuple[int, int, int, int]]) -> Matrix:
    """The matrix of which each rank holds the given rectangle; equal rectangles are replicas.

    Args:
        name: the matrix's name.
        shape: `(rows, cols)` of the whole matrix.
        rectangles: for each rank of the group `(row_start, rows, col_start, cols)`; without elements where it holds
            none.
    """
    holders: dict[tuple[int, int, int, int], list[int]] = {}
    for rank, (row_start, rows, col_start, cols) in enumerate(rectangles):
        if rows and cols:
            holders.setdefault((row_start, rows, col_start, cols), []).append(rank)
    shards = (Shard(ranks[0], *rectangle, replicas=tuple(ranks[1:])) for rectangle, ranks in holders.items())
    return Matrix(name=name, shape=shape, shards=tuple(shards))


def replicated(name: str, shape: tuple[int, int], world_size: int) -> Matrix:
    """The matrix that every rank holds whole."""
    return from_rectangles(name, shape, [(0, shape[0], 0, shape[1])] * world_size)


def row_sharded(name: str, shape: tuple[int, int], rows_per_rank: Sequence[int]) -> Matrix:
    """The matrix whose rank r holds the next `rows_per_rank[r]` rows, as ZeRO sharding cuts it; zeros are allowed."""
    ends = itertools.accumulate(rows_per_rank)
    rectangles = [(end - rows, rows, 0, shape[1]) for end, rows in zip(ends, rows_per_rank, strict=True)]
    return from_rectangles(name, shape, rectangles)
