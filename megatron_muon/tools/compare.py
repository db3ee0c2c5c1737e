"""`megatron-muon compare`: a table of runs by setting, and a picture of their validation losses.

Reads losses, speeds and Megatron's arguments from TensorBoard's files, and bytes of optimizer state
from `facts.json`. Runs that differ only in their seed are one setting.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from megatron_muon.errors import UserError
from megatron_muon.megatron import FACTS, LOSS
from megatron_muon.megatron.places import EVENT_FILES, read_json
from megatron_muon.tools.train.records import read_events

VALIDATION, SPEED, SHARE = f"{LOSS} validation", "tokens-per-second", "optimizer-share"
COMPARED_AT = """\
data_path train_data_path valid_data_path data_args_path split seq_length global_batch_size
num_layers hidden_size ffn_hidden_size num_experts"""
"""Steps to a loss are comparable only between runs in which these arguments agree."""

NOT_SETTINGS = """\
seed save load tensorboard_dir config rank local_rank data_cache_path iteration ckpt_step
consumed_train_samples consumed_valid_samples skipped_train_samples
num_floating_point_operations_so_far wandb_project wandb_entity wandb_exp_name wandb_save_dir
profile use_pytorch_profiler profile_step_start profile_step_end profile_ranks"""
"""Arguments in which runs of one setting may differ: seed, paths, progress, profiling."""

COLUMNS = (
    ("validation loss", "loss", ".4f"),
    ("steps to baseline", "steps", ".0f"),
    ("hours to baseline", "hours", ".3f"),
    ("tokens/s", "tokens_per_second", ",.0f"),
    ("optimizer", "optimizer_share", ".1%"),
    ("state MB", "state_mb", ",.2f"),
)
"""Headings, attributes of `Run`, and how figures are shown."""

EPILOG = """\
examples:
  megatron-muon compare runs/adamw runs/muon
  megatron-muon compare runs/lr-sweep/* --baseline runs/lr-sweep/adam-0.002-1 --png losses.png

Runs that differ only in their seed share one row: mean ± standard deviation. Steps and hours count
until a run reaches the baseline's last validation loss, interpolated between two validations; hours
assume the run's median speed and exclude validation. The optimizer's share needs
--timing-log-level 1. "-" means unknown.
"""


class Validation(NamedTuple):
    """A validation loss, and the training before it."""

    step: float
    tokens: float
    hours: float
    loss: float


class Run:
    """A run as its folder records it, over all its starts; a figure is None if it is not known."""

    steps: float | None = None
    hours: float | None = None

    def __init__(self, folder: Path) -> None:
        places = {file.parent for file in folder.rglob(EVENT_FILES)}
        if len(places) > 1:
            raise UserError(f"{folder} holds {len(places)} runs; give each: {folder}/*")
        if not places:
            raise UserError(f"no run in {folder}; give a folder that `megatron-muon train` wrote")
        place = places.pop()
        self.folder = folder
        self.events = read_events(place)
        self.args = self.events.args
        if not self.events.points(VALIDATION):
            raise UserError(f"{folder} has no validation loss; lower its --eval-interval")
        self.tokens_per_second = self._median(SPEED)
        self.optimizer_share = self._median(SHARE)
        self.validation = self._validation()
        self.loss = self.validation[-1].loss
        self.state_mb = sum(read_json(place / FACTS).get("state_bytes", {}).values()) / 1e6 or None

    def _median(self, tag: str) -> float | None:
        values: list[float] = [point.value for point in self.events.points(tag)]
        return statistics.median(values) if values else None

    def _validation(self) -> list[Validation]:
        """The curve; the test set's loss, under the tag and step of the last one, is left out."""
        found: dict[int, Validation] = {}
        samples = self.events.points(f"{VALIDATION} vs samples")
        for point, at in zip(self.events.points(VALIDATION), samples, strict=False):
            tokens = at.step * int(self.args["seq_length"])
            hours = tokens / (self.tokens_per_second or math.nan) / 3600
            found.setdefault(point.step, Validation(point.step, tokens, hours, point.value))
        return sorted(found.values())

    def reach(self, target: float) -> None:
        """Sets `steps` and `hours` to where the curve first is at a loss or below."""
        before = self.validation[0]
        for point in self.validation:
            if point.loss <= target:
                fall = before.loss - point.loss
                part = (before.loss - target) / fall if fall else 0.0
                self.steps = before.step + part * (point.step - before.step)
                self.hours = before.hours + part * (point.hours - before.hours)
                return
            before = point


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `megatron-muon compare`."""
    parser.description = (
        "Compares runs, or shows one: loss, steps and hours to the baseline's loss, speed, state."
    )
    parser.epilog = EPILOG
    add = parser.add_argument
    add("runs", type=Path, nargs="+", metavar="RUN", help="run folder")
    add("--baseline", type=Path, metavar="RUN", help="run of the baseline (default: the first RUN)")
    add("--png", type=Path, metavar="FILE", help="plot loss against tokens and against hours")


def run(args: argparse.Namespace) -> int:
    """Prints the table and what is not comparable; draws the picture."""
    first = args.baseline or args.runs[0]
    folders = dict.fromkeys([first, *args.runs])
    runs = [Run(folder) for folder in folders]
    settings = group(runs)
    baseline, seeds = next(iter(settings.items()))
    target = statistics.fmean(run.loss for run in seeds)
    notes = [f"baseline: {baseline}, final validation loss {target:.4f}"]
    for run in runs:
        notes += check(run, runs[0], target)
    rows = [["setting", "runs", *(heading for heading, _, _ in COLUMNS)]]
    for name, seeds in settings.items():
        figures = [spread(seeds, figure, form) for _, figure, form in COLUMNS]
        rows.append([name, str(len(seeds)), *figures])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *figures in rows:
        padded = map(str.rjust, figures, widths[1:])
        print(name.ljust(widths[0]), *padded, sep="  ")
    print(*notes, sep="\n")
    if args.png is not None:
        draw(args.png, settings)
    return 0


def group(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs by setting, named by the arguments that are not the same in all runs."""
    names = ["optimizer", "lr", "muon_lr", *chain(*(run.args for run in runs))]
    differing = []
    for name in dict.fromkeys(names):
        values = {run.args.get(name) for run in runs}
        if len(values) > 1 and name not in NOT_SETTINGS.split():
            differing.append(name)
    groups = defaultdict(list)
    for run in runs:
        label = [f"{name}={run.args.get(name)}" for name in differing or ["optimizer"]]
        groups[" ".join(label)].append(run)
    return groups


def check(run: Run, baseline: Run, target: float) -> Iterator[str]:
    """Measures the steps to a loss where that is fair; yields notes on what is not."""
    note = f"note: {run.folder}"
    mine, theirs = run.args, baseline.args
    differing = [name for name in COMPARED_AT.split() if mine.get(name) != theirs.get(name)]
    if differing:
        yield f"{note} is not comparable with the baseline: it has another {', '.join(differing)}"
    else:
        run.reach(target)
    if run is not baseline and run.steps == run.validation[0].step:
        yield f"{note} is at the baseline's loss by its first validation; lower --eval-interval"
    last, wanted = run.events.points(LOSS)[-1].step, run.args["train_iters"]
    if wanted not in ("None", str(last)):
        yield f"{note} ended after {last} of {wanted} steps"


def spread(seeds: Sequence[Run], figure: str, form: str) -> str:
    """Mean and standard deviation over seeds as text; "-" if one of them lacks the figure."""
    values = [getattr(run, figure) for run in seeds]
    if None in values or any(map(math.isnan, values)):
        return "-"
    mean = format(statistics.fmean(values), form)
    if len(values) == 1:
        return mean
    return mean + " ± " + format(statistics.stdev(values), form)


def draw(file: Path, settings: dict[str, list[Run]]) -> None:
    """Draws the validation losses of all runs, in one color for each setting."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.4 + 0.25 * len(settings)), layout="constrained")
    over_tokens, over_hours = figure.subplots(1, 2, sharey=True)
    for number, (name, seeds) in enumerate(settings.items()):
        color = f"C{number}"
        over_hours.plot([], [], color, label=name.replace("$", r"\$"))  # not mathematics
        for run in seeds:
            _, tokens, hours, losses = zip(*run.validation, strict=True)
            over_tokens.plot(tokens, losses, color, marker=".")
            over_hours.plot(hours, losses, color, marker=".")
    over_tokens.set(xlabel="tokens", ylabel="validation loss (nats per token)")
    over_hours.set(xlabel="hours of training")
    figure.legend(loc="outside upper center")
    figure.savefig(file, format="png")
    print(f"picture: {file}")
