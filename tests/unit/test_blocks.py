"""Splitting a matrix into blocks and putting it together again."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_muon.core.blocks import RowSplit, whole

SPLITS = st.builds(
    RowSplit,
    groups=st.integers(1, 5),
    parts=st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple),
)


@given(SPLITS, st.integers(1, 5))
def test_blocks_are_views_that_cover_the_matrix(split: RowSplit, cols: int) -> None:
    matrix = torch.arange(split.rows * cols, dtype=torch.float32).view(split.rows, cols)
    views = split.views(matrix)
    assert [(view.shape[0] * view.shape[1], view.shape[2]) for view in views] == split.block_shapes(cols)
    assert sorted(value for view in views for value in view.flatten().tolist()) == matrix.flatten().tolist()
    for view in views:
        view.add_(1000.0)
    assert (matrix >= 1000.0).all()


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_fused_qkv_by_its_definition(groups: int, heads_per_group: int, width: int) -> None:
    """Row by row: query heads, key head, value head of the first group, then of the next."""
    owner = []
    for group in range(groups):
        for head in range(heads_per_group):
            owner += [(0, group * heads_per_group + head, row) for row in range(width)]
        owner += [(1, group, row) for row in range(width)]
        owner += [(2, group, row) for row in range(width)]
    matrix = torch.tensor(owner, dtype=torch.float32)
    split = RowSplit(groups=groups, parts=(heads_per_group * width, width, width))
    for part, block in enumerate(view.flatten(0, 1) for view in split.views(matrix)):
        expected = [row for row in owner if row[0] == part]
        assert block.tolist() == [[float(value) for value in row] for row in expected]
        assert expected == sorted(expected), "heads and rows keep their order"


def test_whole_is_one_block() -> None:
    matrix = torch.randn(5, 3)
    (view,) = whole(5).views(matrix)
    assert torch.equal(view, matrix[None])


@pytest.mark.parametrize("shape", [(7, 3), (0, 3), (8,), (2, 4, 3)])
def test_a_shard_is_no_whole_matrix(shape: tuple[int, ...]) -> None:
    """The QKV split was once decided from the rows that a rank happened to hold."""
    with pytest.raises(ValueError, match=r"needs a 2D matrix of 8 rows, got"):
        RowSplit(groups=2, parts=(2, 1, 1)).views(torch.zeros(shape))


@pytest.mark.parametrize(("groups", "parts"), [(0, (1,)), (1, ()), (2, (3, 0)), (-1, (2,)), (1, (-2,))])
def test_groups_and_parts_are_positive(groups: int, parts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=f"groups={groups}"):
        RowSplit(groups=groups, parts=parts)
