"""The plans of the shipped models at many sizes as a table, as docs/performance.md has it.

    OMP_NUM_THREADS=1 python -m benchmarks.plans

Each line is `megatron-muon plan --config configs/NAME.yaml --world-size N`, with its defaults.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_muon import cli

MODELS = ("llama3-8b", "llama3-70b", "moe-large")
RANKS = (64, 128, 256, 512, 1024, 2048, 4096)
HEADINGS = (
    *("model", "ranks", "step, ms", "Newton-Schulz, ms", "exchange, ms"),
    *("extra memory, MiB", "load, max / mean", "Muon / Adam", "waiting for communication"),
)


def planned(config: Path, ranks: int, hardware: str) -> dict[str, Any]:
    """The figures of a plan."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        file = Path(folder) / "plan.json"
        given = [
            "plan",
            "--config",
            config,
            "--world-size",
            ranks,
            "--hardware",
            hardware,
            "--json",
            file,
        ]
        if status := cli.main([str(word) for word in given]):
            raise SystemExit(status)
        figures: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return figures


def cells(model: str, figures: dict[str, Any]) -> list[str]:
    """A line of the table; of a plan without a training step the last two cells are dashes."""
    step = figures.get("training_step")
    return [
        model,
        f"{figures['world_size']:,}",
        *(f"{figures[part]:,.1f}" for part in ("step_ms", "ns_ms", "exchange_ms")),
        f"{figures['extra_bytes'] / 2**20:,.0f}",
        f"{figures['max_over_mean']:.2f}",
        *(
            (f"{step['muon_over_adam']:.3f}", f"{step['communication_share']:.0%}")
            if step
            else "--"
        ),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table, line by line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--configs",
        type=Path,
        nargs="+",
        default=[Path(f"configs/{model}.yaml") for model in MODELS],
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--hardware", default="h100-sxm")
    args = parser.parse_args(argv)
    for row in (HEADINGS, ["---"] * len(HEADINGS)):
        print(f"| {' | '.join(row)} |")
    for config in args.configs:
        for ranks in args.ranks:
            print(
                f"| {' | '.join(cells(config.stem, planned(config, ranks, args.hardware)))} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
