"""A report's page: one HTML file, with text of others as text, read by a parser; and pictures with
nothing cut off.
"""

from __future__ import annotations

import base64
import itertools
import json
import math
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from megatron_muon import cli
from megatron_muon.tools.report.page import html_page
from tests.support.made_runs import falling, make_run, report_of

TAGS = {
    *{"html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "strong", "code"},
    *{"pre", "ul", "li", "img", "table", "thead", "tbody", "tr", "th", "td"},
}
"""All that a page is made of; a browser fetches none of them but a picture, and runs none."""


class Page(HTMLParser):
    """What a browser would find: tags with their attributes, and all text but the style."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data if self.tags and self.tags[-1][0] != "style" else ""

    def all(self, tag: str) -> list[dict[str, str | None]]:
        """The attributes of all tags of a name."""
        return [attributes for name, attributes in self.tags if name == tag]


def test_one_file_holds_the_whole_report(tmp_path: Path) -> None:
    """Its pictures are those beside the Markdown, to the byte, and it refers to nothing outside
    itself.
    """
    make_run(tmp_path / "runs" / "adam", falling(0.05), optimizer="adam", lr="1e-3")
    make_run(tmp_path / "runs" / "muon", falling(0.1), lr="4e-3")
    report = tmp_path / "out"
    assert cli.main(["report", str(tmp_path / "runs"), "--out", str(report)]) == 0
    html = (report / "report.html").read_text("utf-8")
    page = Page(html)
    beside = {path.read_bytes() for path in report.glob("*.png")}
    inside = [str(image["src"]).removeprefix("data:image/png;base64,") for image in page.all("img")]
    assert {base64.b64decode(data, validate=True) for data in inside} == beside
    assert len(inside) == len(beside) == 2
    assert all(image["alt"] for image in page.all("img"))
    assert {tag for tag, _ in page.tags} <= TAGS
    assert not any("href" in attributes for _, attributes in page.tags)
    assert "url(" not in html
    assert "@import" not in html
    assert len(html) < 3e6


NAMES = (
    *(
        "<script>alert(1)</script>",
        "a`b",
        "``",
        "<img src=x onerror=alert(1)>",
        '"><b>',
        "'onload='x",
        "&lt;b&gt;",
    ),
    *(
        "a|b",
        "[a](javascript:alert(1))",
        "![x](http:/a/b.png)",
        "# a",
        "</code></title><p>",
        "{title}",
        "*a*",
        "_a",
    ),
    *("two\n\n# lines", "é\u202e\x07"),
)


@pytest.mark.parametrize("name", NAMES)
def test_names_show_as_text(tmp_path: Path, name: str) -> None:
    """Of a run's folder, a setting, a command, a commit and an optimizer."""
    run = {"commit": name, "command": f"train {name}", "torchrun": name}
    make_run(tmp_path / name / "a", falling(0.05), run=run)
    make_run(
        tmp_path / name / "b", falling(0.1), run=run, args={"optimizer": name, "train_iters": name}
    )
    for folder, value in (("a", "x"), ("b", name)):
        (tmp_path / name / folder / "config.yaml").write_text(
            json.dumps({"MODEL_ARGS": {"--data-path": value}})
        )
    page = Page(html_page(report_of(tmp_path / name).page(()), {}))
    assert {tag for tag, _ in page.tags} <= TAGS
    assert not any(
        attribute.startswith("on") for _, attributes in page.tags for attribute in attributes
    )
    assert not page.all("img")
    assert (len(page.all("h1")), len(page.all("h2"))) == (1, 3)
    shown = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in name)
    typed = f"train {shown}".partition("\\n")[0]  # a command keeps its lines
    for of_what in (
        f"/{shown}",
        f"data_path={shown}",
        typed,
        f"commit {shown}",
        f"{shown} and Muon",
    ):
        assert of_what in page.text, of_what


def test_html_in_the_markdown_is_text() -> None:
    """The control of the test above: the parser sees a tag that the page has, and the one that it
    has not as text.
    """
    page = Page(html_page("**a**\n\n<b>bold</b>\n\n<script>\nx\n</script>", {}))
    assert len(page.all("strong")) == 1
    assert not {"b", "script"} & {tag for tag, _ in page.tags}
    assert "<b>bold</b>" in page.text
    assert "<script>\nx\n</script>" in page.text


# Pictures

Make = Callable[..., None]
Draw = Callable[[], tuple[dict[str, Figure], str]]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    number = itertools.count()
    return lambda *given, **settings: make_run(
        tmp_path / "runs" / str(next(number)), *given, **settings
    )


@pytest.fixture
def draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Draw:
    """Draws the report of the runs made: its figures by the name of their file, and the page."""
    figures: dict[str, Figure] = {}
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, file, **_: figures.update({file.name: figure})
    )

    def drawn() -> tuple[dict[str, Figure], str]:
        report = report_of(tmp_path / "runs")
        names = report.draw(Path("nowhere"))
        assert names == list(figures)
        return figures, report.page(names)

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
    """All points of a panel's lines that a marker or a line between two shows, within the panel's
    limits.
    """
    (left, right), (low, high) = panel.get_xlim(), panel.get_ylim()
    lines = [
        line
        for line in panel.get_lines()
        if line.get_marker() not in ("", "None") or len(line.get_xdata()) > 1
    ]
    return [
        (x, y)
        for line in lines
        for x, y in zip(*line.get_data(), strict=True)
        if left <= x <= right and low <= y <= high
    ]


@pytest.mark.parametrize(("outcome", "steps"), [("stopped", 1), ("interrupted", 3), ("failed", 3)])
def test_the_loss_of_a_run_that_did_not_finish_is_drawn(
    make: Make, draw: Draw, outcome: str, steps: int
) -> None:
    """Curves were of finished runs alone, and the page of a run that was stopped had a heading and
    nothing below it.
    """
    make(falling(0.1), steps=steps, every=1, outcome=outcome)
    figures, page = draw()
    assert list(figures) == ["loss-steps.png"]
    training, validation = figures["loss-steps.png"].axes
    assert len(points(training)) == len(points(validation)) == steps
    (legend,) = figures["loss-steps.png"].legends
    assert [text.get_text() for text in legend.get_texts()] == ["Muon, lr 0.01 (not finished)"]
    assert page.startswith("# Muon\n")
    assert "Side by side" not in page
    assert f"| {steps} | - |" in page
    assert "| not finished: 1 of 1 |" in page


def test_a_run_that_goes_on_is_drawn_beside_a_finished_one(make: Make, draw: Draw) -> None:
    """Its loss axis is that of the finished run: a diverged or early one would press it flat."""
    make(falling(0.1), optimizer="adam", lr="1e-3", steps=100)
    make(falling(0.2), steps=20, outcome="stopped")
    make(lambda _: 50.0, lr="0.5", steps=100, args={"train_iters": 200}, summary=False)
    figure = draw()[0]["loss-steps.png"]
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == [
        "AdamW, lr 0.001",
        "Muon, lr 0.01 (not finished)",
        "Muon, lr 0.5 (not finished)",
    ]
    low, high = figure.axes[0].get_ylim()
    assert low < 2.1
    assert high < 6


def test_a_longer_run_that_goes_on_is_not_cut_off_by_a_short_finished_one(
    make: Make, draw: Draw
) -> None:
    make(falling(0.1), lr="1e-3", steps=3)
    make(falling(0.1), steps=90, outcome="stopped")
    training, _ = draw()[0]["loss-steps.png"].axes
    assert min(y for _, y in points(training)) < 2.1


def test_where_no_loss_is_a_number_the_page_says_so(make: Make, draw: Draw) -> None:
    make(lambda _: math.nan)
    figures, page = draw()
    assert "loss-steps.png" not in figures
    assert "## Loss\n\nNo logged loss is a finite number.\n" in page


@pytest.mark.parametrize("outcomes", [("stopped", "stopped"), ("stopped", "finished")])
def test_rates_without_a_final_loss_make_no_empty_picture(
    make: Make, draw: Draw, outcomes: tuple[str, str]
) -> None:
    for lr, outcome in zip(("1e-3", "4e-3"), outcomes, strict=True):
        make(falling(0.1), lr=lr, outcome=outcome)
    assert "final-loss-by-rate.png" not in draw()[0]


def test_diverged_rates_have_a_cross_each(make: Make, draw: Draw) -> None:
    rates = ("1e-3", "2e-3", "4e-3")
    for optimizer, lr in itertools.product(("adam", "adaptive_muon"), rates):
        make(
            falling(0.1) if lr == rates[0] else lambda _: math.nan,
            optimizer=optimizer,
            lr=lr,
            steps=10,
        )
    figure = draw()[0]["final-loss-by-rate.png"]
    assert not squeezed(figure)
    crosses = [line for line in figure.axes[0].get_lines() if line.get_marker() == "x"]
    assert [sorted(line.get_xdata()) for line in crosses] == [[0.002, 0.004]] * 2
    assert crosses[0].get_ydata()[0] != crosses[1].get_ydata()[0]


LONG = r"/a/very/$$\rac$$/long/place" + "x" * 200
"""Matplotlib takes what stands between two dollar signs for mathematics, and fails where it is none."""

CROWDED: dict[str, list[dict[str, Any]]] = {
    "single point": [
        {"optimizer": name, "lr": lr, "every": 40}
        for name, lr in (("adam", "1e-3"), ("muon", "4e-3"))
    ],
    "long names": [
        {
            "flags": {"--data-path": f"{LONG}/{n % 2}", "--muon-scale-mode": f"{n}{'y' * 60}"},
            "steps": 10,
        }
        for n in range(6)
    ],
    "six optimizers": [
        {"optimizer": f"optimizer_{n}", "lr": f"{1e-3 * 2**n:.3g}", "steps": 10} for n in range(6)
    ],
}


@pytest.mark.parametrize("case", CROWDED)
def test_every_line_and_name_has_room(make: Make, draw: Draw, case: str) -> None:
    """Six long names left no room for the panels."""
    for number, settings in enumerate(CROWDED[case]):
        make(falling(0.05 + number / 100), **settings)
    figures, _ = draw()
    assert not {name: found for name, figure in figures.items() if (found := squeezed(figure))}
    assert all(points(panel) for figure in figures.values() for panel in figure.axes)
    looks = {
        (line.get_color(), line.get_marker())
        for line in figures["loss-steps.png"].axes[0].get_lines()
    }
    assert len(looks) == len(CROWDED[case])
