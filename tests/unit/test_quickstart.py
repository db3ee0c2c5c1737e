"""`megatron-muon quickstart`: which commands it runs, in which folder, and when it stops."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from megatron_muon import cli


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """The commands that were run, in an empty folder; a training leaves what a training leaves."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["megatron-muon"])
    lines: list[str] = []
    real = cli.main

    def main(argv):
        if argv[0] == "quickstart":
            return real(argv)
        assert sys.argv == ["megatron-muon", *argv], "the run's records would name another command"
        lines.append(" ".join(argv))
        if argv[0] == "train":
            Path(argv[argv.index("--out") + 1]).mkdir(parents=True)
        return 0

    monkeypatch.setattr(cli, "main", main)
    return lines


def test_a_second_quickstart_leaves_the_first_alone(asked):
    """It wrote over the first one's checkpoint, and both curves stood in one folder."""
    assert cli.main(["quickstart"]) == 0
    assert cli.main(["quickstart", "--nproc", "4", "--", "--bf16"]) == 0
    later = asked[6].split()[-1]
    assert re.fullmatch(r"runs/quickstart-\d{8}-\d{6}", later)
    runs = (("runs/quickstart", "2", ""), (later, "4", " -- --bf16"))
    assert asked == [
        line
        for out, nproc, more in runs
        for line in (
            "data prepare --stdlib --output data/stdlib",
            f"train --config configs/quickstart.yaml --nproc {nproc} --out {out}{more}",
            f"compare {out}",
            f"generate --checkpoint {out} --prompt def ",
        )
    ]


def test_without_transformers_it_says_why_the_model_writes_nothing(asked, monkeypatch, capsys):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "transformers" else found(name)
    )
    assert cli.main(["quickstart"]) == 0
    assert [line.split()[0] for line in asked] == ["data", "train", "compare"]
    assert "transformers is not installed" in capsys.readouterr().out


def test_the_first_step_that_fails_is_the_last_and_its_status_is_handed_on(
    asked, monkeypatch, capsys
):
    watched = cli.main
    monkeypatch.setattr(cli, "main", lambda argv: 7 if argv[0] == "train" else watched(argv))
    assert cli.main(["quickstart"]) == 7
    assert [line.split()[0] for line in asked] == ["data"]
    typed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("$ ")]
    assert (
        typed[-1]
        == "$ megatron-muon train --config configs/quickstart.yaml --nproc 2 --out runs/quickstart"
    )
