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


def repeat_under_load(repeats: int, directory: Path, *, at_once: int = 1, seconds: float = cli.SECONDS) -> list[str]:
    """Train on two ranks `repeats` times, through torchrun, on loaded cores; how each run ended, "ok" if well.

    A run is well if its losses are those of the first: memory that is written to after it was freed shows there too.

    Args:
        repeats: how many runs.
        directory: a folder for each run is made here.
        at_once: runs at a time; several are each other's load, one has busy processes beside it.
        seconds: a run that takes longer hangs.
    """
    corpus = cli.make_corpus(directory)
    expected: list[list[float]] = []

    def once(number: int) -> str:
        try:
            run = cli.torchrun(directory / f"run{number}", *ARGS, *corpus, seconds=seconds, cold=True)
        except cli.HangError as hang:
            return f"hung: {hang}"
        if run.returncode or len(run.losses) != STEPS:
            return f"crashed with status {run.returncode}\n{run.tail}"
        expected.append(run.losses)
        end = "ok" if run.losses == expected[0] else f"other losses: {run.losses}"
        print(f"run {number} of {repeats}: {end}, {run.seconds:.0f} s", flush=True)
        return end

    with contextlib.nullcontext() if at_once > 1 else loaded_cores(), ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(once, range(1, repeats + 1)))


@pytest.mark.wide
@pytest.mark.timeout(700)
def test_repeats_under_load_end_well(tmp_path):
    """Megatron-FSDP freed buckets into which gloo's collectives still wrote: one run in fifteen crashed."""
    assert repeat_under_load(3, tmp_path) == ["ok"] * 3


def main() -> int:
    parser = argparse.ArgumentParser(description="Repeat a two-rank training on loaded cores; count crashes and hangs.")
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--at-once", type=int, default=1, help="runs at a time, each the others' load (%(default)s)")
    parser.add_argument("--seconds", type=float, default=cli.SECONDS, help="a longer run hangs (%(default)s)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        ends = repeat_under_load(args.repeats, Path(directory), at_once=args.at_once, seconds=args.seconds)
    bad = [end for end in ends if end != "ok"]
    print(*bad, f"\n{len(ends)} runs: {len(ends) - len(bad)} ended well", sep="\n\n")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
