"""One rank of a rehearsal: its real optimizers, made from the planned layout, take two steps and are recorded.

`make_muon` makes the Muons and `factory.wrap` what megatron-core puts around them, as for training. What training has
from a model is given here: parameters of the planned shards' shapes with gradients, and the layout. Left out is what
is megatron-core's alone: gradient reduction and norm before the step, the scalar optimizer, gathering the weights.
"""

from __future__ import annotations

import contextlib
import io
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
import torch.distributed as dist

from megatron_muon.core.plan import Plan
from megatron_muon.core.rules.rule import Held
from megatron_muon.fsdp.build import offload_run
from megatron_muon.megatron.builder import make_muon
from megatron_muon.megatron.chained import MuonChainedOptimizer
from megatron_muon.megatron.factory import wrap
from megatron_muon.megatron.settings import MuonOptimizerConfig
from megatron_muon.offload.store import DEVICE, RecordStore
from megatron_muon.tools.plan.estimate import Group, Hardware, node_pattern
from megatron_muon.tools.rehearse import machine, process_groups
from megatron_muon.tools.rehearse.recorder import HOST_WAITS, Recorder, place
from megatron_muon.tools.rehearse.trace import RankTrace

STEPS = 2
"""The first one has what happens once, the second one is what all others are like."""


PlanKey = tuple[str, tuple[int, ...]]
"""The name of a kind of groups, and how their ranks lie in nodes."""


@dataclass
class Rehearsal:
    """What ranks have in common.

    Attributes:
        settings: of the optimizers.
        groups: what is planned, dense matrices first.
        world_size: ranks of the run.
        hardware: where it is to run.
        plans: by `plan_key`; the first rank makes one that is missing as in training, and the others take it.
    """

    settings: MuonOptimizerConfig
    groups: Sequence[Group]
    world_size: int
    hardware: Hardware
    plans: dict[PlanKey, Plan] = field(default_factory=dict)

    def plan_key(self, group: Group, members: Sequence[int]) -> PlanKey:
        """What the plan of a group with these global ranks goes by."""
        return group.name, node_pattern(members, self.hardware)


class _Chunk(SimpleNamespace):
    """A model chunk, for what a chain asks of it around a step."""

    def __init__(self) -> None:
        super().__init__(ddp_config=SimpleNamespace(use_megatron_fsdp=True), module=self)

    def install_optimized_model_weights(self) -> None:
        """Megatron-FSDP's."""

    def start_param_sync(self) -> None:
        """Megatron-FSDP's."""


def rehearse_rank(rank: int, rehearsal: Rehearsal) -> RankTrace:
    """Build a rank's optimizers and take two steps."""
    recorder = Recorder(machine.DEVICE)
    trace = RankTrace(rank, recorder.groups, steps=recorder.steps, synchronizations=recorder.synchronizations)
    with (
        contextlib.redirect_stdout(io.StringIO()),
        process_groups.world(rank, rehearsal.world_size, recorder),
        machine.on(rehearsal.hardware, recorder),
    ):
        try:
            _run(rank, rehearsal, recorder, trace)
        except HOST_WAITS as error:
            what = f"{str(error).split('.')[1]}, a value that the host asks for,"
            trace.synchronizations.append(f"{what} at {place(_stack(error))}")
            trace.failure = f"stopped where the host waits for the device, at {place(_stack(error))}"
        except Exception as error:
            reason = str(error).strip().splitlines() or [""]
            trace.failure = f"{type(error).__name__}: {reason[0]} ({place(_stack(error))})"
    return trace


def _stack(error: BaseException) -> traceback.StackSummary:
    return traceback.extract_tb(error.__traceback__)


def _run(rank: int, rehearsal: Rehearsal, recorder: Recorder, trace: RankTrace) -> None:
    config, device = rehearsal.settings, machine.DEVICE
    chunk, members, offload = _Chunk(), [], offload_run(config)
    scratch: torch.Tensor | None = None
    for group in rehearsal.groups:
        ranks = group.members(rank, rehearsal.world_size)
        process_group, key = dist.new_group(ranks), rehearsal.plan_key(group, ranks)
        shards = group.layout.held(process_group.rank())
        made = (torch.empty(shard.rows, shard.cols, device=device) for shard in shards)
        parameters: list[torch.Tensor] = [torch.nn.Parameter(each) for each in made]
        for parameter in parameters:
            if parameter.numel():
                parameter.grad = torch.empty_like(parameter)
        names = {p: matrix.name for p, matrix in zip(parameters, group.layout.matrices, strict=True)}
        held = Held(
            group.layout,
            process_group,
            device,
            experts=[1] * len(parameters),
            columns=[(shard.col_start, shard.cols) for shard in shards],
            over_tp=config.muon_tp_mode != "blockwise",
        )
        plan = rehearsal.plans.get(key)
        muon = make_muon([{"params": parameters}], held, config, names, offload=offload, plan=plan, scratch=scratch)
        scratch = muon.exchange.arena.memory
        members.append(wrap(muon, config, [chunk], SimpleNamespace(tp=None)))
        if muon.exchange.plan is not None:
            rehearsal.plans.setdefault(key, muon.exchange.plan)
            trace.plans.append(muon.exchange.plan.digest())
    chain = MuonChainedOptimizer(members)
    chain.grad_norms_by_group = {}  # as megatron-core leaves it that has computed the norm
    for group, member in zip(rehearsal.groups, members, strict=True):
        muon = member.optimizer
        muon.probe = recorder.probe([matrix.name for matrix in group.layout.matrices])
        muon.update_matrices = recorder.group(group.name, muon.exchange.arena.nbytes)(muon.update_matrices)
    trace.state_bytes = _state_bytes(chain)
    try:
        for _ in range(STEPS):
            with recorder.step():
                chain.step_with_ready_grads()
    finally:
        if offload is not None:
            offload.close()


def _state_bytes(chain: MuonChainedOptimizer) -> dict[str, int]:
    """Bytes of momentum by place, as `megatron.state` reports them."""
    found: Counter[str] = Counter()
    for muon in (member.optimizer for member in chain.chained_optimizers):
        found.update(muon.store.bytes if isinstance(muon.store, RecordStore) else {})
        slots = (slot for state in muon.state.values() for slot in state.values())
        found[DEVICE] += sum(slot.nbytes for slot in slots if isinstance(slot, torch.Tensor))
    return dict(found)
