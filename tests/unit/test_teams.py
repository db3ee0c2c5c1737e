"""Teams: what each rank has of a block, who gets one, and the iteration over its parts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_muon.core.assignment import TeamRules
from megatron_muon.core.cost import KERNEL, Iteration
from megatron_muon.core.layout import Layout, Matrix, RowSplit
from megatron_muon.core.plan import Plan, make_plan
from megatron_muon.core.slices import TEAM_SIZES, Piece, Team
from megatron_muon.megatron.plan_figures import loads_of
from tests.support.buffers import sizes_of
from tests.support.cut_matrices import row_sharded

# What each rank has


@given(data=st.data())
def test_slices_and_shards_have_every_element_in_common_once(data: st.DataObject) -> None:
    """A piece of a slice has the place in it that it has in the block; test_exchange carries out
    what follows from that.
    """
    parts = data.draw(
        st.lists(st.integers(1, 40), min_size=1, max_size=3),
    )
    split = RowSplit(data.draw(st.integers(1, 7)), tuple(parts))
    cut = data.draw(st.integers(0, split.rows))
    cols = data.draw(st.integers(1, 40))
    matrix = row_sharded("w", (split.rows, cols), [cut, split.rows - cut], split)
    size = data.draw(st.sampled_from(TEAM_SIZES[1:]))
    cuts = []
    for block in matrix.blocks:
        possible = [count for count in TEAM_SIZES if count <= min(size, max(block))]
        count = data.draw(st.sampled_from(possible))
        cuts.append(
            (data.draw(st.integers(0, size // count - 1)) * count, count),
        )
    team = Team(tuple(range(size)), (0.0,) * size, tuple(cuts))
    numbers = torch.arange(matrix.numel).view(matrix.shape)
    seen = torch.zeros_like(numbers)
    for block_slice in team.slices(0, matrix):
        block = split.views(numbers)[block_slice.block].reshape(block_slice.of)
        rows, cols = block_slice.rows, block_slice.cols
        own = block[rows.start : rows.stop, cols.start : cols.stop]
        common = block_slice.overlaps(matrix.shards.rectangles)
        for shard, elements in zip(matrix.shards, common, strict=True):
            pieces = list(one_by_one(block_slice.runs(shard)))
            assert sum(piece.rows * piece.cols for piece in pieces) == elements
            for piece in pieces:
                of_matrix = rectangle(numbers, piece.row, piece.col, piece)
                assert torch.equal(
                    of_matrix, rectangle(own, piece.slice_row, piece.slice_col, piece)
                )
                rectangle(seen, piece.row, piece.col, piece).add_(1)
    assert seen.eq(1).all()


def one_by_one(runs: list[Piece]) -> Iterator[Piece]:
    for run in runs:
        for number in range(run.repeats):
            row = run.row + number * run.stride
            slice_row = run.slice_row + number * run.rows
            yield run._replace(row=row, slice_row=slice_row, repeats=1)


def rectangle(matrix: torch.Tensor, row: int, col: int, piece: Piece) -> torch.Tensor:
    return matrix[row : row + piece.rows, col : col + piece.cols]


def test_parts_of_long_sides_are_multiples_of_eight() -> None:
    team = Team(
        (0, 1, 2, 3),
        (0.0,) * 4,
        ((0, 4),),
    )
    wide, tall = Matrix("w", (64, 201)), Matrix("w", (63, 5))
    assert [len(part.cols) for part in team.slices(0, wide)] == [48, 56, 48, 49]
    assert [len(part.rows) for part in team.slices(0, tall)] == [15, 16, 16, 16]


# Who gets one


def rules(ranks: int, *, node: int = 8, size: int = 0) -> TeamRules:
    return TeamRules(
        Iteration(products=KERNEL).cost,
        [rank // node for rank in range(ranks)],
        size,
    )


def plan_of(
    shapes: list[tuple[int, int]],
    ranks: int,
    teams: TeamRules | None,
) -> Plan:
    matrices = []
    for number, shape in enumerate(shapes):
        held = [shape[0] // ranks + (rank < shape[0] % ranks) for rank in range(ranks)]
        matrices.append(row_sharded(str(number), shape, held))
    costs = [float(Iteration(products=KERNEL).cost(*shape)) for shape in shapes]
    return make_plan(Layout(ranks, tuple(matrices)), costs, sizes=sizes_of(2), rules=teams)


def sizes(plan: Plan) -> list[int]:
    return [len(team.ranks) for team in plan.teams]


def test_a_matrix_beyond_a_ranks_share_gets_a_team() -> None:
    shapes = [(28672, 4096), *[(4096, 4096)] * 2]
    alone, together = plan_of(shapes, 8, None), plan_of(shapes, 8, rules(8))
    assert sizes(together)[0] > 1
    assert max(loads_of(together)) < 0.6 * max(loads_of(alone))
    for index, team in enumerate(together.teams):
        assert len(team.loads) == len(team.ranks), index
    assert sum(loads_of(together)) == pytest.approx(
        sum(sum(team.loads) for team in together.teams),
    )


@pytest.mark.parametrize(
    ("shapes", "ranks"),
    [([(4096, 4096)] * 64, 8), ([(64, 256)], 4)],
    ids=str,
)
def test_where_teams_save_nothing_there_are_none(shapes: list[tuple[int, int]], ranks: int) -> None:
    plan = plan_of(shapes, ranks, rules(ranks))
    assert set(sizes(plan)) == {1}
    assert plan == plan_of(shapes, ranks, None)


def test_blocks_of_a_matrix_go_to_different_ranks() -> None:
    split = RowSplit(1, (4096, 4096))
    matrix = row_sharded("gate_up", (8192, 4096), [4096, 4096], split)
    cost = float(2 * Iteration(products=KERNEL).cost(4096, 4096))
    layout = Layout(2, (matrix,))
    plan = make_plan(layout, [cost], sizes=sizes_of(2), rules=rules(2))
    assert plan.teams[0].cuts == ((0, 1), (1, 1))
    assert loads_of(plan) == [cost / 2, cost / 2]


def test_more_ranks_make_a_step_no_slower() -> None:
    """Llama 3's matrices of 32 layers: the largest load falls, or stays."""
    shapes = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)] * 32
    loads = [
        max(
            loads_of(plan_of(shapes, ranks, rules(ranks))),
        )
        for ranks in (64, 256, 1024)
    ]
    assert loads == sorted(loads, reverse=True)
    assert loads[-1] < 0.5 * max(loads_of(plan_of(shapes, 1024, None)))


# The iteration over parts
