"""Prints the plans of the shipped models at many sizes as a table.

    OMP_NUM_THREADS=1 python -m benchmarks.plans

Each line is `megatron-muon plan --config configs/NAME.yaml --world-size N` with its defaults.
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import parse_models
from megatron_muon import cli

RANKS = (64, 128, 256, 512, 1024, 2048, 4096)
HEADINGS = (
    *("model", "ranks", "step, ms", "Newton-Schulz, ms", "exchange, ms"),
    *("extra memory, MiB", "load, max / mean"),
)


def planned(config: Path, ranks: int) -> dict[str, Any]:
    """The figures of a plan."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        file = Path(folder, "plan.json")
        given = ("--config", config, "--world-size", ranks, "--json", file)
        if status := cli.main(["plan", *map(str, given)]):
            raise SystemExit(status)
        figures: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return figures


def cells(model: str, figures: dict[str, Any]) -> list[str]:
    """A line of the table."""
    found = [model, f"{figures['world_size']:,}"]
    for part in ("step_ms", "ns_ms", "exchange_ms"):
        found.append(f"{figures[part]:,.1f}")
    found.append(f"{figures['extra_bytes'] / 2**20:,.0f}")
    return [*found, f"{figures['max_over_mean']:.2f}"]


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table, line by line."""
    args = parse_models(__doc__, RANKS, argv)
    for row in (HEADINGS, ["---"] * len(HEADINGS)):
        print(f"| {' | '.join(row)} |")
    for config in args.configs:
        for ranks in args.ranks:
            row = cells(config.stem, planned(config, ranks))
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
