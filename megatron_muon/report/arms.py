"""What a report compares: arms, which are runs that differ in their seed alone, and the best arm of each optimizer.

Arithmetic only; `page` writes, `plots` draws.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_muon.errors import UserError
from megatron_muon.runs.comparable import BUDGET, MEASURE, differing, other_circumstances
from megatron_muon.runs.records import PHASES, LossPoint, Record, is_run, read_record
from megatron_muon.sweep.results import Spread

BASELINE = "adam"
"""The optimizer that others are compared with."""

_MUONS = ("muon", "adaptive_muon")
_NAMES = {"adam": "AdamW", "muon": "Muon", "adaptive_muon": "AdaptiveMuon", "lion": "Lion", "sgd": "SGD"}
_PLACES = ("seed", "save", "load", "tensorboard_dir", "config", "rank", "local_rank", "data_cache_path")
_MOST_CURVES = 6


def display_name(optimizer: str) -> str:
    """An optimizer's name for people; Megatron's adam decouples weight decay."""
    return _NAMES.get(optimizer, optimizer)


@dataclass(frozen=True)
class CurvePoint:
    """A loss at a step over the seeds; `seconds` is their mean."""

    step: int
    tokens: int | None
    seconds: float
    loss: Spread


@dataclass(frozen=True)
class Arm:
    """Runs that differ in their seed alone.

    Attributes:
        settings: key and value of what tells it from the other arms.
        runs: ordered by seed.
    """

    settings: tuple[tuple[str, str], ...]
    runs: tuple[Record, ...]

    @property
    def name(self) -> str:
        """Its settings in words."""
        return ",".join(f"{key}={value}" for key, value in self.settings) or self.runs[0].folder.name

    @property
    def optimizer(self) -> str:
        """The --optimizer of its runs."""
        return self.runs[0].optimizer

    @property
    def rate(self) -> float | None:
        """The learning rate of the matrices: --muon-lr of a Muon that has one, else --lr."""
        args = self.runs[0].args
        texts = [args.get("muon_lr") if self.optimizer in _MUONS else None, args.get("lr")]
        return next((number for text in texts if (number := _number(text)) is not None), None)

    @property
    def diverged(self) -> int:
        """How many of its runs diverged."""
        return sum(run.diverged for run in self.runs)

    @property
    def finished(self) -> int:
        """How many of its runs finished."""
        return sum(run.outcome == "finished" for run in self.runs)

    @property
    def sound(self) -> tuple[Record, ...]:
        """Its runs that finished without diverging: those that means are taken over."""
        return tuple(run for run in self.runs if run.outcome == "finished" and not run.diverged)

    @property
    def final(self) -> Spread | None:
        """Its last validation loss over the seeds; the training loss where there is no validation."""
        return self.spread("validation_last" if any(run.validation for run in self.runs) else "loss_last")

    @property
    def counts(self) -> bool:
        """Whether it may stand for its optimizer: all of its runs finished, none diverged."""
        return self.final is not None and len(self.sound) == len(self.runs)

    @property
    def peak_bytes(self) -> int | None:
        """The most that a rank's memory held in any run."""
        return max((run.peak_bytes or 0 for run in self.runs), default=0) or None

    def spread(self, figure: str) -> Spread | None:
        """An attribute of `Record` over its sound runs."""
        return Spread.of(getattr(run, figure) for run in self.sound)

    def train(self, window: int) -> list[CurvePoint]:
        """Training losses over the seeds; each loss of a seed is the mean of the last `window` that were logged."""
        return _curve([_smooth(run.train, window) for run in self.sound])

    def validation(self) -> list[CurvePoint]:
        """Validation losses over the seeds."""
        return _curve([run.validation for run in self.sound])


@dataclass(frozen=True)
class Crossing:
    """Where a validation curve first comes to a loss; between two validations by a straight line.

    Attributes:
        at_first: it is the first validation, so the curve came there then or before.
    """

    steps: float
    seconds: float
    at_first: bool


@dataclass(frozen=True)
class Reached(Crossing):
    """Where the mean curve of an arm came to a loss, and each seed that came there."""

    seeds: tuple[Crossing, ...]

    @property
    def by_seed(self) -> Spread | None:
        """Steps of each seed by itself."""
        return Spread.of(seed.steps for seed in self.seeds)


@dataclass(frozen=True)
class Comparison:
    """An optimizer's best arm beside the baseline's.

    Attributes:
        goal: the baseline's final validation.
        reached: where `arm` came to the goal's loss; None where it did not.
        differing: what the two were trained with that makes a step cost something else, by name, with each one's value;
            nothing is concluded then.
    """

    arm: Arm
    baseline: Arm
    goal: CurvePoint
    reached: Reached | None
    differing: Mapping[str, Sequence[str]]

    @property
    def target(self) -> float:
        """The baseline's final validation loss, mean over seeds."""
        return self.goal.loss.mean

    @property
    def baseline_first(self) -> float:
        """The step at which the baseline itself first came to the target."""
        found = reach(self.baseline, self.target)
        return found.steps if found else self.goal.step

    @property
    def other_circumstances(self) -> str | None:
        """Why times say little, as far as that was recorded."""
        return other_circumstances(self.arm.sound, self.baseline.sound)

    @property
    def steps_ratio(self) -> float | None:
        """Steps to the target by those of the baseline."""
        return self.reached.steps / self.goal.step if self.reached and not self.differing else None

    @property
    def seconds_ratio(self) -> float | None:
        """Seconds to the target by those of the baseline."""
        if not self.reached or not self.goal.seconds or self.differing:
            return None
        return self.reached.seconds / self.goal.seconds


def find_runs(places: Sequence[Path]) -> list[Path]:
    """The folders of runs at or below the places given, in order.

    Raises:
        UserError: a place that holds none.
    """
    found: dict[Path, None] = {}
    for place in places:
        below = [place] if is_run(place) else sorted(path for path in place.glob("**") if is_run(path))
        if not below:
            raise UserError(f"no run at or below {str(place)!r}; give folders of `megatron-muon train` or `sweep`")
        found.update(dict.fromkeys(below))
    return list(found)


def read_arms(folders: Iterable[Path]) -> tuple[list[Arm], list[Record]]:
    """The arms, and the runs left out because they ended before their first step."""
    records = [read_record(folder) for folder in folders]
    empty = [record for record in records if not record.train]
    kept = [record for record in records if record.train]
    if not kept:
        raise UserError(f"none of the {len(records)} runs has logged a step; see {records[0].folder}/train.log")
    have_flags = all(record.settings for record in kept)
    told_by = [record.settings if have_flags else record.args for record in kept]
    keys = _differing_keys(told_by)
    groups: dict[tuple[tuple[str, str], ...], list[Record]] = {}
    for record, settings in zip(kept, told_by, strict=True):
        groups.setdefault(tuple((key, settings[key]) for key in keys if key in settings), []).append(record)
    arms = [
        Arm(settings, tuple(sorted(runs, key=lambda run: (run.seed or 0, str(run.folder)))))
        for settings, runs in groups.items()
    ]
    return sorted(arms, key=lambda arm: (arm.optimizer, arm.rate or 0.0, arm.name)), empty


def best_arms(arms: Sequence[Arm]) -> list[Arm]:
    """The best arm of each optimizer, the baseline first; none where losses do not measure the same."""
    best: dict[str, Arm] = {}
    if not_comparable(arms):
        return []
    for arm in sorted((arm for arm in arms if arm.counts), key=_final):
        best.setdefault(arm.optimizer, arm)
    return sorted(best.values(), key=lambda arm: (arm.optimizer != BASELINE, arm.optimizer))


def not_comparable(arms: Sequence[Arm]) -> dict[str, list[str]]:
    """What the arms were trained on, where that differs and losses are not comparable: by name, each arm's value."""
    return differing([arm.runs[0] for arm in arms], MEASURE)


def rates_tried(arms: Sequence[Arm], optimizer: str) -> list[float]:
    """The learning rates at which an optimizer was trained to the end, in order."""
    return sorted({arm.rate for arm in arms if arm.optimizer == optimizer and arm.counts and arm.rate is not None})


def shown_arms(arms: Sequence[Arm]) -> list[Arm]:
    """The arms whose curves are drawn: the best of each optimizer, or of one optimizer the best few."""
    best = best_arms(arms)
    if len(best) > 1:
        return best
    ranked = sorted((arm for arm in arms if arm.final is not None), key=_final)
    return (ranked or list(arms))[:_MOST_CURVES]


def compare(best: Sequence[Arm]) -> list[Comparison]:
    """Every other optimizer's best arm beside the baseline's; none without a baseline or validation."""
    baseline = next((arm for arm in best if arm.optimizer == BASELINE), None)
    if baseline is None or not (curve := baseline.validation()):
        return []
    goal = curve[-1]
    return [
        Comparison(arm, baseline, goal, reach(arm, goal.loss.mean), differing([arm.runs[0], baseline.runs[0]], BUDGET))
        for arm in best
        if arm is not baseline and arm.validation()
    ]


def reach(arm: Arm, target: float) -> Reached | None:
    """Where the mean validation curve of an arm first comes to a loss; None where it does not."""
    mean = [LossPoint(point.step, point.tokens, point.seconds, point.loss.mean) for point in arm.validation()]
    crossing = _crossing(mean, target)
    seeds = [_crossing(run.validation, target) for run in arm.sound]
    return Reached(**vars(crossing), seeds=tuple(filter(None, seeds))) if crossing else None


def step_parts(arm: Arm) -> dict[str, float]:
    """Milliseconds of a training step by part: Muon's phases, the rest of the optimizer's step, all else."""
    runs = arm.sound or arm.runs
    step = _mean(run.step_ms for run in runs)
    if step is None:
        return {}
    optimizer = _mean(run.optimizer_ms for run in runs)
    phases = {phase: _mean(run.phases_ms.get(phase) for run in runs) for phase in PHASES}
    parts = {phase.replace("_", "-"): value for phase, value in phases.items() if value is not None}
    known = sum(parts.values())
    if optimizer is not None:
        parts["rest of the optimizer"] = max(optimizer - known, 0.0)
        known = max(optimizer, known)
    return {**parts, "rest of the step": max(step - known, 0.0)}


def _curve(runs: Sequence[Sequence[LossPoint]]) -> list[CurvePoint]:
    """The runs' losses at the steps that all of them have."""
    by_step = [{point.step: point for point in run} for run in runs]
    steps = sorted(set.intersection(*(set(points) for points in by_step))) if by_step else []
    found = []
    for step in steps:
        points = [run[step] for run in by_step]
        if (loss := Spread.of(point.loss for point in points)) is not None:
            seconds = statistics.fmean(point.seconds for point in points)
            found.append(CurvePoint(step, points[0].tokens, seconds, loss))
    return found


def _smooth(points: Sequence[LossPoint], window: int) -> list[LossPoint]:
    return [
        replace(point, loss=statistics.fmean(other.loss for other in points[max(0, at + 1 - window) : at + 1]))
        for at, point in enumerate(points)
    ]


def _crossing(points: Sequence[LossPoint], target: float) -> Crossing | None:
    before: LossPoint | None = None
    for point in points:
        if point.loss <= target:
            if before is None:
                return Crossing(float(point.step), point.seconds, at_first=True)
            part = (before.loss - target) / (before.loss - point.loss)
            steps = before.step + part * (point.step - before.step)
            seconds = before.seconds + part * (point.seconds - before.seconds)
            return Crossing(steps, seconds, at_first=False)
        if math.isfinite(point.loss):
            before = point
    return None


def _differing_keys(every: Sequence[Mapping[str, str]]) -> list[str]:
    """Keys whose values are not the same in all runs, the optimizer and rates first."""
    keys = dict.fromkeys(key for settings in every for key in settings)
    found = [key for key in keys if key not in _PLACES and len({settings.get(key) for settings in every}) > 1]
    first = ("optimizer", "lr", "muon_lr")
    return sorted(found, key=lambda key: first.index(key) if key in first else len(first))


def _final(arm: Arm) -> float:
    assert arm.final is not None
    return arm.final.mean


def _number(text: str | None) -> float | None:
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _mean(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else None
