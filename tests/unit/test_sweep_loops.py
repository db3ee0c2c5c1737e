"""The shell loops of examples/, with a stand-in for `megatron-muon` that notes what it is to do."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = """\
#!/bin/bash
echo "$*" >>"$OUT/calls"
[[ $1 == train && " $* " != *" --dry-run "* ]] || exit 0
while [[ $1 != --out ]]; do shift; done
mkdir -p "$2"
status=0 outcome='"outcome": "finished", "diverged": false'
[[ $2 != *"${INTERRUPTED:-none}"* ]] || status=130 outcome='"outcome": "interrupted"'
[[ $2 != *"${DIVERGED:-none}"* ]] || status=16 outcome='"outcome": "failed", "diverged": true'
echo "{$outcome}" >"$2/summary.json"
exit "$status"
"""


@pytest.fixture
def sweep(tmp_path):
    """Runs a script of examples/; its exit status, and what it calls: runs, and compared runs."""
    (tmp_path / "megatron-muon").write_text(STAND_IN)
    (tmp_path / "megatron-muon").chmod(0o755)
    (tmp_path / "text.bin").touch()
    path = f"{tmp_path}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "OUT": str(tmp_path)}

    def run(script, *arguments, **given):
        (tmp_path / "calls").write_text("")
        line = ["bash", ROOT / "examples" / script, *arguments]
        places = {**env, "CORPUS": str(tmp_path / "text"), **given}
        done = subprocess.run(line, cwd=tmp_path, env=places, check=False)
        calls = (tmp_path / "calls").read_text().replace(f"{tmp_path}/", "").splitlines()
        trained = [call.removeprefix("train ") for call in calls if call.startswith("train ")]
        compared = [call for call in calls if call.startswith("compare ")]
        return done.returncode, trained, compared

    return run


def folders(trained: list[str]) -> list[str]:
    """The --out of each training."""
    return [call.split("--out ")[1].split()[0] for call in trained]


def test_an_interrupted_sweep_stops_and_trains_the_rest_when_started_again(sweep):
    """A run that diverged is not trained again, and not compared."""
    grid = {"RATES": "adam:1e-3 muon:4e-3 muon:1e20", "SEEDS": "1 2", "DIVERGED": "1e20"}
    every = [
        f"{point}-{seed}"
        for seed in (1, 2)
        for point in (
            "adam-1e-3",
            "muon-4e-3",
            "muon-1e20",
        )
    ]
    status, trained, compared = sweep("lr_sweep.sh", INTERRUPTED="adam-1e-3-2", **grid)
    assert (status, folders(trained), compared) == (130, every[:4], [])
    status, trained, compared = sweep("lr_sweep.sh", "--train-iters", "9", **grid)
    assert (status, folders(trained)) == (0, every[3:])
    assert trained[0] == (
        "--resume --out adam-1e-3-2 --config configs/quickstart.yaml --nproc 1"
        " --optimizer adam --lr 1e-3 --seed 2 --train-iters 9"
    )
    finished = " ".join(name for name in every if "1e20" not in name)
    assert compared == [f"compare {finished} --png losses.png"]
    assert sweep("lr_sweep.sh", **grid) == (0, [], compared)


def test_rates_across_widths_are_compared_within_a_scale_mode(sweep):
    status, trained, compared = sweep(
        "lr_transfer.sh", MODES="spectral unit_rms_norm", RATES="0.1 0.2"
    )
    assert (status, len(trained)) == (0, 2 * 3 * 2)
    assert folders(trained)[:3] == ["spectral-64-0.1", "spectral-64-0.2", "spectral-128-0.1"]
    assert "--init-method-std 0.0400 --muon-lr 0.1" in trained[0]
    assert [line.split()[-1] for line in compared] == ["spectral.png", "unit_rms_norm.png"]


def test_a_recipe_has_rates_and_seeds_and_a_dry_run_compares_nothing(sweep):
    status, trained, compared = sweep("recipes.sh", "--dry-run")
    assert (status, len(trained), compared) == (0, 6 * 3, [])
    status, trained, _ = sweep("recipes.sh", RECIPES="muonh:muon_lr=0.04,0.08", SEEDS="1")
    assert folders(trained) == ["muonh-0.04-1", "muonh-0.08-1"]
    assert "--config configs/recipes/muonh.yaml" in trained[1]
    assert "--muon-lr 0.08" in trained[1]
