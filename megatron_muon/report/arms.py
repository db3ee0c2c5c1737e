"""What a report compares: arms, which are runs that differ in their seed alone, and the best arm of each optimizer.

Arithmetic only; `report_page` writes the page, `plots` draws.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_muon.errors import UserError
from megatron_muon.runs.comparable import BUDGET, MEASURE, differing, other_circumstances
from megatron_muon.runs.records import PHASES, LossPoint, Record, is_run, read_record
from megatron_muon.sweep.results import Spread

BASELINE = "adam"
"""The optimizer that others are compared with."""

MUONS = ("muon", "adaptive_muon")

_NAMES = {"adam": "AdamW", "muon": "Muon", "adaptive_muon": "AdaptiveMuon", "lion": "Lion", "sgd": "SGD"}
_PLACES = ("seed", "save", "load", "tensorboard_dir", "config", "rank", "local_rank", "data_cache_path")
_MOST_CURVES = 6
_REST_OF_OPTIMIZER, _REST = "rest of the optimizer", "rest of the step"


def display_name(optimizer: str) -> str:
    """An optimizer's name for people; Megatron's adam decouples weight decay."""
    return _NAMES.get(optimizer, optimizer)


@dataclass(frozen=True)
class CurvePoint:
    """A loss at a step over the seeds, and where that was: tokens, and seconds in the mean."""

    step: int
    tokens: int | None
    seconds: float
    loss: Spread


@dataclass(frozen=True)
class Arm:
    """Runs that differ in their seed alone.

    Attributes:
        settings: what tells it from the other arms, key and value.
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
        texts = [args.get("muon_lr") if self.optimizer in MUONS else None, args.get("lr")]
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
        """Its runs that finished and did not diverge: those that means are of."""
        return tuple(run for run in self.runs if run.outcome == "finished" and not run.diverged)

    @property
    def final(self) -> Spread | None:
        """Its last validation loss over the seeds; the training loss where there is no validation."""
        if any(run.validation for run in self.runs):
            return Spread.of(run.validation_last for run in self.sound)
        return Spread.of(run.loss_last for run in self.sound)

    @property
    def counts(self) -> bool:
        """Whether it may stand for its optimizer: all of its runs finished, none diverged."""
        return self.final is not None and len(self.sound) == len(self.runs)

    def train(self, window: int = 1) -> list[CurvePoint]:
        """Training losses over the seeds, each seed's the mean of so many logged steps."""
        return curve([smooth(run.train, window) for run in self.sound])

    def validation(self) -> list[CurvePoint]:
        """Validation losses over the seeds."""
        return curve([run.validation for run in self.sound])


@dataclass(frozen=True)
class Reached:
    """Where an arm came to a loss.

    Attributes:
        steps: on the mean curve of the seeds, between two validations by a straight line.
        seconds: likewise.
        by_seed: steps of each seed by itself, over those that came there.
        seeds: how many did.
        at_first: whether that is the first validation: it came there then or before.
        seeds_at_first: of how many seeds that is so.
    """

    steps: float
    seconds: float
    by_seed: Spread | None
    seeds: int
    at_first: bool = False
    seeds_at_first: int = 0


@dataclass(frozen=True)
class Comparison:
    """An optimizer's best arm beside the baseline's.

    Attributes:
        arm: the best arm.
        baseline: that of the baseline.
        target: the baseline's final validation loss, mean over seeds.
        baseline_steps: steps that it took.
        baseline_seconds: seconds that it took.
        reached: None where the arm did not get there.
        differing: what the two were trained with that makes steps mean another thing, by name, with each one's value;
            nothing is concluded then.
    """

    arm: Arm
    baseline: Arm
    target: float
    baseline_steps: int
    baseline_seconds: float
    reached: Reached | None
    differing: Mapping[str, Sequence[str]]

    @property
    def baseline_first(self) -> float:
        """The step at which the baseline itself first came to the target."""
        found = reach(self.baseline, self.target)
        return found.steps if found else self.baseline_steps

    @property
    def other_circumstances(self) -> str | None:
        """Why times say little, as far as that was recorded."""
        return other_circumstances(self.arm.sound, self.baseline.sound)

    @property
    def steps_ratio(self) -> float | None:
        """Steps to the target by those of the baseline."""
        return self.reached.steps / self.baseline_steps if self.reached and not self.differing else None

    @property
    def seconds_ratio(self) -> float | None:
        """Seconds to the target by those of the baseline."""
        if not self.reached or not self.baseline_seconds or self.differing:
            return None
        return self.reached.seconds / self.baseline_seconds


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
    differing = _differing(kept)
    groups: dict[tuple[tuple[str, str], ...], list[Record]] = {}
    for record in kept:
        settings = _of(record, whole=all(record.settings for record in kept))
        groups.setdefault(tuple((key, settings[key]) for key in differing if key in settings), []).append(record)
    arms = [
        Arm(settings, tuple(sorted(runs, key=lambda run: (run.seed or 0, str(run.folder)))))
        for settings, runs in groups.items()
    ]
    return sorted(arms, key=lambda arm: (arm.optimizer, arm.rate or 0.0, arm.name)), empty


def best_arms(arms: Sequence[Arm]) -> list[Arm]:
    """The best arm of each optimizer, the baseline first; none where losses are not of the same thing."""
    best: dict[str, Arm] = {}
    if not_comparable(arms):
        return []
    for arm in arms:
        if arm.counts and (arm.optimizer not in best or _final(arm) < _final(best[arm.optimizer])):
            best[arm.optimizer] = arm
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
    ranked = sorted((arm for arm in arms if arm.final is not None), key=_final)[:_MOST_CURVES]
    return ranked or list(arms)[:_MOST_CURVES]


def compare(best: Sequence[Arm]) -> list[Comparison]:
    """Every other optimizer's best arm beside the baseline's; none without a baseline or validation."""
    baseline = next((arm for arm in best if arm.optimizer == BASELINE), None)
    curve_of_baseline = baseline.validation() if baseline else []
    if baseline is None or not curve_of_baseline:
        return []
    last = curve_of_baseline[-1]
    return [
        Comparison(
            arm,
            baseline,
            last.loss.mean,
            last.step,
            last.seconds,
            reach(arm, last.loss.mean),
            differing([arm.runs[0], baseline.runs[0]], BUDGET),
        )
        for arm in best
        if arm is not baseline and arm.validation()
    ]


def reach(arm: Arm, target: float) -> Reached | None:
    """Where the mean validation curve of an arm first comes to a loss; None where it does not."""
    points = [(float(point.step), point.seconds, point.loss.mean) for point in arm.validation()]
    crossing = _crossing(points, target)
    if crossing is None:
        return None
    own = [
        found
        for run in arm.sound
        if (found := _crossing([(float(p.step), p.seconds, p.loss) for p in run.validation], target))
    ]
    steps, seconds, at_first = crossing
    return Reached(
        steps, seconds, Spread.of(found[0] for found in own), len(own), at_first, sum(found[2] for found in own)
    )


def step_parts(arm: Arm) -> dict[str, float]:
    """Milliseconds of a training step by part: Muon's phases, the rest of the optimizer's step, all else."""
    runs = arm.sound or arm.runs
    step = _mean(run.step_ms for run in runs)
    if step is None:
        return {}
    optimizer = _mean(run.optimizer_ms for run in runs)
    phases = {phase: _mean(run.phases_ms.get(phase) for run in runs) for phase in PHASES}
    known = {phase.replace("_", "-"): value for phase, value in phases.items() if value is not None}
    within = sum(known.values())
    if optimizer is None:
        return {**known, _REST: max(step - within, 0.0)}
    return {**known, _REST_OF_OPTIMIZER: max(optimizer - within, 0.0), _REST: max(step - max(optimizer, within), 0.0)}


def curve(runs: Sequence[Sequence[LossPoint]]) -> list[CurvePoint]:
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


def smooth(points: Sequence[LossPoint], window: int) -> list[LossPoint]:
    """The same with each loss the mean of the last `window` that were logged."""
    found = []
    for at, point in enumerate(points):
        losses = [other.loss for other in points[max(0, at + 1 - window) : at + 1]]
        found.append(LossPoint(point.step, point.tokens, point.seconds, statistics.fmean(losses)))
    return found


def _crossing(points: Sequence[tuple[float, float, float]], target: float) -> tuple[float, float, bool] | None:
    """Steps and seconds where a curve of (steps, seconds, loss) first comes to a loss, by straight lines.

    The third is whether that is its first point, before which nothing is known.
    """
    before = None
    for steps, seconds, loss in points:
        if loss <= target:
            if before is None:
                return steps, seconds, True
            part = (before[2] - target) / (before[2] - loss)
            return before[0] + part * (steps - before[0]), before[1] + part * (seconds - before[1]), False
        if math.isfinite(loss):
            before = (steps, seconds, loss)
    return None


def _of(record: Record, *, whole: bool) -> Mapping[str, str]:
    """What a run is told by: its flags, or Megatron's arguments where some run has no file of its flags."""
    return record.settings if whole else record.args


def _differing(records: Sequence[Record]) -> list[str]:
    """Settings that are not the same in all runs, the optimizer and rates first."""
    whole = all(record.settings for record in records)
    every = [_of(record, whole=whole) for record in records]
    keys = dict.fromkeys(key for settings in every for key in settings)
    differing = [key for key in keys if key not in _PLACES and len({settings.get(key) for settings in every}) > 1]
    first = ("optimizer", "lr", "muon_lr")
    return [key for key in first if key in differing] + [key for key in differing if key not in first]


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
