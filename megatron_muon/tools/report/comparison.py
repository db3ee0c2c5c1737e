"""What may be concluded from arms: the best of each optimizer, the steps to the baseline's loss, and what forbids it.

Losses compare where the data is the same, steps where batch and model are, times where machine and load are.
"""

from __future__ import annotations

import math
import os
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import NamedTuple

from megatron_muon.tools.report.arms import Arm, CurvePoint, Spread, best_of, ranked
from megatron_muon.tools.train.records import LossPoint, Record

BASELINE = "adam"
"""The optimizer that others are compared with."""

_DATA = ("data_path", "train_data_path", "valid_data_path", "data_args_path", "per_split_data_args_path", "mock_data")
MEASURE = (*_DATA, "split", "seq_length")
"""Where these differ, losses differ in what they measure."""

_BATCH = "tokens a step"
_MODEL = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "num_experts")
_BUDGET = (_BATCH, *_MODEL)
"""Where these differ, steps differ in what they cost."""

_ABSENT = "-"
_NUMBER = re.compile(r"[\d.]+(e[+-]?\d+)?")
_OTHER_LOAD_PART = 0.5
"""Loads that differ by this fraction of the cores make times incomparable."""

_MOST_CURVES = 6


class Crossing(NamedTuple):
    """Where a validation curve first reaches a loss: on a line between two validations; at the first, a bound."""

    steps: float
    seconds: float
    at_first: bool


@dataclass(frozen=True)
class Comparison:
    """An optimizer's best arm beside the baseline's; the fields after these two are report.json's.

    Attributes:
        target: the baseline's final validation loss, mean over seeds, at its step and seconds that follow.
        differing: what makes a step cost something else, by name, with each one's value; nothing is concluded then.
        baseline_first_there: the step at which the baseline itself first reached the target.
        steps: where the mean curve of the arm reached the target; None where it did not.
        steps_by_seed: of each seed by itself that came there.
    """

    arm: Arm
    baseline: Arm
    target: float
    baseline_steps: int
    baseline_seconds: float
    differing: dict[str, list[str]]
    other_circumstances: str | None
    baseline_first_there: float
    steps: float | None
    steps_are_a_bound: bool | None
    seconds: float | None
    steps_by_seed: Spread | None
    steps_ratio: float | None
    seconds_ratio: float | None


def not_comparable(arms: Sequence[Arm]) -> dict[str, list[str]]:
    """What the arms were trained on, where that differs and losses are not comparable: by name, each arm's value."""
    return _differing([arm.runs[0] for arm in arms], MEASURE)


def best_arms(arms: Sequence[Arm]) -> list[Arm]:
    """The best arm of each optimizer, the baseline first; none where losses do not measure the same."""
    if not_comparable(arms):
        return []
    return sorted(best_of(arms, lambda arm: arm.optimizer), key=lambda arm: (arm.optimizer != BASELINE, arm.optimizer))


def shown_arms(arms: Sequence[Arm]) -> list[Arm]:
    """The arms whose curves are drawn: the best of each optimizer; else the best few, then those without final loss."""
    best = best_arms(arms)
    finished = ranked(arms)
    return best if len(best) > 1 else [*finished, *(arm for arm in arms if arm not in finished)][:_MOST_CURVES]


def rates_tried(arms: Sequence[Arm], optimizer: str) -> list[float]:
    """The learning rates at which an optimizer was trained to the end, in order."""
    return sorted({arm.rate for arm in arms if arm.optimizer == optimizer and arm.counts and arm.rate is not None})


def compare(best: Sequence[Arm]) -> list[Comparison]:
    """Every other optimizer's best arm beside the baseline's; none without a baseline or validation."""
    baseline = next((arm for arm in best if arm.optimizer == BASELINE), None)
    if baseline is None or not (curve := baseline.validation()):
        return []
    return [_compare(arm, baseline, curve) for arm in best if arm is not baseline and arm.validation()]


def _compare(arm: Arm, baseline: Arm, curve: Sequence[CurvePoint]) -> Comparison:
    goal, differing = curve[-1], _differing([arm.runs[0], baseline.runs[0]], _BUDGET)
    there, reached = reach(curve, goal.loss), reach(arm.validation(), goal.loss)
    steps, seconds, at_first = reached or (None, None, None)
    seeds = (reach(run.validation, goal.loss) for run in arm.sound)
    return Comparison(
        arm=arm,
        baseline=baseline,
        target=goal.loss,
        baseline_steps=goal.step,
        baseline_seconds=goal.seconds,
        differing=differing,
        other_circumstances=_other_circumstances(arm.sound, baseline.sound),
        baseline_first_there=there.steps if there else goal.step,
        steps=steps,
        steps_are_a_bound=at_first,
        seconds=seconds,
        steps_by_seed=Spread.of(seed.steps for seed in seeds if seed) if reached else None,
        steps_ratio=steps / goal.step if steps is not None and not differing else None,
        seconds_ratio=seconds / goal.seconds if seconds is not None and goal.seconds and not differing else None,
    )


def reach(points: Sequence[LossPoint], target: float) -> Crossing | None:
    """Where a validation curve first reaches a loss; None where it does not."""
    before: LossPoint | None = None
    for point in points:
        if point.loss <= target:
            if before is None:
                return Crossing(float(point.step), point.seconds, at_first=True)
            part = (before.loss - target) / (before.loss - point.loss)
            steps = before.step + part * (point.step - before.step)
            return Crossing(steps, before.seconds + part * (point.seconds - before.seconds), at_first=False)
        if math.isfinite(point.loss):
            before = point
    return None


def load_of(runs: Iterable[Record]) -> list[float]:
    """The machine's load before each run, where run.json has it."""
    return [load for run in runs if (load := run.run.get("machine", {}).get("load_average_before")) is not None]


def _other_circumstances(runs: Sequence[Record], others: Sequence[Record]) -> str | None:
    """In words why times of two sides cannot be compared, as far as run.json tells; None where nothing is known."""
    if _places(runs) != _places(others):
        return "they ran on other machines or numbers of processes"
    if not (loads := load_of(runs)) or not (other_loads := load_of(others)):
        return None
    mean, other_mean, cores = statistics.fmean(loads), statistics.fmean(other_loads), _cores(runs)
    if abs(mean - other_mean) < _OTHER_LOAD_PART * cores:
        return None
    return f"the machine's load before them was {mean:.1f} and {other_mean:.1f} on {cores} cores"


def _cores(runs: Iterable[Record]) -> int:
    return next(int(run.run["machine"]["cores"]) for run in runs if run.run.get("machine"))


def _places(runs: Iterable[Record]) -> set[tuple[object, ...]]:
    """Where runs ran."""
    return {
        (*map(run.run.get("machine", {}).get, ("processor", "cores")), *map(run.run.get, ("device", "nodes", "ranks")))
        for run in runs
    }


def _differing(runs: Sequence[Record], keys: Iterable[str]) -> dict[str, list[str]]:
    """Which of the keys are not the same in all runs, and each run's value."""
    values = {key: [_value(run, key) for run in runs] for key in keys}
    return {
        key: each
        for key, each in values.items()
        if len(set(each)) > 1 and (key not in _DATA or len({_resolved(run, key) for run in runs}) > 1)
    }


def _value(run: Record, key: str) -> str:
    """A run's setting as text, from Megatron's arguments, which are complete, else from the flags."""
    if key == _BATCH:
        sizes = [_value(run, name) for name in ("global_batch_size", "seq_length")]
        return f"{int(sizes[0]) * int(sizes[1]):,}" if all(size.isdigit() for size in sizes) else _ABSENT
    text = run.args.get(key) or run.settings.get(key) or _ABSENT
    if text in ("None", "False"):  # Megatron writes str(value)
        return _ABSENT
    return " ".join(text.translate(str.maketrans("", "", "[]'\",")).split()) if key in _DATA else text


def _resolved(run: Record, key: str) -> str:
    """A data path from the root: relative ones start from the folder that the run was started in."""
    words = _value(run, key).split(" ")
    folder = run.run.get("directory", "")
    return " ".join(word if _NUMBER.fullmatch(word) else os.path.normpath(PurePath(folder, word)) for word in words)
