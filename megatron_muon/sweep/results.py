"""What a sweep came to: a row for each run, a row for each point over its seeds, results.csv and results.json.

The final loss that points are compared by is the last validation loss, or the training loss where there is no
validation. A point counts for the best when all of its seeds have finished and none has diverged.
"""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_muon.errors import UserError
from megatron_muon.runs import run_folder
from megatron_muon.runs.comparable import MEASURE
from megatron_muon.runs.records import read_record
from megatron_muon.sweep.grid import Point, Task

CSV, JSON = "results.csv", "results.json"

FIGURES = (
    "outcome",
    "diverged",
    "iterations",
    "tokens",
    "loss_last",
    "validation_loss",
    "validation_best",
    "validation_best_iteration",
    "step_ms",
    "tokens_per_second",
    "seconds",
    "train_seconds",
    "state_bytes",
    "peak_bytes",
)
"""Columns of results.csv after the point, its settings and the seed; before `folder`. docs/experiments.md has them."""

NOT_STARTED, UNDER_WAY = "not started", "cut off"


@dataclass(frozen=True)
class Spread:
    """A figure over seeds.

    Attributes:
        mean: over the seeds that have it.
        std: sample standard deviation; None with one seed.
        low: the least.
        high: the most.
        count: seeds that have it.
    """

    mean: float
    std: float | None
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """Over what is a finite number; None where nothing is."""
        numbers = [value for value in values if value is not None and math.isfinite(value)]
        if not numbers:
            return None
        std = statistics.stdev(numbers) if len(numbers) > 1 else None
        return cls(statistics.fmean(numbers), std, min(numbers), max(numbers), len(numbers))

    def shown(self, form: str = ".4f") -> str:
        """Mean, and spread where there is one."""
        return f"{self.mean:{form}}" + (f" ± {self.std:{form}}" if self.std is not None else "")


@dataclass(frozen=True)
class PointResult:
    """A point over its seeds.

    Attributes:
        point: which.
        seeds: how many were asked for.
        finished: how many have finished.
        diverged: how many have diverged.
        final: what points are compared by.
        figures: spreads by name of the column.
        best: whether it is the best of its optimizer, on its data.
    """

    point: Point
    seeds: int
    finished: int
    diverged: int
    final: Spread | None
    figures: Mapping[str, Spread | None]
    best: bool = False

    @property
    def counts(self) -> bool:
        """Whether it may be the best."""
        return self.final is not None and self.finished == self.seeds and self.diverged == 0


def row(task: Task, folder: Path | None = None) -> dict[str, Any]:
    """The row of a run as its folder tells it."""
    folder = task.folder if folder is None else folder
    head = {"point": task.point.name, **dict(task.point.settings), "seed": task.seed}
    try:
        record = read_record(folder)
    except UserError:
        return {**head, **dict.fromkeys(FIGURES), "outcome": NOT_STARTED, "folder": str(folder)}
    best, summary = record.validation_best, record.summary
    figures = {
        "outcome": record.outcome if summary or not record.run else UNDER_WAY,
        "diverged": record.diverged,
        "iterations": record.iterations,
        "tokens": record.tokens,
        "loss_last": record.loss_last,
        "validation_loss": record.validation_last,
        "validation_best": best.loss if best else None,
        "validation_best_iteration": best.step if best else None,
        "step_ms": record.step_ms,
        "tokens_per_second": record.tokens_per_second,
        "seconds": summary.get("seconds"),
        "train_seconds": record.train_seconds,
        "state_bytes": record.all_state_bytes,
        "peak_bytes": record.peak_bytes,
    }
    return run_folder.strict({**head, **figures, "folder": str(folder)})  # type: ignore[no-any-return]


def final_column(rows: Sequence[Mapping[str, Any]]) -> str:
    """The column that points are compared by."""
    return "validation_loss" if any(row["validation_loss"] is not None for row in rows) else "loss_last"


def by_point(points: Sequence[Point], rows: Sequence[Mapping[str, Any]]) -> list[PointResult]:
    """The points in their order, the best of each optimizer marked, on each data where there are several."""
    column = final_column(rows)
    results = []
    for point in points:
        own = [row for row in rows if row["point"] == point.name]
        done = [row for row in own if row["outcome"] == "finished" and not row["diverged"]]
        figures = {
            name: Spread.of(row[name] for row in done) for name in FIGURES if name not in ("outcome", "diverged")
        }
        results.append(
            PointResult(
                point=point,
                seeds=len(own),
                finished=sum(row["outcome"] == "finished" for row in own),
                diverged=sum(bool(row["diverged"]) for row in own),
                final=figures[column],
                figures=figures,
            )
        )
    best: dict[tuple[str | None, ...], PointResult] = {}
    for result in results:
        kind = _kind(result.point)
        if result.counts and (kind not in best or _loss(result) < _loss(best[kind])):
            best[kind] = result
    return [result if best.get(_kind(result.point)) is not result else _marked(result) for result in results]


def at_the_edge(results: Sequence[PointResult]) -> list[str]:
    """What the best points leave open: a number that is the least or the most of those tried beside it."""
    notes = []
    for best in (result for result in results if result.best):
        for key, value in best.point.settings:
            if key in MEASURE:  # which is best on other data is another question
                continue
            others = {name: text for name, text in best.point.settings if name != key}
            beside = [
                text
                for result in results
                if (text := result.point.value(key)) is not None
                and {name: other for name, other in result.point.settings if name != key} == others
            ]
            numbers = [_number(text) for text in beside]
            number = _number(value)
            if len(beside) < 2 or number is None or any(other is None for other in numbers):
                continue
            known = [other for other in numbers if other is not None]
            for edge, word, further in ((min(known), "least", "smaller"), (max(known), "most", "larger")):
                if number == edge:
                    notes.append(
                        f"{best.point.name}: {key}={value} is the {word} that was tried; try {further} ones too"
                    )
    return notes


def write(out: Path, points: Sequence[Point], rows: Sequence[Mapping[str, Any]], head: Mapping[str, Any]) -> None:
    """Writes results.csv and results.json, each whole or not at all.

    Args:
        out: the sweep's folder.
        points: all points.
        rows: all runs.
        head: what results.json begins with.
    """
    results = by_point(points, rows)
    _replace(out / CSV, csv_text(points, rows))
    run_folder.write_json(
        out / JSON,
        {
            **head,
            "compared_by": final_column(rows),
            "points": [
                {
                    "point": result.point.name,
                    "settings": dict(result.point.settings),
                    "seeds": result.seeds,
                    "finished": result.finished,
                    "diverged": result.diverged,
                    "best": result.best,
                    **{name: spread and vars(spread) for name, spread in result.figures.items()},
                }
                for result in results
            ],
            "notes": at_the_edge(results),
            "runs": [dict(row) for row in rows],
        },
    )


def csv_text(points: Sequence[Point], rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as CSV; what is not known is empty."""
    keys = list(dict.fromkeys(key for point in points for key, _ in point.settings))
    text = io.StringIO()
    columns = ["point", *keys, "seed", *FIGURES, "folder"]
    writer = csv.DictWriter(text, columns, restval="", extrasaction="raise", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def table(points: Sequence[Point], rows: Sequence[Mapping[str, Any]]) -> Any:
    """The points as a table of rich: means and spread over the seeds."""
    from rich.table import Table
    from rich.text import Text

    results, column = by_point(points, rows), final_column(rows)
    shown: tuple[tuple[str, Callable[[PointResult], str]], ...] = (
        ("point", lambda result: result.point.name),
        ("runs", lambda result: f"{result.finished}/{result.seeds}"),
        ("validation loss", lambda result: _cell(result, "validation_loss")),
        ("best on the way", lambda result: _cell(result, "validation_best")),
        ("training loss", lambda result: _cell(result, "loss_last")),
        ("step ms", lambda result: _cell(result, "step_ms", ",.1f")),
        ("state MB", lambda result: _megabytes(result)),
        ("", _remark),
    )
    if column == "loss_last":
        shown = tuple(pair for pair in shown if pair[0] not in ("validation loss", "best on the way"))
    page = Table(box=None, padding=(0, 2, 0, 0), title_justify="left")
    for name, _ in shown:
        page.add_column(name, justify="left" if name in ("point", "") else "right", no_wrap=True)
    for result in results:
        page.add_row(*(Text(cell(result)) for _, cell in shown), style="bold" if result.best else None)
    return page


def _kind(point: Point) -> tuple[str | None, ...]:
    """What points must agree in for one to be the best of them."""
    return tuple(point.value(key) for key in ("optimizer", *MEASURE))


def _marked(result: PointResult) -> PointResult:
    return PointResult(**{**vars(result), "best": True})


def _loss(result: PointResult) -> float:
    assert result.final is not None
    return result.final.mean


def _cell(result: PointResult, name: str, form: str = ".4f") -> str:
    spread = result.figures[name]
    return spread.shown(form) if spread else "-"


def _megabytes(result: PointResult) -> str:
    spread = result.figures["state_bytes"]
    return f"{spread.mean / 1e6:,.2f}" if spread else "-"


def _remark(result: PointResult) -> str:
    """Words at the end of a point's line."""
    if result.diverged:
        return f"diverged{f' ({result.diverged} of {result.seeds})' if result.seeds > 1 else ''}"
    if result.finished < result.seeds:
        return "not finished"
    return "<- best" if result.best else ""


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _replace(file: Path, text: str) -> None:
    partial = file.with_name(f".{file.name}")
    partial.write_text(text, "utf-8")
    partial.replace(file)
