"""What a sweep tries: every point of its `--grid`s with every seed.

One `--grid` is a product of its keys' values; several are alternatives, each tried by itself.
"""

from __future__ import annotations

import csv
import hashlib
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_muon.errors import UserError


@dataclass(frozen=True)
class Task:
    """One run of a sweep: a point, named by its settings as they are typed for `--set`, with a seed and a folder."""

    point: str
    settings: tuple[tuple[str, str], ...]
    seed: int
    folder: Path

    @property
    def name(self) -> str:
        """For people: optimizer=muon,lr=0.008 seed=1."""
        return f"{self.point} seed={self.seed}"


def tasks_of(grids: Sequence[Sequence[str]], seeds: int, out: Path) -> list[Task]:
    """Every point, none twice, with the seeds 1 to `seeds`: all points with the first seed, then with the second.

    A UserError names a word of a `--grid` that is not KEY=VALUE,VALUE.
    """
    points = dict.fromkeys(point for words in grids for point in _points(words))
    tasks = []
    for seed, point in itertools.product(range(1, seeds + 1), points):
        name = ",".join(f"{key}={value}" for key, value in point)
        tasks.append(Task(name, point, seed, out / folder_of(name) / f"seed={seed}"))
    return tasks


def folder_of(point: str) -> str:
    """A point's name as a folder: without slashes or blanks, not too long, and never that of another point."""
    plain = re.sub(r"[^\w+,=.@:-]", "-", point, flags=re.ASCII)[:150]
    return plain if plain == point else f"{plain}-{hashlib.sha256(point.encode()).hexdigest()[:8]}"


def _points(words: Sequence[str]) -> Iterator[tuple[tuple[str, str], ...]]:
    grid: dict[str, list[str]] = {}
    for word in words:
        first, *values = next(csv.reader([word], skipinitialspace=True), []) or [""]
        key, _, value = first.partition("=")
        key = key.lstrip("-").replace("-", "_").lower()
        if not key.isidentifier() or not all([value, *values]) or key in grid:
            raise UserError(
                f"--grid {' '.join(words)}: write KEY=VALUE,VALUE for each key once, such as optimizer=adam,muon "
                f"lr=1e-3,2e-3; found {word!r}"
            )
        grid[key] = [value, *values]
    for combination in itertools.product(*grid.values()):
        yield tuple(zip(grid, combination, strict=True))
