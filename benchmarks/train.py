"""`python -m benchmarks.train`: whole training steps of a config, Muon and Adam in turn, and Muon with further flags.

Each run is `torchrun pretrain_gpt.py` with the config and flags that choose the optimizer, the
number of steps and the log, in a temporary directory. Times come from TensorBoard (Megatron's
`iteration-time`), the count of Muon's parameters from the facts that a Muon run leaves beside them.
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
from megatron_muon.megatron import FACTS
from megatron_muon.megatron.places import read_json
from megatron_muon.tools.parser import CommandParser, positive
from megatron_muon.tools.train.processes import environment, pretrain_program
from megatron_muon.tools.train.records import read_events

if TYPE_CHECKING:
    from rich.table import Table

OPTIMIZERS = ("muon", "adam")
COMPARED = "muon with --compare"
"""The arm of Muon with further flags."""

MOMENTUM_BYTES, ADAM_BYTES = 4, 8
"""State of an element: Muon's fp32 momentum, and Adam's two fp32 moments."""

_NOT_MEASURED = ("--save", "--load", "--save-interval", "--timing-log-level", "--wandb-project")
"""Flags of a config that write, read, or put barriers around parts of a step."""


EXAMPLES = """\
examples:
  whole training steps, Muon and Adam in turn:
    python -m benchmarks.train --config configs/quickstart.yaml --json train.json
  what QK-clip costs of a step:
    python -m benchmarks.train --config configs/quickstart.yaml --rounds 5 --compare='--qk-clip --qk-clip-threshold 1'
  whole training steps with larger batches:
    python -m benchmarks.train --config configs/quickstart.yaml -- --micro-batch-size 16 --global-batch-size 64
"""

DESCRIPTION = """\
Trains a few steps of a config through pretrain_gpt.py with Muon and with Adam in turn, and compares the steps' times:
medians after the warm-up. Nothing is saved. Flags of pretrain_gpt.py may stand among these or after --.
"""


def configure(parser: CommandParser) -> None:
    """Adds description, arguments and examples."""
    parser.description, parser.epilog = DESCRIPTION, EXAMPLES
    parser.take_megatron_flags("any flag of pretrain_gpt.py, among these or after --")
    add = parser.add_argument
    add(
        "--config",
        type=Path,
        required=True,
        metavar="FILE",
        help="experiment file, as pretrain_gpt.py takes it",
    )
    add("--ranks", type=positive, default=2, metavar="N", help="processes on this machine (2)")
    add("--steps", type=positive, default=20, metavar="S", help="training steps of each run (20)")
    add(
        "--warmup",
        type=positive,
        default=5,
        metavar="W",
        help="first steps of each run that do not count (5)",
    )
    add(
        "--rounds",
        type=positive,
        default=2,
        metavar="R",
        help="runs of each optimizer, in turn (2)",
    )
    add(
        "--compare",
        metavar="FLAGS",
        help="Muon once more, with these flags of pretrain_gpt.py too: --compare='--qk-clip'",
    )


@dataclass(frozen=True)
class TrainRun:
    """What one run left behind: times after the warm-up; Muon's parameters, None in a run without Muon."""

    step_ms: tuple[float, ...]
    tokens_per_step: int
    muon_parameters: int | None


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Runs the trainings in turn and returns their figures.

    Raises:
        UserError: the config cannot be read, or the warm-up is as long as a run.
        RunFailedError: a run failed.
    """
    from megatron_muon.megatron.flags.config_file import load_config

    if args.warmup >= args.steps:
        raise UserError(
            f"--warmup {args.warmup} leaves none of --steps {args.steps}; raise --steps or lower"
            " --warmup"
        )
    in_config = [flag for flag, _ in load_config(args.config).flags]
    arms: dict[str, list[str]] = {optimizer: [] for optimizer in OPTIMIZERS}
    if args.compare is not None:
        arms[COMPARED] = shlex.split(args.compare)
    runs: dict[str, list[TrainRun]] = {arm: [] for arm in arms}
    for number in range(args.rounds):
        for arm, more in arms.items():
            what, optimizer = (
                f"the {arm} run of round {number + 1} of {args.rounds}",
                arm.split()[0],
            )
            print(f"training: {what}", file=sys.stderr)
            with tempfile.TemporaryDirectory(prefix="bench-") as folder:
                tensorboard, log = Path(folder, "tensorboard"), Path(folder, "log")
                flags = (
                    *args.flags,
                    *more,
                    *run_flags(in_config, optimizer, steps=args.steps, tensorboard=tensorboard),
                )
                command = torchrun(
                    args.ranks, *pretrain_program(), "--config", str(args.config), *flags
                )
                run_logged(command, log, env=environment(args.ranks), what=what)
                runs[arm].append(_read_run(tensorboard, warmup=args.warmup))
    return {
        **figures(runs),
        **({"compared_flags": args.compare} if args.compare is not None else {}),
    }


def run_flags(
    in_config: Sequence[str], optimizer: str, *, steps: int, tensorboard: Path
) -> list[str]:
    """The flags that make a config's run short, logged at every step, and free of anything that is not training.

    Only flags that are `in_config` can be taken back.
    """
    taken_back = [part for flag in _NOT_MEASURED if flag in in_config for part in ("--unset", flag)]
    return [
        *taken_back,
        *("--optimizer", optimizer, "--use-megatron-fsdp", "--train-iters", str(steps)),
        *("--eval-iters", "0", "--eval-interval", str(steps + 1), "--log-interval", "1"),
        *(
            "--tensorboard-dir",
            str(tensorboard),
            "--tensorboard-log-interval",
            "1",
            "--log-timers-to-tensorboard",
        ),
    ]


def _read_run(tensorboard: Path, *, warmup: int) -> TrainRun:
    events = read_events(tensorboard)
    step_ms = tuple(
        point.value * 1e3 for point in events.points("iteration-time") if point.step > warmup
    )
    if not step_ms:
        raise UserError(
            f"the run logged no step after the first {warmup}; raise --steps or lower --warmup"
        )
    batch_size = events.points("batch-size")[-1].value
    return TrainRun(
        step_ms=step_ms,
        tokens_per_step=round(batch_size) * int(events.args["seq_length"]),
        muon_parameters=read_json(tensorboard / FACTS).get("muon_parameters"),
    )


def figures(runs: dict[str, list[TrainRun]]) -> dict[str, Any]:
    """The keys of the JSON: medians over the steps of all rounds, `rounds_ms` those of each run."""
    medians = {
        name: statistics.median(ms for one in of for ms in one.step_ms) for name, of in runs.items()
    }
    parameters = runs["muon"][0].muon_parameters
    if parameters is None:
        raise UserError(
            "the Muon run told nothing of its parameters; does the config set --muon-* off?"
        )
    return {
        "muon_step_ms": medians["muon"],
        "adam_step_ms": medians["adam"],
        "ratio": medians["muon"] / medians["adam"],
        **(
            {"compared_step_ms": medians[COMPARED], "compared_over_muon": _over_muon(runs)}
            if COMPARED in runs
            else {}
        ),
        "tokens_per_step": runs["muon"][0].tokens_per_step,
        "optimizer_state_bytes": {
            "muon": MOMENTUM_BYTES * parameters,
            "adam": ADAM_BYTES * parameters,
        },
        "optimizer_state_source": (
            f"{parameters} parameters that Muon takes (as the run told), all ranks together: fp32"
            f" momentum {MOMENTUM_BYTES} bytes, Adam's two fp32 moments {ADAM_BYTES} bytes"
        ),
        "rounds_ms": [
            {name: statistics.median(of[number].step_ms) for name, of in runs.items()}
            for number in range(len(runs["muon"]))
        ],
    }


def tables(results: Mapping[str, Any]) -> list[Table]:
    """Muon against Adam, from the figures."""
    rows = []
    medians = {name: results[f"{name}_step_ms"] for name in OPTIMIZERS}
    caption = f"Muon / Adam: {results['ratio']:.3f}; state of the parameters that Muon takes"
    if "compared_flags" in results:
        medians[COMPARED] = results["compared_step_ms"]
        caption += (
            f"\nMuon with {results['compared_flags']} / Muon: {results['compared_over_muon']:.3f}"
        )
    for name, median in medians.items():
        runs = " ".join(f"{one[name]:,.0f}" for one in results["rounds_ms"])
        state = results["optimizer_state_bytes"][name.split()[0]] / 1e6
        rows.append((name, f"{median:,.1f}", runs, f"{state:,.1f}"))
    title = f"Training step, {results['tokens_per_step']:,} tokens"
    return [table(title, ("optimizer", "median ms", "by run", "state MB"), rows, caption)]


def _over_muon(runs: dict[str, list[TrainRun]]) -> float:
    """The median over rounds of what the compared flags make of Muon's median step: runs of a round are neighbours."""
    plain, compared = (
        [statistics.median(one.step_ms) for one in runs[arm]] for arm in ("muon", COMPARED)
    )
    ratios: list[float] = [more / less for less, more in zip(plain, compared, strict=True)]
    return statistics.median(ratios)


def run(argv: Sequence[str] | None = None) -> int:
    """Runs the command line, by default this process's, and returns the exit status."""
    return main("train", configure, measure, tables, argv)


if __name__ == "__main__":
    sys.exit(run())
