"""Whole training runs in the pool's workers: `launch.main`, which is what pretrain_gpt.py calls,
without its imports.

A run through torchrun spends nearly all of its time on imports. Here a worker that has imported
everything forks a child for each run, so that many layouts can be tried in the time of one.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.support.cli import Run
from tests.support.pool import Pool


@dataclass(frozen=True)
class Trainings:
    """Runs in one folder.

    Attributes:
        ranks: the pool.
        folder: where they run; the flags' paths are relative to it.
        flags: flags of every run, in front.
        batch: sequences of a step where the flags do not say; each rank has its share in one
            micro-batch.
    """

    ranks: Pool
    folder: Path
    flags: tuple[str, ...]
    batch: int | None = None

    def __call__(self, *flags: str, ranks: int = 2) -> Run:
        """Train with these flags too; the exit status, and what the ranks printed, one after the
        other.
        """
        answers = self.ranks(
            ranks, train, argv=self.line(*flags, ranks=ranks), folder=str(self.folder)
        )
        assert len({status for status, _ in answers}) == 1, "\n".join(
            text[-3000:] for _, text in answers
        )
        return Run(answers[0][0], "".join(text for _, text in answers), 0.0)

    def line(self, *flags: str, ranks: int = 2) -> list[str]:
        """The command line of a run."""
        sizes = {
            "--global-batch-size": self.batch,
            "--micro-batch-size": self.batch and self.batch // ranks,
        }
        batch = [word for flag, size in sizes.items() if size for word in (flag, str(size))]
        return [*self.flags, *batch, *flags]


def train(
    rank: int,
    world_size: int,
    *,
    argv: list[str],
    folder: str,
) -> tuple[int, str]:
    """In a worker: one training run; the exit status and the output."""
    import torch

    from megatron_muon.megatron import launch

    sys.modules["__main__"].installed.undo()  # the worker's patches: the run installs its own
    # the pool's end needs it, and the process ends then
    torch.distributed.destroy_process_group = lambda *_: None
    launch._SECONDS_FOR_FIRST_RANK = 0.0  # nobody ends the others
    os.chdir(folder)
    log = Path(folder) / f"run-{os.getpid()}.log"
    with log.open("wb") as stream:
        for descriptor in (1, 2):
            os.dup2(stream.fileno(), descriptor)
    try:
        status = launch.main(argv)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.stdout.flush()
        sys.stderr.write(log.read_text(errors="replace")[-3000:])
        raise
    sys.stdout.flush()
    sys.stderr.flush()
    return status, log.read_text("utf-8", errors="replace")
