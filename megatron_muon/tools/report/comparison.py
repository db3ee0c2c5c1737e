"""What may be concluded from arms: the best of each optimizer, the steps to the baseline's loss, and what forbids it.

Losses compare where the data is the same, steps where batch and model are, times where machine and load are.
"""

from __future__ import annotations

import math
import os
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import NamedTuple

from megatron_muon.tools.report.arms import Arm, CurvePoint, Spread, best_of, display_name, ranked
from megatron_muon.tools.report.markdown import code, plain, table
from megatron_muon.tools.train.records import LossPoint, Record

_BASELINE = "adam"
"""The optimizer that others are compared with."""

_DATA = ("data_path", "train_data_path", "valid_data_path", "data_args_path", "per_split_data_args_path", "mock_data")
MEASURE = (*_DATA, "split", "seq_length")
"""Losses are comparable only where these agree."""

_BATCH = "tokens a step"
_MODEL = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "num_experts")
_BUDGET = (_BATCH, *_MODEL)
"""Steps cost the same only where these agree."""

_ABSENT = "-"
_OTHER_LOAD_PART = 0.5
"""Loads that differ by this fraction of the cores make times incomparable."""

_MOST_CURVES = 6

HOW_STEPS_ARE_COUNTED = """\
Steps to a loss: the target is the baseline's final validation loss, the mean of its seeds. The other's validation
losses are averaged over its seeds at each validation; where that curve first reaches the target, the step is taken from
the straight line between this validation and the one before. Where that is the first validation, the step is a bound,
"at or before". The ratio is that step divided by the baseline's last. Seconds are read off the same line, between
the mean seconds of the seeds at both ends: time in the training loop, validation included, start-up not. A single
seed's own crossing is found the same way."""


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
        steps_by_seed: where each seed's own curve reached it.
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
    return sorted(best_of(arms, lambda arm: arm.optimizer), key=lambda arm: (arm.optimizer != _BASELINE, arm.optimizer))


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
    baseline = next((arm for arm in best if arm.optimizer == _BASELINE), None)
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


def headline(arms: Sequence[Arm], best: Sequence[Arm], compared: Sequence[Comparison]) -> list[str]:
    """Paragraphs: one for each comparison, or a table of what the runs differ in where losses are not comparable."""
    if found := not_comparable(arms):
        return _not_compared("These runs are not compared: they were not trained on the same", arms, found)
    parts = []
    for one in compared:
        if one.differing:
            words = f"{_name(one.arm)} and {_name(one.baseline)} are not compared: their steps are not of the same size"
            parts += _not_compared(words, [one.arm, one.baseline], one.differing)
        else:
            parts.append(_conclusion(one))
    return parts + (_limits(arms, best) if len(best) > 1 else [])


def at_most(bound: bool | None) -> str:
    """Words before a number that may be a bound."""
    return "at most " if bound else ""


def _name(arm: Arm) -> str:
    return plain(display_name(arm.optimizer))


def _conclusion(one: Comparison) -> str:
    name, base = _name(one.arm), _name(one.baseline)
    goal = f"{base}'s final validation loss of {one.target:.4f}"
    if one.steps is None or one.steps_ratio is None:
        return f"**{name} did not reach {goal} in {one.arm.runs[0].iterations:,} steps.**"
    if one.steps_are_a_bound and one.steps_ratio >= 1:
        return (
            f"**{name} had reached {goal} by its first validation, at step {one.steps:,.0f} of {base}'s "
            f"{one.baseline_steps:,}: this says nothing; validate more often.**"
        )
    bound = at_most(one.steps_are_a_bound)
    at, first = ("at or before step ", ", its first validation") if bound else ("", "")
    words = f"**{name} reaches {goal} in {bound}{one.steps_ratio:.2f} of the steps**: "
    words += f"{at}{one.steps:,.0f} instead of {one.baseline_steps:,}{first}"
    if one.seconds_ratio is not None:
        words += f", in {bound}{one.seconds_ratio:.2f} of the time"
        words += f" (which says little: {one.other_circumstances})" if one.other_circumstances else ""
    if one.baseline_first_there < one.baseline_steps:
        words += f". {base} itself first reached it at step {one.baseline_first_there:,.0f}"
    if (own := one.steps_by_seed) and len(one.arm.sound) > 1:
        low, high = own.low / one.baseline_steps, own.high / one.baseline_steps
        is_bound = any(run.validation[0].loss <= one.target for run in one.arm.sound if run.validation)
        words += f". Each seed by itself: {at_most(is_bound)}{low:.2f} to {high:.2f} of the steps "
        words += f"({own.count} of {len(one.arm.sound)} seeds)"
    return words + "."


def _limits(arms: Sequence[Arm], best: Sequence[Arm]) -> list[str]:
    """How fair the comparison is: rates that were not searched, lengths and seeds that differ."""
    found = []
    for arm in best:
        rates = rates_tried(arms, arm.optimizer)
        if len(rates) < 2:
            found.append(f"{_name(arm)} has one learning rate here; others may do better")
        elif arm.rate in (rates[0], rates[-1]):
            edge, further = ("least", "smaller") if arm.rate == rates[0] else ("most", "larger")
            found.append(f"{_name(arm)}'s learning rate is the {edge} of those tried; a {further} one may do better")
    lengths = [str(arm.runs[0].args.get("train_iters")) for arm in best]
    seeds = [", ".join(str(run.seed) for run in arm.sound) for arm in best]
    for words, values in (
        ("Learning rates decay over different numbers of steps", lengths),
        ("The seeds differ, and with them the samples of training and validation", seeds),
    ):
        if len(set(values)) > 1:
            shown = "; ".join(f"{_name(arm)} {value}" for arm, value in zip(best, values, strict=True))
            found.append(f"{words} ({shown})")
    return [f"{'. '.join(found)}."] if found else []


def _not_compared(words: str, arms: Sequence[Arm], found: Mapping[str, Sequence[str]]) -> list[str]:
    rows = [[code(arm.name), *(code(values[place]) for values in found.values())] for place, arm in enumerate(arms)]
    return [f"**{words}.** Give `report` runs that agree in these:", table(["", *found], rows)]


def _other_circumstances(runs: Sequence[Record], others: Sequence[Record]) -> str | None:
    """In words why times of two sides cannot be compared, as far as run.json tells; None where nothing is known."""
    if _places(runs) != _places(others):
        return "they ran on other machines or numbers of processes"
    if not (loads := load_of(runs)) or not (other_loads := load_of(others)):
        return None
    mean, other_mean = statistics.fmean(loads), statistics.fmean(other_loads)
    cores = next(int(run.run["machine"]["cores"]) for run in runs if run.run.get("machine"))
    if abs(mean - other_mean) < _OTHER_LOAD_PART * cores:
        return None
    return f"the machine's load before them was {mean:.1f} and {other_mean:.1f} on {cores} cores"


def _places(runs: Iterable[Record]) -> set[tuple[object, ...]]:
    """The machines and numbers of processes of runs."""
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
        if len(set(each)) > 1 and (key not in _DATA or len({_from_root(run, key) for run in runs}) > 1)
    }


def _value(run: Record, key: str) -> str:
    """A run's setting as text, from Megatron's arguments, which are complete, else from the flags."""
    if key == _BATCH:
        sizes = [_value(run, name) for name in ("global_batch_size", "seq_length")]
        return f"{int(sizes[0]) * int(sizes[1]):,}" if all(size.isdigit() for size in sizes) else _ABSENT
    text = run.args.get(key) or run.settings.get(key) or _ABSENT
    if text in ("None", "False"):  # Megatron writes str(value)
        return _ABSENT
    return " ".join(re.sub(r"[\[\]'\",]", "", text).split()) if key in _DATA else text


def _from_root(run: Record, key: str) -> str:
    """Data paths from the root: relative ones start from the folder that the run was started in; weights stay."""
    folder = run.run.get("directory", "")
    words = _value(run, key).split(" ")
    return " ".join(
        w if re.fullmatch(r"[\d.]+(e[+-]?\d+)?", w) else os.path.normpath(PurePath(folder, w)) for w in words
    )
