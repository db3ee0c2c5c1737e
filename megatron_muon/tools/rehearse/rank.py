"""The ranks of a rehearsal: their real optimizers, made from the planned layout, take two steps and are recorded.

`make_muon` and `factory.wrap` make the optimizers as for training, of parameters of the planned
shards' shapes. Gradient reduction and norm, the scalar optimizer and gathering the weights are
megatron-core's, and left out.
"""

from __future__ import annotations

import contextlib
import gc
import io
import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from megatron_muon.core.plan import Plan
from megatron_muon.core.rules.rule import Held
from megatron_muon.megatron.builder import make_muon
from megatron_muon.megatron.chained import MuonChainedOptimizer
from megatron_muon.megatron.factory import wrap
from megatron_muon.megatron.muon_config import MuonOptimizerConfig
from megatron_muon.tools.plan.estimate import Group, Hardware, node_pattern
from megatron_muon.tools.rehearse import machine
from megatron_muon.tools.rehearse.recorder import Orthogonalized, RankTrace, Recorder, place

STEPS = 2
"""The first one has what happens once, the second one is like all others."""
BATCH = 8
"""Ranks that a process is given at a time."""


@dataclass
class Rehearsal:
    """What ranks have in common; `groups` are planned, dense matrices first.

    A plan that is missing in `plans`, by the name of a kind of groups and how their ranks lie in
    nodes, is made by the first rank as in training, and the others take it.
    """

    settings: MuonOptimizerConfig
    groups: Sequence[Group]
    world_size: int
    hardware: Hardware
    plans: dict[tuple[str, tuple[int, ...]], Plan] = field(default_factory=dict)


_shared: Rehearsal


def rehearse(
    rehearsal: Rehearsal, ranks: Sequence[int], done: Callable[[int], object]
) -> dict[int, RankTrace]:
    """The traces of some ranks of the world, by forked processes; `done` gets the number of finished ranks."""
    global _shared
    first, *others = ranks
    # makes the plans, for which the others would wait
    traces = {first: rehearse_rank(first, rehearsal)}
    _shared = rehearsal
    processes = max(min(len(os.sched_getaffinity(0)), -(-len(others) // BATCH)), 1)
    # keeps pages shared
    with multiprocessing.get_context("fork").Pool(processes, initializer=gc.freeze) as pool:
        for trace in pool.imap_unordered(_rehearse_shared, others, chunksize=BATCH):
            traces[trace.rank] = trace
            done(len(traces))
    return dict(sorted(traces.items()))


def _rehearse_shared(rank: int) -> RankTrace:
    return rehearse_rank(rank, _shared)


def rehearse_rank(rank: int, rehearsal: Rehearsal) -> RankTrace:
    """Build a rank's optimizers and take two steps."""
    recorder = Recorder(rank, machine.DEVICE)
    trace = recorder.trace
    with (
        contextlib.redirect_stdout(io.StringIO()),
        machine.world(rehearsal.world_size, recorder),
        machine.on(rehearsal.hardware, recorder),
    ):
        try:
            run(rehearsal, recorder)
        except Exception as error:
            where = place(traceback.extract_tb(error.__traceback__))
            if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
                what = f"{str(error).split('.')[1]}, a value that the host asks for,"
                trace.synchronizations.append(f"{what} at {where}")
            trace.failure = (
                f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]} ({where})"
            )
    return trace


def run(rehearsal: Rehearsal, recorder: Recorder) -> None:
    """Build the optimizers of the recorder's rank and take two steps, in a world and on a machine that are there."""
    config, device, trace = rehearsal.settings, machine.DEVICE, recorder.trace
    # of a model, as far as a chain asks
    chunk = SimpleNamespace(ddp_config=SimpleNamespace(use_megatron_fsdp=True))
    chunk.module, chunk.install_optimized_model_weights, chunk.start_param_sync = (
        chunk,
        lambda: None,
        lambda: None,
    )
    members, digests = [], []
    scratch: torch.Tensor | None = None
    for group in rehearsal.groups:
        ranks = group.members(trace.rank)
        process_group, key = (
            dist.new_group(ranks),
            (
                group.name,
                node_pattern(ranks, rehearsal.hardware),
            ),
        )
        shards = group.layout.held(process_group.rank())
        names: dict[torch.Tensor, str] = {}
        for shard, matrix in zip(shards, group.layout.matrices, strict=True):
            parameter = torch.nn.Parameter(torch.empty(shard.rows, shard.cols, device=device))
            parameter.grad = torch.empty_like(parameter) if parameter.numel() else None
            names[parameter] = matrix.name
        held = Held(
            group.layout,
            process_group,
            device,
            experts=[1] * len(names),
            over_tp=config.muon_tp_mode != "blockwise",
        )
        plan, groups = rehearsal.plans.get(key), [{"params": list(names)}]
        muon: Any = make_muon(groups, held, config, names, offload=None, plan=plan, scratch=scratch)
        exchange = muon.exchange
        scratch = exchange.arena.memory
        members.append(wrap(muon, config, [chunk], SimpleNamespace(tp=None)))
        assert exchange.plan is not None
        rehearsal.plans.setdefault(key, exchange.plan)
        digests.append(exchange.plan.digest())
        muon.probe = Orthogonalized(recorder, list(names.values()))
        muon.update_matrices = recorder.group(group.name, exchange.arena.nbytes)(
            muon.update_matrices
        )
    trace.digest = "-".join(digests)
    chain = MuonChainedOptimizer(members)
    chain.grad_norms_by_group = {}  # as megatron-core leaves it that has computed the norm
    for _ in range(STEPS):
        with recorder.step():
            chain.step_with_ready_grads()
