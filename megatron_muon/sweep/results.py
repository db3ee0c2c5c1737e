"""What a sweep came to: a row for each run, a row for each point over its seeds, results.csv and results.json.

The final loss that points are compared by is the last validation loss, or the training loss where there is no
validation. A point counts for the best when all of its seeds have finished and none has diverged.
"""

from __future__ import annotations

import contextlib
import csv
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_muon.checkpoint import files
from megatron_muon.errors import UserError
from megatron_muon.runs import run_folder
from megatron_muon.runs.comparable import MEASURE
from megatron_muon.runs.records import Record, read_record
from megatron_muon.sweep.grid import Point, Task

if TYPE_CHECKING:
    from rich.table import Table

CSV, JSON = "results.csv", "results.json"

FIGURES: dict[str, Callable[[Record], Any]] = {
    "outcome": lambda run: run.outcome if run.summary or not run.run else "cut off",
    "diverged": lambda run: run.diverged,
    "iterations": lambda run: run.iterations,
    "tokens": lambda run: run.tokens,
    "loss_last": lambda run: run.loss_last,
    "validation_loss": lambda run: run.validation_last,
    "validation_best": lambda run: run.validation_best and run.validation_best.loss,
    "validation_best_iteration": lambda run: run.validation_best and run.validation_best.step,
    "step_ms": lambda run: run.step_ms,
    "tokens_per_second": lambda run: run.tokens_per_second,
    "seconds": lambda run: run.summary.get("seconds"),
    "train_seconds": lambda run: run.train_seconds,
    "state_bytes": lambda run: run.all_state_bytes,
    "peak_bytes": lambda run: run.peak_bytes,
}
"""Columns of results.csv after the point, its settings and the seed; before `folder`. docs/experiments.md has them."""


@dataclass(frozen=True)
class Spread:
    """A figure over the seeds that have it, `count` of them; `std` is the sample standard deviation, None with one."""

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
        seeds: how many were asked for; of these, `finished` and `diverged`.
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
        """Whether it is a candidate for the best: all seeds finished, none diverged."""
        return self.final is not None and self.finished == self.seeds and self.diverged == 0

    @property
    def loss(self) -> float:
        """The mean that points are compared by; not a number where there is none."""
        return self.final.mean if self.final else math.nan


def row(task: Task) -> dict[str, Any]:
    """The row of a run as its folder tells it."""
    head = {"point": task.point.name, **dict(task.point.settings), "seed": task.seed}
    figures = dict.fromkeys(FIGURES) | {"outcome": "not started"}
    with contextlib.suppress(UserError):
        record = read_record(task.folder)
        figures = {name: figure(record) for name, figure in FIGURES.items()}
    return {**head, **run_folder.strict(figures), "folder": str(task.folder)}


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
        if result.counts and (kind not in best or result.loss < best[kind].loss):
            best[kind] = result
    return [replace(result, best=best.get(_kind(result.point)) is result) for result in results]


def at_the_edge(results: Sequence[PointResult]) -> list[str]:
    """What the best points leave open: a number that is the least or the most of those tried beside it."""
    notes = []
    for best in (result for result in results if result.best):
        settings = dict(best.point.settings)
        for key, value in settings.items():
            if key in MEASURE:  # which is best on other data is another question
                continue
            others = (dict(result.point.settings) for result in results)
            beside = [other[key] for other in others if key in other and {**other, key: value} == settings]
            try:
                tried = [float(text) for text in beside]
            except ValueError:
                continue
            for edge, word, further in ((min(tried), "least", "smaller"), (max(tried), "most", "larger")):
                if len(tried) > 1 and float(value) == edge:
                    notes.append(
                        f"{best.point.name}: {key}={value} is the {word} that was tried; try {further} ones too"
                    )
    return notes


def write(out: Path, points: Sequence[Point], rows: Sequence[Mapping[str, Any]], head: Mapping[str, Any]) -> None:
    """Writes results.csv and results.json, which begins with `head`, each whole or not at all."""
    results = by_point(points, rows)
    keys = dict.fromkeys(key for point in points for key, _ in point.settings)
    with files.written_at_once(out / CSV) as stream:
        writer = csv.DictWriter(stream, ["point", *keys, "seed", *FIGURES, "folder"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
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


def table(results: Sequence[PointResult], column: str) -> Table:
    """The points, compared by `column`: means and spread over the seeds."""
    from rich.table import Table
    from rich.text import Text

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
