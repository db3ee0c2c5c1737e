"""`megatron-muon doctor --gpu --device cpu` on ranks: all checks pass, and an exchange that does
not wait is found.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_muon.tools.doctor import checks, steps
from megatron_muon.tools.doctor.checks import Context
from tests.support import cli
from tests.support.pool import Pool
from tests.support.wide import wide_but

SOME = ["machine", "arithmetic", "stress"]
RUNS: dict[str, tuple[int, list[str]]] = {
    "2 ranks, some": (2, ["--only", *SOME]),
    "2 ranks": (2, []),
    "1 rank": (1, []),
}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("run", wide_but(["2 ranks, some"], RUNS))
def test_all_that_can_run_passes(run: str, tmp_path: Path) -> None:
    ranks, only = RUNS[run]
    line = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        "-m",
    ]
    line += ["megatron_muon.tools.doctor.gpu", "--device", "cpu", *only, "--report", "report.md"]
    made = cli.run(line, tmp_path, seconds=1000, cold=True).checked()
    assert "all checks pass that can run here; " in made.output
    assert "skipped: no GPU: symmetric kernel\n" in made.output
    report = json.loads((tmp_path / "report.json").read_text("utf-8"))
    assert {one["status"] for one in report["checks"].values()} == {"ok"}
    assert report["checks"]["machine"]["figures"]["ranks"] == ranks
    text = (tmp_path / "report.md").read_text("utf-8")
    assert str(tmp_path) not in text
    assert all(f"\n## {name}: ok\n" in text for name in only[1:] or report["checks"])


class Dropped:
    """Work that nobody waits for."""

    def wait(self) -> None:
        """Return at once."""


def stressed(rank: int, world_size: int, *, folder: str) -> list[str]:
    """In a worker: what `stress` finds where all-to-alls are not waited for."""
    right, left = dist.all_to_all_single, []

    def all_to_all_single(*args: Any, **options: Any) -> Dropped:
        left.append(right(*args, **options))
        return Dropped()

    dist.all_to_all_single = all_to_all_single
    try:
        context = Context(torch.device("cpu"), Path(folder), rank, world_size)
        steps.stress(context)
    finally:
        dist.all_to_all_single = right
        for work in left:
            work.wait()
    return context.wrong


def test_an_exchange_that_does_not_wait_is_found(ranks: Pool, tmp_path: Path) -> None:
    found = ranks(2, stressed, folder=str(tmp_path))
    assert any("owner: " in text for of_rank in found for text in of_rank), found


@pytest.mark.wide
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (
            ("--muon-extra-scale-factor", "0.05"),
            "optim_grads_params: losses beside one rank's: error ",
        ),
        (("--muon-momentun", "0.5"), "optim_grads_params: status 2\n"),
    ],
)
def test_a_training_that_differs_is_found(
    flags: tuple[str, ...], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "TRAININGS", {**checks.TRAININGS, "optim_grads_params": flags})
    monkeypatch.setattr(checks, "ON_CPU", ("optim_grads_params",))
    context = Context(torch.device("cpu"), tmp_path)
    checks.training(context)
    assert any(text in wrong for wrong in context.wrong), context.wrong
