"""The pictures of a report, as PNG files. Lines differ in dash and marker, so none needs its colour.

A function that returns False has drawn nothing, for want of figures.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from megatron_muon.tools.report.arms import Arm, CurvePoint, display_name
from megatron_muon.tools.report.comparison import Comparison

_COLOURS = ("#1f4e99", "#c8511b", "#2d7d46", "#7b3fa0", "#8a6d1d", "#444444")
_DASHES = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (6, 2, 1, 2)), (0, (9, 3)), (0, (3, 1, 1, 1, 1, 1)))
_MARKERS = "os^DvPX"
_LOOK = {
    "font.size": 11,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "text.parse_math": False,  # a dollar sign is one
    "legend.fontsize": 10,
    "legend.frameon": False,
}
_MARKERS_ON_A_LINE = 9
_LINE_INCHES, _LETTER_INCHES = 0.22, 0.085
_MAX_LEGEND_LINE = 46
"""Letters after which a name in the legend continues on the next line."""
_LEAST_LOSS_RANGE = 0.2
_LOSS_TOP = 0.05
"""Loss axes begin at the highest mean loss after this part of the run: before, every curve falls alike."""

AXES = {
    "steps": ("optimizer steps", "step"),
    "tokens": ("tokens trained on", "tokens"),
    "seconds": ("seconds in the training loop", "seconds"),
}
"""What losses are drawn over: its label, and the attribute of a point."""


class Curves(NamedTuple):
    """Losses of an arm over the seeds, its name in the legend, and whether its runs finished."""

    label: str
    train: Sequence[CurvePoint]
    validation: Sequence[CurvePoint]
    finished: bool


def draw_losses(file: Path, arms: Sequence[Curves], axis: str, compared: Sequence[Comparison]) -> bool:
    """Training and validation loss over one of `AXES`; the target of the first comparison is marked."""
    label, across = AXES[axis]
    sides = {"training loss": [arm.train for arm in arms], "validation loss": [arm.validation for arm in arms]}
    known = {
        name: [[point for point in curve if getattr(point, across) is not None] for curve in curves]
        for name, curves in sides.items()
    }
    shown = {name: curves for name, curves in known.items() if any(curves)}
    if not shown:
        return False
    with _figure(file, panels=len(shown), width=6.0, height=4.4) as panels:
        for panel, (name, curves) in zip(panels, shown.items(), strict=True):
            for number, (arm, points) in enumerate(zip(arms, curves, strict=True)):
                if points:
                    _draw_curve(panel, points, across, number, arm.label)
            if name == "validation loss" and compared:
                _mark_target(panel, compared[0], axis)
            panel.set_xlabel(label)
            panel.set_ylabel(f"{name} (nats per token)")
            _limit(panel, arms, curves)
            panel.xaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 5, 10], integer=axis != "seconds"))
            panel.xaxis.set_major_formatter(EngFormatter(sep=""))
    return True


def draw_rates(file: Path, arms: Sequence[Arm], *, final: str) -> bool:
    """Final loss, named `final`, against learning rate: a line for each optimizer through the best of each rate."""
    shown = [arm for arm in arms if arm.rate and (arm.final or arm.diverged)]
    rates = sorted({arm.rate for arm in shown if arm.rate})
    if len(rates) < 2 or not any(arm.final for arm in shown):
        return False
    with _figure(file, panels=1, width=7.0, height=4.4) as (panel,):
        panel.set_xscale("log")
        optimizers = list(dict.fromkeys(arm.optimizer for arm in shown))
        for number, optimizer in enumerate(optimizers):
            best: dict[float, float] = {}
            for arm in (arm for arm in shown if arm.optimizer == optimizer):
                if loss := arm.final:
                    bars = {"yerr": [[loss.mean - loss.low], [loss.high - loss.mean]], "capsize": 4}
                    look = _style(number) | {"linestyle": "none"} | (bars if loss.count > 1 else {})
                    panel.errorbar(arm.rate, loss.mean, **look)
                    best[arm.rate or 0.0] = min(loss.mean, best.get(arm.rate or 0.0, math.inf))
            if best:
                panel.plot(*zip(*sorted(best.items()), strict=True), label=display_name(optimizer), **_style(number))
        _mark_diverged(panel, [[arm for arm in shown if arm.optimizer == optimizer] for optimizer in optimizers])
        panel.set_xticks(rates, [f"{rate:g}" for rate in rates], rotation=45 if len(rates) > 5 else 0)
        panel.minorticks_off()
        panel.set_xlabel("peak learning rate of the matrices (logarithmic)")
        panel.set_ylabel(f"final {final} (nats per token)")
    return True


def _style(number: int) -> dict[str, Any]:
    """The look of a line: with seven markers and six colours and dashes, no two of 42 are alike."""
    colour, dash = _COLOURS[number % len(_COLOURS)], _DASHES[number % len(_DASHES)]
    marker = _MARKERS[number % len(_MARKERS)]
    return {"color": colour, "linestyle": dash, "marker": marker, "markersize": 6, "linewidth": 1.8}


def _draw_curve(panel: Any, points: Sequence[CurvePoint], across: str, number: int, label: str) -> None:
    style = _style(number)
    every = max(1, math.ceil(len(points) / _MARKERS_ON_A_LINE))
    first = min((number * every) // 3, len(points) - 1)
    where, loss, low, high = ([getattr(point, name) for point in points] for name in (across, "loss", "low", "high"))
    panel.plot(where, loss, label=label, markevery=(first, every), **style)
    panel.fill_between(where, low, high, color=style["color"], alpha=0.18, linewidth=0)


def _mark_diverged(panel: Any, by_optimizer: Sequence[Sequence[Arm]]) -> None:
    """Crosses above all points, a row for each optimizer in its colour, with how many of how many runs diverged."""
    low, high = panel.get_ylim()
    row, rows = (high - low) * 0.09, 0
    for number, arms in enumerate(by_optimizer):
        rates = {arm.rate or 0.0 for arm in arms if arm.diverged}
        height = high + row * (rows + 0.5)
        cross = {"marker": "x", "markersize": 8, "markeredgewidth": 2, "color": _style(number)["color"]}
        label = f"{display_name(arms[0].optimizer)} diverged (runs)"
        for rate in rates:
            alike = [arm for arm in arms if arm.rate == rate]
            panel.plot([rate], [height], linestyle="none", label=label, **cross)
            words = f"{sum(arm.diverged for arm in alike)}/{sum(len(arm.runs) for arm in alike)}"
            beside = {"xytext": (7, 0), "textcoords": "offset points", "va": "center", "fontsize": 9}
            panel.annotate(words, (rate, height), **beside)
        rows += bool(rates)
    if rows:
        panel.set_yticks([tick for tick in panel.get_yticks() if low <= tick <= high])
        panel.set_ylim(low, high + row * rows)
        panel.axhline(high, color="0.5", linewidth=0.8)


def _mark_target(panel: Any, compared: Comparison, axis: str) -> None:
    """The baseline's final loss, and where the other reaches it."""
    words = f"final loss of {display_name(compared.baseline.optimizer)}: {compared.target:.3f}"
    panel.axhline(compared.target, color="0.35", linewidth=1.0, linestyle=(0, (2, 2)), zorder=1, label=words)
    at = {"steps": compared.steps, "seconds": compared.seconds}.get(axis)
    if at is not None:
        bound = "or before " if compared.steps_are_a_bound else ""
        words = f"{display_name(compared.arm.optimizer)} there at {bound}{axis.removesuffix('s')} {at:,.0f}"
        star = {"marker": "*", "markersize": 15, "color": "black", "linestyle": "none", "zorder": 5}
        panel.plot([at], [compared.target], label=words, **star)


def _limit(panel: Any, arms: Sequence[Curves], curves: Sequence[Sequence[CurvePoint]]) -> None:
    """Cuts off the beginning, where all losses are high, and what rises above the runs that finished."""
    low = min(point.low for points in curves for point in points)
    begun = _LOSS_TOP * max(points[-1].step for points in curves if points)
    finished = [points for arm, points in zip(arms, curves, strict=True) if arm.finished and points]
    of = finished or [points for points in curves if points]
    high = max(point.high for points in of for point in points if point.step >= begun or point is points[-1])
    room = 0.05 * max(high - low, _LEAST_LOSS_RANGE)
    panel.set_ylim(low - room, high + room)


@contextmanager
def _figure(file: Path, *, panels: int, width: float, height: float) -> Iterator[Sequence[Any]]:
    """Panels side by side, each of a width and height in inches; then one legend above all, and the file is written.

    The legend covers no curve: the figure grows by its lines.
    """
    with matplotlib.rc_context(_LOOK):
        figure = Figure(figsize=(width * panels, height), dpi=110, layout="constrained")
        axes = [figure.add_subplot(1, panels, place) for place in range(1, panels + 1)]
        yield axes
        named = [pair for panel in axes for pair in zip(*panel.get_legend_handles_labels(), strict=True)]
        handles = {textwrap.fill(label, _MAX_LEGEND_LINE): handle for handle, label in named}
        letters = max(len(line) for label in handles for line in label.splitlines())
        columns = max(1, min(len(handles), int(figure.get_figwidth() / (0.8 + _LETTER_INCHES * letters))))
        lines = -(-len(handles) // columns) * max(label.count("\n") + 1 for label in handles)
        figure.set_figheight(figure.get_figheight() + _LINE_INCHES * lines)
        figure.legend(handles.values(), handles, loc="outside upper center", ncols=columns)
        figure.savefig(file, metadata={"Software": None})
