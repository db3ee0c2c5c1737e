"""Times the host's work in an optimizer step of rank 0 of the shipped models.

    OMP_NUM_THREADS=1 python -m benchmarks.host [--configs FILE.yaml ...] [--ranks N ...]

The rank's real optimizer steps with the owners and waves of the plan, on matrices of as many rows
and one to three columns, so that products and copies take next to nothing, in a process group that
answers at once. The time is the processor's, the minimum over some steps. A CPU has no driver that
launches kernels, and iterates blocks in other batches than a GPU.
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch

from benchmarks.command import parse_models
from benchmarks.rehearse import machine, rank
from benchmarks.rehearse.recorder import Recorder
from megatron_muon import cpu
from megatron_muon.core.layout import Layout, Shards
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


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a table, line by line."""
    args = parse_models(__doc__, (64, 1024), argv)
    cpu.install(force=True)
    print("| model | ranks | host, ms |\n| --- | --- | --- |")
    for config in args.configs:
        for ranks in args.ranks:
            ms = f"{host_ms(config, ranks):.2f}"
            print(f"| {config.stem} | {ranks:,} | {ms} |", flush=True)


if __name__ == "__main__":
    main()
