"""Times the host's work in an optimizer step of rank 0 of the shipped models.

    OMP_NUM_THREADS=1 python -m benchmarks.host [--configs FILE.yaml ...] [--ranks N ...]
    OMP_NUM_THREADS=1 python -m benchmarks.host --small

The rank's real optimizer steps with the owners and waves of the plan, on matrices of as many rows
and one to three columns, so that products and copies take next to nothing, in a process group that
answers at once. The time is the processor's, the minimum over some steps. A CPU has no driver that
launches kernels, and iterates blocks in other batches than a GPU.

`--small` times FSDP2's Muon over 64 of 256 x 512 on fake CUDA tensors, with kernels that are not
launched; products on fake tensors are most of it.
"""

from __future__ import annotations

import contextlib
import io
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.command import parse_models
from benchmarks.rehearse import machine, rank
from benchmarks.rehearse.recorder import Recorder
from megatron_muon import cpu
from megatron_muon.core.layout import Layout, Shards
from megatron_muon.fsdp.muon import Muon
from megatron_muon.tools.plan.estimate import HARDWARE, node_pattern, plan_group
from megatron_muon.tools.plan.plan_command import settings_of
from megatron_muon.tools.plan.planned_model import read_model

STEPS, COLUMNS = 8, 1


class _TimedSteps(Recorder):
    """Times steps, and records nothing."""

    def __init__(self) -> None:
        super().__init__(0, torch.device("cpu"))
        self.seconds: list[float] = []

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around a step."""
        started = time.process_time()
        yield
        self.seconds.append(time.process_time() - started)


def narrow(layout: Layout) -> Layout:
    """The same matrices with few columns; different widths stay different."""
    widths = sorted({matrix.shape[1] for matrix in layout.matrices})
    matrices = []
    for matrix in layout.matrices:
        rows, width = matrix.shape
        cols = COLUMNS * (1 + widths.index(width))
        shards = Shards(replace(shard, cols=cols) for shard in matrix.shards)
        matrices.append(replace(matrix, shape=(rows, cols), shards=shards))
    return Layout(layout.world_size, tuple(matrices))


def host_ms(config: Path, ranks: int) -> float:
    """Milliseconds of a step of rank 0."""
    hardware = HARDWARE["h100-sxm"]
    settings, groups, _ = read_model(config, ranks)
    settings.lr = settings.lr or 0.0
    rehearsal = rank.Rehearsal(settings, [], ranks, hardware)
    narrowed = []
    for group in groups:
        layout = narrow(group.layout)
        narrowed.append(replace(group, layout=layout))
        key = group.name, node_pattern(group.members(0), hardware)
        plan = plan_group(group, settings_of(settings, hardware), hardware).plan
        rehearsal.plans[key] = replace(plan, layout=layout)
    rehearsal.groups = narrowed
    recorder = _TimedSteps()
    with (
        machine.world(ranks, recorder),
        mock.patch.object(machine, "DEVICE", torch.device("cpu")),
        mock.patch.object(rank, "STEPS", STEPS),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        rank.run(rehearsal, recorder)
    return min(recorder.seconds) * 1e3


SMALL: dict[str, dict[str, Any]] = {
    "Muon": {},
    "NorMuon": {"moment2_method": "normuon"},
    "int8 momentum": {"momentum_dtype": "int8"},
}


def small_ms(settings: dict[str, Any]) -> float:
    """Milliseconds of a step over small matrices of one rank, on fake CUDA tensors."""
    recorder = Recorder(0, machine.DEVICE)
    with machine.on(HARDWARE["h100-sxm"], recorder):
        mesh = DeviceMesh("cuda", [0])
        named = []
        for number in range(64):
            local = torch.empty(256, 512, device=machine.DEVICE)
            sharded = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
            p = torch.nn.Parameter(sharded)
            p.grad = torch.zeros_like(sharded)
            named.append((f"w{number}", p))
        optimizer = Muon(named, lr=0.01, **settings)
        seconds = []
        for _ in range(2 + STEPS):
            started = time.process_time()
            optimizer.step()
            seconds.append(time.process_time() - started)
    return min(seconds[2:]) * 1e3


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a table, line by line."""
    if "--small" in (sys.argv[1:] if argv is None else argv):
        dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
        print("| 64 of 256 x 512 | host, ms |\n| --- | --- |")
        for name, settings in SMALL.items():
            print(f"| {name} | {small_ms(settings):.2f} |", flush=True)
        dist.destroy_process_group()
        return
    args = parse_models(__doc__, (64, 1024), argv)
    cpu.install(force=True)
    print("| model | ranks | host, ms |\n| --- | --- | --- |")
    for config in args.configs:
        for ranks in args.ranks:
            ms = f"{host_ms(config, ranks):.2f}"
            print(f"| {config.stem} | {ranks:,} | {ms} |", flush=True)


if __name__ == "__main__":
    main()
