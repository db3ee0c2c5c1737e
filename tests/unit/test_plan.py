"""Plans: one owner for each matrix, even loads, waves that carry everything once, and the memory
that a step takes.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.rehearse.rank import Rehearsal, rehearse_rank
from megatron_muon import cpu
from megatron_muon.core.assignment import TeamRules
from megatron_muon.core.buffers import AUTO_BYTES
from megatron_muon.core.cost import TOGETHER, Iteration
from megatron_muon.core.layout import Layout, RowSplit
from megatron_muon.core.packing import MIN_WAVES
from megatron_muon.core.plan import Plan, make_plan
from megatron_muon.errors import UserError
from megatron_muon.megatron.muon_config import MuonOptimizerConfig
from megatron_muon.megatron.plan_figures import all_to_alls, imbalance, loads_of, received_bytes
from megatron_muon.tools.plan.estimate import HARDWARE, Group, PlanSettings, plan_group
from megatron_muon.tools.plan.plan_command import settings_of
from tests.support.buffers import sizes_of, smallest_bytes
from tests.support.cut_matrices import row_sharded
from tests.support.owners import owners_of

STANDARD = Iteration(method="standard")


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Uneven and empty shards, empty ranks, more ranks than rows, one rank holding all."""
    world_size = draw(st.integers(1, 6))
    matrices = []
    count = draw(st.integers(1, 12))
    inner = world_size - 1
    for index in range(count):
        rows = draw(st.integers(1, 12))
        cols = draw(st.integers(1, 9))
        cuts = draw(st.lists(st.integers(0, rows), min_size=inner, max_size=inner))
        cuts.sort()
        rows_per_rank = [bottom - top for top, bottom in pairwise([0, *cuts, rows])]
        matrices.append(row_sharded(f"w{index}", (rows, cols), rows_per_rank))
    return Layout(world_size, tuple(matrices))


def costs(layout: Layout) -> list[float]:
    return [float(STANDARD.cost(*matrix.shape)) for matrix in layout.matrices]


def planned(layout: Layout, buffer_bytes: int | None = None, element_bytes: int = 4) -> Plan:
    sizes = sizes_of(element_bytes)
    return make_plan(layout, costs(layout), buffer_bytes=buffer_bytes, sizes=sizes)


def most_bytes(plan: Plan) -> int:
    """Bytes of the buffers on the rank that has most."""
    return int(plan.step_bytes.max())


def alike(
    ranks: int,
    count: int,
    shape: tuple[int, int],
    *rows: list[int],
) -> Layout:
    """Matrices of one shape, cut in turns by these rows on each rank."""
    matrices = []
    for index in range(count):
        matrices.append(row_sharded(f"w{index}", shape, rows[index % len(rows)]))
    return Layout(ranks, tuple(matrices))


@given(
    layouts(),
    st.integers(0, 4000),
    st.sampled_from([2, 4]),
)
def test_every_matrix_has_an_owner_and_one_wave(
    layout: Layout, more: int, element_bytes: int
) -> None:
    smallest = smallest_bytes(lambda size: planned(layout, size, element_bytes))
    plan = planned(layout, smallest + more, element_bytes)
    assert len(owners_of(plan)) == len(layout.matrices)
    assert all(0 <= owner < layout.world_size for owner in owners_of(plan))
    travelling = list(itertools.chain(*plan.waves))
    batches = [list(itertools.chain(*of_rank)) for of_rank in plan.batches]
    every = list(range(len(layout.matrices)))
    assert sorted(itertools.chain(travelling, *batches)) == every
    for rank, indices in enumerate(batches):
        for index in indices:
            assert owners_of(plan)[index] == rank
            assert [shard.rank for shard in layout.matrices[index].shards] == [rank]
    assert sum(loads_of(plan)) == pytest.approx(sum(costs(layout)))
    assert plan == planned(layout, smallest + more, element_bytes)


@given(
    layouts(),
    st.integers(0, 60_000),
    st.sampled_from([2, 4]),
)
def test_a_step_takes_no_more_than_it_may(layout: Layout, more: int, element_bytes: int) -> None:
    smallest = smallest_bytes(lambda size: planned(layout, size, element_bytes))
    plan = planned(layout, smallest + more, element_bytes)
    assert plan.buffer_bytes == smallest + more
    assert most_bytes(plan) <= plan.buffer_bytes
    by_default = planned(layout)
    assert by_default.buffer_bytes == AUTO_BYTES
    assert most_bytes(by_default) <= by_default.buffer_bytes
    gaps = 6000  # of three lanes and a scratch: fewer waves may leave some out
    if smallest > gaps:
        with pytest.raises(UserError, match="is too small"):
            planned(layout, smallest - gaps, element_bytes)


@given(
    layouts(),
    st.integers(0, 60_000),
    st.sampled_from([1, 2, 4]),
)
def test_what_the_error_names_is_enough_with_teams_too(
    layout: Layout, more: int, node: int
) -> None:
    sizes = sizes_of(2)
    nodes = [rank // node for rank in range(layout.world_size)]

    def of(buffer_bytes: int, size: int = 0) -> Plan:
        rules = TeamRules(sizes.method.cost, nodes, size)
        return make_plan(layout, costs(layout), buffer_bytes=buffer_bytes, sizes=sizes, rules=rules)

    smallest = smallest_bytes(of)
    plan = of(smallest + more)
    assert most_bytes(plan) <= smallest + more
    for size in TeamRules(sizes.method.cost, nodes).sizes:
        assert smallest <= smallest_bytes(functools.partial(of, size=size))


@pytest.mark.parametrize("limit_mb", [None, 128])
def test_experts_that_leave_a_remainder_are_not_padded_to_all_ranks(limit_mb: int | None) -> None:
    """xtuner #2069: 512 ranks, EP 8, so 64 ranks to a group of experts, of which 64 k + 12 made a
    buffer of 72 GiB.

    Here Megatron-FSDP cuts a layer's 76 matrices into 64 equal pieces; a step takes its buffer and
    no more.
    """
    ranks = 64
    count = 64 + 12
    rows = 2048
    edges = [round(count * rows * rank / ranks) for rank in range(ranks + 1)]
    matrices = []
    for number in range(count):
        first = number * rows
        last = first + rows
        inside = [min(max(edge, first), last) for edge in edges]
        held = [bottom - top for top, bottom in pairwise(inside)]
        matrices.append(row_sharded(f"expert{number}", (rows, 1024), held))
    layout = Layout(ranks, tuple(matrices))
    sizes = sizes_of(2)
    buffer_bytes = None if limit_mb is None else limit_mb * 2**20
    rules = TeamRules(sizes.method.cost, [rank // 8 for rank in range(ranks)])
    plan = make_plan(layout, costs(layout), buffer_bytes=buffer_bytes, sizes=sizes, rules=rules)
    assert plan.buffer_bytes == (buffer_bytes or AUTO_BYTES)
    assert most_bytes(plan) <= plan.buffer_bytes
    assert imbalance(plan) <= 2.0 * ranks / count  # two matrices at most


@given(layouts())
def test_an_estimated_step_takes_no_less_than_its_parts_and_no_more_than_all_of_them(
    layout: Layout,
) -> None:
    iteration = Iteration(method="standard", precision="highest")
    sizes = sizes_of(4, iteration)
    made = plan_group(Group("layout", layout), PlanSettings(None, sizes), HARDWARE["cpu-2core"])
    assert made.plan == make_plan(layout, costs(layout), sizes=sizes)
    times = made.times
    assert times.step_ms >= max(times.ns_ms, times.exchange_ms) * (1 - 1e-9)
    whole_step = times.exchange_ms + sum(costs(layout)) / 0.1e12 * 1e3
    assert times.step_ms <= whole_step * (1 + 1e-9)


@pytest.mark.parametrize(
    "rows",
    [[6, 1, 1], [1, 6, 1], [1, 1, 6]],
)
def test_who_holds_most_owns(rows: list[int]) -> None:
    plan = planned(alike(3, 1, (8, 4), rows))
    assert owners_of(plan) == (rows.index(6),)


def test_owners_lie_where_their_rows_are() -> None:
    """Each matrix lies in one node, but for a row: nothing else goes between nodes."""
    here = [15, 16, 16, 16, 1, 0, 0, 0]
    there = [1, 0, 0, 0, 15, 16, 16, 16]
    layout = alike(8, 16, (64, 64), here, there)
    sizes = sizes_of(2)
    rules = TeamRules(sizes.method.cost, [0] * 4 + [1] * 4, size=1)
    plan = make_plan(layout, [1.0] * 16, sizes=sizes, rules=rules)
    assert [owner // 4 for owner in owners_of(plan)] == [0, 1] * 8
    assert imbalance(plan) == 1.0


def test_even_holders_keep_what_is_theirs() -> None:
    """Whole matrices, as many on every rank: nothing travels."""
    each = [[0] * 4 for _ in range(4)]
    for rank in range(4):
        each[rank][rank] = 8
    layout = alike(4, 40, (8, 8), *each)
    plan = planned(layout)
    assert not any(plan.waves)
    assert received_bytes(plan, all_to_alls(plan)) == (0, 0, 0, 0)
    assert imbalance(plan) == 1.0


def test_whole_matrices_move_when_one_rank_holds_all() -> None:
    plan = planned(
        alike(4, 40, (8, 8), [8, 0, 0, 0]),
    )
    assert imbalance(plan) <= 1.05
    assert sum(map(len, plan.batches[0])) == owners_of(plan).count(0) == 10


def test_large_matrices_of_several_owners_travel_together() -> None:
    """One matrix a wave would leave all ranks but one idle."""
    plan = planned(alike(4, 8, (64, 64), [16] * 4), 200_000)
    assert len(plan.waves) == 2
    for wave in plan.waves:
        assert sorted(owners_of(plan)[index] for index in wave) == [0, 1, 2, 3]


def test_rows_of_a_wave_lie_on_all_ranks() -> None:
    """Layers of a model, each flat over the ranks: matrices of one shape lie on the same ranks."""
    layer = {
        (128, 64): [88, 40, 0, 0, 0, 0, 0, 0],
        (64, 64): [0, 48, 16, 0, 0, 0, 0, 0],
        (256, 64): [0, 0, 72, 88, 88, 8, 0, 0],
        (255, 64): [0, 0, 0, 0, 0, 80, 88, 87],
    }
    matrices = []
    for number in range(32):
        for shape, rows in layer.items():
            matrices.append(row_sharded(f"layer{number}.{shape}", shape, rows))
    layout = Layout(8, tuple(matrices))
    plan = planned(layout, 800_000)
    assert len(plan.waves) > 7
    sent = np.zeros((len(plan.waves), 8))
    for number, wave in enumerate(plan.waves):
        for index in wave:
            shards = layout.matrices[index].shards
            sent[number, shards.ranks] += shards.elements[shards.numbers]
    assert sent.max(axis=1).sum() < 1.35 * sent.sum(axis=0).max()


@pytest.mark.parametrize("shape", [(512, 512), (384, 512), (512, 640), (640, 768)])
def test_batches_iterate_full_stacks(shape: tuple[int, int]) -> None:
    """Batches of six would iterate four matrices of 512 x 512, then two."""
    together = TOGETHER["cpu"] // math.prod(shape)
    layout = alike(2, 12 * together, shape, [shape[0], 0], [0, shape[0]])
    for buffer_mb in range(16, 96, 4):
        counts = [len(batch) for batch in planned(layout, buffer_mb << 20).batches[0]]
        assert sum(counts) == 6 * together
        assert sum(-(-count // together) for count in counts) == max(len(counts), 6)


def test_batches_of_a_method_that_takes_all_together_have_even_work() -> None:
    """Small matrices, and a few large ones beside several waves."""
    shards = [[16, 16]] * 96 + [[64, 0]] * 30 + [[2048, 0]] * 6
    shapes = [(32, 512)] * 96 + [(64, 64)] * 30 + [(2048, 2048)] * 6
    matrices = []
    for number, (rows, shape) in enumerate(zip(shards, shapes, strict=True)):
        matrices.append(row_sharded(f"w{number}", shape, rows))
    sizes = sizes_of(2)
    method = replace(sizes.method)
    method.together = lambda kind: sys.maxsize  # type: ignore[method-assign]
    # the large ones stay on the rank that holds them
    plan = make_plan(
        Layout(2, tuple(matrices)),
        [1e6] * 96 + [1.0] * 36,
        buffer_bytes=96 << 20,
        sizes=replace(sizes, method=method),
    )
    elements = [sum(matrices[index].numel for index in batch) for batch in plan.batches[0]]
    assert len(elements) > 1
    assert max(elements) <= 2 * sum(elements) / len(elements)


def test_owners_have_even_work_in_each_wave() -> None:
    """Layers of a GPT under FSDP2: each matrix lies evenly on all ranks."""
    matrices = []
    for number in range(8):
        for shape in ((1536, 512), (512, 512), (2048, 512), (512, 2048)):
            name = f"layer{number}.{shape}"
            matrices.append(row_sharded(name, shape, [shape[0] // 2] * 2))
    plan = planned(Layout(2, tuple(matrices)), element_bytes=2)
    assert len(plan.waves) > 4
    slowest = 0.0
    total = np.zeros(2)
    for wave in plan.waves:
        work = np.zeros(2)
        for index in wave:
            work[list(plan.teams[index].ranks)] += plan.teams[index].loads
        slowest += work.max()
        total += work
    assert slowest < 1.05 * total.max()


def test_many_matrices_make_several_waves() -> None:
    few = planned(alike(2, 8, (256, 256), [128, 128]))
    assert len(few.waves) == 1  # a collective takes longer than it overlaps
    plan = planned(alike(2, 48, (256, 256), [128, 128]))
    assert len(plan.waves) >= MIN_WAVES
    for wave in plan.waves:
        assert {owners_of(plan)[index] for index in wave} == {0, 1}


HOLDERS = 3
LAYERS = []
QKV, GATED = RowSplit(4, (256, 64, 64)), RowSplit(1, (2048, 2048))
for number in range(4):
    name = f"layer{number}."
    LAYERS += [
        row_sharded(name + "qkv", (1536, 1024), [512, 1000, 24], QKV),
        row_sharded(name + "proj", (1024, 1024), [0, 24, 1000]),
        row_sharded(name + "fc1", (4096, 1024), [1500, 1500, 1096], GATED),
        row_sharded(name + "fc2", (1024, 4096), [0, 1024, 0]),
    ]
MODEL = Layout(HOLDERS, tuple(LAYERS))
CAUTIOUS = {"muon_cautious_weight_decay": True, "weight_decay": 0.1}
ADAMUON = {"optimizer": "adaptive_muon"}
NORMUON = {
    "optimizer": "adaptive_muon",
    "adaptive_muon_moment2_method": "normuon",
    "muon_exchange_buffer_mb": 144.0,
}
OFTEN = [
    {},
    {"muon_team_size": "2"},
    ADAMUON,
    {"muon_hyperball": True, "weight_decay": 0.0},
    NORMUON,
]
SELDOM = [
    {"muon_fp32_matmul_prec": "highest", "muon_ns": "gram"},
    {**NORMUON, **CAUTIOUS},
    {**ADAMUON, "muon_exchange_dtype": "fp32", "muon_exchange_buffer_mb": 256.0},
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
    usual = {
        "optimizer": "muon",
        "lr": 0.01,
        "muon_exchange_buffer_mb": 112.0,
        "muon_nesterov": True,
    }
    config = MuonOptimizerConfig(**(usual | settings))
    group = Group("dense", MODEL)
    machine = HARDWARE[hardware]
    planned = plan_group(group, settings_of(config, machine), machine)
    rehearsal = Rehearsal(config, [group], HOLDERS, machine)
    for rank in range(HOLDERS):
        taken = rehearse_rank(rank, rehearsal).steps[-1].extra_bytes
        assert taken <= planned.plan.buffer_bytes
        assert planned.plan.step_bytes[rank] == pytest.approx(taken, rel=0.1)
