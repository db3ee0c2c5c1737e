"""`megatron-muon rehearse`: what a user types and gets, and that a plan says what a rehearsal counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_muon import cli
from megatron_muon.core import plan
from megatron_muon.core.exchange import Exchange

CONFIGS = Path(__file__).parents[2] / "configs"
QUICKSTART = CONFIGS / "quickstart.yaml"


def rehearsed(tmp_path: Path, *argv: object, status: int = 0) -> dict[str, Any]:
    target = tmp_path / "rehearsal.json"
    assert cli.main(["rehearse", *map(str, argv), "--json", str(target)]) == status
    read: dict[str, Any] = json.loads(target.read_text("utf-8"))
    return read


@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        ("quickstart", 4),
        pytest.param("quickstart", 2, marks=pytest.mark.wide),
        pytest.param("llama3-8b", 8, marks=pytest.mark.wide),
        pytest.param("llama3-8b", 64, marks=pytest.mark.wide),
    ],
)
def test_plan_and_rehearsal_agree(tmp_path: Path, name: str, world_size: int) -> None:
    """Bytes and products to the last one; memory within 10 %. Plans counted 1.4 to 3 times what a step takes."""
    figures = rehearsed(tmp_path, "--config", CONFIGS / f"{name}.yaml", "--world-size", world_size)
    planned, found = figures["planned"], figures["rehearsed"]
    assert found["received_bytes"] == planned["received_bytes"] > 0
    assert found["extra_bytes"] == pytest.approx(planned["extra_bytes"], rel=0.1)
    assert found["flops"] == pytest.approx(planned["flops"], rel=1e-6)
    assert [rank["rank"] for rank in figures["by_rank"]] == list(range(world_size))


def test_ranks_that_do_not_agree_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make = Exchange.__init__

    def swapped(exchange: Exchange, *args: Any, **kwargs: Any) -> None:
        make(exchange, *args, **kwargs)
        if exchange._rank == 2:
            exchange._waves[:2] = exchange._waves[1::-1]

    monkeypatch.setattr(Exchange, "__init__", swapped)
    monkeypatch.setattr(plan, "SMALL_BYTES", 0)  # several waves
    argv = ("--config", QUICKSTART, "--world-size", 4)
    figures = rehearsed(tmp_path, *argv, status=1)
    assert figures["findings"]
    assert all(finding["check"] == "bytes" and 2 in finding["ranks"] for finding in figures["findings"])
    out = capsys.readouterr().out
    assert "bytes, ranks 0, 2: step 0" in out or "bytes, ranks 2, 0: step 0" in out
    assert "agree" not in out.splitlines()[-1]


def test_what_users_get_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, text in (
        (("--config", QUICKSTART, "--world-size", 4, "--ranks", 0, 4), "--ranks 4 is not a rank of 4"),
        (("--config", QUICKSTART, "--world-size", 0), "must be a whole number of at least 1"),
        (("--config", QUICKSTART, "--world-size", 2, "--muon-exchange", "allgather"), "allgather is not rehearsed"),
    ):
        assert cli.main(["rehearse", *map(str, argv)]) == 2
        assert text in capsys.readouterr().err


def test_a_file_that_cannot_be_written_loses_no_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    argv = ("--config", QUICKSTART, "--world-size", 4, "--ranks", 3, 1, "--node-ranks", 2)
    assert cli.main(["rehearse", *map(str, argv), "--json", str(tmp_path / "missing" / "step.json")]) == 2
    out, error = capsys.readouterr()
    assert "ranks, layout and plan agree" in out
    assert "2 of 4 ranks" in out
    assert "what the other ranks send" in out
    assert "rehearsing ...\n" in error
    assert "cannot write" in error.splitlines()[-1]
    assert not [one for one in recwarn if issubclass(one.category, FutureWarning)]
