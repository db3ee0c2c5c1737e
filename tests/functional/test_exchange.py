"""The owner exchange equals the all-gather exchange to the last bit, on layouts of any shape.

Layouts are drawn at random: uneven shards, empty ranks, more ranks than rows, one rank that holds all, cuts along
columns, replicas. Both start from the same rows in fp32; a second step and a slow rank change nothing.
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

from megatron_muon.core.probe import SILENT
from tests.support.pool import Pool
from tests.support.wide import wide_but

pytestmark = pytest.mark.usefixtures("delayed_too")

LAYOUTS = 20


Rectangle = tuple[int, int, int, int]


def rectangles(rows: int, cols: int, world_size: int, chance: random.Random) -> list[Rectangle]:
    """Who holds what: strips of columns cut into rows, in any order of ranks.

    Ranks that are left over hold nothing or the same as another.
    """
    strips = chance.randint(1, min(world_size, cols))
    bands = chance.randint(1, world_size // strips)
    cells = [
        (row_start, row_stop - row_start, col_start, col_stop - col_start)
        for col_start, col_stop in itertools.pairwise([0, *sorted(chance.sample(range(1, cols), strips - 1)), cols])
        for row_start, row_stop in itertools.pairwise([0, *sorted(chance.choices(range(rows + 1), k=bands - 1)), rows])
    ]
    spare = [chance.choice([*cells, (0, 0, 0, 0)]) for _ in range(world_size - len(cells))]
    held = [*cells, *spare]
    if chance.random() < 0.7:  # as Megatron-FSDP has them: ranks in the order of rows
        return held
    return chance.sample(held, len(held))


def updates(
    rank: int,
    world_size: int,
    *,
    seed: int,
    waves: str,
    team_size: int | None = None,
    by_pairs: bool = False,
) -> list[dict[int, torch.Tensor]]:
    """In a worker: this rank's update rows by matrix: all-gather, owner, owner again, owner with a slow rank."""
    from megatron_muon.core.assignment import TeamRules
    from megatron_muon.core.build import gathered_exchange, owner_exchange
    from megatron_muon.core.cost import Iteration
    from megatron_muon.core.exchange import Buffers
    from megatron_muon.core.layout import Layout, RowSplit, from_rectangles, whole
    from megatron_muon.core.memory import Memory
    from megatron_muon.core.orthogonalize import Orthogonalizer
    from megatron_muon.core.plan import make_plan
    from tests.support.rows import ByMatrix

    chance = random.Random(seed)
    matrices = []
    for number in range(chance.randint(1, 6)):
        split = whole(chance.randint(1, 9)) if chance.random() < 0.6 else RowSplit(chance.randint(1, 3), (2, 1, 1))
        shape = (split.rows, chance.randint(1, 9))
        matrices.append(from_rectangles(str(number), shape, rectangles(*shape, world_size, chance), split))
    layout = Layout(world_size, tuple(matrices))
    orthogonalizer = Orthogonalizer(Iteration(precision="highest"))
    costs = [orthogonalizer.flops(matrix) for matrix in matrices]
    group = dist.group.WORLD
    assert group is not None
    rules = None
    if team_size is not None:
        rules = TeamRules(orthogonalizer.iteration.cost, [0] * world_size, team_size)
    plan = make_plan(layout, costs, memory=Memory(4), rules=rules)
    plan = replace(plan, by_pairs=by_pairs)
    if waves == "of one matrix":
        plan = replace(plan, waves=tuple((index,) for wave in plan.waves for index in wave))

    def rows(index: int) -> torch.Tensor:
        full = torch.randn(matrices[index].shape, generator=torch.Generator().manual_seed(index))
        shard = matrices[index].shard_of(rank)
        assert shard is not None, "rows are asked for that this rank does not hold"
        down, across = (slice(start, start + n) for start, n in
                        ((shard.row_start, shard.rows), (shard.col_start, shard.cols)))  # fmt: skip
        return full[down, across]

    def run(exchange: Any, *, slow: int = -1) -> dict[int, torch.Tensor]:
        done: dict[int, torch.Tensor] = {}

        def slow_rows(index: int) -> torch.Tensor:
            if rank == slow:
                time.sleep(0.05)
            return rows(index)

        of_step = ByMatrix(slow_rows, done.__setitem__)
        exchange.run(of_step, SILENT)
        assert sorted(of_step.prepared) == sorted(done), "every matrix takes part once"
        assert not any(update.isnan().any() for update in done.values())
        return done

    device = torch.device("cpu")
    gathered = gathered_exchange(layout, group, orthogonalizer, Buffers(device))
    owner = owner_exchange(plan, group, orthogonalizer, Buffers(device), wire_dtype=torch.float32)
    results = [run(gathered), run(owner), run(owner), run(owner, slow=world_size - 1)]
    held = {index for index, matrix in enumerate(matrices) if matrix.shard_of(rank) is not None}
    assert all(set(result) == held for result in results)
    return results


def of_all_layouts(rank: int, world_size: int, **how: Any) -> list[list[dict[int, torch.Tensor]]]:
    """In a worker: `updates` of one layout after the other."""
    return [updates(rank, world_size, seed=seed, **how) for seed in range(LAYOUTS)]


WAVES = ("of one matrix", "large")


@pytest.mark.parametrize(
    ("world_size", "waves"), wide_but([(3, "of one matrix")], itertools.product((1, 2, 3, 4), WAVES))
)
def test_owner_equals_all_gather(ranks: Pool, world_size: int, waves: str) -> None:
    for layouts in ranks(world_size, of_all_layouts, waves=waves):
        for seed, (expected, *others) in enumerate(layouts):
            for found in others:
                for index, update in expected.items():
                    assert torch.equal(found[index], update), f"layout {seed}, matrix {index}"


@pytest.mark.parametrize("waves", wide_but(["large"], WAVES))
def test_messages_to_peers_alone_equal_all_gather(ranks: Pool, waves: str) -> None:
    """What arrives is the same, in the same places."""
    for layouts in ranks(4, of_all_layouts, waves=waves, team_size=1, by_pairs=True):
        for seed, (expected, *others) in enumerate(layouts):
            for found in others:
                for index, update in expected.items():
                    assert torch.equal(found[index], update), f"layout {seed}, matrix {index}"


@pytest.mark.parametrize(
    ("world_size", "team_size", "waves"),
    wide_but(
        [(3, 2, "large")],
        [(*ranks_and_team, waves) for ranks_and_team in [(2, 2), (3, 2), (4, 2), (4, 4)] for waves in WAVES],
    ),
)
def test_teams_equal_all_gather(ranks: Pool, world_size: int, team_size: int, waves: str) -> None:
    """To the rounding of sums formed in another order, and the same bits again and with a slow rank."""
    different = 0
    for layouts in ranks(world_size, of_all_layouts, waves=waves, team_size=team_size):
        for seed, (expected, first, *others) in enumerate(layouts):
            for index, update in expected.items():
                where = f"layout {seed}, matrix {index}"
                error = (first[index] - update).abs().max()
                assert error < 2e-5, f"{where}: {error}"
                different += not torch.equal(first[index], update)
                for again in others:
                    assert torch.equal(again[index], first[index]), where
    assert different, "no matrix was cut"


def of_small_magnitude(rank: int, world_size: int, *, scale: float) -> list[torch.Tensor]:
    """In a worker: this rank's update of a tall matrix of which the second half is zero; all-gather, a team of two."""
    from megatron_muon.core.assignment import TeamRules
    from megatron_muon.core.build import gathered_exchange, owner_exchange
    from megatron_muon.core.cost import Iteration
    from megatron_muon.core.exchange import Buffers
    from megatron_muon.core.layout import Layout, row_sharded
    from megatron_muon.core.memory import Memory
    from megatron_muon.core.orthogonalize import Orthogonalizer
    from megatron_muon.core.plan import make_plan
    from tests.support.rows import ByMatrix

    layout = Layout(world_size, (row_sharded("w", (64, 32), [32] * world_size),))
    orthogonalizer = Orthogonalizer(Iteration(precision="highest"))
    rules = TeamRules(orthogonalizer.iteration.cost, [0] * world_size, world_size)
    group = dist.group.WORLD
    plan = make_plan(layout, [1.0], memory=Memory(4), rules=rules)
    rows = torch.randn(32, 32, generator=torch.Generator().manual_seed(1)) * (scale if rank == 0 else 0.0)

    def run(exchange: Any) -> torch.Tensor:
        found: list[torch.Tensor] = []
        exchange.run(ByMatrix(lambda _: rows, lambda _, update: found.append(update)), SILENT)
        return found[0]

    device = torch.device("cpu")
    owner = owner_exchange(plan, group, orthogonalizer, Buffers(device), wire_dtype=torch.float32)
    return [run(gathered_exchange(layout, group, orthogonalizer, Buffers(device))), run(owner)]


@pytest.mark.parametrize("scale", [1.0, 1e-30])
def test_a_part_of_zeros_does_not_hide_a_small_one(ranks: Pool, scale: float) -> None:
    expected, found = ranks(2, of_small_magnitude, scale=scale)[0]
    assert expected.norm() > 1.0
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
