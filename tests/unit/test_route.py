"""Routes of all ranks, carried out by hand in one process: rows make whole blocks, and updates come
back.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_muon.core.arena import Copies
from megatron_muon.core.assignment import TeamRules
from megatron_muon.core.cost import Iteration
from megatron_muon.core.layout import Layout, Matrix, RowSplit, from_rectangles
from megatron_muon.core.memory import Memory
from megatron_muon.core.plan import make_plan
from megatron_muon.core.route import ALL_TO_ALL, Route, make_route
from megatron_muon.core.slices import BlockSlice

RANKS = 4
WAYS = {"rows_by": ALL_TO_ALL, "updates_by": ALL_TO_ALL}


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Matrices of one or three blocks, cut by rows or columns, unevenly, with empty shards and
    replicas.
    """
    matrices = []
    for number in range(draw(st.integers(1, 4))):
        parts = draw(st.sampled_from([(1,), (2, 1, 1)]))
        split = RowSplit(draw(st.integers(1, 6)), parts)
        rows, cols = split.rows, draw(st.integers(1, 9))
        by_rows = draw(st.booleans())
        side = rows if by_rows else cols
        copies = draw(st.sampled_from([1, 2]))
        edges = [
            0,
            *sorted(draw(st.integers(0, side)) for _ in range(RANKS // copies - 1)),
            side,
        ]
        held = [
            (start, end - start, 0, cols) if by_rows else (0, rows, start, end - start)
            for start, end in itertools.pairwise(edges)
        ]
        matrices.append(from_rectangles(str(number), (rows, cols), held * copies, split))
    return Layout(RANKS, tuple(matrices))


def whole(number: int, matrix: Matrix) -> torch.Tensor:
    """A matrix of numbers that occur once."""
    return 1.0 + 1000 * number + torch.arange(matrix.numel, dtype=torch.float32).view(matrix.shape)


def slot_of(slot: BlockSlice, layout: Layout) -> torch.Tensor:
    """What a slot is to have, by the split's own views."""
    matrix = layout.matrices[slot.index]
    block = matrix.split.views(whole(slot.index, matrix))[slot.block or 0].reshape(slot.of)
    dim = 0 if slot.is_tall else 1
    before = [replace(slot, place=place).shape[dim] for place in range(slot.place)]
    return block.narrow(dim, sum(before), slot.shape[dim])


def exchanged(
    sent: list[torch.Tensor], counts: list[list[int]], received: list[list[int]]
) -> list[torch.Tensor]:
    """What each rank has after an all-to-all; `counts` are what each sends, `received` what each
    expects.
    """
    parts = [buffer.split(of_rank) for buffer, of_rank in zip(sent, counts, strict=True)]
    assert [list(of_rank) for of_rank in zip(*counts, strict=True)] == received
    return [torch.cat(arrived) for arrived in zip(*parts, strict=True)]


@settings(deadline=None)
@given(layouts(), st.sampled_from([1, 2]))
def test_rows_make_whole_blocks_and_updates_come_home(layout: Layout, team_size: int) -> None:
    rules = TeamRules(Iteration(precision="highest").cost, [0] * RANKS, team_size)
    plan = make_plan(
        layout, [float(matrix.numel) for matrix in layout.matrices], memory=Memory(4), rules=rules
    )
    for wave in plan.waves:
        routes = [
            make_route(layout, wave, plan.teams, rank, lambda shape: 1.0, number=0, **WAYS)
            for rank in range(RANKS)
        ]
        check_wave(layout, routes)


def check_wave(layout: Layout, routes: list[Route]) -> None:
    rows, sent, own = [], [], []
    for route in routes:
        flat = torch.full((route.numel,), torch.nan)
        for held in route.rows:
            shard = held.shard
            full = whole(held.of, layout.matrices[held.of]).narrow(0, shard.row_start, shard.rows)
            part = full.narrow(1, shard.col_start, shard.cols)
            flat[held.start : held.start + shard.numel] = part.reshape(-1)
        rows.append(flat)
        sent.append(torch.full((route.send.numel,), torch.nan))
        own.append(torch.full((route.own.numel,), torch.nan))
        Copies(route.send.copies, flat, sent[-1])()
        Copies(route.own.copies, flat, own[-1])()
    received = exchanged(
        sent, [route.send.counts for route in routes], [route.receive.counts for route in routes]
    )
    back, stacked = [], []
    for route, arrived, stayed in zip(routes, received, own, strict=True):
        stacks = torch.full((route.stacked,), torch.nan)
        Copies(route.receive.copies, arrived, stacks)()
        Copies(route.own_to_stacks, stayed, stacks)()
        for stack in route.stacks:
            blocks = stacks[stack.start : stack.start + stack.numel].view(stack.shape)
            for wide, slot in zip(blocks, stack.slots, strict=True):
                assert torch.equal(wide.mT if slot.is_tall else wide, slot_of(slot, layout))
        back.append(torch.full((route.back.numel,), torch.nan))
        Copies(route.back.copies, stacks, back[-1])()
        stacked.append(stacks)
    counts = [route.back.counts for route in routes], [route.returned.counts for route in routes]
    for route, arrived, stacks, before in zip(
        routes, exchanged(back, *counts), stacked, rows, strict=True
    ):
        returned = torch.cat(
            [arrived, torch.full((route.numel - len(arrived),), torch.nan)],
        )
        Copies(route.own_updates, stacks, returned)()
        own_updates = torch.full((route.numel,), torch.nan)
        Copies(route.returned.copies, returned, own_updates)()
        assert torch.equal(own_updates, before), "the update of rows is not theirs"


def test_a_copy_to_the_wrong_slot_would_be_seen() -> None:
    """Negative control: two equal blocks in each other's place."""
    held = [(2 * rank, 2, 0, 4) for rank in range(RANKS)]
    matrices = [from_rectangles(name, (8, 4), held) for name in "01"]
    layout = Layout(RANKS, tuple(matrices))
    plan = make_plan(layout, [1.0, 1.0], memory=Memory(4))
    teams = [plan.teams[0]] * 2
    routes = [
        make_route(layout, (0, 1), teams, rank, lambda shape: 1.0, number=0, **WAYS)
        for rank in range(RANKS)
    ]
    check_wave(layout, routes)
    owner = routes[teams[0].ranks[0]]
    stack = owner.stacks[0]
    owner.stacks[0] = stack._replace(slots=stack.slots[::-1])
    with pytest.raises(AssertionError):
        check_wave(layout, routes)
