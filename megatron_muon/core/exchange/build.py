"""Builds the exchange of a layout: its batches, its plan, and the check that all ranks have the same plan."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_muon.core.adaptive import SecondMoment
from megatron_muon.core.assignment import TeamRules
from megatron_muon.core.batch import BlockKind
from megatron_muon.core.cost import AUTO
from megatron_muon.core.errors import UserError
from megatron_muon.core.exchange.owner import OwnerExchange
from megatron_muon.core.exchange.repeated import AllGatherExchange, LocalExchange
from megatron_muon.core.exchange.shared import SharedExchange
from megatron_muon.core.exchange.steps import Batch, Exchange
from megatron_muon.core.layout import Layout
from megatron_muon.core.memory import Memory, MomentBytes, moment_bytes
from megatron_muon.core.orthogonalize import Orthogonalizer, kernel_operands
from megatron_muon.core.plan import DIGEST_LENGTH, Plan, make_plan
from megatron_muon.core.portions import Portion
from megatron_muon.core.ranks import connect, nodes_of, numbers_of_all_ranks
from megatron_muon.core.teams import TeamGroup, make_teams
from megatron_muon.core.tuning import tune

OWNER, ALL_GATHER, SHARED, LOCAL = "owner", "allgather", "shared", "local"


def make_exchange(
    scheme: str,
    layout: Layout,
    group: dist.ProcessGroup,
    orthogonalizer: Orthogonalizer,
    *,
    moment: SecondMoment | None,
    cautious: bool = False,
    buffer_mb: float | None,
    wire: str,
    device: torch.device,
    team_size: str = AUTO,
    plan: Plan | None = None,
) -> Exchange:
    """The exchange of `layout` by one of the schemes OWNER, ALL_GATHER, SHARED and LOCAL.

    Collective, but for LOCAL without the symmetric kernel.

    Args:
        scheme: the last two are for matrices that every rank holds whole.
        layout: who holds which rectangle; the same on every rank.
        group: the process group of the layout.
        orthogonalizer: of the matrices.
        moment: of an adaptive Muon.
        cautious: whether decay is.
        buffer_mb: MiB that a step may take on a rank; None is 256, or as much as the largest matrix needs.
        wire: "fp32", "bf16", or "auto" for the dtype in which the iteration starts.
        device: where the rows lie.
        team_size: with OWNER, how many ranks may own a matrix together: "auto", or a number for all matrices.
        plan: of OWNER and SHARED, where it has been made before; None makes it.

    Where these ranks cannot have the `team_size`, they use 1, and the exchange's `unmet` says so: other matrices may
    have it. The caller refuses what none has, by `refuse_unmet`.

    Raises:
        UserError: a team cannot have the second moment's norms; the buffer is too small.
        RuntimeError: ranks have made different plans.
    """
    teams: dict[tuple[int, ...], TeamGroup] = {}

    def batches(indices: Sequence[int], portions: Sequence[Portion] = ()) -> Batch:
        normalize = None if moment is None else moment.normalizer(indices)
        return orthogonalizer.batch([layout.matrices[i] for i in indices], normalize, portions, teams)

    buffer_bytes = None if buffer_mb is None else int(buffer_mb * 2**20)
    beside = moment_bytes(None if moment is None else moment.method, cautious=cautious)
    if scheme in (LOCAL, ALL_GATHER):
        _prepare_kernel(layout, group, orthogonalizer)
    if scheme == LOCAL:
        memory = Memory(torch.float32.itemsize, orthogonalizer.iteration, beside)
        return LocalExchange(layout, group, batches, memory=memory, buffer_bytes=buffer_bytes, device=device)
    if scheme == ALL_GATHER:
        return AllGatherExchange(layout, group, batches, device=device)
    asked = _team_rules(team_size, group, orthogonalizer, moment) if scheme == OWNER else None
    rules = None if asked is None else asked.possible()
    wire_dtype = {"auto": orthogonalizer.dtype, "bf16": torch.bfloat16, "fp32": torch.float32}[wire]
    plan = _plan(layout, group, orthogonalizer, buffer_bytes, wire_dtype, rules, plan, beside)
    connect([group], device)
    _prepare_kernel(layout, group, orthogonalizer, plan)
    if asked is None:
        return SharedExchange(plan, group, batches, wire_dtype=wire_dtype, device=device)
    # Now that all ranks have one plan, they agree on which groups it takes.
    teams.update(make_teams(group, plan.teams))
    connect([team.group for team in teams.values()], device)
    return OwnerExchange(
        plan,
        group,
        batches,
        wire_dtype=wire_dtype,
        device=device,
        teams=teams,
        unmet=asked.unmet(),
    )


def _team_rules(
    team_size: str, group: dist.ProcessGroup, orthogonalizer: Orthogonalizer, moment: SecondMoment | None
) -> TeamRules:
    """Which teams may own a matrix."""
    size = 0 if team_size == AUTO else int(team_size)
    if moment is not None and moment.normalizer(()) is not None:
        if size > 1:
            raise UserError(
                f"--muon-team-size {size}: NorMuon keeps the norm of a whole update, which no rank of a team has; use "
                "--muon-team-size 1, or --adaptive-muon-moment2-method adamuon"
            )
        size = 1
    return TeamRules(orthogonalizer.iteration.cost, nodes_of(group), size)


def _plan(
    layout: Layout,
    group: dist.ProcessGroup,
    orthogonalizer: Orthogonalizer,
    buffer_bytes: int | None,
    wire_dtype: torch.dtype,
    rules: TeamRules | None,
    made: Plan | None,
    beside: MomentBytes,
) -> Plan:
    """Owners and waves, the same on every rank."""
    costs = [orthogonalizer.flops(matrix) for matrix in layout.matrices]
    memory = Memory(wire_dtype.itemsize, orthogonalizer.iteration, beside)
    plan = made or make_plan(layout, costs, memory=memory, buffer_bytes=buffer_bytes, rules=rules)
    found = [f"{number:0{DIGEST_LENGTH}x}" for (number,) in numbers_of_all_ranks([int(plan.digest(), 16)], group)]
    for other, digest in enumerate(found):
        if digest != found[0]:
            raise RuntimeError(
                f"rank 0 of the group has plan {found[0]} and rank {other} has {digest}: they would wait for each "
                "other; start all ranks with the same settings, software and devices"
            )
    return plan


def _prepare_kernel(
    layout: Layout, group: dist.ProcessGroup, orthogonalizer: Orthogonalizer, plan: Plan | None = None
) -> None:
    """Tune the symmetric kernel for the blocks of all ranks, and compile it for this rank's.

    Without a plan every rank has all blocks. Collective where the kernel is used.
    """

    def kinds(ranks: Sequence[int]) -> list[BlockKind]:
        if plan is None:
            return orthogonalizer.kernel_kinds(layout.matrices)
        owned = [index for index, team in enumerate(plan.teams) if any(rank in ranks for rank in team.ranks)]
        return orthogonalizer.kernel_kinds(
            (layout.matrices[index] for index in owned if plan.teams[index].cuts is None),
            (one for index in owned if plan.teams[index].cuts for one in plan.portions(index) if one.rank in ranks),
        )

    if everyone := kinds(range(group.size())):
        tune(kernel_operands(everyone), group, orthogonalizer.device)
        orthogonalizer.warm_up(kinds([group.rank()]))
