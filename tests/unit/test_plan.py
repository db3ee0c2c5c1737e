"""Plans: one owner for each matrix, even loads, waves that carry everything once, and the memory
that a step takes.
"""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.rehearse.rank import Rehearsal, rehearse_rank
from megatron_muon import cpu
from megatron_muon.core.assignment import TeamRules
from megatron_muon.core.cost import Iteration
from megatron_muon.core.layout import Layout, Matrix, RowSplit, Shard, row_sharded
from megatron_muon.core.memory import Memory
from megatron_muon.core.plan import MIN_WAVES, Plan, make_plan
from megatron_muon.core.user_errors import UserError
from megatron_muon.megatron.muon_config import MuonOptimizerConfig
from megatron_muon.tools.plan.estimate import HARDWARE, Group, PlanSettings, extra_bytes, plan_group
from megatron_muon.tools.plan.plan_command import settings_of
from tests.support.buffers import smallest_bytes

STANDARD = Iteration(method="standard")


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Uneven and empty shards, empty ranks, more ranks than rows, one rank holding all."""
    world_size = draw(st.integers(1, 6))
    matrices = []
    for index in range(draw(st.integers(1, 12))):
        rows, cols = draw(st.integers(1, 12)), draw(st.integers(1, 9))
        cuts = sorted(
            draw(st.lists(st.integers(0, rows), min_size=world_size - 1, max_size=world_size - 1))
        )
        rows_per_rank = [bottom - top for top, bottom in pairwise([0, *cuts, rows])]
        matrices.append(row_sharded(f"w{index}", (rows, cols), rows_per_rank))
    return Layout(world_size, tuple(matrices))


def costs(layout: Layout) -> list[float]:
    return [float(STANDARD.flops(*matrix.shape)) for matrix in layout.matrices]


def planned(layout: Layout, buffer_bytes: int | None = None, element_bytes: int = 4) -> Plan:
    return make_plan(layout, costs(layout), buffer_bytes=buffer_bytes, memory=Memory(element_bytes))


def alike(ranks: int, count: int, shape: tuple[int, int], *rows: list[int]) -> Layout:
    """Matrices of one shape, cut in turns by these rows on each rank."""
    matrices = []
    for index in range(count):
        matrices.append(row_sharded(f"w{index}", shape, rows[index % len(rows)]))
    return Layout(ranks, tuple(matrices))


@given(layouts(), st.integers(0, 4000), st.sampled_from([2, 4]))
def test_every_matrix_has_an_owner_and_travels_once(
    layout: Layout, more: int, element_bytes: int
) -> None:
    buffer_bytes = smallest_bytes(lambda size: planned(layout, size, element_bytes)) + more
    plan = planned(layout, buffer_bytes, element_bytes)
    assert len(plan.owners) == len(layout.matrices)
    assert all(0 <= owner < layout.world_size for owner in plan.owners)
    travelling = [index for wave in plan.waves for index in wave]
    whole = [index for indices in plan.whole for index in indices]
    assert sorted(travelling + whole) == list(range(len(layout.matrices)))
    assert all(plan.waves)
    for rank, indices in enumerate(plan.whole):
        for index in indices:
            assert plan.owners[index] == rank
            assert [shard.rank for shard in layout.matrices[index].shards] == [rank]
    assert sum(plan.loads) == pytest.approx(sum(costs(layout)))
    assert plan == planned(layout, buffer_bytes, element_bytes)


@given(layouts(), st.integers(0, 60_000), st.sampled_from([2, 4]))
def test_a_step_takes_no_more_than_it_may(layout: Layout, more: int, element_bytes: int) -> None:
    smallest = smallest_bytes(lambda size: planned(layout, size, element_bytes))
    plan = planned(layout, smallest + more, element_bytes)
    assert plan.buffer_bytes == smallest + more
    assert int(extra_bytes(plan).max()) <= plan.buffer_bytes
    assert int(extra_bytes(planned(layout)).max()) <= planned(layout).buffer_bytes == 256 * 2**20
    if smallest > 2000:
        with pytest.raises(UserError, match="is too small"):
            planned(layout, smallest - 2000, element_bytes)


@given(layouts(), st.integers(0, 60_000), st.sampled_from([1, 2, 4]))
def test_what_the_error_names_is_enough_with_teams_too(
    layout: Layout, more: int, node: int
) -> None:
    memory = Memory(2)
    nodes = [rank // node for rank in range(layout.world_size)]

    def of(buffer_bytes: int, size: int = 0) -> Plan:
        rules = TeamRules(memory.iteration.cost, nodes, size)
        return make_plan(
            layout, costs(layout), buffer_bytes=buffer_bytes, memory=memory, rules=rules
        )

    smallest = smallest_bytes(of)
    plan = of(smallest + more)
    assert int(extra_bytes(plan).max()) <= smallest + more
    for size in TeamRules(memory.iteration.cost, nodes).sizes:
        assert smallest <= smallest_bytes(functools.partial(of, size=size))


@pytest.mark.parametrize("limit_mb", [None, 128])
def test_experts_that_leave_a_remainder_are_not_padded_to_all_ranks(limit_mb: int | None) -> None:
    """xtuner #2069: 512 ranks, EP 8, so 64 ranks to a group of experts, of which 64 k + 12 made a
    buffer of 72 GiB.

    Here Megatron-FSDP cuts a layer's 76 matrices into 64 equal pieces; a step takes its buffer and
    no more.
    """
    ranks, (rows, cols), count = 64, (2048, 1024), 64 + 12
    edges = [round(count * rows * rank / ranks) for rank in range(ranks + 1)]
    matrices = []
    for number in range(count):
        first, last = number * rows, (number + 1) * rows
        held = [max(min(b, last) - max(a, first), 0) for a, b in pairwise(edges)]
        matrices.append(row_sharded(f"expert{number}", (rows, cols), held))
    layout, memory = Layout(ranks, tuple(matrices)), Memory(2)
    buffer_bytes = None if limit_mb is None else limit_mb * 2**20
    rules = TeamRules(memory.iteration.cost, [rank // 8 for rank in range(ranks)])
    plan = make_plan(layout, costs(layout), buffer_bytes=buffer_bytes, memory=memory, rules=rules)
    assert int(extra_bytes(plan).max()) <= plan.buffer_bytes == (buffer_bytes or 256 * 2**20)
    assert plan.imbalance <= 2.0 * ranks / count  # two matrices at most


@given(layouts())
def test_an_estimated_step_takes_no_less_than_its_parts_and_no_more_than_all_of_them(
    layout: Layout,
) -> None:
    iteration = Iteration(method="standard", precision="highest")
    memory = Memory(4, iteration)
    made = plan_group(Group("layout", layout), PlanSettings(None, memory), HARDWARE["cpu-2core"])
    assert made.plan == make_plan(layout, costs(layout), memory=memory)
    times = made.times
    assert times.step_ms >= max(times.ns_ms, times.exchange_ms) * (1 - 1e-9)
    whole_step = times.exchange_ms + sum(costs(layout)) / 0.1e12 * 1e3
    assert times.step_ms <= whole_step * (1 + 1e-9)


@pytest.mark.parametrize("rows", [[6, 1, 1], [1, 6, 1], [1, 1, 6]])
def test_who_holds_most_owns(rows: list[int]) -> None:
    plan = make_plan(alike(3, 1, (8, 4), rows), [1.0], memory=Memory(4))
    assert plan.owners == (rows.index(6),)


def test_owners_lie_where_their_rows_are() -> None:
    """Each matrix lies in one node, but for a row: nothing else goes between nodes."""
    here, there = [15, 16, 16, 16, 1, 0, 0, 0], [1, 0, 0, 0, 15, 16, 16, 16]
    layout = alike(8, 16, (64, 64), here, there)
    memory = Memory(2)
    rules = TeamRules(memory.iteration.cost, [0] * 4 + [1] * 4, size=1)
    plan = make_plan(layout, [1.0] * 16, memory=memory, rules=rules)
    assert [owner // 4 for owner in plan.owners] == [0, 1] * 8
    assert plan.imbalance == 1.0


def test_even_holders_keep_what_is_theirs() -> None:
    """Whole matrices, as many on every rank: nothing travels."""
    matrices = tuple(Matrix(f"w{k}", (8, 8), (Shard(k % 4, 0, 8, 0, 8),)) for k in range(40))
    plan = make_plan(Layout(4, matrices), [1.0] * 40, memory=Memory(4))
    assert plan.waves == ()
    assert plan.exchanged_bytes() == (0, 0, 0, 0)
    assert plan.imbalance == 1.0


def test_whole_matrices_move_when_one_rank_holds_all() -> None:
    layout = alike(4, 40, (8, 8), [8, 0, 0, 0])
    plan = make_plan(layout, costs(layout), memory=Memory(4))
    assert plan.imbalance <= 1.05
    assert len(plan.whole[0]) == 10


def test_large_matrices_of_several_owners_travel_together() -> None:
    """One matrix a wave would leave all ranks but one idle."""
    layout = alike(4, 8, (64, 64), [16] * 4)
    plan = planned(layout, 400_000)
    assert [sorted(plan.owners[index] for index in wave) for wave in plan.waves] == [
        [0, 1, 2, 3]
    ] * 2


def test_many_matrices_make_several_waves() -> None:
    few, layout = (alike(2, count, (256, 256), [128, 128]) for count in (8, 48))
    # a collective takes longer than it overlaps
    assert len(make_plan(few, costs(few), memory=Memory(4)).waves) == 1
    plan = make_plan(layout, costs(layout), memory=Memory(4))
    assert len(plan.waves) >= MIN_WAVES
    for wave in plan.waves:
        assert {plan.owners[index] for index in wave} == {0, 1}


@settings(max_examples=20)
@given(st.integers(2, 8), st.integers(1, 4), st.sampled_from([64, 96, 256]), st.booleans())
def test_loads_are_even_where_matrices_are_many(
    ranks: int, kinds: int, hidden: int, whole: bool
) -> None:
    shapes = [(hidden * (kind + 1), hidden) for kind in range(kinds)]
    matrices = []
    for index in range(30 * ranks):
        shape = shapes[index % kinds]
        each = shape[0] // ranks
        rows = [each] * (ranks - 1) + [shape[0] - each * (ranks - 1)]
        if whole:
            rows = [shape[0] if rank == index // 7 % ranks else 0 for rank in range(ranks)]
        matrices.append(row_sharded(f"w{index}", shape, rows))
    layout = Layout(ranks, tuple(matrices))
    assert make_plan(layout, costs(layout), memory=Memory(2)).imbalance <= 1.05


def test_whole_matrices_are_cut_to_the_buffer() -> None:
    """A rank that owns all of a model would otherwise stack all of it at once."""
    layout = alike(1, 10, (8, 8), [8])
    few = make_plan(layout, [1.0] * 10, buffer_bytes=3 * 4 * 8 * 8 * 4, memory=Memory(4))
    parts = few.fillers(0)
    assert sorted(index for part in parts for index in part) == list(range(10))
    for part in parts:
        matrices = [layout.matrices[index] for index in part]
        assert few.memory.whole(matrices) <= few.buffer_bytes
    ample = make_plan(layout, [1.0] * 10, buffer_bytes=2**20, memory=Memory(4))
    assert ample.fillers(0) == (tuple(range(10)),)


@given(
    st.lists(st.sampled_from([(8, 8), (8, 16), (4, 64)]), max_size=30),
    st.integers(1, 40),
    st.integers(1, 40_000),
)
def test_whole_matrices_go_in_parts_of_equal_shapes(
    shapes: list[tuple[int, int]], at_least: int, limit: int
) -> None:
    matrices = [row_sharded(f"m{i}", shape, [shape[0]]) for i, shape in enumerate(shapes)]
    memory, layout = Memory(4), Layout(1, tuple(matrices))
    parts = memory.parts(layout, range(len(shapes)), limit, at_least)
    assert sorted(index for part in parts for index in part) == list(range(len(shapes)))
    for part in parts:
        assert len(part) == 1 or memory.whole([matrices[index] for index in part]) <= limit
    kinds = [len({shapes[index] for index in part}) for part in parts]
    assert sum(kinds) <= len(parts) + max(len(set(shapes)) - 1, 0)
    count = len(shapes)
    ample = memory.parts(alike(1, count, (8, 8), [8]), range(count), 2**40, at_least)
    sizes = [len(part) for part in ample]
    assert len(sizes) == min(at_least, count)
    assert max(sizes, default=0) <= min(sizes, default=0) + 1


HOLDERS = 3
KINDS = (
    ("qkv", (1536, 1024), [512, 1000, 24], RowSplit(4, (256, 64, 64))),
    ("proj", (1024, 1024), [0, 24, 1000], None),
    ("fc1", (4096, 1024), [1500, 1500, 1096], RowSplit(1, (2048, 2048))),
    ("fc2", (1024, 4096), [0, 1024, 0], None),
)
MODEL = Layout(
    HOLDERS,
    tuple(row_sharded(f"{k}.{name}", *kind) for k in range(4) for name, *kind in KINDS),
)
CAUTIOUS = {"muon_cautious_weight_decay": True, "weight_decay": 0.1}
ADAMUON, NORMUON = (
    {"optimizer": "adaptive_muon", "adaptive_muon_moment2_method": method}
    for method in ("adamuon", "normuon")
)
FP32, LARGE = {"muon_exchange_dtype": "fp32"}, {"muon_exchange_buffer_mb": 256.0}
OFTEN = [
    {},
    {"muon_team_size": "2"},
    ADAMUON,
    {"muon_hyperball": True, "weight_decay": 0.0},
    {**NORMUON, "muon_exchange_buffer_mb": 144.0},
]
SELDOM = [
    {**FP32, "muon_nesterov": False},
    {"muon_fp32_matmul_prec": "highest", "muon_ns": "gram"},
    {"muon_ns": "standard", "muon_exchange_buffer_mb": 1024.0},
    {**ADAMUON, "muon_team_size": "2"},
    {**NORMUON, **CAUTIOUS, "muon_exchange_buffer_mb": 144.0},
    {**CAUTIOUS, "muon_team_size": "2"},
    {**ADAMUON, **FP32, **LARGE},
]
OLDER = {"muon_ns": "gram", "muon_num_ns_steps": 2}


@pytest.mark.parametrize(
    ("settings", "hardware"),
    [
        *((settings, "h100-sxm") for settings in OFTEN),
        *(pytest.param(settings, "h100-sxm", marks=pytest.mark.wide) for settings in SELDOM),
        pytest.param(OLDER, "a100-sxm", marks=pytest.mark.wide),
    ],
)
def test_a_step_takes_what_its_plan_says(settings: dict[str, Any], hardware: str) -> None:
    cpu.uninstall()
    usual = {"optimizer": "muon", "lr": 0.01, "muon_exchange_buffer_mb": 112.0}
    config = MuonOptimizerConfig(**({**usual, "muon_nesterov": True} | settings))
    group, machine = Group("dense", MODEL), HARDWARE[hardware]
    planned = plan_group(group, settings_of(config, machine), machine)
    rehearsal = Rehearsal(config, [group], HOLDERS, machine)
    for rank in range(HOLDERS):
        taken = rehearse_rank(rank, rehearsal).steps[-1].extra_bytes
        assert taken <= planned.plan.buffer_bytes
        assert planned.extra[rank] == pytest.approx(taken, rel=0.1)
