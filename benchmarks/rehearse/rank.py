"""The ranks of a rehearsal: real optimizers of the planned layout take two recorded steps.

`make_muon` and `factory.wrap` build the optimizers as for training, on parameters with the shapes
of the planned shards. Gradient reduction and norm, the scalar optimizer and gathering the weights
are megatron-core's, and left out.
"""

from __future__ import annotations

import contextlib
import gc
import io
import multiprocessing
import os
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from benchmarks.rehearse import machine
from benchmarks.rehearse.recorder import OrthogonalizedParts, RankTrace, Recorder, location
from megatron_muon.core.plan import Plan
from megatron_muon.core.rules.held import Held
from megatron_muon.fsdp.assembly import Beside
from megatron_muon.fsdp.part import view_parameters
from megatron_muon.matrices.views import Matrices, View
from megatron_muon.megatron.builder import make_muon
from megatron_muon.megatron.chained import MuonChainedOptimizer
from megatron_muon.megatron.factory import wrap
from megatron_muon.megatron.muon_config import MuonOptimizerConfig
from megatron_muon.tools.plan.estimate import Group, Hardware, node_pattern

STEPS = 2
"""The first step includes one-time work, the second one is like all others."""
BATCH = 8
"""Ranks that a process is given at a time."""


@dataclass
class Rehearsal:
    """The settings that ranks share; `groups` are planned, dense matrices first.

    A plan that is missing in `plans`, by kind of group and node pattern, is made by the first rank
    as in training; the others take it.
    """

    settings: MuonOptimizerConfig
    groups: Sequence[Group]
    world_size: int
    hardware: Hardware
    plans: dict[tuple[str, tuple[int, ...]], Plan] = field(default_factory=dict)


_shared: Rehearsal


def rehearse(rehearsal: Rehearsal, ranks: Sequence[int]) -> dict[int, RankTrace]:
    """Returns the traces of some ranks of the world, made by forked processes."""
    global _shared
    first, *others = ranks
    # makes the plans, for which the others would wait
    traces = {first: rehearse_rank(first, rehearsal)}
    _shared = rehearsal
    cores = len(os.sched_getaffinity(0))
    processes = max(min(cores, -(-len(others) // BATCH)), 1)
    # frozen objects stay in pages that the processes share
    with multiprocessing.get_context("fork").Pool(processes, initializer=gc.freeze) as pool:
        for trace in pool.imap_unordered(_rehearse_shared, others, chunksize=BATCH):
            traces[trace.rank] = trace
    return dict(sorted(traces.items()))


def _rehearse_shared(rank: int) -> RankTrace:
    return rehearse_rank(rank, _shared)


def rehearse_rank(rank: int, rehearsal: Rehearsal) -> RankTrace:
    """Builds a rank's optimizers and takes two steps."""
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
            where = location(traceback.extract_tb(error.__traceback__))
            if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
                operation = str(error).split(".")[1]
                wait = f"{operation}, a value that the host requests, at {where}"
                trace.synchronizations.append(wait)
            message = (str(error).strip().splitlines() or [""])[0]
            trace.failure = f"{type(error).__name__}: {message} ({where})"
    return trace


def run(rehearsal: Rehearsal, recorder: Recorder) -> None:
    """Builds the optimizers of the recorder's rank and takes two steps, within `machine.world`."""
    config, trace = rehearsal.settings, recorder.trace
    # the part of a model that a chained optimizer uses
    chunk = SimpleNamespace(ddp_config=SimpleNamespace(use_megatron_fsdp=True))
    chunk.module = chunk
    chunk.install_optimized_model_weights = lambda: None
    chunk.start_param_sync = lambda: None
    members, digests = [], []
    memory: torch.Tensor | None = None
    for group in rehearsal.groups:
        ranks = group.members(trace.rank)
        process_group = dist.new_group(ranks)
        key = group.name, node_pattern(ranks, rehearsal.hardware)
        read = _parameters(group, process_group.rank())
        place = process_group.rank()
        held = Held(
            group.layout,
            process_group,
            machine.DEVICE,
            [shard.rectangle for shard in group.layout.held(place)],
            over_tp=config.muon_tp_mode != "blockwise",
        )
        viewed = view_parameters(read, held.rectangles)
        beside = Beside(plan=rehearsal.plans.get(key), memory=memory)
        parameters = [{"params": list(read)}]
        muon: Any = make_muon(parameters, viewed, held, config, beside, machine.DEVICE)
        part = muon.part
        part.audit = None  # of whole matrices, on the host
        memory, plan = part.waves.memory.tensor, part.waves.plan
        members.append(wrap(muon, config, [chunk], SimpleNamespace(tp=None)))
        assert plan is not None
        rehearsal.plans.setdefault(key, plan)
        digests.append(plan.digest())
        part.probe = OrthogonalizedParts(recorder, part.names)
        in_group = recorder.group(group.name, part.waves.memory.nbytes)
        part.step = in_group(part.step)
    trace.digest = "-".join(digests)
    chain = MuonChainedOptimizer(members)
    chain.grad_norms_by_group = {}  # as megatron-core leaves it after computing the norm
    for _ in range(STEPS):
        with recorder.step():
            chain.step_with_ready_grads()


def _parameters(group: Group, rank: int) -> dict[torch.Tensor, Matrices]:
    """Parameters of a rank's shards, with gradients, and their matrices."""
    read: dict[torch.Tensor, Matrices] = {}
    for shard, matrix in zip(group.layout.held(rank), group.layout.matrices, strict=True):
        empty = torch.empty(shard.rows, shard.cols, device=machine.DEVICE)
        parameter = torch.nn.Parameter(empty)
        parameter.grad = torch.empty_like(parameter) if parameter.numel() else None
        read[parameter] = Matrices(name=matrix.name, view=View(matrix.shape))
    return read
