"""What the host of rank 0 takes for an optimizer step of the shipped models.

    OMP_NUM_THREADS=1 python -m benchmarks.host [--configs FILE.yaml ...] [--ranks N ...]

The rank's real optimizer steps with the owners and waves of the plan, on matrices of as many rows
and a few columns, so that products and copies take next to nothing, in a process group that answers
at once. The time is that of the processor, the least of some steps. On a CPU there is no driver to
launch kernels, nor are blocks iterated in the same parts as on a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch

from megatron_muon import cpu
from megatron_muon.core.layout import Layout, Matrix
from megatron_muon.tools.plan.estimate import HARDWARE, Group, node_pattern, plan_group
from megatron_muon.tools.plan.plan_command import settings_of
from megatron_muon.tools.plan.planned_model import read_model
from megatron_muon.tools.rehearse import machine
from megatron_muon.tools.rehearse import rank as of_rank
from megatron_muon.tools.rehearse.recorder import Recorder

STEPS, COLUMNS = 8, 8


class _Timed(Recorder):
    """Notes how long steps take, and records nothing."""

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
    """The same matrices with few columns, as many as there are different widths, so that kinds of blocks stay apart."""
    widths = {
        width: COLUMNS * (1 + place)
        for place, width in enumerate(sorted({m.shape[1] for m in layout.matrices}))
    }

    def matrix(one: Matrix) -> Matrix:
        rows, width = one.shape
        shards = tuple(replace(shard, cols=widths[width]) for shard in one.shards)
        return replace(one, shape=(rows, widths[width]), shards=shards)

    return Layout(layout.world_size, tuple(map(matrix, layout.matrices)))


def host_ms(config: Path, ranks: int) -> float:
    """Milliseconds of a step of rank 0."""
    hardware = HARDWARE["h100-sxm"]
    settings, groups, _ = read_model(config, ranks)
    settings.lr = settings.lr or 0.0
    narrowed: list[Group] = [replace(group, layout=narrow(group.layout)) for group in groups]
    rehearsal = of_rank.Rehearsal(settings, narrowed, ranks, hardware)
    for group, narrow_one in zip(groups, narrowed, strict=True):
        key = group.name, node_pattern(group.members(0), hardware)
        plan = plan_group(group, settings_of(settings, hardware), hardware).plan
        rehearsal.plans[key] = replace(plan, layout=narrow_one.layout)
    recorder = _Timed()
    with (
        machine.world(ranks, recorder),
        mock.patch.object(machine, "DEVICE", torch.device("cpu")),
        mock.patch.object(of_rank, "STEPS", STEPS),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        of_rank.run(rehearsal, recorder)
    return min(recorder.seconds) * 1e3


def main(argv: Sequence[str] | None = None) -> None:
    """Print a table, line by line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    models = ("llama3-8b", "llama3-70b", "moe-large")
    parser.add_argument(
        "--configs",
        type=Path,
        nargs="+",
        default=[Path(f"configs/{model}.yaml") for model in models],
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=(64, 1024))
    args = parser.parse_args(argv)
    cpu.install(force=True)
    print("| model | ranks | host, ms |\n| --- | --- | --- |")
    for config in args.configs:
        for ranks in args.ranks:
            print(f"| {config.stem} | {ranks:,} | {host_ms(config, ranks):.2f} |", flush=True)


if __name__ == "__main__":
    main()
