"""Who holds which part of which matrix, and which of its rows are orthogonalised as blocks of their own.

Fused projections keep several matrices in one parameter: QKV interleaves query, key and value rows
group by group. Orthogonalising them together would mix their singular vectors, so the rows of a
matrix are split into *blocks*.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

Rectangle = tuple[int, int, int, int]
"""`(row_start, rows, col_start, cols)` of a whole matrix."""

Ints = np.ndarray[Any, np.dtype[np.int64]]


class LayoutError(ValueError):
    """A layout whose shards do not tile its matrices, or whose blocks do not add up to their rows."""


@dataclass(frozen=True)
class RowSplit:
    """Rows of a matrix as `groups` repetitions of consecutive `parts`; block i gathers part i of every group.

    `RowSplit(1, (rows,))` is the whole matrix, `RowSplit(query_groups, (q, k, v))` Megatron's fused
    QKV with `q`, `k` and `v` rows in each query group (source: megatron.core.transformer.attention,
    SelfAttention.get_query_key_value_tensors), `RowSplit(T, (f, f))` the gate and up rows of a
    gated MLP that T tensor-parallel ranks share, `RowSplit(1, (w,) * heads)` heads of w rows each
    by itself.
    """

    groups: int
    parts: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Rows of the whole matrix."""
        return self.groups * sum(self.parts)

    def views(self, matrix: torch.Tensor) -> list[torch.Tensor]:
        """The blocks of `matrix`, 2D `(rows, cols)`, as views `(groups, part, cols)`, in the order of their rows."""
        if matrix.ndim != 2 or len(matrix) != self.rows:
            wanted = (
                f"a split of {self.groups} x {self.parts} rows needs a 2D matrix of {self.rows}"
                " rows"
            )
            raise ValueError(f"{wanted}, got {tuple(matrix.shape)}")
        return list(matrix.unflatten(0, (self.groups, -1)).split(self.parts, dim=1))


def whole(rows: int) -> RowSplit:
    """The split of a matrix of `rows` rows that is one block."""
    return RowSplit(groups=1, parts=(rows,))


@dataclass(frozen=True, slots=True)
class Shard:
    """The rectangle of a matrix that one rank holds, or several alike: `rank` the lowest, `replicas` ascending."""

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

        Owner r reads from holder r * H // W of H holders and W ranks, which spreads requests over
        the replicas; where replicas are blocks of consecutive ranks, each owner reads within its
        own block.
        """
        holders = self.holders
        return owner if owner in holders else holders[owner * len(holders) // world_size]


@dataclass(frozen=True, eq=False)
class Holders:
    """Who holds the shards of matrices that are cut alike, as columns of numbers.

    `ranks` and `numbers` have each pair of a rank and the number of a shard that it holds;
    `elements` and `rectangles`, rows as `Rectangle`, each shard.
    """

    shards: tuple[Shard, ...]
    ranks: Ints
    numbers: Ints
    elements: Ints
    rectangles: Ints

    @classmethod
    def of(cls, shards: tuple[Shard, ...]) -> Holders:
        """The holders of `shards`."""
        pairs = [
            (holder, number) for number, shard in enumerate(shards) for holder in shard.holders
        ]
        ranks, numbers = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        corners = [(s.row_start, s.rows, s.col_start, s.cols) for s in shards]
        rectangles = np.array(corners, dtype=np.int64).reshape(-1, 4)
        return cls(shards, ranks, numbers, rectangles[:, 1] * rectangles[:, 3], rectangles)

    def sources(self, owner: int, world_size: int) -> Ints:
        """For each shard the rank from which `owner` has it."""
        if len(self.ranks) == len(self.shards):
            return self.ranks
        return np.array([shard.source(owner, world_size) for shard in self.shards], dtype=np.int64)


@dataclass(frozen=True)
class Matrix:
    """A named matrix, its global shape `(rows, cols)`, its non-empty shards, which tile it, by rank, and its blocks.

    `steps` are its Newton-Schulz steps, 0 for as many as the iteration has for all. Matrices that
    are cut alike may share a tuple of shards, which is checked once.
    """

    name: str
    shape: tuple[int, int]
    shards: tuple[Shard, ...] = ()
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
        """Shapes of the blocks that are orthogonalised alone."""
        return [(self.split.groups * part, self.shape[1]) for part in self.split.parts]

    def shard_of(self, rank: int) -> Shard | None:
        """The shard that `rank` holds, or None where it holds nothing."""
        return next(
            (shard for shard in self.shards if rank == shard.rank or rank in shard.replicas), None
        )

    def check_tiling(self) -> None:
        """Raise a LayoutError for the first gap, overlap or overhang of the shards."""
        rows, cols = self.shape
        for shard in self.shards:
            if min(shard.rows, shard.cols) < 1:
                raise LayoutError(
                    f"{self.name}: rank {shard.rank} has an empty shard; leave empty shards out"
                )
            if not (
                0 <= shard.row_start <= rows - shard.rows
                and 0 <= shard.col_start <= cols - shard.cols
            ):
                raise LayoutError(
                    f"{self.name}: the shard of rank {shard.rank} leaves the matrix {rows} x {cols}"
                )
        tops = sorted(
            {
                0,
                *(s.row_start for s in self.shards),
                *(s.row_start + s.rows for s in self.shards),
            }
            - {rows}
        )
        lefts = sorted(
            {
                0,
                *(s.col_start for s in self.shards),
                *(s.col_start + s.cols for s in self.shards),
            }
            - {cols}
        )
        # of each cell between the edges of shards
        holders = np.zeros((len(tops), len(lefts)), dtype=np.int64)
        for s in self.shards:
            above, below = (
                bisect.bisect_left(tops, row) for row in (s.row_start, s.row_start + s.rows)
            )
            left, right = (
                bisect.bisect_left(lefts, col) for col in (s.col_start, s.col_start + s.cols)
            )
            holders[above:below, left:right] += 1
        if (holders != 1).any():
            row, col = np.argwhere(holders != 1)[0]
            fault = "no rank holds" if holders[row, col] == 0 else "several ranks hold"
            raise LayoutError(f"{self.name}: {fault} row {tops[row]}, column {lefts[col]}")


@dataclass(frozen=True)
class Layout:
    """All matrices of one process group of `world_size` ranks.

    Raises:
        LayoutError: a matrix is not tiled, or its blocks do not add up to its rows.
    """

    world_size: int
    matrices: tuple[Matrix, ...]

    def __post_init__(self) -> None:
        checked: set[tuple[int, tuple[int, int]]] = set()
        for matrix in self.matrices:
            name, split = matrix.name, matrix.split
            cut = id(matrix.shards), matrix.shape
            if cut not in checked:
                matrix.check_tiling()
                checked.add(cut)
            if split.rows != matrix.shape[0]:
                blocks = f"{split.groups} x {list(split.parts)}"
                raise LayoutError(
                    f"{name}: blocks of {blocks} rows do not make its {matrix.shape[0]} rows"
                )

    def digest(self) -> int:
        """A hash of all that is in the layout, 0 <= digest < 2**63: equal layouts have equal ones, on any rank."""
        content = hashlib.sha256(repr(self.world_size).encode())
        of_shards: dict[int, bytes] = {}
        for matrix in self.matrices:
            split, cut = matrix.split, id(matrix.shards)
            content.update(
                repr((matrix.name, matrix.shape, matrix.steps, split.groups, split.parts)).encode()
            )
            if cut not in of_shards:
                numbers = array("q")
                for s in matrix.shards:
                    numbers.extend(
                        (
                            s.rank,
                            s.row_start,
                            s.rows,
                            s.col_start,
                            s.cols,
                            len(s.replicas),
                            *s.replicas,
                        )
                    )
                of_shards[cut] = hashlib.sha256(numbers).digest()
            content.update(of_shards[cut])
        return int.from_bytes(content.digest()[:8]) >> 1

    @functools.cached_property
    def holders(self) -> list[Holders]:
        """Who holds each matrix; those that are cut alike have the same object."""
        cuts = {id(matrix.shards): matrix.shards for matrix in self.matrices}
        found = {cut: Holders.of(shards) for cut, shards in cuts.items()}
        return [found[id(matrix.shards)] for matrix in self.matrices]

    def held(self, rank: int, indices: Sequence[int] | None = None) -> list[Shard]:
        """What `rank` holds of each matrix, or of some; a shard without rows where it holds nothing."""
        matrices = self.matrices if indices is None else [self.matrices[index] for index in indices]
        found = {
            cut: one.shard_of(rank)
            for cut, one in {id(one.shards): one for one in matrices}.items()
        }
        return [
            found[id(one.shards)]
            or Shard(
                rank,
                0,
                0,
                0,
                one.shape[1],
            )
            for one in matrices
        ]


def as_shards(rectangles: Sequence[Rectangle]) -> tuple[Shard, ...]:
    """The shards of a matrix of which rank r holds `rectangles[r]`, in the order of ranks; equal ones are replicas."""
    holders: dict[Rectangle, list[int]] = {}
    for rank, rectangle in enumerate(rectangles):
        if rectangle[1] and rectangle[3]:
            holders.setdefault(rectangle, []).append(rank)
    return tuple(
        Shard(ranks[0], *rectangle, replicas=tuple(ranks[1:]))
        for rectangle, ranks in holders.items()
    )


def from_rectangles(
    name: str,
    shape: tuple[int, int],
    rectangles: Sequence[Rectangle],
    split: RowSplit | None = None,
) -> Matrix:
    """The matrix of which rank r holds `rectangles[r]`, without elements where it holds none."""
    return Matrix(name, shape, as_shards(rectangles), split or whole(shape[0]))


@functools.cache
def everywhere(shape: tuple[int, int], world_size: int) -> tuple[Shard, ...]:
    """The one shard of a matrix that every rank holds whole."""
    return as_shards([(0, shape[0], 0, shape[1])] * world_size)


def row_sharded(
    name: str, shape: tuple[int, int], rows_per_rank: Sequence[int], split: RowSplit | None = None
) -> Matrix:
    """The matrix whose rank r holds the next `rows_per_rank[r]` rows, as ZeRO sharding cuts it; zeros are allowed."""
    ends = itertools.accumulate(rows_per_rank)
    rectangles = [
        (end - rows, rows, 0, shape[1]) for end, rows in zip(ends, rows_per_rank, strict=True)
    ]
    return from_rectangles(name, shape, rectangles, split)
