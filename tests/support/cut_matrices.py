"""Matrices for tests, described by the rows or the rectangle of each rank."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from megatron_muon.core.layout import Matrix, Rectangle, RowSplit, Shard, Shards, whole


def as_shards(rectangles: Sequence[Rectangle]) -> Shards:
    """The shards of a matrix of which rank r holds `rectangles[r]`; equal ones are replicas."""
    holders: dict[Rectangle, list[int]] = {}
    for rank, rectangle in enumerate(rectangles):
        if rectangle[1] and rectangle[3]:
            holders.setdefault(rectangle, []).append(rank)
    return Shards(
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


def row_sharded(
    name: str, shape: tuple[int, int], rows_per_rank: Sequence[int], split: RowSplit | None = None
) -> Matrix:
    """The matrix whose rank r holds the next `rows_per_rank[r]` rows, or none, as ZeRO cuts it."""
    ends = itertools.accumulate(rows_per_rank)
    rectangles = [
        (end - rows, rows, 0, shape[1]) for end, rows in zip(ends, rows_per_rank, strict=True)
    ]
    return from_rectangles(name, shape, rectangles, split)
