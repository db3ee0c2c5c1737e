"""A rank's waves and its Muon in one process, without a process group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_muon.core import build
from megatron_muon.core.build import StepOptions, Waves
from megatron_muon.core.exchange import ToOwners
from megatron_muon.core.plan import Plan
from megatron_muon.core.rules.rule import Rule
from megatron_muon.core.teams import TeamGroup
from megatron_muon.fsdp.part import Part, view_parameters
from megatron_muon.matrices.views import Matrices, View
from megatron_muon.megatron.sharded_muon import ShardedMuon

CPU = torch.device("cpu")


@dataclass
class Group:
    """Size and rank of a process group."""

    ranks: int
    mine: int

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return self.mine


class _Teams(dict[tuple[int, ...], TeamGroup]):
    """A group for every team that is requested."""

    def __missing__(self, ranks: tuple[int, ...]) -> TeamGroup:
        group: Any = Group(len(ranks), 0)
        return TeamGroup(ranks, group)


def waves_of(
    plan: Plan,
    rank: int,
    kind: type[ToOwners] = ToOwners,
    **options: Any,
) -> Waves:
    """The waves of a rank of a plan, with `StepOptions`; building them needs no other rank."""
    carrier = kind(
        plan.layout,
        plan.teams,
        Group(plan.layout.world_size, rank),
        plan.sizes.method.kind,
        by_pairs=plan.by_pairs,
    )
    made = StepOptions(CPU, **options)
    return build._lay_out("", carrier, plan.waves, _Teams(), plan.sizes, made, plan)


def muon_of(
    waves: Waves,
    parameters: Sequence[torch.nn.Parameter],
    settings: dict[str, Any],
    *,
    rules: Sequence[Rule] = (),
    store: Any = None,
    **passing: Any,
) -> ShardedMuon:
    """The Muon of a rank's rows of each matrix; `passing` are arguments of `Passes`."""
    transport = waves.transport
    matrices = {}
    for p, matrix in zip(parameters, transport.layout.matrices, strict=True):
        matrices[p] = Matrices(name=matrix.name, view=View(matrix.shape))
    held = [shard.rectangle for shard in transport.layout.held(transport.rank)]
    viewed = view_parameters(matrices, held)
    part = Part(viewed, waves, rules, passing, store=store)
    return ShardedMuon([{"params": list(parameters)}], part, settings)
