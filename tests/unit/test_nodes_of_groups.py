"""Groups whose ranks are not neighbours are planned and rehearsed by the nodes in which their ranks lie."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from megatron_muon import cpu
from megatron_muon.core.layout import Layout, row_sharded
from megatron_muon.megatron.settings import MuonOptimizerConfig
from megatron_muon.tools.plan.command import settings_of
from megatron_muon.tools.plan.estimate import HARDWARE, Group, Hardware, KindPlan, plan_kind
from megatron_muon.tools.rehearse.checks import Recorded, check
from megatron_muon.tools.rehearse.rank import Rehearsal, rehearse_rank

H100 = HARDWARE["h100-sxm"]


def experts(matrices: int, *, stride: int, together: int = 1) -> Group:
    layout = Layout(4, tuple(row_sharded(f"e{k}", (256, 128), [64] * 4) for k in range(matrices)))
    return Group("experts", layout, stride=stride, together=together)


def rehearsed(
    group: Group, world_size: int, hardware: Hardware, ranks: Sequence[int]
) -> tuple[KindPlan, Rehearsal, Recorded]:
    """In teams of two: the plan, what is rehearsed, and the record of `ranks`."""
    cpu.uninstall()
    config = MuonOptimizerConfig(optimizer="muon", lr=0.01, weight_decay=0.1, muon_team_size="2")
    kind = plan_kind(group, settings_of(config, hardware), hardware, world_size)
    of = Rehearsal(config, [group], world_size, hardware)
    return kind, of, Recorded({rank: rehearse_rank(rank, of) for rank in ranks}, [kind], world_size)


def test_groups_that_lie_in_nodes_differently_have_plans_of_their_own() -> None:
    """Expert groups (0, 3, 6, 9), (1, 4, 7, 10) and (2, 5, 8, 11) in nodes of 4: rank 0's plan was handed to all."""
    nodes_of_4 = dataclasses.replace(H100, node_ranks=4)
    kind, of, record = rehearsed(experts(2, stride=3), 12, nodes_of_4, range(12))
    assert [kind.of(rank).plan.teams[0].ranks for rank in range(3)] == [(0, 1), (1, 2), (2, 3)]
    assert check(record) == []
    assert len(of.plans) == len(kind.plans) == 3
    plans = {rank: record.traces[rank].plans for rank in range(12)}
    assert plans[1] == plans[4] != plans[0]


def test_a_group_over_tensor_parallel_ranks_lies_in_the_nodes_of_its_ranks() -> None:
    """Ranks 0, 1, 16 and 17 are in two nodes; the plan took each of them for a node of its own."""
    group = experts(6, stride=8, together=2)
    assert group.members(0, 32) == [0, 1, 16, 17]
    kind, _, record = rehearsed(group, 32, H100, [0, 1, 16, 17])
    assert {team.ranks for team in kind.worst.plan.teams} == {(0, 1), (2, 3)}
    assert check(record) == []
