"""`python -m benchmarks.train`: times whole training steps of a config, Muon and Adam in turn.

Each run is `torchrun pretrain_gpt.py` with the config and flags that choose the optimizer, the
number of steps and the log, in a temporary directory. Times are Megatron's `iteration-time`, read
from TensorBoard.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.command import main, run_logged, table, torchrun
from megatron_muon.errors import UserError
from megatron_muon.tools.parser import CommandParser, positive
from megatron_muon.tools.train.processes import environment, pretrain_program
from megatron_muon.tools.train.records import read_events

if TYPE_CHECKING:
    from rich.table import Table

MUON, ADAM, COMPARED = "muon", "adam", "muon with --compare"

_NOT_MEASURED = ("--save", "--load", "--save-interval", "--timing-log-level", "--wandb-project")
"""Flags of a config that write, read, or add barriers to a step."""

EXAMPLES = """\
examples:
  whole training steps, Muon and Adam in turn:
    python -m benchmarks.train --config configs/quickstart.yaml --json train.json
  the cost of QK-clip:
    python -m benchmarks.train --config configs/quickstart.yaml --compare='--qk-clip'
  larger batches:
    python -m benchmarks.train --config configs/quickstart.yaml -- --micro-batch-size 16
"""

DESCRIPTION = """\
Train a few steps of a config through pretrain_gpt.py with Muon and with Adam in turn, and compare
the median times of a step after the warm-up. Nothing is saved.
"""


def configure(parser: CommandParser) -> None:
    """Adds description, arguments and examples."""
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    parser.take_megatron_flags("any flag of pretrain_gpt.py, among these or after --")
    add = parser.add_argument
    add("--config", type=Path, required=True, metavar="FILE", help="experiment file")
    add("--ranks", type=positive, default=2, metavar="N", help="processes on this machine (2)")
    add("--steps", type=positive, default=20, metavar="S", help="training steps of each run (20)")
    add("--warmup", type=positive, default=5, metavar="W", help="untimed steps of each run (5)")
    add("--rounds", type=positive, default=2, metavar="R", help="runs of each optimizer (2)")
    add("--compare", metavar="FLAGS", help="Muon again with these flags: --compare='--qk-clip'")


@dataclass(frozen=True)
class TrainRun:
    """The measurements of one run."""

    step_ms: tuple[float, ...]  # after the warm-up
    tokens_per_step: int

    @property
    def median_ms(self) -> float:
        """The median time of a step."""
        return statistics.median(self.step_ms)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Runs the trainings in turn and returns their figures.

    Raises:
        UserError: the config cannot be read, or the warm-up is as long as a run.
        RunFailedError: a run failed.
    """
    from megatron_muon.megatron.flags.config_file import load_config

    if args.warmup >= args.steps:
        text = f"--warmup {args.warmup} leaves none of --steps {args.steps}"
        raise UserError(f"{text}; raise --steps or lower --warmup")
    in_config = [flag for flag, _ in load_config(args.config).flags]
    arms: dict[str, list[str]] = {MUON: [], ADAM: []}
    if args.compare is not None:
        arms[COMPARED] = shlex.split(args.compare)
    runs: dict[str, list[TrainRun]] = {arm: [] for arm in arms}
    for number in range(args.rounds):
        for arm, more in arms.items():
            what = f"the {arm} run of round {number + 1} of {args.rounds}"
            print(f"training: {what}", file=sys.stderr)
            runs[arm].append(_train(args, arm, [*args.flags, *more], in_config, what))
    return figures(runs) | {"compared_flags": args.compare}


def _train(
    args: argparse.Namespace, arm: str, flags: Sequence[str], in_config: Sequence[str], what: str
) -> TrainRun:
    optimizer = arm.split()[0]
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        tensorboard = Path(folder, "tensorboard")
        flags = [*flags, *run_flags(in_config, optimizer, args.steps, tensorboard)]
        program = (*pretrain_program(), "--config", str(args.config), *flags)
        command = torchrun(args.ranks, *program)
        run_logged(command, Path(folder, "log"), env=environment(args.ranks), what=what)
        events = read_events(tensorboard)
    times = events.points("iteration-time")
    step_ms = tuple(point.value * 1e3 for point in times if point.step > args.warmup)
    if not step_ms:
        raise UserError(f"{what} logged no step after --warmup {args.warmup}; raise --steps")
    batch = round(events.points("batch-size")[-1].value)
    return TrainRun(step_ms, batch * int(events.args["seq_length"]))


def run_flags(in_config: Sequence[str], optimizer: str, steps: int, tensorboard: Path) -> list[str]:
    """The flags of a short run without saving that logs every step.

    Only flags that are `in_config` can be unset.
    """
    unset = [part for flag in _NOT_MEASURED if flag in in_config for part in ("--unset", flag)]
    return [
        *unset,
        *("--optimizer", optimizer, "--use-megatron-fsdp", "--train-iters", str(steps)),
        *("--eval-iters", "0", "--eval-interval", str(steps + 1), "--log-interval", "1"),
        *("--tensorboard-dir", str(tensorboard), "--tensorboard-log-interval", "1"),
        "--log-timers-to-tensorboard",
    ]


def figures(runs: Mapping[str, Sequence[TrainRun]]) -> dict[str, Any]:
    """Medians over the steps of all rounds, and of each run; ratios to Adam and to plain Muon.

    Ratios to plain Muon are medians over rounds, as runs of a round are neighbors in time.
    """
    medians = {}
    for arm, of in runs.items():
        medians[arm] = statistics.median(ms for run in of for ms in run.step_ms)
    found = {
        "step_ms": medians,
        "muon_over_adam": medians[MUON] / medians[ADAM],
        "tokens_per_step": runs[MUON][0].tokens_per_step,
        "rounds_ms": {arm: [run.median_ms for run in of] for arm, of in runs.items()},
    }
    if COMPARED in runs:
        rounds = zip(runs[COMPARED], runs[MUON], strict=True)
        ratio = statistics.median(more.median_ms / plain.median_ms for more, plain in rounds)
        found["compared_over_muon"] = ratio
    return found


def tables(results: Mapping[str, Any]) -> list[Table]:
    """The table of the optimizers."""
    rows = []
    for arm, median in results["step_ms"].items():
        rounds = " ".join(f"{ms:,.0f}" for ms in results["rounds_ms"][arm])
        rows.append((arm, f"{median:,.1f}", rounds))
    caption = f"Muon / Adam: {results['muon_over_adam']:.3f}"
    if results["compared_flags"] is not None:
        ratio = f"{results['compared_over_muon']:.3f}"
        caption += f"\nMuon with {results['compared_flags']} / Muon: {ratio}"
    title = f"Training step, {results['tokens_per_step']:,} tokens"
    return [table(title, ("optimizer", "median ms", "by run"), rows, caption)]


def run(argv: Sequence[str] | None = None) -> int:
    """Runs the command line, by default this process's, and returns the exit status."""
    return main("train", configure, measure, tables, argv)


if __name__ == "__main__":
    sys.exit(run())
