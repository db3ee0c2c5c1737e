"""Arms, runs that differ in their seed alone: figures over their seeds, which are the best, and what that says.

Losses compare where the data is the same, steps where batch and model are, times where machine and
processes are. Arithmetic only; sweeps and reports write and draw it.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron_muon.errors import UserError
from megatron_muon.megatron.flags.refusals import MUONS
from megatron_muon.tools.train.records import LossPoint, Record, is_run, read_record

MEASURE = (
    *(
        "data_path",
        "train_data_path",
        "valid_data_path",
        "data_args_path",
        "per_split_data_args_path",
        "mock_data",
    ),
    *("split", "seq_length"),
)
"""Losses are comparable only where these agree."""

_BUDGET = (
    *(
        "global_batch_size",
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "num_query_groups",
    ),
    "num_experts",
)
"""Steps cost the same only where these agree."""

_BASELINE = "adam"
"""The optimizer that others are compared with."""

_NAMES = {
    "adam": "AdamW",
    "muon": "Muon",
    "adaptive_muon": "AdaptiveMuon",
    "lion": "Lion",
    "sgd": "SGD",
}
_NO_SETTINGS = {
    *("seed", "save", "tensorboard_dir", "config", "rank", "local_rank", "data_cache_path"),
    *("wandb_project", "wandb_entity", "wandb_exp_name", "wandb_save_dir"),
    *("profile", "use_pytorch_profiler", "profile_step_start", "profile_step_end", "profile_ranks"),
    *("iteration", "consumed_train_samples", "consumed_valid_samples", "skipped_train_samples"),
    *("num_floating_point_operations_so_far", "ckpt_step"),
}
"""What may differ between runs that are otherwise alike: places, profiling, and the progress of an earlier start."""


@dataclass(frozen=True)
class Spread:
    """A figure over the `count` seeds that have it; `std` is the sample standard deviation, None for one seed."""

    mean: float
    std: float | None
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """The spread of the finite values; None if there are none."""
        numbers = [value for value in values if value is not None and math.isfinite(value)]
        if not numbers:
            return None
        std = statistics.stdev(numbers) if len(numbers) > 1 else None
        return cls(statistics.fmean(numbers), std, min(numbers), max(numbers), len(numbers))

    def __format__(self, form: str) -> str:
        return f"{self.mean:{form}}" + (f" ± {self.std:{form}}" if self.std is not None else "")


@dataclass(frozen=True)
class CurvePoint(LossPoint):
    """Means over the seeds at a step, with the lowest and highest loss."""

    low: float
    high: float


class Arm:
    """Runs that differ in their seed alone: records, or rows of a sweep, whose attributes are figures.

    Attributes:
        settings: what tells these runs from others, by name.
        sound: the runs that finished without diverging.
        drawn: the sound runs; without any, all runs as far as they got.
        final: the final loss of the sound runs, by their attribute `compared_by`.
        counts: all runs are sound, so that the arm may be the best of its kind.
    """

    def __init__(
        self, name: str, settings: Mapping[str, str], runs: Sequence[Any], compared_by: str
    ) -> None:
        self.name, self.settings, self.runs = name, dict(settings), tuple(runs)
        self.finished = sum(run.outcome == "finished" for run in runs)
        self.diverged = sum(bool(run.diverged) for run in runs)
        self.sound = tuple(run for run in runs if run.outcome == "finished" and not run.diverged)
        self.drawn = self.sound or self.runs
        self.final = Spread.of(getattr(run, compared_by) for run in self.sound)
        self.counts = self.final is not None and len(self.sound) == len(runs)

    def spread(self, figure: str) -> Spread | None:
        """A figure of the drawn runs."""
        return Spread.of(getattr(run, figure) for run in self.drawn)

    @property
    def optimizer(self) -> str:
        """The --optimizer of its runs."""
        return str(self.runs[0].optimizer)

    @property
    def optimizer_name(self) -> str:
        """The optimizer's name for people; Megatron's adam decouples weight decay."""
        return _NAMES.get(self.optimizer, self.optimizer)

    @property
    def rate(self) -> float | None:
        """The learning rate of the matrices: --muon-lr of a Muon that has one, else --lr."""
        args = self.runs[0].args
        given = [
            args.get(key, "None")
            for key in (("muon_lr", "lr") if self.optimizer in MUONS else ("lr",))
        ]
        return next((float(text) for text in given if text not in ("None", "nan")), None)

    def curve(self, losses: str) -> list[CurvePoint]:
        """The means of its runs' losses, "train" or "validation", at the steps that all drawn runs have."""
        by_step = [{point.step: point for point in getattr(run, losses)} for run in self.drawn]
        found = []
        for step in sorted(set.intersection(*map(set, by_step))):
            points = [run[step] for run in by_step]
            if loss := Spread.of(point.loss for point in points):
                seconds = statistics.fmean(point.seconds for point in points)
                found.append(
                    CurvePoint(step, points[0].tokens, seconds, loss.mean, loss.low, loss.high)
                )
        return found

    def remark(self, *, is_best: bool) -> str:
        """What to know of its figures."""
        if self.diverged:
            return f"diverged: {self.diverged} of {len(self.runs)}"
        if self.finished < len(self.runs):
            return f"not finished: {len(self.runs) - self.finished} of {len(self.runs)}"
        return "best" if is_best else ""


def ranked(arms: Iterable[Arm]) -> list[Arm]:
    """The arms by their mean final loss, the lowest first, those without one last."""
    return sorted(arms, key=lambda arm: arm.final.mean if arm.final else math.inf)


def best_of(arms: Iterable[Arm], kind: Callable[[Arm], Hashable]) -> list[Arm]:
    """The best of each kind, among those whose runs all finished without diverging."""
    best: dict[Hashable, Arm] = {}
    for arm in ranked(arm for arm in arms if arm.counts):
        best.setdefault(kind(arm), arm)
    return list(best.values())


def at_edges(best: Arm, arms: Iterable[Arm]) -> list[str]:
    """Where a number among an arm's settings is the least or most of those that were tried with all else equal."""
    notes = []
    for key, value in best.settings.items():
        alike = [
            arm.settings
            for arm in arms
            if key in arm.settings and {**arm.settings, key: value} == best.settings
        ]
        try:
            tried = sorted(float(settings[key]) for settings in alike)
        except ValueError:
            continue
        if key not in MEASURE and len(tried) > 1 and float(value) in (tried[0], tried[-1]):
            word, further = ("least", "smaller") if float(value) == tried[0] else ("most", "larger")
            notes.append(
                f"{best.name}: {key}={value} is the {word} that was tried; a {further} one may do"
                " better"
            )
    return notes


def find_runs(places: Sequence[Path]) -> list[Path]:
    """The folders of runs at or below the places given, in order; a UserError names a place without one."""
    found: dict[Path, None] = {}
    for place in places:
        below = (
            [place] if is_run(place) else sorted(path for path in place.glob("**") if is_run(path))
        )
        if not below:
            raise UserError(
                f"no run at or below {str(place)!r}; give folders of `megatron-muon train` or"
                " `sweep`"
            )
        found.update(dict.fromkeys(below))
    return list(found)


def read_arms(folders: Iterable[Path]) -> tuple[list[Arm], list[Record]]:
    """The arms, and the runs left out because they logged no step; a UserError where no run did."""
    records = [read_record(folder) for folder in folders]
    kept, empty = [run for run in records if run.train], [run for run in records if not run.train]
    if not kept:
        raise UserError(
            f"none of the {len(records)} runs has logged a step; see {records[0].folder}/train.log"
        )
    have_flags = all(run.settings for run in kept)
    each = [_settings(run.settings if have_flags else run.args) for run in kept]
    first = ("optimizer", "lr", "muon_lr")
    every_key = dict.fromkeys((*first, *(key for settings in each for key in settings)))
    keys = [key for key in every_key if len({settings.get(key) for settings in each}) > 1]
    groups: dict[tuple[tuple[str, str], ...], list[Record]] = {}
    for run, settings in zip(kept, each, strict=True):
        groups.setdefault(
            tuple((key, settings[key]) for key in keys if key in settings), []
        ).append(run)
    compared_by = "validation_last" if any(run.validation for run in kept) else "loss_last"
    arms = []
    for group, runs in groups.items():
        name = (
            ",".join(f"{key}={value}" for key, value in group) or f"optimizer={runs[0].optimizer}"
        )
        runs.sort(key=lambda run: (run.seed or 0, str(run.folder)))
        arms.append(Arm(name, dict(group), runs, compared_by))
    return sorted(arms, key=lambda arm: (arm.optimizer, arm.rate or 0.0, arm.name)), empty


def _settings(values: Mapping[str, str]) -> dict[str, str]:
    """What tells experiments apart; a --load of the run's own checkpoints does not."""
    own = {"load"} if values.get("load") in ("None", values.get("save")) else set()
    return {key: value for key, value in values.items() if key not in _NO_SETTINGS | own}


class Crossing(NamedTuple):
    """Where a validation curve first reaches a loss: on a line between two validations; at the first, a bound."""

    steps: float
    seconds: float
    is_bound: bool


class Comparison:
    """An optimizer's best arm beside the baseline's.

    Attributes:
        target: the baseline's final validation loss, mean over seeds, after `baseline_steps`.
        differing: what makes a step cost something else, by name, with each one's value; nothing is
            concluded then.
        reached: where the mean curve of the arm reached the target; None where it did not.
        by_seed: where the seeds' own curves reached it, those that did.
        steps_ratio, seconds_ratio: of the baseline's; the latter only where both ran on alike
        machines.
    """

    def __init__(self, arm: Arm, baseline: Arm) -> None:
        goal = baseline.curve("validation")[-1]
        self.arm, self.baseline, self.target, self.baseline_steps = (
            arm,
            baseline,
            goal.loss,
            goal.step,
        )
        self.differing = _differing([arm.runs[0], baseline.runs[0]], _BUDGET)
        self.reached = reached = reach(arm.curve("validation"), goal.loss)
        self.by_seed = [
            crossing for run in arm.sound if (crossing := reach(run.validation, goal.loss))
        ]
        is_timed = goal.seconds and _places(arm.runs) == _places(baseline.runs)
        self.steps_ratio = reached.steps / goal.step if reached and not self.differing else None
        self.seconds_ratio = (
            reached.seconds / goal.seconds if reached and is_timed and not self.differing else None
        )


def not_comparable(arms: Sequence[Arm]) -> dict[str, list[str]]:
    """What the arms were trained on, where that differs and losses are not comparable: by name, each arm's value."""
    return _differing([arm.runs[0] for arm in arms], MEASURE)


def best_arms(arms: Sequence[Arm]) -> list[Arm]:
    """The best arm of each optimizer, the baseline first; none where losses do not measure the same."""
    if not_comparable(arms):
        return []
    return sorted(
        best_of(arms, lambda arm: arm.optimizer),
        key=lambda arm: (arm.optimizer != _BASELINE, arm.optimizer),
    )


def compare(best: Sequence[Arm]) -> list[Comparison]:
    """Every other optimizer's best arm beside the baseline's; none without a baseline or validation."""
    baseline = next((arm for arm in best if arm.optimizer == _BASELINE), None)
    if baseline is None or not baseline.curve("validation"):
        return []
    return [
        Comparison(arm, baseline) for arm in best if arm is not baseline and arm.curve("validation")
    ]


def reach(points: Sequence[LossPoint], target: float) -> Crossing | None:
    """Where a validation curve first reaches a loss; None where it does not."""
    before: LossPoint | None = None
    for point in points:
        if point.loss <= target:
            if before is None:
                return Crossing(float(point.step), point.seconds, is_bound=True)
            part = (before.loss - target) / (before.loss - point.loss)
            steps = before.step + part * (point.step - before.step)
            return Crossing(
                steps, before.seconds + part * (point.seconds - before.seconds), is_bound=False
            )
        if math.isfinite(point.loss):
            before = point
    return None


def _places(runs: Iterable[Record]) -> set[tuple[object, ...]]:
    """The machines and numbers of processes of runs."""
    return {
        (
            *map(run.run.get("machine", {}).get, ("processor", "cores")),
            *map(run.run.get, ("device", "ranks")),
        )
        for run in runs
    }


def _differing(runs: Sequence[Record], keys: Iterable[str]) -> dict[str, list[str]]:
    """Which of the keys are not the same in all runs, and each run's value."""
    values = {key: [_value(run, key) for run in runs] for key in keys}
    return {key: each for key, each in values.items() if len(set(each)) > 1}


def _value(run: Record, key: str) -> str:
    """A run's setting as text, from Megatron's arguments, which are complete, else from the flags."""
    text = run.args.get(key) or run.settings.get(key) or "-"
    if text in ("None", "False"):  # Megatron writes str(value)
        return "-"
    is_relative = key.endswith("_path") and text != "-" and not re.search(r"(^|')/", text)
    return f"{text} from {run.run.get('directory', '.')}" if is_relative else text
