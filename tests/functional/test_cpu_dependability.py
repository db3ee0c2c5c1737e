"""Training on CPU ends well, again and again, on a machine that has other things to do.

The tests repeat a few times, on busy cores. The proof is sixty repeats, about half an hour on two cores, or a third of
that where runs are each other's load:

    .venv/bin/python -m tests.functional.test_cpu_dependability --repeats 60
    .venv/bin/python -m tests.functional.test_cpu_dependability --repeats 60 --at-once 4
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support import cli

STEPS = 10
ARGS = (
    *(*cli.MUON, *cli.TINY, "--data-parallel-sharding-strategy", "optim_grads_params"),
    *("--overlap-grad-reduce", "--overlap-param-gather", "--global-batch-size", "8", "--train-iters", str(STEPS)),
)
# Ends by itself with the process that started it, however that ends.
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(10**6))"


@dataclass
class Outcome:
    """How the repeats ended.

    Attributes:
        losses: the losses of each run that ended well.
        crashes: number and end of the output of each run that ended badly.
        hangs: the same of each run that did not end.
    """

    losses: list[list[float]] = field(default_factory=list)
    crashes: list[tuple[int, str]] = field(default_factory=list)
    hangs: list[tuple[int, str]] = field(default_factory=list)

    @property
    def differing(self) -> int:
        """Runs whose losses are not those of the first: memory that is written to after it was freed shows here too."""
        return sum(losses != self.losses[0] for losses in self.losses)

    @property
    def well(self) -> bool:
        return not self.crashes and not self.hangs and not self.differing


@contextlib.contextmanager
def loaded_cores() -> Iterator[None]:
    """Within the context a process is busy on every core."""
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def repeat_under_load(
    repeats: int, directory: Path, *, at_once: int = 1, seconds: float = cli.SECONDS, show: bool = False
) -> Outcome:
    """Train on two ranks `repeats` times, through torchrun, on loaded cores.

    Args:
        repeats: how many runs.
        directory: a folder for each run is made here.
        at_once: runs at a time; several are each other's load, one has busy processes beside it.
        seconds: a run that takes longer hangs.
        show: print a line for each run.
    """
    corpus = cli.make_corpus(directory)
    outcome = Outcome()

    def once(number: int) -> None:
        try:
            run = cli.torchrun(directory / f"run{number}", *ARGS, *corpus, seconds=seconds, cold=True)
        except cli.HangError as hang:
            outcome.hangs.append((number, str(hang)))
            result = "HUNG"
        else:
            if run.returncode == 0 and len(run.losses) == STEPS:
                outcome.losses.append(run.losses)
                result = "ok" if run.losses == outcome.losses[0] else f"OTHER LOSSES {run.losses}"
            else:
                outcome.crashes.append((number, run.tail))
                result = f"CRASHED with status {run.returncode}"
            result += f", {run.seconds:.0f} s"
        if show:
            print(f"run {number} of {repeats}: {result}", flush=True)

    with contextlib.nullcontext() if at_once > 1 else loaded_cores(), ThreadPoolExecutor(at_once) as pool:
        list(pool.map(once, range(1, repeats + 1)))
    return outcome


@pytest.mark.wide
@pytest.mark.timeout(700)
def test_repeats_under_load_end_well(tmp_path):
    """Megatron-FSDP freed buckets into which gloo's collectives still wrote: one run in fifteen crashed."""
    outcome = repeat_under_load(3, tmp_path)
    assert outcome.well, outcome
    assert len(outcome.losses) == 3


def main() -> int:
    parser = argparse.ArgumentParser(description="Repeat a two-rank training on loaded cores; count crashes and hangs.")
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--at-once", type=int, default=1, help="runs at a time, each the others' load (%(default)s)")
    parser.add_argument("--seconds", type=float, default=cli.SECONDS, help="a longer run hangs (%(default)s)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        outcome = repeat_under_load(
            args.repeats, Path(directory), at_once=args.at_once, seconds=args.seconds, show=True
        )
    for kind, runs in (("crash", outcome.crashes), ("hang", outcome.hangs)):
        for number, output in runs:
            print(f"\n--- {kind} in run {number}\n{output}")
    print(
        f"\n{args.repeats} runs: {len(outcome.losses)} ended well, {len(outcome.crashes)} crashed, "
        f"{len(outcome.hangs)} hung, {outcome.differing} with losses other than the first run's"
    )
    return 0 if outcome.well else 1


if __name__ == "__main__":
    sys.exit(main())
