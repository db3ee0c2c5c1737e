"""What a report concludes, in Markdown: steps to the baseline's loss and what limits them, or why there are none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_muon.tools.report.arms import Arm, display_name
from megatron_muon.tools.report.comparison import Comparison, not_comparable, rates_tried
from megatron_muon.tools.report.markdown import code, plain, table

HOW_STEPS_ARE_COUNTED = """\
Steps to a loss: the target is the baseline's final validation loss, the mean of its seeds. The other's validation
losses are averaged over its seeds at each validation; where that curve first reaches the target, the step is taken from
the straight line between this validation and the one before. Where that is the first validation, the step is a bound,
"at or before". The ratio is that step divided by the baseline's last. Seconds are read off the same line, between
the mean seconds of the seeds at both ends: time in the training loop, validation included, start-up not. A single
seed's own crossing is found the same way."""


def headline(arms: Sequence[Arm], best: Sequence[Arm], compared: Sequence[Comparison]) -> list[str]:
    """Paragraphs: one for each comparison, or a table of what the runs differ in where losses are not comparable."""
    if found := not_comparable(arms):
        return _not_compared("These runs are not compared: they were not trained on the same", arms, found)
    parts = []
    for one in compared:
        if one.differing:
            names = f"{_name(one.arm)} and {_name(one.baseline)}"
            words = f"{names} are not compared: their steps are not of the same size"
            parts += _not_compared(words, [one.arm, one.baseline], one.differing)
        else:
            parts.append(_conclusion(one))
    return parts + (_limits(arms, best) if len(best) > 1 else [])


def _name(arm: Arm) -> str:
    return plain(display_name(arm.optimizer))


def at_most(bound: bool | None) -> str:
    """Words before a number that may be a bound."""
    return "at most " if bound else ""


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
    words = (
        f"**{name} reaches {goal} in {bound}{one.steps_ratio:.2f} of the steps**: "
        f"{'at or before step ' if bound else ''}{one.steps:,.0f} instead of {one.baseline_steps:,}"
        f"{', its first validation' if bound else ''}"
    )
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
    """What a reader must know of how fair the comparison is: rates that were not searched, seeds that differ."""
    found = []
    for arm in best:
        rates, name = rates_tried(arms, arm.optimizer), _name(arm)
        if len(rates) < 2:
            found.append(f"{name} has one learning rate here; others may do better")
        elif arm.rate in (rates[0], rates[-1]):
            edge, further = ("least", "smaller") if arm.rate == rates[0] else ("most", "larger")
            found.append(f"{name}'s learning rate is the {edge} of those tried; a {further} one may do better")
    lengths = {_name(arm): str(arm.runs[0].args.get("train_iters")) for arm in best}
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{name} {steps}" for name, steps in lengths.items())
        found.append(f"Learning rates decay over different numbers of steps ({shown})")
    seeds = {_name(arm): ", ".join(str(run.seed) for run in arm.sound) for arm in best}
    if len(set(seeds.values())) > 1:
        shown = "; ".join(f"{name} {numbers}" for name, numbers in seeds.items())
        found.append(f"The seeds differ ({shown}), and with them the samples of training and validation")
    return [f"{'. '.join(found)}."] if found else []


def _not_compared(words: str, arms: Sequence[Arm], found: Mapping[str, Sequence[str]]) -> list[str]:
    rows = [[code(arm.name), *(code(values[place]) for values in found.values())] for place, arm in enumerate(arms)]
    return [f"**{words}.** Give `report` runs that agree in these:", table(["", *found], rows)]
