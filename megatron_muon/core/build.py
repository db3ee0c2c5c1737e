"""Builds the exchange of a layout: its plan, the check that all ranks have the same one, and this rank's routes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from megatron_muon.core.assignment import TeamRules, Unmet
from megatron_muon.core.collectives import make_teams
from megatron_muon.core.cost import AUTO
from megatron_muon.core.exchange import GATHERED, LOCAL, OWNER, SHARED, Buffers, Exchange
from megatron_muon.core.layout import Layout, everywhere
from megatron_muon.core.memory import AUTO_BYTES, Memory, MomentBytes
from megatron_muon.core.orthogonalize import Orthogonalizer
from megatron_muon.core.plan import DIGEST_LENGTH, Plan, make_plan
from megatron_muon.core.ranks import connect, nodes_of, numbers_of_all_ranks
from megatron_muon.core.route import ALL_GATHER, ALL_TO_ALL, BROADCAST, Route, make_route
from megatron_muon.core.rules.rule import Rule
from megatron_muon.core.slices import Team
from megatron_muon.core.user_errors import SettingError


def make_exchange(
    scheme: str,
    layout: Layout,
    group: dist.ProcessGroup,
    orthogonalizer: Orthogonalizer,
    buffers: Buffers,
    *,
    buffer_mb: float | None,
    wire: str,
    team_size: str = AUTO,
    plan: Plan | None = None,
    rules: Sequence[Rule] = (),
    beside: MomentBytes = MomentBytes(),  # noqa: B008  # a tuple
) -> Exchange:
    """The exchange of `layout` by a scheme: OWNER, GATHERED, or, where ranks hold whole matrices, SHARED and LOCAL.

    Collective.

    Args:
        layout: who holds which rectangle; the same on every rank of `group`.
        buffer_mb: MiB that a step may take on a rank; None is 256, or as much as the largest matrix
            needs.
        wire: "fp32", "bf16", or "auto" for the dtype in which the iteration starts.
        team_size: with OWNER, how many ranks may own a matrix together: "auto", or a number for all
            matrices. Ranks that cannot have it use 1, and the exchange's `unmet` says so, for
            `refuse_unmet`.
        plan: of OWNER and SHARED, where it has been made before.

    Raises:
        UserError: a team cannot have the second moment's norms; the buffer is too small.
        RuntimeError: ranks have made different plans.
    """
    buffer_bytes = None if buffer_mb is None else int(buffer_mb * 2**20)
    if scheme in (LOCAL, GATHERED):
        _compile_kernel(layout, group, orthogonalizer)
        parts: Sequence[Sequence[int]] = ()
        if scheme == LOCAL:
            memory = Memory(torch.float32.itemsize, orthogonalizer.iteration, beside)
            memory.check(
                buffer_bytes,
                max((memory.whole([matrix]) for matrix in layout.matrices), default=0),
                layout,
            )
            parts = memory.parts(layout, range(len(layout.matrices)), buffer_bytes or AUTO_BYTES)
        return exchange_by(scheme, layout, group, orthogonalizer, buffers, rules, parts=parts)
    team_rules = _team_rules(team_size, group, orthogonalizer, rules) if scheme == OWNER else None
    wire_dtype = {"auto": orthogonalizer.dtype, "bf16": torch.bfloat16, "fp32": torch.float32}[wire]
    if plan is None:
        plan = make_plan(
            layout,
            [orthogonalizer.flops(matrix) for matrix in layout.matrices],
            memory=Memory(wire_dtype.itemsize, orthogonalizer.iteration, beside),
            buffer_bytes=buffer_bytes,
            rules=None if team_rules is None else team_rules.possible(),
        )
    _compare(plan, group)
    connect([group], buffers.device)
    _compile_kernel(layout, group, orthogonalizer, plan)
    return exchange_by(
        scheme,
        plan.layout,
        group,
        orthogonalizer,
        buffers,
        rules,
        wire_dtype=wire_dtype,
        plan=plan,
        unmet=None if team_rules is None else team_rules.unmet(),
    )


def _compare(plan: Plan, group: dist.ProcessGroup) -> None:
    """Raise a RuntimeError on every rank where ranks have different plans. Collective."""
    digests = [
        f"{number:0{DIGEST_LENGTH}x}"
        for (number,) in numbers_of_all_ranks([int(plan.digest(), 16)], group)
    ]
    for other, digest in enumerate(digests):
        if digest != digests[0]:
            raise RuntimeError(
                f"rank 0 of the group has plan {digests[0]} and rank {other} has {digest}: they"
                " would wait for each other; start all ranks with the same settings, software and"
                " devices"
            )


def exchange_by(
    scheme: str,
    layout: Layout,
    group: dist.ProcessGroup,
    orthogonalizer: Orthogonalizer,
    buffers: Buffers,
    rules: Sequence[Rule] = (),
    *,
    wire_dtype: torch.dtype = torch.float32,
    plan: Plan | None = None,
    unmet: Unmet | None = None,
    parts: Sequence[Sequence[int]] = (),
) -> Exchange:
    """The exchange by a scheme: what travels in which wave. Collective where there are teams.

    OWNER, by a plan: every matrix has an owner, or a team; rows travel there, and updates back.
    SHARED, by a plan: each matrix, which all ranks hold whole, has one owner, which broadcasts its
    update. The owner too applies the update as it travels, so that replicas stay the same to the
    last bit.
    LOCAL: every rank does all of the work on matrices that it holds whole, those of each of `parts`
    together.
    GATHERED: every rank gathers and orthogonalises all matrices, one after the other: the reference
    to compare with.
    """
    rank, count, teams = group.rank(), len(layout.matrices), None
    route = functools.partial(make_route, rank=rank, scale=orthogonalizer.scale)
    routes, local = list[Route](), list[Route]()
    if scheme == LOCAL:
        alone = Layout(
            1, tuple(replace(one, shards=everywhere(one.shape, 1)) for one in layout.matrices)
        )
        local = [
            route(
                alone,
                part,
                [Team((0,), (0.0,))] * count,
                rank=0,
            )
            for part in parts
        ]
    elif plan is None:
        owners = [Team((rank,), (0.0,))] * count
        routes = [
            route(layout, [index], owners, number=index, rows_by=ALL_GATHER)
            for index in range(count)
        ]
    elif scheme == SHARED:
        fillers = itertools.zip_longest(*map(plan.fillers, range(layout.world_size)), fillvalue=())
        waves = [*plan.waves, *(tuple(itertools.chain(*of_ranks)) for of_ranks in fillers)]
        routes = [
            route(layout, wave, plan.teams, number=k, updates_by=BROADCAST)
            for k, wave in enumerate(waves)
        ]
    else:
        teams = make_teams(group, plan.teams)
        connect([team.group for team in teams.values()], buffers.device)
        travel = functools.partial(
            route, layout, teams=plan.teams, rows_by=ALL_TO_ALL, updates_by=ALL_TO_ALL
        )
        routes = [travel(wave, number=number) for number, wave in enumerate(plan.waves)]
        local = [route(layout, indices, plan.teams) for indices in plan.fillers(rank)]
    return Exchange(
        scheme,
        layout,
        group,
        orthogonalizer,
        buffers,
        rules,
        routes=routes,
        local=local,
        wire_dtype=wire_dtype,
        plan=plan,
        teams=teams,
        unmet=unmet,
    )


def _team_rules(
    team_size: str, group: dist.ProcessGroup, orthogonalizer: Orthogonalizer, rules: Sequence[Rule]
) -> TeamRules:
    """Which teams may own a matrix."""
    size = 0 if team_size == AUTO else int(team_size)
    for rule in rules:
        if rule.normalize is not None:
            if size > 1:
                raise SettingError(
                    "muon_team_size",
                    size,
                    f"cannot be: {type(rule).__name__} works on whole matrices, which no rank of a"
                    " team has",
                    "use 1",
                )
            size = 1
    return TeamRules(orthogonalizer.iteration.cost, nodes_of(group), size)


def _compile_kernel(
    layout: Layout,
    group: dist.ProcessGroup,
    orthogonalizer: Orthogonalizer,
    plan: Plan | None = None,
) -> None:
    """Compile the symmetric kernel for the blocks that this rank orthogonalises."""
    rank = group.rank()
    teams = [Team((rank,), ())] * len(layout.matrices) if plan is None else plan.teams
    slots = [team.slots(index, layout.matrices[index]) for index, team in enumerate(teams)]
    orthogonalizer.warm_up(
        orthogonalizer.kernel_kinds([one for one in itertools.chain(*slots) if one.rank == rank])
    )
