"""The pictures of a report, as PNG files. Lines differ in their markers, so none needs its colour.

A function that returns False has drawn nothing, for want of figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from megatron_muon.tools.report.arms import Arm, Comparison, CurvePoint, ranked

_LOOK = {"axes.grid": True, "grid.alpha": 0.3, "text.parse_math": False}  # a dollar sign is one
_MARKERS = "os^DvPX"
_LOSS_TOP = 0.05
"""Loss axes begin at the highest mean loss after this part of the run: before, every curve falls alike."""


def draw_losses(file: Path, arms: Mapping[str, Arm], compared: Sequence[Comparison]) -> bool:
    """Training and validation loss against steps, by the arms' names; the target of the first comparison is marked."""
    curves = {
        losses: [arm.curve(losses) for arm in arms.values()] for losses in ("train", "validation")
    }
    shown = {losses: some for losses, some in curves.items() if any(some)}
    if not shown:
        return False
    with _figure(file, panels=len(shown), names=len(arms) + 2 * len(compared[:1])) as panels:
        for panel, (losses, some) in zip(panels, shown.items(), strict=True):
            for number, (name, points) in enumerate(zip(arms, some, strict=True)):
                every = max(1, len(points) // 9)
                steps, loss, low, high = (
                    [getattr(p, of) for p in points] for of in ("step", "loss", "low", "high")
                )
                (line,) = panel.plot(steps, loss, label=name, markevery=every, **_style(number))
                panel.fill_between(
                    steps, low, high, color=line.get_color(), alpha=0.18, linewidth=0
                )
            if losses == "validation" and compared:
                _mark_target(panel, compared[0])
            _limit(panel, list(arms.values()), some)
            panel.set(
                xlabel="optimizer steps",
                ylabel=f"{losses.replace('train', 'training')} loss (nats per token)",
            )
    return True


def draw_rates(file: Path, arms: Sequence[Arm]) -> bool:
    """Final loss against learning rate: a line for each optimizer through its best of each rate; crosses diverged."""
    rates = sorted({arm.rate for arm in arms if arm.rate and (arm.final or arm.diverged)})
    if len(rates) < 2 or not any(arm.rate and arm.final for arm in arms):
        return False
    names = dict.fromkeys(arm.optimizer_name for arm in arms if arm.rate)
    with _figure(file, panels=1, names=2 * len(names)) as (panel,):
        for number, name in enumerate(names):
            own = [arm for arm in arms if arm.optimizer_name == name and arm.rate]
            # a rate's lowest comes last
            best = {arm.rate: arm.final for arm in reversed(ranked(own)) if arm.final}
            at = [rate for rate in rates if rate in best]
            mean, low, high = (
                [getattr(best[rate], of) for rate in at] for of in ("mean", "low", "high")
            )
            panel.plot(at, mean, label=name, **_style(number))
            panel.vlines(at, low, high, color=f"C{number}")
            if diverged := [arm.rate for arm in own if arm.diverged]:
                cross = {"color": f"C{number}", "transform": panel.get_xaxis_transform()}
                panel.plot(
                    diverged,
                    [0.97 - 0.04 * number] * len(diverged),
                    "x",
                    label=f"{name} diverged",
                    **cross,
                )
        panel.set_xscale("log")
        panel.set_xticks(
            rates, [f"{rate:g}" for rate in rates], rotation=45 if len(rates) > 5 else 0
        )
        panel.minorticks_off()
        panel.set(
            xlabel="peak learning rate of the matrices (logarithmic)",
            ylabel="final loss (nats per token)",
        )
    return True


def _style(number: int) -> dict[str, Any]:
    """The look of a line; no two of seventy are alike."""
    return {"color": f"C{number}", "marker": _MARKERS[number % len(_MARKERS)], "markersize": 6}


def _mark_target(panel: Any, compared: Comparison) -> None:
    """The baseline's final loss, and where the other reaches it."""
    words = f"final loss of {compared.baseline.optimizer_name}: {compared.target:.3f}"
    panel.axhline(compared.target, color="0.35", linewidth=1.0, linestyle="--", label=words)
    if there := compared.reached:
        words = (
            f"{compared.arm.optimizer_name} there at {'or before ' * there.is_bound}step"
            f" {there.steps:,.0f}"
        )
        panel.plot([there.steps], [compared.target], "k*", markersize=15, label=words)


def _limit(panel: Any, arms: Sequence[Arm], curves: Sequence[Sequence[CurvePoint]]) -> None:
    """Cuts off the beginning, where all losses are high, and what rises above the runs that finished."""
    low = min(point.low for points in curves for point in points)
    begun = _LOSS_TOP * max(points[-1].step for points in curves if points)
    finished = [points for arm, points in zip(arms, curves, strict=True) if arm.sound and points]
    of = finished or [points for points in curves if points]
    high = max(
        point.high
        for points in of
        for point in points
        if point.step >= begun or point is points[-1]
    )
    room = 0.05 * max(high - low, 0.2)
    panel.set_ylim(low - room, high + room)


@contextmanager
def _figure(file: Path, *, panels: int, names: int) -> Iterator[Sequence[Any]]:
    """Panels side by side; then one legend above all, for which the figure grows, and the file is written."""
    with matplotlib.rc_context(_LOOK):
        figure = Figure(figsize=(6.5 * panels, 4.4 + 0.25 * names), dpi=110, layout="constrained")
        axes = figure.subplots(1, panels, squeeze=False)[0]
        yield axes
        named = [
            pair for panel in axes for pair in zip(*panel.get_legend_handles_labels(), strict=True)
        ]
        handles = {label: handle for handle, label in named}
        figure.legend(handles.values(), handles.keys(), loc="outside upper center", frameon=False)
        figure.savefig(file, metadata={"Software": None})
