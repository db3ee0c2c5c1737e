"""What a sweep came to: a row for each run, a row for each point over its seeds, results.csv and results.json.

The final loss that points are compared by is the last validation loss, or the training loss where there is no
validation. A point counts for the best when all of its seeds have finished and none has diverged.
"""

from __future__ import annotations

import contextlib
import csv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from megatron_muon.checkpoint import files
from megatron_muon.errors import UserError
from megatron_muon.tools.report.arms import Seeds, best_of
from megatron_muon.tools.report.comparison import MEASURE
from megatron_muon.tools.sweep.grid import Point, Task
from megatron_muon.tools.train import run_folder
from megatron_muon.tools.train.records import Record, read_record

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


class Row(SimpleNamespace):
    """A row of results.csv; a run's events are large, and not kept."""

    @classmethod
    def of(cls, task: Task) -> Row:
        """The row of a run as its folder tells it."""
        head = {"point": task.point.name, **dict(task.point.settings), "seed": task.seed}
        figures = dict.fromkeys(FIGURES) | {"outcome": "not started"}
        with contextlib.suppress(UserError):
            record = read_record(task.folder)
            figures = {name: figure(record) for name, figure in FIGURES.items()}
        return cls(**head, **run_folder.strict(figures), folder=str(task.folder))


class Results:
    """The points over their seeds, the best of each optimizer and data, and which column they are compared by."""

    def __init__(self, points: Sequence[Point], rows: Sequence[Row]) -> None:
        self.rows = rows
        self.final = "validation_loss" if any(row.validation_loss is not None for row in rows) else "loss_last"
        self.points = [
            Seeds(point.name, point.settings, tuple(row for row in rows if row.point == point.name), self.final)
            for point in points
        ]
        self.best = best_of(self.points, _kind)

    def notes(self) -> list[str]:
        """What the best points leave open: a number that is the least or the most of those tried beside it."""
        notes = []
        for best in (point for point in self.points if point in self.best):
            settings = dict(best.settings)
            for key, value in settings.items():
                if key in MEASURE:  # which is best on other data is another question
                    continue
                others = (dict(point.settings) for point in self.points)
                beside = [other[key] for other in others if key in other and {**other, key: value} == settings]
                try:
                    tried = [float(text) for text in beside]
                except ValueError:
                    continue
                for edge, word, further in ((min(tried), "least", "smaller"), (max(tried), "most", "larger")):
                    if len(tried) > 1 and float(value) == edge:
                        notes.append(f"{best.name}: {key}={value} is the {word} that was tried; try {further} ones too")
        return notes

    def write(self, out: Path, head: Mapping[str, Any]) -> None:
        """Writes results.csv and results.json, which begins with `head`, each whole or not at all."""
        keys = dict.fromkeys(key for point in self.points for key, _ in point.settings)
        with files.written_at_once(out / CSV) as stream:
            writer = csv.DictWriter(stream, ["point", *keys, "seed", *FIGURES, "folder"], lineterminator="\n")
            writer.writeheader()
            writer.writerows(map(vars, self.rows))
        points = []
        for point in self.points:
            counts = {"seeds": len(point.runs), "finished": point.finished, "diverged": point.diverged}
            spreads = {name: point.spread(name) for name in FIGURES if name not in ("outcome", "diverged")}
            figures = {name: spread and vars(spread) for name, spread in spreads.items()}
            named = {"point": point.name, "settings": dict(point.settings)}
            points.append({**named, **counts, "best": point in self.best, **figures})
        found = {"compared_by": self.final, "points": points, "notes": self.notes(), "runs": list(map(vars, self.rows))}
        run_folder.write_json(out / JSON, {**head, **found})

    def table(self) -> Table:
        """The points: means and spread over the seeds."""
        from rich.table import Table
        from rich.text import Text

        shown: dict[str, Callable[[Seeds[Row]], str]] = {
            "point": lambda point: point.name,
            "runs": lambda point: f"{point.finished}/{len(point.runs)}",
            "validation loss": lambda point: _cell(point, "validation_loss"),
            "best on the way": lambda point: _cell(point, "validation_best"),
            "training loss": lambda point: _cell(point, "loss_last"),
            "step ms": lambda point: _cell(point, "step_ms", ",.1f"),
            "state MB": lambda point: f"{state.mean / 1e6:,.2f}" if (state := point.spread("state_bytes")) else "-",
            "": self._remark,
        }
        if self.final == "loss_last":
            del shown["validation loss"], shown["best on the way"]
        page = Table(box=None, padding=(0, 2, 0, 0), title_justify="left")
        for name in shown:
            page.add_column(name, justify="left" if name in ("point", "") else "right", no_wrap=True)
        for point in self.points:
            page.add_row(*(Text(cell(point)) for cell in shown.values()), style="bold" if point in self.best else None)
        return page

    def _remark(self, point: Seeds[Row]) -> str:
        """Words at the end of a point's line."""
        if point.diverged:
            return f"diverged{f' ({point.diverged} of {len(point.runs)})' if len(point.runs) > 1 else ''}"
        if point.finished < len(point.runs):
            return "not finished"
        return "<- best" if point in self.best else ""


def _kind(point: Seeds[Row]) -> tuple[str | None, ...]:
    """What points must agree in for one to be the best of them."""
    return tuple(dict(point.settings).get(key) for key in ("optimizer", *MEASURE))


def _cell(point: Seeds[Row], name: str, form: str = ".4f") -> str:
    spread = point.spread(name)
    return f"{spread:{form}}" if spread else "-"
