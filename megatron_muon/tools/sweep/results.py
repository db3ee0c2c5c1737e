"""The results of a sweep: a row for each run, a row for each point over its seeds, results.csv and results.json.

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

_COLUMNS = {
    "validation_loss": ("validation loss", ".4f", 1.0),
    "validation_best": ("best on the way", ".4f", 1.0),
    "loss_last": ("training loss", ".4f", 1.0),
    "step_ms": ("step ms", ",.1f", 1.0),
    "state_bytes": ("state MB", ",.2f", 1e6),
}
"""Figures of the printed table: their heading, format and unit."""


class Row(SimpleNamespace):
    """A row of results.csv; a run's events are large, and not kept."""

    @classmethod
    def of(cls, task: Task) -> Row:
        """The row of a run, read from its folder."""
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
            Seeds(point.name, point.settings, [row for row in rows if row.point == point.name], self.final)
            for point in points
        ]
        self.best = best_of(self.points, lambda point: tuple(map(dict(point.settings).get, ("optimizer", *MEASURE))))

    def notes(self) -> list[str]:
        """Where a setting of a best point is the lowest or highest number of those tried beside it."""
        notes = []
        for best in (point for point in self.points if point in self.best):
            settings = dict(best.settings)
            for key, value in settings.items():
                others = (dict(point.settings) for point in self.points)
                beside = [other[key] for other in others if key in other and {**other, key: value} == settings]
                try:
                    tried = sorted(map(float, beside))
                except ValueError:
                    continue
                if key in MEASURE or len(tried) < 2:  # the best on other data answers another question
                    continue
                for edge, word, further in ((tried[0], "least", "smaller"), (tried[-1], "most", "larger")):
                    if float(value) == edge:
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
        """A line for each point, the best in bold."""
        from rich.table import Table
        from rich.text import Text

        columns = {name: shown for name, shown in _COLUMNS.items() if any(point.spread(name) for point in self.points)}
        page = Table(box=None, padding=(0, 2, 0, 0))
        page.add_column("point", no_wrap=True)
        for heading in ("runs", *(heading for heading, _, _ in columns.values())):
            page.add_column(heading, justify="right", no_wrap=True)
        page.add_column("", no_wrap=True)
        for point in self.points:
            cells = [point.name, f"{point.finished}/{len(point.runs)}"]
            for name, (_, form, unit) in columns.items():
                spread = point.spread(name)
                cells.append(
                    "-" if spread is None else f"{spread.mean / unit:{form}}" if unit > 1 else f"{spread:{form}}"
                )
            cells.append(self._remark(point))
            page.add_row(*map(Text, cells), style="bold" if point in self.best else None)
        return page

    def _remark(self, point: Seeds[Row]) -> str:
        """The end of a point's line."""
        if point.diverged:
            return f"diverged ({point.diverged} of {len(point.runs)})"
        if point.finished < len(point.runs):
            return "not finished"
        return "<- best" if point in self.best else ""
