"""What the tests have shown of each parallel layout: collected as they pass, and written as a table.

    MUON_CELLS=cells.json python -m pytest tests/functional
    python -m tests.functional.cells cells.json docs/parallelism.md

The second command replaces the table in the page. test_parallelism_page.py checks that the page claims no cell that a
complete run of the tests has not shown.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

COLUMNS = ("train", "equal to one rank", "save", "resume", "reshard")
ZERO = {"no_shard": "0", "optim": "1", "optim_grads": "2", "optim_grads_params": "3"}
SHARED = "3+"
"""ZeRO-3 whose state the instances of HSDP share too, `--outer-dp-sharding-strategy optim`."""
BEGIN, END = "<!-- table: written by tests.functional.cells -->", "<!-- end of table -->"


class Cells:
    """The cells that passing tests have shown: `(layout, column, strategy)`."""

    def __init__(self) -> None:
        self.shown: set[tuple[str, str, str]] = set()

    def add(self, layout: str, strategy: str, *columns: str) -> None:
        """Note that a test has shown this. `strategy` may be followed by a comma and what else was set."""
        assert set(columns) <= set(COLUMNS), columns
        name, *more = strategy.split(", ")
        self.shown |= {(layout, column, SHARED if "outer optim" in more else ZERO[name]) for column in columns}

    def save(self, file: Path) -> None:
        """Write them, with what the file already holds."""
        held = load(file) if file.exists() else set()
        file.write_text(json.dumps(sorted(held | self.shown), indent=0) + "\n", "utf-8")


def load(file: Path) -> set[tuple[str, str, str]]:
    """The cells in a file that `Cells.save` wrote."""
    return {(layout, column, strategy) for layout, column, strategy in json.loads(file.read_text("utf-8"))}


def table(shown: Iterable[tuple[str, str, str]]) -> str:
    """The cells as Markdown, a row for each layout."""
    rows: dict[str, dict[str, list[str]]] = {}
    for layout, column, strategy in sorted(shown):
        rows.setdefault(layout, {}).setdefault(column, []).append(strategy)
    lines = ["| layout | " + " | ".join(COLUMNS) + " |", "| --- " * (len(COLUMNS) + 1) + "|"]
    for layout, columns in rows.items():
        lines.append(f"| {layout} | " + " | ".join(" ".join(columns.get(column, ["-"])) for column in COLUMNS) + " |")
    return "\n".join(lines)


def claimed(page: str) -> Iterator[tuple[str, str, str]]:
    """The cells that a page's table claims."""
    body = page.partition(BEGIN)[2].partition(END)[0].strip().splitlines()
    for line in body[2:]:
        layout, *cells = (part.strip() for part in line.strip("|").split("|"))
        for column, cell in zip(COLUMNS, cells, strict=True):
            yield from ((layout, column, strategy) for strategy in cell.split() if strategy != "-")


def main(cells: Path, page: Path) -> None:
    """Put the table of the cells in a file into a page."""
    text = page.read_text("utf-8")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    page.write_text(f"{before}{BEGIN}\n{table(load(cells))}\n{END}{after}", "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
