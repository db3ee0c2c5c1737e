"""The pictures of a report, as PNG files. Lines differ in dash and marker, bars in hatching, so none needs its colour.

Nothing here computes what is shown, see `arms`. A function that returns False has drawn nothing, for want of figures.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from megatron_muon.report.arms import Arm, CurvePoint, display_name
from megatron_muon.report.comparison import Comparison
from megatron_muon.report.transfer import Family

_COLOURS = ("#1f4e99", "#c8511b", "#2d7d46", "#7b3fa0", "#8a6d1d", "#444444")
_DASHES = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (6, 2, 1, 2)), (0, (9, 3)), (0, (3, 1, 1, 1, 1, 1)))
_STYLES = [
    {"color": colour, "linestyle": dash, "marker": marker, "markersize": 6, "linewidth": 1.8}
    for colour, dash, marker in zip(_COLOURS, _DASHES, "os^DvP", strict=True)
]
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
    "text.parse_math": False,  # a dollar sign is one
    "legend.fontsize": 10,
    "legend.framealpha": 0.9,
    "hatch.linewidth": 0.5,
}
_MARKERS_ON_A_LINE = 9
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
    """What is drawn of an arm over the seeds, and what the legend calls it."""

    label: str
    train: Sequence[CurvePoint]
    validation: Sequence[CurvePoint]


def draw_losses(file: Path, arms: Sequence[Curves], axis: str, compared: Sequence[Comparison]) -> bool:
    """Training and validation loss over one of `AXES`; the target of the first comparison is marked."""
    label, across = AXES[axis]
    sides = {"training loss": [arm.train for arm in arms], "validation loss": [arm.validation for arm in arms]}
    sides = {
        name: [[point for point in curve if getattr(point, across) is not None] for curve in curves]
        for name, curves in sides.items()
        if any(curves)
    }
    if not any(map(any, sides.values())):
        return False
    with _figure(file, columns=len(sides), width=6.0 * len(sides), height=4.6) as panels:
        for panel, (name, curves) in zip(panels, sides.items(), strict=True):
            for number, (arm, points) in enumerate(zip(arms, curves, strict=True)):
                if points:
                    _draw_curve(panel, points, across, number, arm.label)
            if name == "validation loss" and compared:
                _mark_target(panel, compared[0], axis)
            panel.set_xlabel(label)
            panel.set_ylabel(f"{name} (nats per token)")
            _limit(panel, [points for points in curves if points])
            panel.xaxis.set_major_formatter(EngFormatter(sep=""))
            panel.legend(loc="upper right")
    return True


def draw_rates(file: Path, arms: Sequence[Arm], *, final: str) -> bool:
    """Final loss, named `final`, against learning rate: a line for each optimizer through the best of each rate."""
    rates = sorted({arm.rate for arm in arms if arm.rate})
    if len(rates) < 2:
        return False
    with _figure(file, columns=1, width=8.0, height=5.0) as (panel,):
        panel.set_xscale("log")
        diverged: dict[float, list[str]] = {}
        optimizers = dict.fromkeys(arm.optimizer for arm in arms if arm.rate)
        for optimizer, style in zip(optimizers, itertools.cycle(_STYLES), strict=False):
            best: dict[float, float] = {}
            for arm in (arm for arm in arms if arm.optimizer == optimizer):
                if arm.rate and (final_loss := arm.final):
                    mean, low, high = final_loss.mean, final_loss.low, final_loss.high
                    point = {key: style[key] for key in ("color", "marker", "markersize")}
                    bar = {"yerr": [[mean - low], [high - mean]], "capsize": 4, "linestyle": "none"}
                    panel.errorbar(arm.rate, mean, **bar, **point)
                    best[arm.rate] = min(mean, best.get(arm.rate, math.inf))
                if arm.rate and arm.diverged:
                    words = f"{display_name(optimizer)}: {arm.diverged} of {len(arm.runs)}"
                    diverged.setdefault(arm.rate, []).append(words)
            if best:
                panel.plot(*zip(*sorted(best.items()), strict=True), label=display_name(optimizer), **style)
        if diverged:
            _mark_diverged(panel, diverged)
        panel.set_xticks(rates, [f"{rate:g}" for rate in rates])
        panel.minorticks_off()
        if len(rates) > 6:
            panel.tick_params(axis="x", rotation=45)
        panel.set_xlabel("peak learning rate of the matrices (logarithmic)")
        panel.set_ylabel(f"final {final} (nats per token)")
        panel.legend(loc="best")
    return True


def draw_transfer(file: Path, families: Sequence[Family], *, key: str, final: str) -> bool:
    """Final loss against learning rate: a panel for each family, a line for each value of the setting `key`."""
    with _figure(file, columns=len(families), width=5.0 * len(families), height=4.6) as panels:
        for panel, family in zip(panels, families, strict=True):
            panel.set_xscale("log")
            for line, style in zip(family.lines, itertools.cycle(_STYLES), strict=False):
                spreads = list(line.losses.values())
                means = [spread.mean for spread in spreads]
                bars = [
                    [spread.mean - spread.low for spread in spreads],
                    [spread.high - spread.mean for spread in spreads],
                ]
                panel.errorbar(list(line.losses), means, yerr=bars, capsize=4, label=f"{key} {line.value}", **style)
                star = {"marker": "*", "markersize": 15, "color": style["color"], "markeredgecolor": "black"}
                panel.plot([line.best], [line.losses[line.best].mean], zorder=5, **star)
            rates = sorted({rate for line in family.lines for rate in line.losses})
            panel.set_xticks(rates, [f"{rate:g}" for rate in rates])
            panel.minorticks_off()
            panel.set_title(family.name.replace(", ", "\n"))
            panel.set_xlabel("peak learning rate of the matrices (logarithmic)")
            panel.set_ylabel(f"final {final} (nats per token)")
            panel.legend(loc="best")
    return True


def draw_bars(file: Path, panels: Mapping[str, Bars], *, width: float, above: float, unit: float = 1.0) -> bool:
    """Bars by name, each a stack of its parts in `unit`; panels by the label of their axis; `above` them are inches."""
    panels = {label: bars for label, bars in panels.items() if any(bars.values())}
    if not panels:
        return False
    height = above + 0.62 * max(map(len, panels.values()))
    with _figure(file, columns=len(panels), width=width * len(panels), height=height) as axes:
        for panel, (label, bars) in zip(axes, panels.items(), strict=True):
            _stack(panel, bars, label, unit)
    return True


def _stack(panel: Any, bars: Bars, label: str, unit: float) -> None:
    """Horizontal bars, the first on top; the sum stands at the end of each."""
    longest = max(bars.values(), key=len)
    kinds = list(dict.fromkeys(kind for bar in (longest, *bars.values()) for kind in bar))
    places = range(len(bars))
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
    panel.set_yticks(places, list(bars))
    panel.set_ylim(len(bars) - 0.4, -0.6)
    panel.set_xlabel(label)
    panel.grid(axis="y", visible=False)
    if len(kinds) > 1:
        panel.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=min(len(kinds), 4), frameon=False)


def _draw_curve(panel: Any, points: Sequence[CurvePoint], across: str, number: int, label: str) -> None:
    style = _STYLES[number % len(_STYLES)]
    every = max(1, math.ceil(len(points) / _MARKERS_ON_A_LINE))
    first = min((number * every) // 3, len(points) - 1)
    where, loss, low, high = ([getattr(point, name) for point in points] for name in (across, "loss", "low", "high"))
    panel.plot(where, loss, label=label, markevery=(first, every), **style)
    panel.fill_between(where, low, high, color=style["color"], alpha=0.18, linewidth=0)


def _mark_diverged(panel: Any, diverged: Mapping[float, Sequence[str]]) -> None:
    """Crosses above all points, in a band of their own."""
    low, high = panel.get_ylim()
    height = high + (high - low) * 0.06
    panel.set_yticks([tick for tick in panel.get_yticks() if low <= tick <= high])
    panel.set_ylim(low, high + (high - low) * (0.12 + 0.06 * max(map(len, diverged.values()))))
    panel.axhline(high, color="0.5", linewidth=0.8)
    cross = {"marker": "x", "markersize": 10, "markeredgewidth": 2, "color": "black", "linestyle": "none"}
    panel.plot(list(diverged), [height] * len(diverged), label="diverged (runs)", **cross)
    for rate, lines in diverged.items():
        above = {"xytext": (0, 8), "textcoords": "offset points", "ha": "center", "fontsize": 9}
        panel.annotate("\n".join(lines), (rate, height), **above)
    low_rate, high_rate = panel.get_xlim()
    panel.set_xlim(low_rate / 1.3, high_rate * 1.3)


def _mark_target(panel: Any, compared: Comparison, axis: str) -> None:
    """The baseline's final loss, and where the other comes to it."""
    words = f"final loss of {display_name(compared.baseline.optimizer)}: {compared.target:.3f}"
    panel.axhline(compared.target, color="0.35", linewidth=1.0, linestyle=(0, (2, 2)), zorder=1, label=words)
    at = compared.steps if axis == "steps" else compared.seconds
    if at is None or axis == "tokens":
        return
    bound = "or before " if compared.steps_are_a_bound else ""
    words = f"{display_name(compared.arm.optimizer)} there at {bound}{axis.removesuffix('s')} {at:,.0f}"
    star = {"marker": "*", "markersize": 15, "color": "black", "linestyle": "none", "zorder": 5}
    panel.plot([at], [compared.target], label=words, **star)


def _limit(panel: Any, curves: Sequence[Sequence[CurvePoint]]) -> None:
    """Cuts the beginning's height off, where all curves fall alike."""
    low = min(point.low for points in curves for point in points)
    late = [point for points in curves for point in points if point.step >= _LOSS_TOP * points[-1].step]
    high = max(point.high for point in late)
    room = max(high - low, 1e-3)
    panel.set_ylim(low - 0.05 * room, high + 0.05 * room)


@contextmanager
def _figure(file: Path, *, columns: int, width: float, height: float) -> Iterator[Sequence[Any]]:
    """Panels of a figure, written to the file at the end."""
    with matplotlib.rc_context(_LOOK):
        figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
        yield list(figure.subplots(1, columns, squeeze=False)[0])
        figure.savefig(file, metadata={"Software": None})
