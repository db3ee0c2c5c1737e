"""The page of a report: in Markdown the comparison, the pictures, every arm and what made the figures; and as HTML.

The HTML is one file with the pictures inside: no script, nothing from the network. Text of others
is escaped: no backtick, line break or tag in a folder's name breaks out of its place.
"""

from __future__ import annotations

import base64
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_muon.tools.report import plots
from megatron_muon.tools.report.arms import (
    Arm,
    Comparison,
    at_edges,
    best_arms,
    compare,
    not_comparable,
    ranked,
    reach,
)
from megatron_muon.tools.screen import printable, table
from megatron_muon.tools.train.records import Record

PAGE, HTML = "report.md", "report.html"
LOSSES, RATES = "loss-steps.png", "final-loss-by-rate.png"

_MAX_LABEL_LENGTH, _MAX_CURVES = 100, 6

_FIGURES: dict[str, tuple[str, Callable[[Arm], Any]]] = {
    "learning rate": ("g", lambda arm: arm.rate),
    "seeds": ("", lambda arm: ", ".join(str(run.seed) for run in arm.runs)),
    "steps": (",", lambda arm: max(run.iterations for run in arm.drawn)),
    "tokens": (",", lambda arm: arm.drawn[0].tokens),
    "final loss": (".4f", lambda arm: arm.final),
    "training loss": (".4f", lambda arm: arm.spread("loss_last")),
    "seconds of training": (",.0f", lambda arm: arm.spread("train_seconds")),
    "milliseconds of a step": (",.1f", lambda arm: arm.spread("step_ms")),
    "of these, the optimizer": (",.1f", lambda arm: arm.spread("optimizer_ms")),
    "tokens per second": (",.0f", lambda arm: arm.spread("tokens_per_second")),
    "bytes of optimizer state, all ranks": (",", lambda arm: arm.runs[0].all_state_bytes),
    "peak bytes of a rank": (",", lambda arm: max(run.peak_bytes or 0 for run in arm.runs) or None),
}
"""Figures of an arm, numbers or spreads over its seeds: their format, and where they are from."""

_OF_EVERY_ARM = (
    *("seeds", "steps", "final loss", "training loss", "milliseconds of a step"),
    "bytes of optimizer state, all ranks",
)

_HOW_STEPS_ARE_COUNTED = """\
Steps to a loss: the target is the baseline's final validation loss, the mean of its seeds. The step is where the mean
validation curve of the other's seeds first reaches it, on a straight line between two validations; at the first
validation it is a bound, "at or before". Time is read off the same line: seconds in the training loop."""

_HTML_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>megatron-muon report</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ margin: 0 auto; padding: 1.5rem 1rem; max-width: 70rem; font: 1rem/1.5 sans-serif; overflow-wrap: anywhere; }}
code, pre {{ font: 0.875em/1.5 monospace; white-space: pre-wrap; }}
table {{ display: block; overflow-x: auto; border-collapse: collapse; font-size: 0.9rem; }}
th, td {{ padding: 0.35rem 0.75rem; border-bottom: 1px solid #8886; text-align: left; vertical-align: top; }}
td {{ overflow-wrap: normal; }}
td code {{ display: inline-block; max-width: 24rem; overflow-wrap: anywhere; }}
img {{ max-width: 100%; background: #fff; }}
</style>
</head>
<body>
{body}</body>
</html>
"""


def _cell(label: str, arm: Arm) -> str:
    form, figure = _FIGURES[label]
    value = figure(arm)
    return "-" if value is None else f"{value:{form}}"


class Report:
    """What a report says of arms; `empty` are runs without a step."""

    def __init__(self, arms: Sequence[Arm], empty: Sequence[Record]) -> None:
        self.arms, self.empty = arms, empty
        self.runs = [run for arm in arms for run in arm.runs]
        self.best = best_arms(arms)
        self.compared = compare(self.best)
        self.concluded = [one for one in self.compared if not one.differing]
        shown = self.best if len(self.best) > 1 else ranked(arms)[:_MAX_CURVES]
        self.shown = dict(zip(_labels(shown), shown, strict=True))

    def draw(self, out: Path) -> list[str]:
        """Draws all pictures that the runs have figures for; their names."""
        drawn = {LOSSES: plots.draw_losses(out / LOSSES, self.shown, self.concluded)}
        drawn[RATES] = not not_comparable(self.arms) and plots.draw_rates(out / RATES, self.arms)
        return [name for name, is_drawn in drawn.items() if is_drawn]

    def page(self, pictures: Collection[str]) -> str:
        """The whole page; `pictures` are what `draw` returned."""
        measure = "validation loss" if any(run.validation for run in self.runs) else "training loss"
        parts = [
            f"# {' and '.join(dict.fromkeys(map(_name, self.shown.values())))}",
            (
                f"{len(self.runs)} runs of {len(self.arms)} settings. The final loss is the last"
                f" {measure}. Figures are means ± sample standard deviations of the seeds; bands"
                " and bars span the lowest to the highest."
            ),
            *self._headline(),
        ]
        if len(self.best) > 1:
            parts += ["## Side by side", self._side_by_side(), _HOW_STEPS_ARE_COUNTED]
        picture = f"![loss against optimizer steps]({LOSSES})"
        parts += [
            "## Loss",
            picture if LOSSES in pictures else "No logged loss is a finite number.",
        ]
        if RATES in pictures:
            parts += [
                "## Final loss against learning rate",
                f"![final loss against learning rate]({RATES})",
            ]
        parts += ["## All settings", self._all_arms(), "## How it was made", *self._origin()]
        return "\n\n".join(parts) + "\n"

    def _headline(self) -> list[str]:
        """A paragraph for each comparison, or what the runs differ in where losses are not comparable; its limits."""
        if found := not_comparable(self.arms):
            return _not_compared(
                "These runs are not compared: they were not trained on the same", self.arms, found
            )
        parts = []
        for one in self.compared:
            if one.differing:
                names = f"{_name(one.arm)} and {_name(one.baseline)}"
                words = f"{names} are not compared: their steps are not of the same size"
                parts += _not_compared(words, [one.arm, one.baseline], one.differing)
            else:
                parts.append(_conclusion(one))
        for arm in self.best if len(self.best) > 1 else ():
            if len({other.rate for other in self.arms if other.optimizer == arm.optimizer}) < 2:
                parts.append(f"- {_name(arm)} has one learning rate here; others may do better.")
            parts += [f"- {plain(note)}." for note in at_edges(arm, self.arms)]
        return parts

    def _side_by_side(self) -> str:
        rows = [["settings", *(code(arm.name) for arm in self.best)]]
        rows += [[label, *(_cell(label, arm) for arm in self.best)] for label in _FIGURES]
        if self.concluded:
            baseline, target = self.concluded[0].baseline, self.concluded[0].target
            reached = [(one.arm, one.reached) for one in self.concluded]
            reached.append((baseline, reach(baseline.curve("validation"), target)))
            there = {arm: at for arm, at in reached if at}
            steps = {
                arm: f"{'at or before ' * at.is_bound}{at.steps:,.0f}" for arm, at in there.items()
            }
            rows += [
                ["steps to the baseline's final loss", *(steps.get(arm, "-") for arm in self.best)]
            ]
            for label, name in (("of its steps", "steps_ratio"), ("of its time", "seconds_ratio")):
                ratios = {
                    one.arm: f"{'at most ' * there[one.arm].is_bound}{ratio:.3f}"
                    for one in self.concluded
                    if (ratio := getattr(one, name)) is not None
                }
                rows += [[label, *(ratios.get(arm, "-") for arm in self.best)]]
        head = ["", *map(_name, self.best)]
        return table(
            head, [row for row in rows if set(row[1:]) != {"-"}], numbers=range(1, len(head))
        )

    def _all_arms(self) -> str:
        rows = [
            [
                code(arm.name),
                *(_cell(label, arm) for label in _OF_EVERY_ARM),
                arm.remark(is_best=arm in self.best),
            ]
            for arm in self.arms
        ]
        return table(
            ["settings", *_OF_EVERY_ARM, ""], rows, numbers=range(1, 1 + len(_OF_EVERY_ARM))
        )

    def _origin(self) -> list[str]:
        """Commands, software and machines, and every run."""
        commands = dict.fromkeys(run.run.get("command", "not recorded") for run in self.runs)
        typed = "\n".join(
            f"    {printable(line)}" for each in commands for line in each.splitlines()
        )
        origins = Counter(_origin_of(run.run) for run in self.runs)
        rows = [
            [
                code(str(run.folder)),
                run.outcome,
                plain(str(run.run.get("started", "-"))),
                f"{run.iterations:,}",
            ]
            for run in (*self.runs, *self.empty)
        ]
        return [
            "Commands:",
            typed,
            "\n".join(f"- {runs} runs: {plain(origin)}" for origin, runs in origins.items()),
            table(["folder", "outcome", "started (UTC)", "steps"], rows),
        ]


def _labels(arms: Sequence[Arm]) -> list[str]:
    """Names of arms in pictures: optimizer and rate where these tell them apart, else settings with a number."""
    names = [
        f"{arm.optimizer_name}, lr {arm.rate:g}" if arm.rate is not None else arm.name
        for arm in arms
    ]
    if len(set(names)) < len(arms):
        names = [
            f"{number}: {arm.name[:_MAX_LABEL_LENGTH]}" for number, arm in enumerate(arms, start=1)
        ]
    states = [
        "" if arm.sound else " (diverged)" if arm.diverged else " (not finished)" for arm in arms
    ]
    return [printable(name + state) for name, state in zip(names, states, strict=True)]


def _origin_of(run: Mapping[str, Any]) -> str:
    """With what a run was made and where, from its run.json."""
    if not run:
        return "not recorded"
    software = ", ".join(
        f"{name} {version}" for name, version in (run.get("versions") or {}).items()
    )
    commit = f"commit {run.get('commit')}{', with changes' if run.get('dirty') else ''}"
    machine = "{processor}, {cores} cores, {system}".format_map(run["machine"])
    return f"{commit}; {software}; {machine}; {run['ranks']} processes on {run.get('device')}"


def _name(arm: Arm) -> str:
    return plain(arm.optimizer_name)


def _conclusion(one: Comparison) -> str:
    name, base = _name(one.arm), _name(one.baseline)
    goal = f"{base}'s final validation loss of {one.target:.4f}"
    if one.reached is None or one.steps_ratio is None:
        return f"**{name} did not reach {goal} in {one.arm.runs[0].iterations:,} steps.**"
    if one.reached.is_bound and one.steps_ratio >= 1:
        return (
            f"**{name} reached {goal} by its first validation, too late to conclude anything:"
            " validate more often.**"
        )
    most, at = ("at most ", "at or before step ") if one.reached.is_bound else ("", "")
    words = f"**{name} reaches {goal} in {most}{one.steps_ratio:.2f} of the steps**: "
    words += f"{at}{one.reached.steps:,.0f} instead of {one.baseline_steps:,}"
    if one.seconds_ratio is not None:
        words += f", in {most}{one.seconds_ratio:.2f} of the time"
    if one.by_seed and len(one.arm.sound) > 1:
        ratios = [crossing.steps / one.baseline_steps for crossing in one.by_seed]
        bound = "at most " if any(crossing.is_bound for crossing in one.by_seed) else ""
        words += (
            f". Each seed by itself: {bound}{min(ratios):.2f} to {max(ratios):.2f} of the steps "
        )
        words += f"({len(ratios)} of {len(one.arm.sound)} seeds)"
    return words + "."


def _not_compared(words: str, arms: Sequence[Arm], found: Mapping[str, Sequence[str]]) -> list[str]:
    rows = [
        [code(arm.name), *(code(values[place]) for values in found.values())]
        for place, arm in enumerate(arms)
    ]
    return [f"**{words}.** Give `report` runs that agree in these:", table(["", *found], rows)]


def code(text: str) -> str:
    """A code span, fenced by more backticks than the text has in a row."""
    text = printable(text)
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{space}{text}{space}{fence}"


def plain(text: str) -> str:
    """Text that is no code: marks of Markdown and HTML are escaped."""
    return re.sub(r"[\\`*\[\]<>&]|(?<!\w)_|_(?!\w)", r"\\\g<0>", printable(text))


def html_page(markdown: str, pictures: Mapping[str, bytes]) -> str:
    """The page of a report; `pictures` are PNG files by the name that the Markdown has for them.

    HTML within the Markdown is shown as text. Quotes in text are escaped: only an image's `src="`
    can be one.
    """
    from markdown_it import MarkdownIt

    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(markdown)
    for name, picture in pictures.items():
        body = body.replace(
            f'src="{name}"',
            f'src="data:image/png;base64,{base64.b64encode(picture).decode("ascii")}"',
        )
    return _HTML_PAGE.format(body=body)
