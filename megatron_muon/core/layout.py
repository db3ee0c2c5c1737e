"""The ranks that hold the parts of each matrix, and the rows that are orthogonalized as a block.

Fused projections keep several matrices in one parameter: QKV interleaves query, key and value rows
group by group. Orthogonalizing them together would mix their singular vectors, so the rows of a
matrix are split into *blocks*.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

Rectangle = tuple[int, int, int, int]
"""`(row_start, rows, col_start, cols)` of a whole matrix."""

Ints = np.ndarray[Any, np.dtype[np.int64]]


class LayoutError(ValueError):
    """Shards do not tile a matrix, or blocks do not add up to its rows."""


@dataclass(frozen=True)
class RowSplit:
    """Rows of a matrix as `groups` repetitions of consecutive `parts`.

    Block i gathers part i of every group.

    `RowSplit(1, (rows,))` is the whole matrix, `RowSplit(query_groups, (q, k, v))` Megatron's fused
    QKV with `q`, `k` and `v` rows in each query group (source: megatron.core.transformer.attention,
    SelfAttention.get_query_key_value_tensors), `RowSplit(T, (f, f))` the gate and up rows of a
    gated MLP that T tensor-parallel ranks share, `RowSplit(1, (w,) * heads)` heads of w rows each
    by itself.
    """

    groups: int
    parts: tuple[int, ...]

    @property
    def stride(self) -> int:
        """Rows of a group."""
        return sum(self.parts)

    @property
    def rows(self) -> int:
        """Rows of the whole matrix."""
        return self.groups * self.stride

    def views(
        self,
        matrix: torch.Tensor,
    ) -> list[torch.Tensor]:
        """The blocks of `matrix`, 2D `(rows, cols)`, in order, as views `(groups, part, cols)`."""
        groups = matrix.unflatten(
            0,
            (self.groups, self.stride),
        )
        return list(groups.split(self.parts, dim=1))

    def row(self, block: int, row: int) -> int:
        """The matrix's row that is row `row` of a block."""
        group, inside = divmod(row, self.parts[block])
        return group * self.stride + sum(self.parts[:block]) + inside

    def rows_above(self, block: int, rows: Ints) -> Ints:
        """The number of a block's rows above each of these rows of the matrix."""
        groups, inside = np.divmod(rows, self.stride)
        part = self.parts[block]
        of_group = np.clip(
            inside - sum(self.parts[:block]),
            0,
            part,
        )
        above: Ints = groups * part + of_group
        return above


def whole(rows: int) -> RowSplit:
    """The split of a matrix of `rows` rows that is one block."""
    return RowSplit(groups=1, parts=(rows,))


@dataclass(frozen=True, slots=True)
class Shard:
    """The rectangle of a matrix that `rank` holds, and `replicas`, higher ranks, ascending."""

    rank: int
    row_start: int
    rows: int
    col_start: int
    cols: int
    replicas: tuple[int, ...] = ()

    @property
    def rectangle(self) -> Rectangle:
        """First row, rows, first column, columns."""
        return self.row_start, self.rows, self.col_start, self.cols

    @property
    def numel(self) -> int:
        """Number of elements of the rectangle."""
        return self.rows * self.cols

    @property
    def holders(self) -> tuple[int, ...]:
        """All ranks that hold the rectangle, in ascending order."""
        return (self.rank, *self.replicas)

    def region(self, shape: Sequence[int]) -> tuple[range, range]:
        """Its rows and columns of a tensor of the matrix's shape, or with 1 for either side."""
        sides = []
        for size, start, length in zip(
            shape, self.rectangle[::2], self.rectangle[1::2], strict=True
        ):
            sides.append(range(start, start + length) if size > 1 else range(1))
        return sides[0], sides[1]

    def source(self, owner: int, world_size: int) -> int:
        """The holder from which `owner` has the elements: itself if it holds them.

        Owner r reads from holder r * H // W of H holders and W ranks, which spreads requests over
        the replicas; where replicas are blocks of consecutive ranks, each owner reads within its
        own block.
        """
        holders = self.holders
        return owner if owner in holders else holders[owner * len(holders) // world_size]


def _corners(
    rectangles: Iterable[Rectangle],
) -> dict[tuple[int, int], int]:
    """Corners of rectangles, counted with signs, without those that cancel.

    Two sets of rectangles cover the same elements, equally often, if these are equal.
    """
    counts = Counter[tuple[int, int]]()
    for row, rows, col, cols in rectangles:
        counts[row, col] += 1
        counts[row, col + cols] -= 1
        counts[row + rows, col] -= 1
        counts[row + rows, col + cols] += 1
    return {corner: count for corner, count in counts.items() if count}


class Shards(tuple[Shard, ...]):
    """The shards of a matrix, none of them empty; a rank holds at most one.

    Matrices that are cut alike share one object.

    Attributes:
        rectangles: `Rectangle` of each shard, `(shards, 4)`.
        elements: of each shard.
        corners: of all shards, which are those of the matrix if they tile it.
        by_rank: the number of the shard that each holder has, in the order of shards.
        ranks, numbers: the same as two columns.
    """

    def __init__(
        self,
        shards: Iterable[Shard] = (),
    ) -> None:
        super().__init__()
        rectangles = [shard.rectangle for shard in self]
        self.rectangles = np.array(
            rectangles,
            dtype=np.int64,
        ).reshape(-1, 4)
        self.elements = self.rectangles[:, 1] * self.rectangles[:, 3]
        self.corners = _corners(rectangles)
        self.by_rank: dict[int, int] = {}
        for number, shard in enumerate(self):
            self.by_rank |= dict.fromkeys(shard.holders, number)
        pairs = np.array(
            list(self.by_rank.items()),
            dtype=np.int64,
        )
        self.ranks, self.numbers = pairs.reshape(-1, 2).T.copy()

    @functools.cached_property
    def digest(self) -> bytes:
        """A hash of all shards."""
        return hashlib.sha256(repr(tuple(self)).encode()).digest()

    def sources(self, owner: int, world_size: int) -> Ints:
        """For each shard the rank from which `owner` has it."""
        if len(self.ranks) == len(self):
            return self.ranks
        found = [shard.source(owner, world_size) for shard in self]
        return np.array(found, dtype=np.int64)


_NO_SHARDS = Shards()


@dataclass(frozen=True)
class Matrix:
    """A named matrix of global shape `(rows, cols)`, with the shards that tile it and its blocks.

    `steps` are its Newton-Schulz steps, 0 for as many as the iteration has for all.
    """

    name: str
    shape: tuple[int, int]
    shards: Shards = _NO_SHARDS
    split: RowSplit = None  # type: ignore[assignment]  # one block, where it is not given
    steps: int = 0

    def __post_init__(self) -> None:
        if self.split is None:
            object.__setattr__(self, "split", whole(self.shape[0]))  # type: ignore[unreachable]

    @property
    def numel(self) -> int:
        """Number of elements of the whole matrix."""
        return math.prod(self.shape)

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """Shapes of the blocks that are orthogonalized alone."""
        cols = self.shape[1]
        return [
            (
                self.split.groups * part,
                cols,
            )
            for part in self.split.parts
        ]

    def held_by(self, rank: int) -> Shard:
        """The shard that `rank` holds; one without rows where it holds nothing."""
        number = self.shards.by_rank.get(rank)
        if number is None:
            return Shard(rank, 0, 0, 0, self.shape[1])
        return self.shards[number]

    def check_tiling(self) -> None:
        """Raise a LayoutError for the first gap, overlap or overhang of the shards."""
        rows, cols = self.shape
        expected = _corners([(0, rows, 0, cols)])
        faults = self.shards.corners.items() ^ expected.items()
        if faults:
            (row, col), _ = min(faults)
            raise LayoutError(
                f"{self.name}: shards have a gap, or overlap, from row {row}, column {col} of"
                f" {rows} x {cols}"
            )


@dataclass(frozen=True)
class Layout:
    """All matrices of one process group of `world_size` ranks.

    Raises:
        LayoutError: a matrix is not tiled, or its blocks do not add up to its rows.
    """

    world_size: int
    matrices: tuple[Matrix, ...]

    def __post_init__(self) -> None:
        for matrix in self.matrices:
            matrix.check_tiling()
            rows = matrix.split.rows
            if rows != matrix.shape[0]:
                raise LayoutError(
                    f"{matrix.name}: blocks of {rows} rows for {matrix.shape[0]}",
                )

    def digest(self) -> int:
        """A hash of the layout, 0 <= digest < 2**63, the same on any rank."""
        described = [
            (one.name, one.shape, one.steps, one.split, one.shards.digest) for one in self.matrices
        ]
        content = hashlib.sha256(repr((self.world_size, described)).encode())
        return int.from_bytes(content.digest()[:8]) >> 1

    def held(self, rank: int) -> list[Shard]:
        """The shard of each matrix that `rank` holds; one without rows where it holds nothing."""
        return [matrix.held_by(rank) for matrix in self.matrices]


@functools.cache
def everywhere(
    shape: tuple[int, int],
    world_size: int,
) -> Shards:
    """The one shard of a matrix that every rank holds whole."""
    rows, cols = shape
    return Shards([Shard(0, 0, rows, 0, cols, tuple(range(1, world_size)))])


def replicated_layout(
    matrices: Iterable[Matrix],
    ranks: int,
) -> tuple[Layout, list[Rectangle]]:
    """The layout of matrices that every rank holds whole, and the rectangles of each rank."""
    whole = [
        replace(
            one,
            shards=everywhere(one.shape, ranks),
        )
        for one in matrices
    ]
    return Layout(ranks, tuple(whole)), [one.shards[0].rectangle for one in whole]
