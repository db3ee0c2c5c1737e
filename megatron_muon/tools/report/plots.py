"""The pictures of a report, as PNG files. Lines differ in dash and marker, bars in hatching, so none needs its colour.

Nothing here computes what is shown, see `arms`. A function that returns False has drawn nothing, for want of figures.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from megatron_muon.tools.report.arms import Arm, CurvePoint, Spread, display_name
from megatron_muon.tools.report.comparison import Comparison

_COLOURS = ("#1f4e99", "#c8511b", "#2d7d46", "#7b3fa0", "#8a6d1d", "#444444")
_DASHES = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (6, 2, 1, 2)), (0, (9, 3)), (0, (3, 1, 1, 1, 1, 1)))
_MARKERS = "os^DvPX"
_FILLS = ("#dce8f7", "#f6d2bd", "#c5e3cd", "#decbe9", "#efe2b0", "#c9c9c9", "#f2b8c6")
"""From light to dark, so that prints without colour tell them apart too."""
_HATCHES = ("", "///", "...", "xxx", "\\\\\\", "++", "ooo")
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
    "hatch.linewidth": 0.5,
}
_MARKERS_ON_A_LINE = 9
_LEAST_HEIGHT = 0.2
"""Of a loss axis's part that its room is a share of."""
_LINE, _WORDS, _LETTER = 0.22, 46, 0.085
"""A legend's line in inches, the most letters of one, and a letter's width in inches."""
_NAME = 30
"""Letters of a line of a bar's name."""
_MOST_PANELS = 3
"""Panels side by side; further ones stand below."""
_LOSS_TOP = 0.05
"""Loss axes begin at the highest mean loss after this part of the run: before, every curve falls alike."""

Bars = Mapping[str, Mapping[str, float]]

AXES = {
    "steps": ("optimizer steps", "step"),
    "tokens": ("tokens trained on", "tokens"),
    "seconds": ("seconds in the training loop", "seconds"),
}
"""What losses are drawn over: its label, and the attribute of a point."""


class Curves(NamedTuple):
    """What is drawn of an arm over the seeds, what the legend calls it, and whether it is of runs that finished."""

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
            _limit(panel, arms, curves, whole=axis != "seconds")
            panel.xaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 5, 10], integer=axis != "seconds"))
            panel.xaxis.set_major_formatter(EngFormatter(sep=""))
        _add_legend(panels)
    return True


def draw_rates(file: Path, arms: Sequence[Arm], *, final: str) -> bool:
    """Final loss, named `final`, against learning rate: a line for each optimizer through the best of each rate."""
    shown = [arm for arm in arms if arm.rate and (arm.final or arm.diverged)]
    rates = sorted({arm.rate for arm in shown if arm.rate})
    if len(rates) < 2 or not any(arm.final for arm in shown):
        return False
    with _figure(file, panels=1, width=7.0, height=4.4) as (panel,):
        panel.set_xscale("log")
        diverged: dict[int, tuple[str, dict[float, tuple[int, int]]]] = {}
        for number, optimizer in enumerate(dict.fromkeys(arm.optimizer for arm in shown)):
            name, best = display_name(optimizer), dict[float, float]()
            counts: dict[float, tuple[int, int]] = {}
            for arm in (arm for arm in shown if arm.optimizer == optimizer):
                rate = arm.rate or math.nan
                if final_loss := arm.final:
                    _draw_point(panel, rate, final_loss, number)
                    best[rate] = min(final_loss.mean, best.get(rate, math.inf))
                some, of_all = counts.get(rate, (0, 0))
                counts[rate] = some + arm.diverged, of_all + len(arm.runs)
            if best:
                panel.plot(*zip(*sorted(best.items()), strict=True), label=name, **_style(number))
            if crossed := {rate: pair for rate, pair in counts.items() if pair[0]}:
                diverged[number] = name, crossed
        if diverged:
            _mark_diverged(panel, diverged)
        _label_rates(panel, rates, final)
        _add_legend([panel])
    return True


def draw_bars(file: Path, panels: Mapping[str, Bars], *, width: float, unit: float = 1.0) -> bool:
    """Panels by the label of their axis: bars by name, the same in each; a bar is a stack of its parts in `unit`."""
    panels = {label: bars for label, bars in panels.items() if any(bars.values())}
    if not panels:
        return False
    names = [textwrap.fill(name, _NAME) for name in next(iter(panels.values()))]
    bar_height = max(0.62, 0.22 * max(name.count("\n") + 2 for name in names))
    columns = int(width / 2.2)  # of a legend
    lines = max(-(-len(_kinds(bars)) // columns) for bars in panels.values())
    height = 1.0 + _LINE * lines + bar_height * len(names)
    with _figure(file, panels=len(panels), width=width, height=height) as axes:
        for panel, (label, bars) in zip(axes, panels.items(), strict=True):
            _stack(panel, bars, label, unit, columns)
            panel.set_yticks(range(len(names)), names if panel is axes[0] else [""] * len(names))
    return True


def _kinds(bars: Bars) -> list[str]:
    """The parts of bars, in the order of the one that has most."""
    longest = max(bars.values(), key=len)
    return list(dict.fromkeys(kind for bar in (longest, *bars.values()) for kind in bar))


def _stack(panel: Any, bars: Bars, label: str, unit: float, columns: int) -> None:
    """Horizontal bars, the first on top; the sum stands at the end of each."""
    kinds, places = _kinds(bars), range(len(bars))
    ends = [0.0] * len(bars)
    for number, kind in enumerate(kinds):
        lengths = [bar.get(kind, 0.0) / unit for bar in bars.values()]
        look = {"edgecolor": "black", "linewidth": 0.6, "height": 0.62}
        fill = {"color": _FILLS[number % len(_FILLS)], "hatch": _HATCHES[number % len(_HATCHES)]}
        panel.barh(places, lengths, left=ends, label=kind, **look, **fill)
        ends = [end + length for end, length in zip(ends, lengths, strict=True)]
    for place, end in zip(places, ends, strict=True):
        shown = f"{end:,.0f}" if end >= 100 else f"{end:.3g}"
        panel.text(end, place, f" {shown}" if end else " not in the log", va="center")
    panel.set_xlim(0, max(ends) * 1.15 or 1)
    panel.set_ylim(len(bars) - 0.4, -0.6)
    panel.set_xlabel(label)
    panel.grid(axis="y", visible=False)
    if len(kinds) > 1:
        panel.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=min(len(kinds), columns))


def _style(number: int) -> dict[str, Any]:
    """Of a line: with seven markers and six colours and dashes, no two of 42 are alike."""
    colour, dash = _COLOURS[number % len(_COLOURS)], _DASHES[number % len(_DASHES)]
    marker = _MARKERS[number % len(_MARKERS)]
    return {"color": colour, "linestyle": dash, "marker": marker, "markersize": 6, "linewidth": 1.8}


def _draw_point(panel: Any, rate: float, loss: Spread, number: int) -> None:
    """A mean, with a bar from the least to the most where there are several seeds."""
    bars = {"yerr": [[loss.mean - loss.low], [loss.high - loss.mean]], "capsize": 4} if loss.count > 1 else {}
    panel.errorbar(rate, loss.mean, **bars, **(_style(number) | {"linestyle": "none"}))


def _label_rates(panel: Any, rates: Sequence[float], final: str) -> None:
    """The axes of a picture of final losses by rate: a tick for each rate."""
    panel.set_xticks(rates, [f"{rate:g}" for rate in rates])
    panel.minorticks_off()
    if len(rates) > 5:
        panel.tick_params(axis="x", rotation=45)
    panel.set_xlabel("peak learning rate of the matrices (logarithmic)")
    panel.set_ylabel(f"final {final} (nats per token)")


def _add_legend(panels: Sequence[Any]) -> None:
    """One legend above all panels, where it covers no curve; the figure grows by its lines."""
    named = [zip(*panel.get_legend_handles_labels(), strict=True) for panel in panels]
    handles = {textwrap.fill(label, _WORDS): handle for panel in named for handle, label in panel}
    letters = max(len(line) for label in handles for line in label.splitlines())
    figure = panels[0].figure
    columns = max(1, min(len(handles), int(figure.get_figwidth() / (0.8 + _LETTER * letters))))
    lines = -(-len(handles) // columns) * max(label.count("\n") + 1 for label in handles)
    figure.set_figheight(figure.get_figheight() + _LINE * lines)
    figure.legend(handles.values(), handles, loc="outside upper center", ncols=columns)


def _draw_curve(panel: Any, points: Sequence[CurvePoint], across: str, number: int, label: str) -> None:
    style = _style(number)
    every = max(1, math.ceil(len(points) / _MARKERS_ON_A_LINE))
    first = min((number * every) // 3, len(points) - 1)
    where, loss, low, high = ([getattr(point, name) for point in points] for name in (across, "loss", "low", "high"))
    panel.plot(where, loss, label=label, markevery=(first, every), **style)
    panel.fill_between(where, low, high, color=style["color"], alpha=0.18, linewidth=0)


def _mark_diverged(panel: Any, diverged: Mapping[int, tuple[str, Mapping[float, tuple[int, int]]]]) -> None:
    """Crosses above all points, a row for each optimizer in its colour, with how many of how many runs diverged."""
    low, high = panel.get_ylim()
    row = (high - low) * 0.09
    panel.set_yticks([tick for tick in panel.get_yticks() if low <= tick <= high])
    panel.set_ylim(low, high + row * len(diverged))
    panel.axhline(high, color="0.5", linewidth=0.8)
    for place, (number, (name, counts)) in enumerate(diverged.items()):
        height = high + row * (place + 0.5)
        cross = {"marker": "x", "markersize": 8, "markeredgewidth": 2, "color": _style(number)["color"]}
        panel.plot(list(counts), [height] * len(counts), linestyle="none", label=f"{name} diverged (runs)", **cross)
        for rate, (some, of_all) in counts.items():
            beside = {"xytext": (7, 0), "textcoords": "offset points", "va": "center", "fontsize": 9}
            panel.annotate(f"{some}/{of_all}", (rate, height), **beside)


def _mark_target(panel: Any, compared: Comparison, axis: str) -> None:
    """The baseline's final loss, and where the other reaches it."""
    words = f"final loss of {display_name(compared.baseline.optimizer)}: {compared.target:.3f}"
    panel.axhline(compared.target, color="0.35", linewidth=1.0, linestyle=(0, (2, 2)), zorder=1, label=words)
    at = compared.steps if axis == "steps" else compared.seconds
    if at is None or axis == "tokens":
        return
    bound = "or before " if compared.steps_are_a_bound else ""
    words = f"{display_name(compared.arm.optimizer)} there at {bound}{axis.removesuffix('s')} {at:,.0f}"
    star = {"marker": "*", "markersize": 15, "color": "black", "linestyle": "none", "zorder": 5}
    panel.plot([at], [compared.target], label=words, **star)


def _limit(panel: Any, arms: Sequence[Curves], curves: Sequence[Sequence[CurvePoint]], *, whole: bool) -> None:
    """Cuts off the height of the beginning, where all fall alike, and what rises above those that finished.

    A single point has room, to `whole` numbers.
    """
    low = min(point.low for points in curves for point in points)
    begun = _LOSS_TOP * max(points[-1].step for points in curves if points)
    finished = [points for arm, points in zip(arms, curves, strict=True) if arm.finished and points]
    of = finished or [points for points in curves if points]
    high = max(point.high for points in of for point in points if point.step >= begun or point is points[-1])
    room = 0.05 * max(high - low, _LEAST_HEIGHT)
    panel.set_ylim(low - room, high + room)
    first, last = panel.get_xlim()
    if last - first < 2 and whole:
        panel.set_xlim(first - 1, last + 1)


@contextmanager
def _figure(file: Path, *, panels: int, width: float, height: float) -> Iterator[Sequence[Any]]:
    """Panels of a figure, each so wide and high in inches; the figure is written to the file at the end."""
    columns = min(panels, _MOST_PANELS)
    rows = -(-panels // columns)
    with matplotlib.rc_context(_LOOK):
        figure = Figure(figsize=(width * columns, height * rows), dpi=110, layout="constrained")
        yield [figure.add_subplot(rows, columns, place) for place in range(1, panels + 1)]
        figure.savefig(file, metadata={"Software": None})
