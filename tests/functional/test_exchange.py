"""The owner exchange equals the all-gather exchange to the last bit, on layouts of any shape.

Layouts are drawn at random: uneven shards, empty ranks, more ranks than rows, one rank that holds
all, cuts along columns, replicas. Both start from the same rows in fp32; a second step and a slow
rank change nothing.
"""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_muon.core.assignment import TeamRules
from megatron_muon.core.build import GATHERED, OWNER, StepOptions, Waves, make_waves, sizes_of
from megatron_muon.core.cost import Iteration
from megatron_muon.core.engine import Engine
from megatron_muon.core.layout import Layout, RowSplit, whole
from megatron_muon.core.methods.newton_schulz import NewtonSchulz
from megatron_muon.core.plan import make_plan
from tests.support.cut_matrices import from_rectangles, row_sharded
from tests.support.pool import Pool
from tests.support.rows import ByMatrix
from tests.support.wide import wide_but

pytestmark = pytest.mark.usefixtures("delayed_too")

LAYOUTS = 20

Rectangle = tuple[int, int, int, int]


def rectangles(
    rows: int,
    cols: int,
    world_size: int,
    chance: random.Random,
) -> list[Rectangle]:
    """Who holds what: strips of columns cut into rows, in any order of ranks.

    Ranks that are left over hold nothing or the same as another.
    """
    strips = chance.randint(1, min(world_size, cols))
    bands = chance.randint(1, world_size // strips)
    cells = [
        (row_start, row_stop - row_start, col_start, col_stop - col_start)
        for col_start, col_stop in itertools.pairwise(
            [0, *sorted(chance.sample(range(1, cols), strips - 1)), cols]
        )
        for row_start, row_stop in itertools.pairwise(
            [
                0,
                *sorted(
                    chance.choices(range(rows + 1), k=bands - 1),
                ),
                rows,
            ]
        )
    ]
    choices = [*cells, (0, 0, 0, 0)]
    spare = [chance.choice(choices) for _ in range(world_size - len(cells))]
    held = [*cells, *spare]
    if chance.random() < 0.7:  # as Megatron-FSDP has them: ranks in the order of rows
        return held
    return chance.sample(held, len(held))


def make(
    layout: Layout,
    method: NewtonSchulz,
    *,
    waves: str = "large",
    team_size: int | None = None,
    by_pairs: bool,
) -> tuple[Waves, Waves]:
    """Waves of a layout that every rank gathers, and that go to owners."""
    world, options = dist.group.WORLD, StepOptions(torch.device("cpu"), wire="fp32")
    assert world is not None
    rules = None
    if team_size is not None:
        rules = TeamRules(method.cost, [0] * world.size(), team_size)
    costs = [method.flops(matrix) for matrix in layout.matrices]
    sizes = sizes_of(method, options.wire, (), processor=True)
    plan = replace(make_plan(layout, costs, sizes=sizes, rules=rules), by_pairs=by_pairs)
    if waves == "of one matrix":
        alone = [(index,) for wave in plan.waves for index in wave]
        plan = replace(plan, waves=tuple(alone) or ((),))
    return (
        make_waves(GATHERED, layout, world, method, options),
        make_waves(OWNER, layout, world, method, options, plan=plan),
    )


def updates(rank: int, layout: Layout, waves: Waves, *, slow: int = -1) -> dict[int, torch.Tensor]:
    """This rank's update rows by matrix; rank `slow` takes its time."""
    done: dict[int, torch.Tensor] = {}

    def rows(index: int) -> torch.Tensor:
        if rank == slow:
            time.sleep(0.01)
        full = torch.randn(
            layout.matrices[index].shape, generator=torch.Generator().manual_seed(index)
        )
        shard = layout.matrices[index].held_by(rank)
        assert shard.numel, "rows are asked for that this rank does not hold"
        return full.narrow(
            0,
            shard.row_start,
            shard.rows,
        ).narrow(1, shard.col_start, shard.cols)

    passes = ByMatrix(rows, done.__setitem__)
    Engine(waves, passes).step()
    assert sorted(passes.prepared) == sorted(done), "every matrix takes part once"
    assert not any(update.isnan().any() for update in done.values())
    assert set(done) == {
        i for i, matrix in enumerate(layout.matrices) if matrix.held_by(rank).numel
    }
    return done


def of_all_layouts(
    rank: int,
    world_size: int,
    *,
    ways: list[dict[str, Any]],
) -> list[int]:
    """In a worker: all-gather, owner, owner again and with a slow rank, on every layout; elements
    that differ, by way.

    Teams form sums in another order, so they agree to rounding; twice they are the same to the last
    bit.
    """
    different = [0] * len(ways)
    for seed in range(LAYOUTS):
        chance = random.Random(seed)
        matrices = []
        for number in range(chance.randint(1, 6)):
            split = (
                whole(chance.randint(1, 9))
                if chance.random() < 0.6
                else RowSplit(chance.randint(1, 3), (2, 1, 1))
            )
            shape = (split.rows, chance.randint(1, 9))
            matrices.append(
                from_rectangles(str(number), shape, rectangles(*shape, world_size, chance), split)
            )
        layout = Layout(world_size, tuple(matrices))
        for number, way in enumerate(ways):
            gathered, owner = make(layout, NewtonSchulz(Iteration(precision="highest")), **way)
            expected, first = updates(rank, layout, gathered), updates(rank, layout, owner)
            for again in (
                updates(rank, layout, owner),
                updates(rank, layout, owner, slow=world_size - 1),
            ):
                assert all(torch.equal(again[index], update) for index, update in first.items()), (
                    way,
                    seed,
                )
            for index, update in expected.items():
                assert not update.numel() or (first[index] - update).abs().max() < 2e-5, (
                    way,
                    seed,
                    index,
                )
                different[number] += int((first[index] != update).sum())
    return different


WAVES = ("of one matrix", "large")
WHOLE = [
    {"waves": waves, "team_size": 1 if by_pairs else None, "by_pairs": by_pairs}
    for waves, by_pairs in itertools.product(WAVES, (False, True))
]


@pytest.mark.parametrize("world_size", wide_but([3], (1, 2, 3, 4)))
def test_owner_equals_all_gather(ranks: Pool, world_size: int) -> None:
    """To the last bit, also where messages go to peers alone."""
    assert ranks(world_size, of_all_layouts, ways=WHOLE) == [[0] * len(WHOLE)] * world_size


@pytest.mark.parametrize(
    ("world_size", "team_size"),
    wide_but(
        [(3, 2)],
        [(2, 2), (3, 2), (4, 2), (4, 4)],
    ),
)
def test_teams_equal_all_gather(ranks: Pool, world_size: int, team_size: int) -> None:
    ways = [{"waves": waves, "team_size": team_size, "by_pairs": False} for waves in WAVES]
    found = ranks(world_size, of_all_layouts, ways=ways)
    assert all(sum(of_way) for of_way in zip(*found, strict=True)), "no matrix was cut"


def of_small_magnitude(rank: int, world_size: int, *, scale: float) -> list[torch.Tensor]:
    """In a worker: this rank's update of a tall matrix of which the second half is zero;
    all-gather, a team of two.
    """
    layout = Layout(world_size, (row_sharded("w", (64, 32), [32] * world_size),))
    rows = torch.randn(32, 32, generator=torch.Generator().manual_seed(1)) * (
        scale if rank == 0 else 0.0
    )
    found: list[torch.Tensor] = []
    for waves in make(
        layout, NewtonSchulz(Iteration(precision="highest")), team_size=world_size, by_pairs=False
    ):
        Engine(waves, ByMatrix(lambda _: rows, lambda _, update: found.append(update))).step()
    return found


@pytest.mark.parametrize("scale", [1.0, 1e-30])
def test_a_part_of_zeros_does_not_hide_a_small_one(ranks: Pool, scale: float) -> None:
    expected, found = ranks(2, of_small_magnitude, scale=scale)[0]
    assert expected.norm() > 1.0
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
