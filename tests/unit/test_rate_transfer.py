"""`examples/lr_transfer.py`: whether a rate found at one width holds at others, from runs as they
are left.
"""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.made_runs import make_run

ROOT = Path(__file__).resolve().parents[2]
RATES = ("0.01", "0.02", "0.04")
BEST = {
    ("spectral", 64): 0.04,
    ("spectral", 256): 0.01,
    ("shape_scaling", 64): 0.02,
    ("shape_scaling", 256): 0.02,
}
"""With one mode the best rate moves by four, with the other it stays."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    for (mode, width), best in BEST.items():
        for rate in RATES:
            final = 2.0 + 0.1 * abs(math.log2(float(rate) / best)) + 0.001 * width
            if (mode, width, rate) == ("shape_scaling", 64, "0.04"):
                final = math.nan
            flags = {
                **{
                    "--muon-scale-mode": mode,
                    "--hidden-size": str(width),
                    "--num-attention-heads": str(width // 32),
                },
                **{
                    "--muon-lr": rate,
                    "--muon-extra-scale-factor": "0.1" if mode == "spectral" else "1.0",
                },
            }
            folder = root / f"{mode}-{width}-{rate}"
            make_run(
                folder, lambda _, end=final: end, flags=flags, args={"muon_lr": rate}, steps=10
            )
    return root


def test_what_a_narrow_models_rate_loses_on_a_wide_one(runs: Path, tmp_path: Path) -> None:
    command = [sys.executable, "examples/lr_transfer.py", str(runs), "--out", str(tmp_path)]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in shown.splitlines()[2:]]
    assert {(mode, width): rate for mode, width, rate, *_ in rows} == {
        ("spectral", "64"): "0.04, at the edge",
        ("spectral", "256"): "0.01, at the edge",
        ("shape_scaling", "64"): "0.02, at the edge",  # what comes after it diverged
        ("shape_scaling", "256"): "0.02",
    }
    assert {(mode, width): lost for mode, width, _, _, lost in rows}["spectral", "256"] == "+0.2000"
    assert (tmp_path / "rate-transfer.png").stat().st_size > 10_000
    assert shown.strip() in (tmp_path / "rate-transfer.md").read_text()


def test_a_setting_that_is_the_same_in_all_runs_is_refused(runs: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "examples/lr_transfer.py",
        str(runs),
        "--out",
        str(tmp_path),
        "--setting",
        "seq_length",
    ]
    refused = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (
        refused.returncode,
        "--setting seq_length is the same in all runs" in refused.stderr,
    ) == (1, True)
