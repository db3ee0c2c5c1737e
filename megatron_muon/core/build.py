"""Builds the waves of a step on this rank: plan, routes, buffers and what carries them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_muon.core.assignment import TeamRules
from megatron_muon.core.buffers import CHUNK, Buffers, Sizes, StepMemory
from megatron_muon.core.cost import AUTO
from megatron_muon.core.exchange import ToOwners
from megatron_muon.core.gathered import ToEveryRank
from megatron_muon.core.layout import Layout, replicated_layout
from megatron_muon.core.methods.method import Method
from megatron_muon.core.plan import DIGEST_LENGTH, Plan, make_plan
from megatron_muon.core.replicas import ToReplicas
from megatron_muon.core.route import Route
from megatron_muon.core.rules.rule import Rule
from megatron_muon.core.slices import Team
from megatron_muon.core.teams import Agreement, Teams, make_teams
from megatron_muon.core.wave import Chunk, Space, Wave, route_bytes
from megatron_muon.core.whole import whole_updates
from megatron_muon.errors import SettingError
from megatron_muon.ranks import Alone, connect, nodes_of, numbers_of_all_ranks

OWNER, SHARED, LOCAL, GATHERED = "owner", "shared", "local", "allgather"
"""Schemes: every matrix has an owner, or a team; replicas share the work; every rank has whole
matrices and does all of the work; or does so after gathering them, the reference."""


@dataclass(frozen=True)
class StepOptions:
    """Settings of a step's waves.

    Attributes:
        device: where momentum and stacks are.
        wire: "fp32", "bf16", or "auto" for the dtype of the method.
        buffer_mb: MiB that a step may take on a rank; None is 248, or as much as the largest
            matrix needs.
        team_size: ranks that may own a matrix together: "auto", or a number for all matrices.
        shared: memory of another step, which runs at another time.
        is_freed: give buffers back between steps.
        is_apart: rows are prepared on a stream of their own.
    """

    device: torch.device
    wire: str = AUTO
    buffer_mb: float | None = None
    team_size: str = AUTO
    shared: Tensor | None = None
    is_freed: bool = False
    is_apart: bool = False


@dataclass(frozen=True)
class Waves:
    """The waves of a step on this rank, in their order.

    Attributes:
        scheme: OWNER, SHARED, LOCAL or GATHERED.
        plan: owners and waves, where ranks have made one together.
        unmet: a setting that these ranks cannot have.
    """

    scheme: str
    all: Sequence[Wave]
    transport: ToOwners
    method: Method
    memory: StepMemory
    plan: Plan | None = None
    unmet: SettingError | None = None

    @property
    def chunks(self) -> list[Chunk]:
        """The rows of all waves."""
        chunks = []
        for wave in self.all:
            for each in (wave, *wave.batches):
                chunks += each.chunks
        return chunks


def make_waves(
    scheme: str,
    layout: Layout,
    group: Any,  # a process group, or Alone
    method: Method,
    options: StepOptions,
    rules: Sequence[Rule] = (),
    plan: Plan | None = None,
) -> Waves:
    """The waves of a layout by a scheme. Collective.

    Args:
        layout: who holds which rectangle; the same on every rank of `group`.
        plan: of OWNER and SHARED, if it has been made before.

    Raises:
        SettingError: a team cannot have the second moment's norms, or replicas a method's state;
            the buffer is too small.
        RuntimeError: ranks have made different plans.
    """
    if scheme == SHARED and method.has_state:
        raise SettingError(
            "muon_share_replicated",
            True,
            f"cannot be: {type(method).__name__} keeps state, which every replica has to save",
            "use False",
        )
    wire = options.wire if scheme in (OWNER, SHARED) else "fp32"
    sizes = sizes_of(method, wire, rules, processor=options.device.type == "cpu")
    sizes = replace(sizes, broadcast=scheme == SHARED)
    if scheme == GATHERED:
        owners = [Team((group.rank(),), (0.0,))] * len(layout.matrices)
        gathering = ToEveryRank(layout, owners, group, method.kind)
        waves = [(index,) for index in range(len(layout.matrices))]
        return _lay_out(scheme, gathering, waves, {}, sizes, options)
    if scheme == LOCAL:
        layout, _ = replicated_layout(layout.matrices, 1)
        group = Alone()
    team_rules = _team_rules(options, group, method, rules) if scheme == OWNER else None
    if plan is None:
        mebibytes = options.buffer_mb
        plan = make_plan(
            layout,
            [method.flops(matrix) for matrix in layout.matrices],
            sizes=sizes,
            buffer_bytes=None if mebibytes is None else int(mebibytes * 2**20),
            rules=team_rules and team_rules.possible(),
        )
    _compare(plan, group)
    connect([group], options.device)
    teams = make_teams(group, plan.teams)
    connect([team.group for team in teams.values()], options.device)
    kind = ToReplicas if scheme == SHARED else ToOwners
    carrier = kind(
        plan.layout,
        plan.teams,
        group,
        method.kind,
        by_pairs=plan.by_pairs,
    )
    made = _lay_out(scheme, carrier, plan.waves, teams, sizes, options, plan)
    unmet = team_rules.unmet() if team_rules else None
    return replace(made, plan=None if scheme == LOCAL else plan, unmet=unmet)


def sizes_of(
    method: Method, wire: str, rules: Sequence[Rule | type[Rule]], *, processor: bool
) -> Sizes:
    """Sizes of waves; `processor` if buffers are in host memory."""
    dtypes = {AUTO: method.dtype, "bf16": torch.bfloat16, "fp32": torch.float32}
    return Sizes(
        method,
        dtypes[wire],
        CHUNK["cpu" if processor else "cuda"],
        spare=int(any(rule.scratch for rule in rules)),
        whole=2 * any(rule.normalize is not None for rule in rules),
    )


def _lay_out(
    scheme: str,
    transport: ToOwners,
    waves: Sequence[Sequence[int]],
    teams: Teams,
    sizes: Sizes,
    options: StepOptions,
    plan: Plan | None = None,
) -> Waves:
    """Make routes, allocate buffers, and make the views of waves."""
    sizes = replace(sizes, apart=options.is_apart)
    routes = [transport.route(indices) for indices in waves]
    batches: list[list[Route]] = []
    for number in range(len(waves)):
        beside = [] if plan is None else plan.beside(transport.rank, number)
        batches.append([transport.batch(indices) for indices in beside])
    buffers = Buffers.of(
        [route_bytes(route, sizes) for route in routes],
        [route_bytes(batch, sizes) for of_wave in batches for batch in of_wave],
        apart=sizes.apart,
    )
    memory = StepMemory(options.device, buffers.nbytes, options.shared, is_freed=options.is_freed)
    space = Space(memory, buffers, sizes)

    def make(number: int, route: Route) -> Wave:
        agreement = Agreement(route, transport.teams, teams, transport.rank, options.device)
        wave = Wave(number, route, space, agreement)
        if sizes.whole:
            stacks = [stack.blocks for stack in wave.stacks]
            wave.whole = whole_updates(route.slots, stacks, transport.layout.matrices, wave.work)
        sizes.method.warm_up(route.slots)
        return wave

    made = [make(number, route) for number, route in enumerate(routes)]
    for wave, of_wave in zip(made, batches, strict=True):
        wave.batches = [make(wave.number, batch) for batch in of_wave]
    return Waves(scheme, made, transport, sizes.method, memory, plan)


def _compare(plan: Plan, group: ProcessGroup) -> None:
    """Raise a RuntimeError on every rank where ranks have different plans. Collective."""
    digest = plan.digest()
    for rank, (number,) in enumerate(numbers_of_all_ranks([int(digest, 16)], group)):
        other = f"{number:0{DIGEST_LENGTH}x}"
        if other != digest:
            raise RuntimeError(
                f"this rank has plan {digest} and rank {rank} of its group has {other}: they"
                " would wait for each other; start all ranks with the same settings, software and"
                " devices"
            )


def _team_rules(
    options: StepOptions, group: ProcessGroup, method: Method, rules: Sequence[Rule]
) -> TeamRules:
    """The teams that may own a matrix."""
    size = 0 if options.team_size == AUTO else int(options.team_size)
    alone = [type(rule).__name__ for rule in rules if rule.normalize is not None]
    if not (method.serves_teams or method.has_state):
        alone.append(type(method).__name__)
    needs_whole = [*alone, *([type(method).__name__] if method.has_state else [])]
    if needs_whole and size > 1:
        raise SettingError(
            "muon_team_size",
            size,
            f"cannot be: {needs_whole[0]} works on whole matrices, which no rank of a team has",
            "use 1",
        )
    return team_rules(method, nodes_of(group), 1 if alone else size)


def team_rules(method: Method, nodes: Sequence[int], size: int) -> TeamRules:
    """The teams that a method allows: of whole blocks alone if it has state."""
    state_bytes = functools.cache(method.state_bytes) if method.has_state else None
    return TeamRules(functools.cache(method.cost), nodes, size, state_bytes)
