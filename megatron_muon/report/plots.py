"""The pictures of a report, as PNG files. Lines differ in dash and marker, bars in hatching, so none needs its colour.

Nothing here computes what is shown, see `report`. matplotlib is imported when a picture is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_muon.errors import UserError
from megatron_muon.report.arms import Arm, Comparison, CurvePoint, display_name

_COLOURS = ("#1f4e99", "#c8511b", "#2d7d46", "#7b3fa0", "#8a6d1d", "#444444")
_DASHES = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (6, 2, 1, 2)), (0, (9, 3)), (0, (3, 1, 1, 1, 1, 1)))
_MARKERS = ("o", "s", "^", "D", "v", "P")
_HATCHES = ("", "///", "...", "xxx", "\\\\\\", "++", "ooo")
_DOTS_PER_INCH = 110
_MARKERS_ON_A_LINE = 9
_LOSS_TOP = 0.05
"""Loss axes begin at the highest mean loss after this part of the run: before, every curve falls alike."""

Axis = Callable[[CurvePoint], float | None]
AXES: Mapping[str, tuple[str, Axis]] = {
    "steps": ("optimizer steps", lambda point: float(point.step)),
    "tokens": ("tokens trained on", lambda point: None if point.tokens is None else float(point.tokens)),
    "seconds": ("seconds in the training loop", lambda point: point.seconds),
}


def draw_losses(
    file: Path, arms: Sequence[Arm], axis: str, *, names: Mapping[str, str], window: int, compared: Sequence[Comparison]
) -> bool:
    """Training and validation loss of arms, mean over seeds with the least and the most as a band.

    Args:
        file: where the picture goes.
        arms: what is drawn.
        axis: a key of `AXES`.
        names: what the legend says, by an arm's name.
        window: logged steps that the training loss is averaged over.
        compared: whose target is marked.

    Returns:
        False where the runs do not tell the axis; nothing is drawn then.
    """
    label, where = AXES[axis]
    sides = [("training loss", [arm.train(window) for arm in arms])]
    if any(arm.validation() for arm in arms):
        sides.append(("validation loss", [arm.validation() for arm in arms]))
    sides = [
        (name, [[point for point in points if where(point) is not None] for points in curves]) for name, curves in sides
    ]
    if not any(curves for _, found in sides for curves in found):
        return False
    with _figure(file, columns=len(sides), width=6.0 * len(sides), height=4.6) as panels:
        for panel, (name, curves) in zip(panels, sides, strict=True):
            for number, (arm, points) in enumerate(zip(arms, curves, strict=True)):
                _draw_curve(panel, points, where, number, names[arm.name])
            if name == "validation loss" and compared:
                _mark_target(panel, compared[0], axis)
            panel.set_xlabel(label)
            panel.set_ylabel(f"{name} (nats per token)")
            _limit(panel, [points for points in curves if points])
            panel.xaxis.set_major_formatter(_engineering())
            panel.legend(loc="upper right")
    return True


def draw_rates(file: Path, arms: Sequence[Arm], *, final: str) -> bool:
    """Final loss against learning rate, a line for each optimizer through the best of each rate; diverged runs on top.

    Args:
        file: where the picture goes.
        arms: all of them.
        final: what the final loss is.

    Returns:
        False where there are no two rates; nothing is drawn then.
    """
    rated = [arm for arm in arms if arm.rate]
    if len({arm.rate for arm in rated}) < 2:
        return False
    with _figure(file, columns=1, width=8.0, height=5.0) as (panel,):
        panel.set_xscale("log")
        diverged: list[tuple[float, str]] = []
        for number, optimizer in enumerate(dict.fromkeys(arm.optimizer for arm in rated)):
            own = [arm for arm in rated if arm.optimizer == optimizer]
            style = _style(number)
            by_rate: dict[float, Arm] = {}
            for arm in own:
                rate = arm.rate or 0.0
                if arm.final is not None:
                    _draw_spread(panel, rate, arm, style)
                    best = by_rate.get(rate)
                    if best is None or best.final is None or arm.final.mean < best.final.mean:
                        by_rate[rate] = arm
                if arm.diverged:
                    diverged.append((rate, f"{display_name(optimizer)}: {arm.diverged} of {len(arm.runs)}"))
            line = [(rate, arm.final.mean) for rate, arm in sorted(by_rate.items()) if arm.final is not None]
            panel.plot(*zip(*line, strict=True), label=display_name(optimizer), **style) if line else None
        _mark_diverged(panel, diverged)
        panel.set_xticks(rates := sorted({arm.rate for arm in rated if arm.rate}), [f"{rate:g}" for rate in rates])
        panel.minorticks_off()
        if len(rates) > 6:
            panel.tick_params(axis="x", rotation=45)
        panel.set_xlabel("peak learning rate of the matrices (logarithmic)")
        panel.set_ylabel(f"final {final} (nats per token)")
        panel.legend(loc="best")
    return True


def draw_step_times(file: Path, names: Sequence[str], parts: Sequence[Mapping[str, float]]) -> bool:
    """Milliseconds of a step as stacked bars.

    Args:
        file: where the picture goes.
        names: of the bars.
        parts: of each bar, milliseconds by part, in their order.

    Returns:
        False where no run logged times; nothing is drawn then.
    """
    if not any(parts):
        return False
    with _figure(file, columns=1, width=10.0, height=2.0 + 0.62 * len(names)) as (panel,):
        _stack(panel, names, parts, "milliseconds of a training step (median)")
    return True


def draw_memory(file: Path, names: Sequence[str], state: Sequence[Mapping[str, float]], peak: Sequence[float]) -> bool:
    """Optimizer state of all ranks, and the most that one rank's memory held, as bars.

    Args:
        file: where the picture goes.
        names: of the bars.
        state: of each bar, megabytes by kind.
        peak: of each bar, megabytes; 0 is not known.

    Returns:
        False where no run logged either; nothing is drawn then.
    """
    panels = [("optimizer state, all ranks (MB)", state)] if any(state) else []
    if any(peak):
        panels.append(("peak memory of the fullest rank (MB)", [{"peak": value} if value else {} for value in peak]))
    if not panels:
        return False
    with _figure(file, columns=len(panels), width=6.0 * len(panels), height=1.6 + 0.62 * len(names)) as axes:
        for panel, (label, parts) in zip(axes, panels, strict=True):
            _stack(panel, names, parts, label)
    return True


def _stack(panel: Any, names: Sequence[str], parts: Sequence[Mapping[str, float]], label: str) -> None:
    """Horizontal bars, the first on top; the sum stands at the end of each."""
    longest = max(parts, key=len)
    kinds = list(dict.fromkeys(kind for bar in (longest, *parts) for kind in bar))
    places = list(range(len(names)))[::-1]
    ends = [0.0] * len(names)
    for number, kind in enumerate(kinds):
        lengths = [bar.get(kind, 0.0) for bar in parts]
        panel.barh(
            places, lengths, left=ends, height=0.62, label=kind, edgecolor="black", linewidth=0.6,
            color=_light(number), hatch=_HATCHES[number % len(_HATCHES)],
        )  # fmt: skip
        ends = [end + length for end, length in zip(ends, lengths, strict=True)]
    for place, end in zip(places, ends, strict=True):
        number_of = f"{end:,.0f}" if end >= 100 else f"{end:.3g}"
        panel.text(end, place, f" {number_of}" if end else " not in the log", va="center")
    panel.set_xlim(0, max(ends) * 1.15 or 1)
    panel.set_yticks(places, names)
    panel.set_ylim(-0.6, len(names) - 0.4)
    panel.set_xlabel(label)
    panel.grid(axis="y", visible=False)
    if len(kinds) > 1:
        panel.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=min(len(kinds), 4), frameon=False)


def _draw_curve(panel: Any, points: Sequence[CurvePoint], where: Axis, number: int, name: str) -> None:
    if not points:
        return
    across = [where(point) for point in points]
    style = _style(number)
    every = max(1, math.ceil(len(points) / _MARKERS_ON_A_LINE))
    first = min((number * every) // 3, len(points) - 1)
    panel.plot(across, [point.loss.mean for point in points], label=name, markevery=(first, every), **style)
    low, high = ([getattr(point.loss, end) for point in points] for end in ("low", "high"))
    panel.fill_between(across, low, high, color=style["color"], alpha=0.18, linewidth=0)


def _draw_spread(panel: Any, rate: float, arm: Arm, style: Mapping[str, Any]) -> None:
    spread = arm.final
    assert spread is not None
    below, above = spread.mean - spread.low, spread.high - spread.mean
    look = {"color": style["color"], "marker": style["marker"], "markersize": style["markersize"]}
    panel.errorbar(rate, spread.mean, yerr=[[below], [above]], capsize=4, linestyle="none", **look)


def _mark_diverged(panel: Any, diverged: Sequence[tuple[float, str]]) -> None:
    """Crosses above all points, in a band of their own; words of the same rate stand one over the other."""
    if not diverged:
        return
    low, high = panel.get_ylim()
    by_rate: dict[float, list[str]] = {}
    for rate, words in diverged:
        by_rate.setdefault(rate, []).append(words)
    top = high + (high - low) * (0.12 + 0.06 * max(len(words) for words in by_rate.values()))
    panel.set_yticks([tick for tick in panel.get_yticks() if low <= tick <= high])
    panel.set_ylim(low, top)
    height = high + (high - low) * 0.06
    panel.axhline(high, color="0.5", linewidth=0.8)
    panel.plot(
        list(by_rate), [height] * len(by_rate), linestyle="none", marker="x", markersize=10, color="black",
        markeredgewidth=2, label="diverged (runs)",
    )  # fmt: skip
    for rate, lines in by_rate.items():
        panel.annotate(
            "\n".join(lines), (rate, height), xytext=(0, 8), textcoords="offset points", ha="center", fontsize=9
        )
    low_rate, high_rate = panel.get_xlim()
    panel.set_xlim(low_rate / 1.3, high_rate * 1.3)


def _mark_target(panel: Any, compared: Comparison, axis: str) -> None:
    """The baseline's final loss, and where the other comes to it."""
    panel.axhline(
        compared.target, color="0.35", linewidth=1.0, linestyle=(0, (2, 2)), zorder=1,
        label=f"final loss of {display_name(compared.baseline.optimizer)}: {compared.target:.3f}",
    )  # fmt: skip
    if compared.reached is None or axis == "tokens":
        return
    at = compared.reached.steps if axis == "steps" else compared.reached.seconds
    unit, bound = "step" if axis == "steps" else "second", "or before " if compared.reached.at_first else ""
    panel.plot(
        [at], [compared.target], marker="*", markersize=15, color="black", linestyle="none", zorder=5,
        label=f"{display_name(compared.arm.optimizer)} there at {bound}{unit} {at:,.0f}",
    )  # fmt: skip


def _limit(panel: Any, curves: Sequence[Sequence[CurvePoint]]) -> None:
    """Cuts the beginning's height off, where all curves fall alike."""
    lows = [point.loss.low for points in curves for point in points]
    highs = []
    for points in curves:
        late = [point for point in points if point.step >= _LOSS_TOP * points[-1].step] or list(points)
        highs.append(max(point.loss.high for point in late))
    room = max(max(highs) - min(lows), 1e-3)
    panel.set_ylim(min(lows) - 0.05 * room, max(highs) + 0.05 * room)


def _style(number: int) -> dict[str, Any]:
    return {
        "color": _COLOURS[number % len(_COLOURS)],
        "linestyle": _DASHES[number % len(_DASHES)],
        "marker": _MARKERS[number % len(_MARKERS)],
        "markersize": 6,
        "linewidth": 1.8,
    }


def _light(number: int) -> str:
    """Fillings from light to dark, so that prints without colour tell them apart too."""
    return ("#dce8f7", "#f6d2bd", "#c5e3cd", "#decbe9", "#efe2b0", "#c9c9c9", "#f2b8c6")[number % 7]


def _engineering() -> Any:
    from matplotlib.ticker import EngFormatter

    return EngFormatter(sep="")


@contextmanager
def _figure(file: Path, *, columns: int, width: float, height: float) -> Iterator[Sequence[Any]]:
    """Panels of a figure, written to the file at the end."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("reports need matplotlib; install it with: pip install matplotlib") from None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    look = {"font.size": 11, "axes.grid": True, "grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False}
    look |= {"axes.axisbelow": True, "text.parse_math": False}  # a dollar sign is one
    look |= {"legend.fontsize": 10, "legend.framealpha": 0.9, "hatch.linewidth": 0.5}
    with matplotlib.rc_context(look):
        figure = Figure(figsize=(width, height), dpi=_DOTS_PER_INCH, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(1, columns, squeeze=False)[0]
        yield list(axes)
        figure.savefig(file, metadata={"Software": None})
