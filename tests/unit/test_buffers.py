"""The table of buffers: bytes by arithmetic are those that ranks allocate, and no two buffers that
are in use at one time overlap.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
import torch

from megatron_muon.core import buffers
from megatron_muon.core.assignment import TeamRules
from megatron_muon.core.build import Waves
from megatron_muon.core.layout import Layout, Matrix, Rectangle, RowSplit, replicated_layout, whole
from megatron_muon.core.plan import Plan, make_plan
from megatron_muon.core.replicas import ToReplicas
from megatron_muon.core.wave import Wave
from tests.support.buffers import sizes_of, smallest_bytes
from tests.support.cut_matrices import from_rectangles
from tests.support.one_rank import waves_of

LAYOUTS = 16
RULES = {
    "plain": {},
    "with a spare chunk": {"spare": 1},
    "with whole updates": {"whole": 2},
    "with both": {"spare": 1, "whole": 2},
}


def held(
    rows: int,
    cols: int,
    ranks: int,
    chance: random.Random,
) -> list[Rectangle]:
    """Rows or columns of some ranks, uneven; others hold the same, or nothing."""
    holders = chance.randint(1, ranks)
    along_rows = chance.random() < 0.7
    length = rows if along_rows else cols
    cuts = sorted(chance.choices(range(length + 1), k=holders - 1))
    found: list[Rectangle] = []
    for first, end in itertools.pairwise([0, *cuts, length]):
        box = (first, end - first, 0, cols) if along_rows else (0, rows, first, end - first)
        found.append(box)
    nothing = (0, 0, 0, 0)
    found += [chance.choice([*found, nothing]) for _ in range(ranks - holders)]
    chance.shuffle(found)
    return found


def drawn(seed: int) -> tuple[Layout, random.Random]:
    """A layout: uneven and empty shards, replicas, fused rows, matrices whole on a rank."""
    chance = random.Random(seed)
    ranks = chance.randint(1, 6)
    matrices = []
    for number in range(chance.randint(1, 9)):
        rows, cols = 8 * chance.randint(1, 9), chance.randint(1, 40)
        split = chance.choice([whole(rows), RowSplit(1, (rows // 2, rows // 2))])
        boxes = held(rows, cols, ranks, chance)
        if chance.random() < 0.3:
            boxes = [(0, rows, 0, cols), *[(0, 0, 0, 0)] * (ranks - 1)]
            chance.shuffle(boxes)
        matrices.append(from_rectangles(f"w{number}", (rows, cols), boxes, split))
    return Layout(ranks, tuple(matrices)), chance


def planned(
    seed: int,
    rules: str,
    *,
    more: int | None = None,
) -> Plan:
    """The plan of a layout, in teams of one, two or any; `more` bytes than the least."""
    layout, chance = drawn(seed)
    sizes = sizes_of(chance.choice([2, 4]), **RULES[rules])
    size = 1 if sizes.whole else chance.choice([0, 1, 2])
    of_teams = TeamRules(sizes.method.cost, [0] * layout.world_size, size).possible()
    costs = [float(sizes.method.flops(matrix)) for matrix in layout.matrices]

    def make(buffer_bytes: int | None) -> Plan:
        return make_plan(layout, costs, buffer_bytes=buffer_bytes, sizes=sizes, rules=of_teams)

    return make(None if more is None else smallest_bytes(make) + more)


def allocated(plan: Plan) -> list[int]:
    """Bytes that each rank allocates."""
    return [waves_of(plan, rank).memory.nbytes for rank in range(plan.layout.world_size)]


def by_arithmetic(plan: Plan) -> list[int]:
    found: list[int] = plan.step_bytes.tolist()
    return found


@pytest.mark.parametrize("rules", RULES)
def test_a_plan_counts_what_ranks_allocate(rules: str) -> None:
    for seed in range(LAYOUTS):
        plan = planned(seed, rules)
        assert by_arithmetic(plan) == allocated(plan), seed


@pytest.mark.parametrize("more", [0, 3000, 60_000])
@pytest.mark.parametrize("rules", RULES)
def test_a_step_takes_no_more_than_it_may(rules: str, more: int) -> None:
    """In several waves."""
    for seed in range(LAYOUTS):
        plan = planned(seed, rules, more=more)
        assert by_arithmetic(plan) == allocated(plan), seed
        assert max(allocated(plan)) <= plan.buffer_bytes, seed


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_plan_counts_what_replicas_allocate(ranks: int) -> None:
    matrices = [Matrix(f"w{rows}", (rows, 24)) for rows in range(1, 40, 3)]
    layout, _ = replicated_layout(matrices, ranks)
    sizes = sizes_of(4, broadcast=True)
    costs = [float(matrix.numel) for matrix in matrices]
    plan = make_plan(layout, costs, buffer_bytes=2**18, sizes=sizes)
    found = [waves_of(plan, rank, ToReplicas).memory.nbytes for rank in range(ranks)]
    assert by_arithmetic(plan) == found


Span = tuple[int, int]


def spans(tensors: Iterable[torch.Tensor]) -> list[Span]:
    """First and last address of tensors that have elements."""
    found = []
    for each in tensors:
        if each.numel():
            found.append((each.data_ptr(), each.data_ptr() + each.nbytes))
    return found


def check_apart(*groups: Sequence[Span]) -> None:
    """No span overlaps another of any group."""
    every = sorted(itertools.chain(*groups))
    for (_, end), (start, _) in itertools.pairwise(every):
        assert end <= start


def regions(waves: Waves, k: int) -> list[Span]:
    """Both regions of a wave's lane; none before the first wave and after the last."""
    if not 0 <= k < len(waves.all):
        return []
    wave = waves.all[k]
    route = wave.route
    ends = wave.lane.split([route.owned_start, route.owned_numel])
    return spans(ends)


def stacks(wave: Wave) -> list[Span]:
    return spans(stack.blocks for stack in wave.stacks)


def work(wave: Wave) -> list[Span]:
    return spans(wave.work._buffers.values())


def chunks(wave: Wave) -> list[list[Span]]:
    """Buffers of each chunk."""
    found = []
    for chunk in wave.chunks:
        spare = [] if chunk.spare is None else [chunk.spare]
        found.append(spans([chunk.updates, *spare]))
    return found


def check_stages(waves: Waves) -> None:
    """Buffers that are in use while each wave, or batch, is worked on."""
    for k, wave in enumerate(waves.all):
        ahead, own, before = (regions(waves, k + step) for step in (1, 0, -1))
        check_apart(ahead, own, before, stacks(wave))
        check_apart(ahead, work(wave), before, stacks(wave))
        for chunk in chunks(wave):  # rows are prepared, or updates applied
            check_apart(ahead, own, before, chunk)
            check_apart(regions(waves, k + 2), own, ahead, chunk)
        for batch in wave.batches:
            check_apart(ahead, own, before, stacks(batch), work(batch))
            for chunk in chunks(batch):
                check_apart(ahead, own, before, stacks(batch), chunk)


@pytest.mark.parametrize("rules", RULES)
def test_buffers_that_are_in_use_at_one_time_do_not_overlap(rules: str) -> None:
    largest = 0
    for seed in range(LAYOUTS):
        plan = planned(seed, rules)
        waves = tuple((index,) for wave in plan.waves for index in wave)
        sizes = replace(plan.sizes, chunk_numel=100)
        plan = replace(plan, sizes=sizes, waves=waves or ((),))
        for rank in range(plan.layout.world_size):
            of_rank = waves_of(plan, rank)
            check_stages(of_rank)
            largest = max(largest, len(of_rank.all))
    assert largest > 3


def test_rows_that_are_prepared_on_a_stream_of_their_own_overlap_nothing() -> None:
    """Also where they are more than a chunk: they are prepared as one."""
    for seed in range(LAYOUTS):
        plan = planned(seed, "plain", more=3000)
        plan = replace(plan, sizes=replace(plan.sizes, chunk_numel=100))
        waves = waves_of(plan, 0, is_apart=True)
        check_stages(waves)
        plan = replace(plan, sizes=replace(plan.sizes, apart=True))
        assert by_arithmetic(plan)[0] == waves.memory.nbytes
        prepared = []
        for wave in waves.all:
            own = spans(chunk.prepared for chunk in wave.chunks)
            in_use = itertools.chain(stacks(wave), work(wave), *chunks(wave))
            for other in in_use:
                check_apart(own, [other])
            prepared.append(own)
        for one, other in itertools.pairwise(prepared):
            check_apart(one, other)


def test_an_overlap_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: one lane for all waves."""
    monkeypatch.setattr(buffers.Buffers, "lane_start", lambda self, wave: 0)
    plans = [planned(seed, "plain", more=3000) for seed in range(LAYOUTS)]
    (plan, *_) = [plan for plan in plans if len(plan.waves) > 3]
    with pytest.raises(AssertionError):
        check_stages(waves_of(plan, 0))
