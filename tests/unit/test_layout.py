"""Layouts: shards tile their matrices, or the layout says what is wrong."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_muon.core.layout import Layout, LayoutError, Matrix, RowSplit, Shard, Shards
from tests.support.cut_matrices import row_sharded


def shard(rank: int, rows: range, cols: range) -> Shard:
    return Shard(
        rank=rank, row_start=rows.start, rows=len(rows), col_start=cols.start, cols=len(cols)
    )


def matrix(*shards: Shard, shape: tuple[int, int] = (6, 4)) -> Matrix:
    return Matrix(name="w", shape=shape, shards=Shards(shards))


ROW_CUTS = st.sets(st.integers(1, 11), max_size=4)
COL_CUTS = st.sets(st.integers(1, 7), max_size=3)


@given(ROW_CUTS, COL_CUTS, st.data())
def test_every_grid_tiles_and_every_damage_is_found(
    row_cuts: set[int], col_cuts: set[int], data: st.DataObject
) -> None:
    rows, cols = [0, *sorted(row_cuts), 12], [0, *sorted(col_cuts), 8]
    cells = product(pairwise(rows), pairwise(cols))
    in_any_order = data.draw(
        st.permutations([(range(*rows), range(*cols)) for rows, cols in cells])
    )
    shards = [shard(rank, *cell) for rank, cell in enumerate(in_any_order)]
    Layout(
        world_size=len(shards),
        matrices=(matrix(*shards, shape=(12, 8)),),
    )

    victim = data.draw(st.integers(0, len(shards) - 1))
    broken = shards[victim]
    one = replace(broken, rank=len(shards), rows=1, cols=1)
    taller, narrower = (
        replace(
            broken,
            rows=broken.rows + 1,
        ),
        replace(broken, cols=broken.cols - 1),
    )
    shards[victim : victim + 1] = data.draw(
        st.sampled_from([[], [broken, one], [taller], [narrower]])
    )
    with pytest.raises(LayoutError, match=r"^w: "):
        Layout(
            world_size=len(shards) + 1,
            matrices=(matrix(*shards, shape=(12, 8)),),
        )


@pytest.mark.parametrize(
    ("rows", "cols", "message"),
    [
        ([range(3)], 4, "from row 3, column 0 of 6 x 4"),
        ([range(6)], 3, "from row 0, column 3"),
        ([range(4), range(3, 6)], 4, "from row 3, column 0"),
        ([range(7)], 4, "from row 6, column 0"),
        ([range(-1, 6)], 4, "from row -1, column 0"),
    ],
)
def test_a_fault_is_named_with_its_place(rows: list[range], cols: int, message: str) -> None:
    held = [shard(rank, of_rank, range(cols)) for rank, of_rank in enumerate(rows)]
    with pytest.raises(LayoutError, match=message):
        Layout(world_size=2, matrices=(matrix(*held),))


def test_blocks_make_all_rows() -> None:
    fused = row_sharded(
        "w",
        (6, 4),
        [3, 3],
        RowSplit(2, (2,)),
    )
    with pytest.raises(LayoutError, match="w: blocks of 4 rows for 6"):
        Layout(world_size=2, matrices=(fused,))


SPLITS = st.builds(
    RowSplit,
    groups=st.integers(1, 5),
    parts=st.lists(
        st.integers(1, 6),
        min_size=1,
        max_size=4,
    ).map(tuple),
)


@given(SPLITS, st.integers(1, 5))
def test_blocks_are_views_that_cover_the_matrix(split: RowSplit, cols: int) -> None:
    whole_matrix = Matrix("w", (split.rows, cols), split=split)
    matrix = torch.arange(
        split.rows * cols,
        dtype=torch.float32,
    ).view(split.rows, cols)
    views = split.views(matrix)
    shapes = [view.flatten(0, 1).shape for view in views]
    assert shapes == whole_matrix.blocks
    for view in views:
        view.sub_(1000.0)
    assert (matrix < 0.0).all()
    assert sum(view.numel() for view in views) == matrix.numel()


@pytest.mark.parametrize("shape", [(7, 3), (2, 4, 3)])
def test_a_shard_is_no_whole_matrix(shape: tuple[int, ...]) -> None:
    """The QKV split was once decided from the rows that a rank happened to hold."""
    with pytest.raises(RuntimeError, match="multiply up to the size of dim 0"):
        RowSplit(groups=2, parts=(2, 1, 1)).views(torch.zeros(shape))
