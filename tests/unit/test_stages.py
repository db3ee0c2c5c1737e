"""What travels in stages: by which ranks, when the planner takes them, and that ranks agree on them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_muon import cpu
from megatron_muon.core.assignment import TeamRules
from megatron_muon.core.errors import UserError
from megatron_muon.core.layout import Layout, row_sharded
from megatron_muon.core.memory import Memory
from megatron_muon.core.plan import Plan, make_plan
from megatron_muon.core.traffic import Path, Transfers, ranks_of_nodes
from megatron_muon.megatron.settings import MuonOptimizerConfig
from megatron_muon.planning.command import settings_of
from megatron_muon.planning.estimate import HARDWARE, Group, plan_kind
from megatron_muon.rehearsal.checks import Recorded, check
from megatron_muon.rehearsal.rank import Rehearsal, rehearse_rank

FAR = dataclasses.replace(HARDWARE["h100-sxm"], node_ranks=2)


def planned(ranks: int, node: int, *, stages: int = 0, side: int = 64, count: int = 4) -> Plan:
    held = [side // ranks + (rank < side % ranks) for rank in range(ranks)]
    layout = Layout(ranks, tuple(row_sharded(f"w{k}", (side, side), held) for k in range(count)))
    memory = Memory(2)
    rules = TeamRules(memory.iteration.cost, [rank // node for rank in range(ranks)], 1, stages)
    return make_plan(layout, [1.0] * count, memory=memory, rules=rules)


@given(st.data(), st.integers(2, 4), st.integers(2, 4), st.integers(1, 3), st.booleans())
def test_each_stage_stays_on_its_links(data: st.DataObject, nodes: int, each: int, stages: int, of_rows: bool) -> None:
    rank = st.integers(0, nodes * each - 1)
    pairs = data.draw(st.lists(st.tuples(rank, rank, st.integers(1, 9)), min_size=1))
    columns = (np.array(column, dtype=np.int64) for column in zip(*pairs, strict=True))
    whole = Transfers(*columns).between_ranks()
    path = Path(stages, each, of_rows)
    legs = path.legs(whole)
    assert len(legs) == stages
    for number, leg in enumerate(legs):
        if stages > 1 and number == path.between:
            assert (leg.sources % each == leg.targets % each).all()
        elif stages > 1:
            assert (leg.sources // each == leg.targets // each).all()
        assert np.array_equal(leg.sources, legs[number - 1].targets if number else whole.sources)
        assert np.array_equal(leg.elements, whole.elements)
    assert np.array_equal(legs[-1].targets, whole.targets)


def test_three_stages_use_one_link_for_two_nodes() -> None:
    nodes, each = 16, 4
    ranks = np.arange(nodes * each)
    every = Transfers(
        np.repeat(ranks, len(ranks)), np.tile(ranks, len(ranks)), np.ones(len(ranks) ** 2, dtype=np.int64)
    )
    _, between, _ = Path(3, each).legs(every)
    foreign = between.between_ranks()
    pairs = {(int(a), int(b)) for a, b in zip(foreign.sources, foreign.targets, strict=True)}
    assert len(pairs) == len({(a // each, b // each) for a, b in pairs}) == nodes * (nodes - 1)
    assert foreign.peers(len(ranks)).max() == nodes / each
    assert foreign.received(len(ranks)).max() == nodes * each


@pytest.mark.parametrize(
    ("nodes", "each"),
    [([0] * 8, 0), ([0, 0, 1, 1], 2), ([0, 0, 1], 0), ([0, 1, 2], 0), ([0, 1, 0, 1], 0), ([3, 3, 5, 5], 2), ([0], 0)],
)
def test_nodes_of_as_many_ranks_side_by_side(nodes: list[int], each: int) -> None:
    assert ranks_of_nodes(nodes) == each


def test_stages_are_taken_where_peers_are_many() -> None:
    far, near = planned(512, 8, side=512), planned(8, 8)
    assert far.path.stages > 1
    assert far.peers() <= 64
    assert planned(512, 8, side=512, stages=1).peers() == 511
    assert near.path.stages == 1
    assert planned(16, 8, side=8192, count=64).path.stages == 1  # bytes count, and few messages


@pytest.mark.parametrize("stages", [2, 3])
def test_stages_need_nodes(stages: int) -> None:
    with pytest.raises(UserError, match=f"--muon-exchange-stages {stages} needs two nodes or more"):
        planned(8, 8, stages=stages)


def test_owners_lie_where_their_rows_are() -> None:
    """Each matrix lies in one node, but for a row: nothing else goes between nodes."""
    held = [[15, 16, 16, 16, 1, 0, 0, 0], [1, 0, 0, 0, 15, 16, 16, 16]]
    layout = Layout(8, tuple(row_sharded(f"w{k}", (64, 64), held[k % 2]) for k in range(16)))
    memory = Memory(2)
    rules = TeamRules(memory.iteration.cost, [0] * 4 + [1] * 4, size=1)
    plan = make_plan(layout, [1.0] * 16, memory=memory, rules=rules)
    assert [owner // 4 for owner in plan.owners] == [0, 1] * 8
    assert plan.imbalance == 1.0


@pytest.mark.parametrize("stages", ["2", "3"])
@pytest.mark.parametrize("team_size", ["1", "2"])
def test_ranks_of_two_nodes_agree(team_size: str, stages: str) -> None:
    """On bytes, the order of collectives, and memory."""
    cpu.uninstall()
    held = [700, 524, 300, 12]
    group = Group("dense", Layout(4, tuple(row_sharded(f"w{k}", (1536, 512 + 256 * k), held) for k in range(6))))
    config = MuonOptimizerConfig(
        optimizer="muon", lr=0.01, muon_exchange_stages=stages, muon_exchange_buffer_mb=64.0, muon_team_size=team_size
    )
    traces = {rank: rehearse_rank(rank, Rehearsal(config, [group], 4, FAR)) for rank in range(4)}
    kind = plan_kind(group, settings_of(config, FAR), FAR, 4)
    assert check(Recorded(traces, [kind], 4)) == []
    (plan,) = kind.plans
    assert len(plan.plan.waves) > 1
    for rank, trace in traces.items():
        assert plan.extra[rank] == pytest.approx(trace.steps[-1].extra_bytes, rel=0.1)
    pairs = {members.ranks for trace in traces.values() for members in trace.groups}
    assert pairs >= {(0, 1), (2, 3), (0, 2), (1, 3)}
    assert plan.plan.peers() == 1
