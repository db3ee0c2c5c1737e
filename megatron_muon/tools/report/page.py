"""The page of a report, in Markdown: the comparison, the pictures, every arm, and what made the figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_muon.tools.report import comparison, plots
from megatron_muon.tools.report.arms import Arm, ranked
from megatron_muon.tools.report.markdown import code, plain, table
from megatron_muon.tools.screen import printable
from megatron_muon.tools.train.records import Record

PAGE, HTML = "report.md", "report.html"
LOSSES, RATES = "loss-steps.png", "final-loss-by-rate.png"

_MAX_LABEL_LENGTH = 100

_MOST_CURVES = 6


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

_OF_EVERY_ARM = (*("seeds", "steps", "final loss", "training loss", "milliseconds of a step"),
                 "bytes of optimizer state, all ranks")  # fmt: skip


def _cell(label: str, arm: Arm) -> str:
    form, figure = _FIGURES[label]
    value = figure(arm)
    return "-" if value is None else f"{value:{form}}"


class Report:
    """What a report says of arms; `empty` are runs without a step."""

    def __init__(self, arms: Sequence[Arm], empty: Sequence[Record]) -> None:
        self.arms, self.empty = arms, empty
        self.runs = [run for arm in arms for run in arm.runs]
        self.best = comparison.best_arms(arms)
        self.compared = comparison.compare(self.best)
        self.concluded = [one for one in self.compared if not one.differing]
        shown = self.best if len(self.best) > 1 else ranked(arms)[:_MOST_CURVES]
        self.shown = dict(zip(_labels(shown), shown, strict=True))

    def draw(self, out: Path) -> list[str]:
        """Draws all pictures that the runs have figures for; their names."""
        drawn = {LOSSES: plots.draw_losses(out / LOSSES, self.shown, self.concluded)}
        drawn[RATES] = not comparison.not_comparable(self.arms) and plots.draw_rates(out / RATES, self.arms)
        return [name for name, is_drawn in drawn.items() if is_drawn]

    def page(self, pictures: Collection[str]) -> str:
        """The whole page; `pictures` are what `draw` returned."""
        measure = "validation loss" if any(run.validation for run in self.runs) else "training loss"
        parts = [
            f"# {' and '.join(dict.fromkeys(plain(arm.optimizer_name) for arm in self.shown.values()))}",
            f"{len(self.runs)} runs of {len(self.arms)} settings. The final loss is the last {measure}. Figures are "
            "means ± sample standard deviations of the seeds; bands and bars span the lowest to the highest.",
            *comparison.headline(self.arms, self.best, self.compared),
        ]
        if len(self.best) > 1:
            parts += ["## Side by side", self._side_by_side(), comparison.HOW_STEPS_ARE_COUNTED]
        parts += ["## Loss"]
        if LOSSES in pictures:
            parts += [f"![loss against optimizer steps]({LOSSES})"]
        else:
            parts += ["No logged loss is a finite number."]
        if RATES in pictures:
            parts += ["## Final loss against learning rate", f"![final loss against learning rate]({RATES})"]
        parts += ["## All settings", self._all_arms(), "## How it was made", *self._origin()]
        return "\n\n".join(parts) + "\n"

    def _side_by_side(self) -> str:
        rows = [["settings", *(code(arm.name) for arm in self.best)]]
        rows += [[label, *(_cell(label, arm) for arm in self.best)] for label in _FIGURES]
        if self.concluded:
            target, found = self.concluded[0].target, {one.arm: one for one in self.concluded}
            there = {
                arm: comparison.reach(arm.curve("validation"), target) for arm in (self.concluded[0].baseline, *found)
            }
            steps = {arm: f"{'at or before ' * at.is_bound}{at.steps:,.0f}" if at else "-" for arm, at in there.items()}
            rows += [["steps to the baseline's final loss", *(steps.get(arm, "-") for arm in self.best)]]
            for label, name in (("of its steps", "steps_ratio"), ("of its time", "seconds_ratio")):
                ratios = [getattr(found.get(arm), name, None) for arm in self.best]
                bounds = ["at most " if steps.get(arm, "").startswith("at") else "" for arm in self.best]
                cells = zip(bounds, ratios, strict=True)
                rows += [[label, *("-" if ratio is None else f"{bound}{ratio:.3f}" for bound, ratio in cells)]]
        head = ["", *(plain(arm.optimizer_name) for arm in self.best)]
        return table(head, [row for row in rows if set(row[1:]) != {"-"}], numbers=range(1, len(head)))

    def _all_arms(self) -> str:
        rows = [
            [code(arm.name), *(_cell(label, arm) for label in _OF_EVERY_ARM), arm.remark(is_best=arm in self.best)]
            for arm in self.arms
        ]
        return table(["settings", *_OF_EVERY_ARM, ""], rows, numbers=range(1, 1 + len(_OF_EVERY_ARM)))

    def _origin(self) -> list[str]:
        """Commands, software and machines, and every run."""
        commands = dict.fromkeys(run.run.get("command", "not recorded") for run in self.runs)
        typed = "\n".join(f"    {printable(line)}" for each in commands for line in each.splitlines())
        origins = Counter(_origin_of(run.run) for run in self.runs)
        rows = [
            [code(str(run.folder)), run.outcome, plain(str(run.run.get("started", "-"))), f"{run.iterations:,}"]
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
    names = [f"{arm.optimizer_name}, lr {arm.rate:g}" if arm.rate is not None else arm.name for arm in arms]
    if len(set(names)) < len(arms):
        names = [f"{number}: {arm.name[:_MAX_LABEL_LENGTH]}" for number, arm in enumerate(arms, start=1)]
    states = ["" if arm.sound else " (diverged)" if arm.diverged else " (not finished)" for arm in arms]
    return [printable(name + state) for name, state in zip(names, states, strict=True)]


def _origin_of(run: Mapping[str, Any]) -> str:
    """With what a run was made and where, from its run.json."""
    if not run:
        return "not recorded"
    software = ", ".join(f"{name} {version}" for name, version in (run.get("versions") or {}).items())
    commit = f"commit {run.get('commit')}{', with changes' if run.get('dirty') else ''}"
    machine = "{processor}, {cores} cores, {system}".format_map(run["machine"])
    return f"{commit}; {software}; {machine}; {run['ranks']} processes on {run.get('device')}"
