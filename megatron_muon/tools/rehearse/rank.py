"""The ranks of a rehearsal: their real optimizers, made from the planned layout, take two steps and are recorded.

`make_muon` and `factory.wrap` make the optimizers as for training, of parameters of the planned shards' shapes.
Gradient reduction and norm, the scalar optimizer and gathering the weights are megatron-core's, and left out.
"""

from __future__ import annotations

import contextlib
import gc
import io
import multiprocessing
import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
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
from megatron_muon.tools.rehearse.recorder import HOST_WAITS, Phases, Recorder, place
from megatron_muon.tools.rehearse.trace import RankTrace

STEPS = 2
"""The first one has what happens once, the second one is like all others."""
BATCH = 8
"""Ranks that a process is given at a time."""

PlanKey = tuple[str, tuple[int, ...]]
"""The name of a kind of groups, and how their ranks lie in nodes."""


@dataclass
class Rehearsal:
    """What ranks have in common; `groups` are planned, dense matrices first.

    A plan that is missing in `plans` is made by the first rank as in training, and the others take it.
    """

    settings: MuonOptimizerConfig
    groups: Sequence[Group]
    world_size: int
    hardware: Hardware
    plans: dict[PlanKey, Plan] = field(default_factory=dict)

    def plan_key(self, group: Group, members: Sequence[int]) -> PlanKey:
        """The key in `plans` of a group with these global ranks."""
        return group.name, node_pattern(members, self.hardware)


def _chunk() -> SimpleNamespace:
    """A model chunk, as far as a chain of optimizers asks for it around a step."""
    chunk = SimpleNamespace(ddp_config=SimpleNamespace(use_megatron_fsdp=True))
    chunk.module, chunk.install_optimized_model_weights, chunk.start_param_sync = chunk, lambda: None, lambda: None
    return chunk


def rehearse(
    rehearsal: Rehearsal, ranks: Sequence[int], *, processes: int | None = None, done: Callable[[int], object] = id
) -> dict[int, RankTrace]:
    """The traces of some ranks of the world, by so many forked processes, by default one for each usable core.

    Forked processes need not import, read or plan anything again. `done` is called with the number of finished ranks.
    """
    first, *others = ranks
    traces = {first: rehearse_rank(first, rehearsal)}  # makes the plans, for which the others would wait
    processes = min(processes or len(os.sched_getaffinity(0)), -(-len(others) // BATCH))
    with contextlib.ExitStack() as stack:
        found: Iterable[RankTrace] = (rehearse_rank(rank, rehearsal) for rank in others)
        if processes > 1:
            context = multiprocessing.get_context("fork")
            pool = stack.enter_context(context.Pool(processes, initializer=_share, initargs=(rehearsal,)))
            found = pool.imap_unordered(_rehearse_shared, others, chunksize=BATCH)
        for trace in found:
            traces[trace.rank] = trace
            done(len(traces))
    return dict(sorted(traces.items()))


_shared: Rehearsal


def _share(rehearsal: Rehearsal) -> None:
    """In a forked process: take what the parent has, and keep the collector from writing to its pages."""
    global _shared
    _shared = rehearsal
    gc.freeze()


def _rehearse_shared(rank: int) -> RankTrace:
    return rehearse_rank(rank, _shared)


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
        except Exception as error:
            where = place(traceback.extract_tb(error.__traceback__))
            if isinstance(error, HOST_WAITS):
                what = f"{str(error).split('.')[1]}, a value that the host asks for,"
                trace.synchronizations.append(f"{what} at {where}")
            trace.failure = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]} ({where})"
    return trace


def _run(rank: int, rehearsal: Rehearsal, recorder: Recorder, trace: RankTrace) -> None:
    config, device = rehearsal.settings, machine.DEVICE
    chunk, members, offload = _chunk(), [], offload_run(config)
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
        muon.probe = Phases(recorder, [matrix.name for matrix in group.layout.matrices])
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
    """Bytes of momentum by place."""
    found: Counter[str] = Counter()
    for muon in (member.optimizer for member in chain.chained_optimizers):
        found.update(muon.store.bytes if isinstance(muon.store, RecordStore) else {})
        slots = (slot for state in muon.state.values() for slot in state.values())
        found[DEVICE] += sum(slot.nbytes for slot in slots if isinstance(slot, torch.Tensor))
    return dict(found)
