"""Training on CPU ends well, again and again, on a machine that has other things to do: runs are
each other's load.

The test makes three at once, or one for each core. The proof is sixty, some ten minutes on two
cores:

    .venv/bin/python -m tests.functional.test_cpu_dependability --repeats 60 --at-once 4
"""

import argparse
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support import cli

STEPS = 10
ARGS = (
    *(*cli.MUON, *cli.TINY, "--data-parallel-sharding-strategy", "optim_grads_params"),
    *(
        *cli.words(
            "--overlap-grad-reduce --overlap-param-gather --global-batch-size 8 --train-iters"
        ),
        str(STEPS),
    ),
)


def repeat_under_load(
    repeats: int, directory: Path, *, at_once: int, seconds: float = cli.SECONDS
) -> list[str]:
    """Train on two ranks `repeats` times, through torchrun, `at_once` at a time; how each run
    ended, "ok" if well.

    A run is well if its losses are those of the first: memory that is written to after it was freed
    shows there too. One that takes longer than `seconds` hangs.
    """
    corpus = cli.make_corpus(directory)
    expected: list[list[float]] = []

    def once(number: int) -> str:
        try:
            run = cli.torchrun(
                directory / f"run{number}", *ARGS, *corpus, seconds=seconds, cold=True
            )
        except cli.HangError as hang:
            return f"hung: {hang}"
        if run.returncode or len(run.losses) != STEPS:
            return f"crashed with status {run.returncode}\n{run.tail}"
        expected.append(run.losses)
        end = "ok" if run.losses == expected[0] else f"other losses: {run.losses}"
        print(f"run {number} of {repeats}: {end}, {run.seconds:.0f} s", flush=True)
        return end

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(once, range(1, repeats + 1)))


@pytest.mark.wide
@pytest.mark.timeout(700)
def test_repeats_under_load_end_well(tmp_path):
    """Megatron-FSDP freed buckets into which gloo's collectives still wrote: one run in fifteen
    crashed.
    """
    at_once = max(3, os.cpu_count() or 1)
    assert repeat_under_load(at_once, tmp_path, at_once=at_once) == ["ok"] * at_once


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Repeat a two-rank training on loaded cores; count crashes and hangs."
    )
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument(
        "--at-once", type=int, default=4, help="runs at a time, each the others' load (%(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=cli.SECONDS, help="a longer run hangs (%(default)s)"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        ends = repeat_under_load(
            args.repeats, Path(directory), at_once=args.at_once, seconds=args.seconds
        )
    bad = [end for end in ends if end != "ok"]
    print(
        *bad,
        f"\n{len(ends)} runs: {len(ends) - len(bad)} ended well",
        sep="\n\n",
    )
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
