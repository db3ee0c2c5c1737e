"""What may be concluded from arms: the best of each optimizer, the steps to the baseline's loss, and what forbids it.

Losses compare where the data is the same, steps where batch and model are, times where machine and processes are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_muon.tools.report.arms import MEASURE, Arm, at_edges, best_of
from megatron_muon.tools.report.markdown import code, plain, table
from megatron_muon.tools.train.records import LossPoint, Record

_BASELINE = "adam"
"""The optimizer that others are compared with."""

_BUDGET = (
    *("global_batch_size", "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"),
    "num_experts",
)
"""Steps cost the same only where these agree."""

HOW_STEPS_ARE_COUNTED = """\
Steps to a loss: the target is the baseline's final validation loss, the mean of its seeds. The step is where the mean
validation curve of the other's seeds first reaches it, on a straight line between two validations; at the first
validation it is a bound, "at or before". Time is read off the same line: seconds in the training loop."""


class Crossing(NamedTuple):
    """Where a validation curve first reaches a loss: on a line between two validations; at the first, a bound."""

    steps: float
    seconds: float
    is_bound: bool


@dataclass(frozen=True)
class Comparison:
    """An optimizer's best arm beside the baseline's.

    Attributes:
        target: the baseline's final validation loss, mean over seeds, at its step and seconds that follow.
        differing: what makes a step cost something else, by name, with each one's value; nothing is concluded then.
        reached: where the mean curve of the arm reached the target; None where it did not.
        by_seed: where the seeds' own curves reached it, those that did.
        steps_ratio, seconds_ratio: of the baseline's; the latter only where both ran on alike machines.
    """

    arm: Arm
    baseline: Arm
    target: float
    baseline_steps: int
    differing: dict[str, list[str]]
    reached: Crossing | None
    by_seed: list[Crossing]
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


def compare(best: Sequence[Arm]) -> list[Comparison]:
    """Every other optimizer's best arm beside the baseline's; none without a baseline or validation."""
    baseline = next((arm for arm in best if arm.optimizer == _BASELINE), None)
    if baseline is None or not baseline.curve("validation"):
        return []
    return [_compare(arm, baseline) for arm in best if arm is not baseline and arm.curve("validation")]


def _compare(arm: Arm, baseline: Arm) -> Comparison:
    goal, differing = baseline.curve("validation")[-1], _differing([arm.runs[0], baseline.runs[0]], _BUDGET)
    reached = reach(arm.curve("validation"), goal.loss)
    is_timed = goal.seconds and _places(arm.runs) == _places(baseline.runs)
    by_seed = [reach(run.validation, goal.loss) for run in arm.sound]
    return Comparison(
        arm=arm,
        baseline=baseline,
        target=goal.loss,
        baseline_steps=goal.step,
        differing=differing,
        reached=reached,
        by_seed=[crossing for crossing in by_seed if crossing],
        steps_ratio=reached.steps / goal.step if reached and not differing else None,
        seconds_ratio=reached.seconds / goal.seconds if reached and is_timed and not differing else None,
    )


def reach(points: Sequence[LossPoint], target: float) -> Crossing | None:
    """Where a validation curve first reaches a loss; None where it does not."""
    before: LossPoint | None = None
    for point in points:
        if point.loss <= target:
            if before is None:
                return Crossing(float(point.step), point.seconds, is_bound=True)
            part = (before.loss - target) / (before.loss - point.loss)
            steps = before.step + part * (point.step - before.step)
            return Crossing(steps, before.seconds + part * (point.seconds - before.seconds), is_bound=False)
        if math.isfinite(point.loss):
            before = point
    return None


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
    return parts + ([f"- {limit}" for limit in _limits(arms, best)] if len(best) > 1 else [])


def _name(arm: Arm) -> str:
    return plain(arm.optimizer_name)


def _conclusion(one: Comparison) -> str:
    name, base = _name(one.arm), _name(one.baseline)
    goal = f"{base}'s final validation loss of {one.target:.4f}"
    if one.reached is None or one.steps_ratio is None:
        return f"**{name} did not reach {goal} in {one.arm.runs[0].iterations:,} steps.**"
    if one.reached.is_bound and one.steps_ratio >= 1:
        return f"**{name} reached {goal} by its first validation, too late to conclude anything: validate more often.**"
    most, at = ("at most ", "at or before step ") if one.reached.is_bound else ("", "")
    words = f"**{name} reaches {goal} in {most}{one.steps_ratio:.2f} of the steps**: "
    words += f"{at}{one.reached.steps:,.0f} instead of {one.baseline_steps:,}"
    if one.seconds_ratio is not None:
        words += f", in {most}{one.seconds_ratio:.2f} of the time"
    if one.by_seed and len(one.arm.sound) > 1:
        ratios = [crossing.steps / one.baseline_steps for crossing in one.by_seed]
        bound = "at most " if any(crossing.is_bound for crossing in one.by_seed) else ""
        words += f". Each seed by itself: {bound}{min(ratios):.2f} to {max(ratios):.2f} of the steps "
        words += f"({len(ratios)} of {len(one.arm.sound)} seeds)"
    return words + "."


def _limits(arms: Sequence[Arm], best: Sequence[Arm]) -> list[str]:
    """How fair the comparison is: rates that were not searched."""
    found = []
    for arm in best:
        if len({other.rate for other in arms if other.optimizer == arm.optimizer}) < 2:
            found.append(f"{_name(arm)} has one learning rate here; others may do better.")
        found += [f"{plain(note)}." for note in at_edges(arm, arms)]
    return found


def _not_compared(words: str, arms: Sequence[Arm], found: Mapping[str, Sequence[str]]) -> list[str]:
    rows = [[code(arm.name), *(code(values[place]) for values in found.values())] for place, arm in enumerate(arms)]
    return [f"**{words}.** Give `report` runs that agree in these:", table(["", *found], rows)]


def _places(runs: Iterable[Record]) -> set[tuple[object, ...]]:
    """The machines and numbers of processes of runs."""
    return {
        (*map(run.run.get("machine", {}).get, ("processor", "cores")), *map(run.run.get, ("device", "ranks")))
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
