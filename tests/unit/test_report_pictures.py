"""What a report draws: runs that did not finish too, nothing cut off, no empty picture."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from megatron_muon.tools.report.arms import find_runs, read_arms
from megatron_muon.tools.report.page import Report
from tests.support.made_runs import falling, make_run

Make = Callable[..., None]
Draw = Callable[[], dict[str, Figure]]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    number = itertools.count()
    return lambda *given, **settings: make_run(tmp_path / "runs" / str(next(number)), *given, **settings)


@pytest.fixture
def report(tmp_path: Path) -> Callable[[], Report]:
    return lambda: Report(*read_arms(find_runs([tmp_path / "runs"])))


@pytest.fixture
def draw(report: Callable[[], Report], monkeypatch: pytest.MonkeyPatch) -> Draw:
    """Draws the report of the runs made; its figures by the name of their file."""
    figures: dict[str, Figure] = {}
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **_: figures.update({file.name: figure}))

    def drawn() -> dict[str, Figure]:
        names = report().draw(Path("nowhere"))
        assert names == list(figures)
        return figures

    return drawn


def squeezed(figure: Figure) -> list[str]:
    """What has too little room: a legend that does not fit the figure, and panels beside it."""
    figure.draw_without_rendering()
    room, (legend,) = figure.bbox.padded(2), figure.legends
    box = legend.get_window_extent()
    found = ["the legend"] if box.x0 < room.x0 or box.x1 > room.x1 or box.y1 > room.y1 else []
    panels = [(panel.get_ylabel(), panel.get_window_extent()) for panel in figure.axes]
    return found + [name for name, box in panels if box.width < 200 or box.height < 50]


def points(panel: Any) -> list[tuple[float, float]]:
    """All points of a panel's lines that a marker or a line between two shows, within the panel's limits."""
    (left, right), (low, high) = panel.get_xlim(), panel.get_ylim()
    lines = [line for line in panel.get_lines() if line.get_marker() not in ("", "None") or len(line.get_xdata()) > 1]
    return [(x, y) for line in lines for x, y in zip(*line.get_data(), strict=True)
            if left <= x <= right and low <= y <= high]  # fmt: skip


@pytest.mark.parametrize(("outcome", "steps"), [("stopped", 1), ("interrupted", 3), ("failed", 3)])
def test_the_loss_of_a_run_that_did_not_finish_is_drawn(
    make: Make, draw: Draw, report: Callable[[], Report], outcome: str, steps: int
) -> None:
    """Curves were of finished runs alone, and the page of a run that was stopped had a heading and nothing below it."""
    make(falling(0.1), steps=steps, every=1, outcome=outcome)
    figures = draw()
    (training, validation) = figures["loss-steps.png"].axes
    assert len(points(training)) == len(points(validation)) == steps
    (legend,) = figures["loss-steps.png"].legends
    assert [text.get_text() for text in legend.get_texts()] == ["Muon, lr 0.01 (not finished)"]
    page = report().page(list(figures))
    assert f"| {steps} | - |" in page
    assert "| not finished: 1 of 1 |" in page


def test_a_run_that_goes_on_is_drawn_beside_a_finished_one(make: Make, draw: Draw) -> None:
    """Its loss axis is that of the finished run: a diverged or early one would press it flat."""
    make(falling(0.1), optimizer="adam", lr="1e-3", steps=100)
    make(falling(0.2), steps=20, outcome="stopped")
    make(lambda _: 50.0, lr="0.5", steps=100, args={"train_iters": 200}, summary=False)
    figure = draw()["loss-steps.png"]
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["AdamW, lr 0.001", "Muon, lr 0.01 (not finished)", "Muon, lr 0.5 (not finished)"]
    low, high = figure.axes[0].get_ylim()
    assert low < 2.1
    assert high < 6


def test_a_longer_run_that_goes_on_is_not_cut_off_by_a_short_finished_one(make: Make, draw: Draw) -> None:
    make(falling(0.1), lr="1e-3", steps=3)
    make(falling(0.1), steps=90, outcome="stopped")
    (training, _) = draw()["loss-steps.png"].axes
    assert min(y for _, y in points(training)) < 2.1


def test_where_no_loss_is_a_number_the_page_says_so(make: Make, draw: Draw, report: Callable[[], Report]) -> None:
    make(lambda _: math.nan)
    figures = draw()
    assert "loss-steps.png" not in figures
    page = report().page(list(figures))
    assert "## Loss\n\nNo logged loss is a finite number.\n" in page


@pytest.mark.parametrize("outcomes", [("stopped", "stopped"), ("stopped", "finished")])
def test_rates_without_a_final_loss_make_no_empty_picture(make: Make, draw: Draw, outcomes: tuple[str, str]) -> None:
    for lr, outcome in zip(("1e-3", "4e-3"), outcomes, strict=True):
        make(falling(0.1), lr=lr, outcome=outcome)
    assert "final-loss-by-rate.png" not in draw()


def test_diverged_rates_have_a_cross_each(make: Make, draw: Draw) -> None:
    rates = ("1e-3", "2e-3", "4e-3")
    for optimizer, lr in itertools.product(("adam", "adaptive_muon"), rates):
        make(falling(0.1) if lr == rates[0] else lambda _: math.nan, optimizer=optimizer, lr=lr, steps=10)
    figure = draw()["final-loss-by-rate.png"]
    assert not squeezed(figure)
    crosses = [line for line in figure.axes[0].get_lines() if line.get_marker() == "x"]
    assert [sorted(line.get_xdata()) for line in crosses] == [[0.002, 0.004]] * 2
    assert crosses[0].get_ydata()[0] != crosses[1].get_ydata()[0]


LONG = "/a/very/long/place" + "x" * 200


@pytest.mark.parametrize("case", ["single point", "long names", "six optimizers"])
def test_every_line_and_name_has_room(make: Make, draw: Draw, case: str) -> None:
    """Six long names left no room for the panels."""
    if case == "single point":
        for optimizer, lr in (("adam", "1e-3"), ("muon", "4e-3")):
            make(falling(0.05), optimizer=optimizer, lr=lr, every=40)
    for number in range(6 if case == "long names" else 0):
        flags = {"--data-path": f"{LONG}/{number % 2}", "--muon-scale-mode": f"{number}{'y' * 60}"}
        make(falling(0.05 + number / 100), flags=flags, steps=10)
    for number in range(6 if case == "six optimizers" else 0):
        make(falling(0.05), optimizer=f"optimizer_{number}", lr=f"{1e-3 * 2**number:.3g}", steps=10)
    figures = draw()
    assert not {name: found for name, figure in figures.items() if (found := squeezed(figure))}
    assert all(points(panel) for figure in figures.values() for panel in figure.axes)
    looks = {(line.get_color(), line.get_marker()) for line in figures["loss-steps.png"].axes[0].get_lines()}
    assert len(looks) == (2 if case == "single point" else 6)
