"""`examples/lr_sweep.sh` with real trainings of one rank, and the table that ends it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.functional.test_train import write_config
from tests.support import cli

pytestmark = [pytest.mark.wide, pytest.mark.timeout(700)]


def test_a_sweep_trains_what_is_missing_and_ends_with_a_table(tmp_path: Path) -> None:
    """A rate whose loss is soon no number is left out of the table."""
    model = cli.TINY[: cli.TINY.index("--eval-iters")]
    batches = "--global-batch-size 4 --train-iters 4 --log-interval 1"
    validation = "--eval-interval 2 --eval-iters 1"
    flags = (
        *cli.make_corpus(tmp_path),
        *cli.MUON,
        *batches.split(),
        *validation.split(),
    )
    write_config(tmp_path / "tiny.yaml", *model, *flags)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {"PATH": path, "CONFIG": "tiny.yaml", "OUT": "s", "RATES": "muon:0.01 muon:1e20"}
    line = ["bash", str(cli.ROOT / "examples/lr_sweep.sh"), "--no-save"]

    env["SEEDS"] = "1"
    first = cli.run(line, tmp_path, seconds=2 * cli.SECONDS, env=env).checked()
    assert "validation loss  steps" not in first.output, "one run is nothing to compare"
    summary = tmp_path / "s/muon-0.01-1/summary.json"
    before = summary.read_bytes()
    assert json.loads((tmp_path / "s/muon-1e20-1/summary.json").read_text())["diverged"]

    env["SEEDS"] = "1 2"
    again = cli.run(line, tmp_path, seconds=2 * cli.SECONDS, env=env).checked()
    assert summary.read_bytes() == before
    (row,) = [text for text in again.output.splitlines() if text.startswith("optimizer=muon  ")]
    losses = [
        json.loads((tmp_path / f"s/muon-0.01-{seed}/summary.json").read_text())["validation_loss"]
        for seed in (1, 2)
    ]
    mean = sum(losses) / 2
    assert row.split()[1:3] == ["2", f"{mean:.4f}"]
    assert (tmp_path / "s/losses.png").read_bytes().startswith(b"\x89PNG")
