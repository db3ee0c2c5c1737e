"""The results of a sweep, from the runs' summary.json: a row for each run and one for each point over its seeds.

The final loss that points are compared by is the last validation loss, or the training loss where there is no
validation. A point counts for the best when all of its seeds have finished and none has diverged.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_muon.checkpoint import files
from megatron_muon.megatron.places import RUN, SUMMARY, read_json
from megatron_muon.tools.report.arms import MEASURE, Arm, at_edges, best_of
from megatron_muon.tools.sweep.grid import Task
from megatron_muon.tools.train import run_folder

CSV, JSON = "results.csv", "results.json"

FIGURES = (
    *("iterations", "tokens", "loss_last", "validation_loss", "step_ms", "tokens_per_second", "seconds"),
    "train_seconds",
)
"""Columns of results.csv between `diverged` and `folder`, named as in summary.json; docs/experiments.md has them."""

_COLUMNS = {"validation_loss": ".4f", "loss_last": ".4f", "step_ms": ",.1f"}
"""Figures of the printed table."""


def row_of(task: Task) -> dict[str, Any]:
    """The row of a run, read from its folder."""
    run, summary = (read_json(task.folder / name) for name in (RUN, SUMMARY))
    validation = (summary.get("validation_loss") or {}).values()
    figures = {name: summary.get(name) for name in FIGURES}
    figures["validation_loss"] = statistics.fmean(validation) if validation and None not in validation else None
    return {
        **{"point": task.point, **dict(task.settings), "seed": task.seed},
        "outcome": summary.get("outcome") or ("cut off" if run else "not started"),
        **{"diverged": bool(summary.get("diverged")), **figures, "folder": str(task.folder)},
    }


class Results:
    """The runs and points, the best of each optimizer and data, and which column they are compared by."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.rows = [row_of(task) for task in tasks]
        has_validation = any(row["validation_loss"] is not None for row in self.rows)
        self.final = "validation_loss" if has_validation else "loss_last"
        self.points = []
        for name, settings in dict((task.point, task.settings) for task in tasks).items():
            runs = [SimpleNamespace(**row) for row in self.rows if row["point"] == name]
            self.points.append(Arm(name, dict(settings), runs, self.final))
        self.best = best_of(self.points, lambda point: tuple(map(point.settings.get, ("optimizer", *MEASURE))))
        self.notes = [note for best in self.best for note in at_edges(best, self.points)]

    def write(self, out: Path, head: Mapping[str, Any]) -> None:
        """Writes results.csv and results.json, which begins with `head`, each whole or not at all."""
        keys = (key for point in self.points for key in point.settings)
        columns = dict.fromkeys(["point", *keys, *self.rows[0]])
        with files.written_at_once(out / CSV) as stream:
            writer = csv.DictWriter(stream, [*columns], lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows)
        points = [
            {"point": point.name, "settings": point.settings, "seeds": len(point.runs), "finished": point.finished}
            | {"diverged": point.diverged, "best": point in self.best}
            | {name: point.spread(name) for name in FIGURES}
            for point in self.points
        ]
        found = {"compared_by": self.final, "points": points, "notes": self.notes, "runs": self.rows}
        run_folder.write_json(out / JSON, {**head, **found})

    def table(self) -> str:
        """A line for each point."""
        lines = [["point", "runs", *_COLUMNS, ""]]
        for point in self.points:
            spreads = ((point.spread(name), form) for name, form in _COLUMNS.items())
            cells = ["-" if spread is None else f"{spread:{form}}" for spread, form in spreads]
            remark = point.remark(is_best=point in self.best)
            lines.append([point.name, f"{point.finished}/{len(point.runs)}", *cells, remark])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
