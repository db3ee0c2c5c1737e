"""What a report concludes, in Markdown: steps to the baseline's loss and what limits them, or why there are none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_muon.report.arms import Arm, Comparison, display_name, not_comparable, rates_tried
from megatron_muon.report.markdown import code, table

HOW_STEPS_ARE_COUNTED = """\
Steps to a loss: the target is the baseline's final validation loss, the mean of its seeds. The other's validation
losses are averaged over its seeds at each validation; where that curve first comes to the target or below, the step is
taken from the straight line between this validation and the one before. Where that is the first validation, the step is
a bound, "at or before". The ratio is that step by the baseline's last one. Seconds are read off the same line, between
the mean seconds of the seeds at both ends: time in the training loop, validation included, start-up not. A single
seed's own crossing is found likewise."""


def headline(arms: Sequence[Arm], best: Sequence[Arm], compared: Sequence[Comparison]) -> list[str]:
    """A paragraph for each comparison, or a table of what the runs differ in where losses are not comparable."""
    if found := not_comparable(arms):
        return _not_compared("These runs are not compared: they were not trained on the same", arms, found)
    lines = []
    for one in compared:
        if one.differing:
            names = f"{display_name(one.arm.optimizer)} and {display_name(one.baseline.optimizer)}"
            words = f"{names} are not compared: their steps are not of the same size"
            lines += _not_compared(words, [one.arm, one.baseline], one.differing)
        else:
            lines += [_conclusion(one), ""]
    return lines + (_limits(arms, best) if len(best) > 1 else [])


def at_most(bound: bool) -> str:
    """What stands before a number that is a bound."""
    return "at most " if bound else ""


def _conclusion(one: Comparison) -> str:
    name, base = display_name(one.arm.optimizer), display_name(one.baseline.optimizer)
    if one.reached is None or one.steps_ratio is None:
        return (
            f"**{name} did not come to {base}'s final validation loss of {one.target:.4f} in "
            f"{one.arm.runs[0].iterations:,} steps.**"
        )
    if one.reached.at_first and one.steps_ratio >= 1:
        return (
            f"**{name} had come to {base}'s final validation loss of {one.target:.4f} by its first validation, at step "
            f"{one.reached.steps:,.0f} of {base}'s {one.goal.step:,}: that tells nothing; validate more often.**"
        )
    bound = at_most(one.reached.at_first)
    words = (
        f"**{name} comes to {base}'s final validation loss of {one.target:.4f} in {bound}{one.steps_ratio:.2f} of the "
        f"steps**: {'at or before step ' if bound else ''}{one.reached.steps:,.0f} instead of {one.goal.step:,}"
        f"{', its first validation' if bound else ''}"
    )
    if one.seconds_ratio is not None:
        words += f", in {bound}{one.seconds_ratio:.2f} of the time"
        if why := one.other_circumstances:
            words += f" (which says little: {why})"
    if one.baseline_first < one.goal.step:
        words += f". {base} itself first came to it at step {one.baseline_first:,.0f}"
    if (own := one.reached.by_seed) is not None and len(one.arm.sound) > 1:
        low, high = (steps / one.goal.step for steps in (own.low, own.high))
        seeds = one.reached.seeds
        words += (
            f". Each seed by itself: {at_most(any(seed.at_first for seed in seeds))}{low:.2f} to {high:.2f} of the "
            f"steps ({len(seeds)} of {len(one.arm.sound)} seeds)"
        )
    return words + "."


def _limits(arms: Sequence[Arm], best: Sequence[Arm]) -> list[str]:
    """What a reader must know of how fair the comparison is: rates that were not searched, seeds that differ."""
    found = []
    for arm in best:
        rates, name = rates_tried(arms, arm.optimizer), display_name(arm.optimizer)
        if len(rates) < 2:
            found.append(f"{name} has one learning rate here; others may do better")
        elif arm.rate in (rates[0], rates[-1]):
            edge, further = ("least", "smaller") if arm.rate == rates[0] else ("most", "larger")
            found.append(f"{name}'s learning rate is the {edge} of those tried; a {further} one may do better")
    lengths = {arm.optimizer: arm.runs[0].args.get("train_iters") for arm in best}
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{display_name(name)} {steps}" for name, steps in lengths.items())
        found.append(f"Learning rates decay over different numbers of steps ({shown})")
    seeds = {arm.optimizer: [run.seed for run in arm.sound] for arm in best}
    if len(set(map(str, seeds.values()))) > 1:
        each = (f"{display_name(name)} {', '.join(map(str, numbers))}" for name, numbers in seeds.items())
        found.append(f"The seeds differ ({'; '.join(each)}), and with them the samples of training and validation")
    return [f"{'. '.join(found)}.", ""] if found else []


def _not_compared(words: str, arms: Sequence[Arm], found: Mapping[str, Sequence[str]]) -> list[str]:
    rows = [[code(arm.name), *(code(values[place]) for values in found.values())] for place, arm in enumerate(arms)]
    return [f"**{words}.** Give `report` runs that agree in these:", "", *table(["", *found], rows), ""]
