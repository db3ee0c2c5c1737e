"""What a sweep tries: points from `--grid`, each a few settings, and the folders and flags that belong to them.

One `--grid` is a product of its keys' values; several are alternatives, so that settings which make sense for one
optimizer only are tried with it alone:

    --grid optimizer=adam lr=1e-3,2e-3  --grid optimizer=muon lr=4e-3,8e-3 muon_momentum=0.9,0.95

are 2 + 4 points.
"""

from __future__ import annotations

import csv
import hashlib
import itertools
import re
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_muon.errors import UserError

_KEY = re.compile(r"-*([A-Za-z_][A-Za-z0-9_-]*)=(.*)\Z", re.DOTALL)
_MAX_FOLDER_LENGTH = 150


@dataclass(frozen=True)
class Point:
    """One combination of settings, as they are typed for `--set`, in the order of the grid.

    Its name leaves the `hidden` keys out: those that take a setting away and do nothing else in their grid.
    """

    settings: tuple[tuple[str, str], ...]
    hidden: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """Its settings for people: optimizer=muon,lr=0.008."""
        shown = [setting for setting in self.settings if setting[0] not in self.hidden]
        return ",".join(f"{key}={value}" for key, value in shown or self.settings)

    @property
    def folder(self) -> str:
        """Its name as a folder: without slashes or blanks, and not too long."""
        quoted = urllib.parse.quote(self.name, safe="+,=.@:").replace("%2F", "-")
        if len(quoted) > _MAX_FOLDER_LENGTH or "%" in quoted:
            digest = hashlib.sha256(self.name.encode()).hexdigest()[:8]
            quoted = f"{quoted.replace('%', '_')[:_MAX_FOLDER_LENGTH]}-{digest}"
        return quoted


@dataclass(frozen=True)
class Task:
    """One run of a sweep: a point with a seed, in its own folder below the sweep's."""

    point: Point
    seed: int
    folder: Path

    @property
    def name(self) -> str:
        """For people: optimizer=muon,lr=0.008 seed=1."""
        return f"{self.point.name} seed={self.seed}"


def parse_grids(grids: Sequence[Sequence[str]]) -> tuple[Point, ...]:
    """The points of all `--grid`s, given by their words KEY=VALUE,VALUE,...,KEY=..., in their order, none twice.

    Raises:
        UserError: a word is not of that form, or a second `--grid` was meant as a factor of the first.
    """
    points: dict[frozenset[tuple[str, str]], Point] = {}
    folders: dict[str, Point] = {}
    first: dict[str, list[str]] = {}
    for grid in map(_parse, grids):
        if first and not first.keys() & grid.keys():
            both = " ".join(f"{key}={','.join(values)}" for key, values in {**first, **grid}.items())
            raise UserError(
                f"--grid {' '.join(first)}... and --grid {' '.join(grid)}... have no key in common: several --grid are "
                f"alternatives, each tried for itself; for every combination write one: --grid {both}"
            )
        first = {**grid, **first}
        hidden = frozenset(key for key, values in grid.items() if values == ["null"])
        for values in itertools.product(*grid.values()):
            point = Point(tuple(zip(grid, values, strict=True)), hidden)
            point = points.setdefault(frozenset(point.settings), point)
            if (other := folders.setdefault(point.folder, point)) is not point:
                raise UserError(
                    f"--grid: the points {dict(other.settings)} and {dict(point.settings)} would share the folder "
                    f"{point.folder}; leave one of them out"
                )
    return tuple(points.values())


def tasks_of(points: Sequence[Point], seeds: int, out: Path) -> tuple[Task, ...]:
    """Every point with the seeds 1 to `seeds`: all points with the first seed, then with the second."""
    return tuple(
        Task(point, seed, out / point.folder / f"seed={seed}") for seed in range(1, seeds + 1) for point in points
    )


def _parse(words: Sequence[str]) -> dict[str, list[str]]:
    """Values by key of one `--grid`."""
    grid: dict[str, list[str]] = {}
    for word in words:
        key = ""
        for value in next(csv.reader([word], skipinitialspace=True), []):
            if match := _KEY.match(value):
                key, value = match[1].replace("-", "_").lower(), match[2]
                if key in grid:
                    raise UserError(f"--grid {' '.join(words)}: {key} is given twice; write {key}=VALUE,VALUE once")
                if key == "seed":
                    raise UserError(f"--grid {word}: seeds come from --seeds N, which takes 1 to N")
                grid[key] = []
            if not key or not value or value in grid[key]:
                fault = "a value is empty or stands there twice" if key else "no key"
                raise UserError(
                    f"--grid {word}: {fault}; write KEY=VALUE,VALUE, such as optimizer=adam,muon lr=1e-3,2e-3"
                )
            grid[key].append(value)
    return grid
