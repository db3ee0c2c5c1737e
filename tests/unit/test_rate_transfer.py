"""`megatron-muon report --transfer`: whether a rate found at one width holds at others, from runs as they are left."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megatron_muon import cli
from megatron_muon.errors import UserError
from megatron_muon.tools.report.arms import find_runs, read_arms
from megatron_muon.tools.report.transfer import families, transfer_table
from tests.support.made_runs import make_run

RATES = ("0.01", "0.02", "0.04")
BEST = {("spectral", 64): 0.04, ("spectral", 256): 0.01, ("shape_scaling", 64): 0.02, ("shape_scaling", 256): 0.02}
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
                **{"--muon-scale-mode": mode, "--hidden-size": str(width), "--num-attention-heads": str(width // 32)},
                **{"--muon-lr": rate, "--muon-extra-scale-factor": "0.1" if mode == "spectral" else "1.0"},
            }
            folder = root / f"{mode}-{width}-{rate}"
            make_run(folder, lambda _, end=final: end, flags=flags, args={"muon_lr": rate}, steps=10)
    return root


def test_what_a_narrow_models_rate_loses_on_a_wide_one(runs: Path) -> None:
    found = {family.name: family for family in families(read_arms(find_runs([runs]))[0], "hidden_size")}
    spectral, shape = (
        found[f"muon_scale_mode={mode}, muon_extra_scale_factor={factor}"]
        for mode, factor in (("spectral", "0.1"), ("shape_scaling", "1.0"))
    )
    assert len(found) == 2, "heads follow from the width and make no family"
    for family, mode in ((spectral, "spectral"), (shape, "shape_scaling")):
        assert [line.value for line in family.lines] == ["64", "256"]
        assert [line.best for line in family.lines] == [BEST[mode, 64], BEST[mode, 256]]
    assert spectral.lines[1].lost(spectral.lines[0].best) == pytest.approx(0.2, abs=1e-5)
    assert spectral.lines[1].at_edge
    assert shape.lines[1].lost(shape.lines[0].best) == 0.0
    assert shape.lines[0].tried[-1] == 0.04 not in shape.lines[0].losses, "it diverged"
    assert shape.lines[0].lost(0.04) is None
    assert not shape.lines[0].at_edge
    rows = transfer_table(list(found.values()), "hidden_size").splitlines()
    assert sum("0.01, at the edge" in row and row.endswith("+0.2000 |") for row in rows) == 1


def test_a_setting_that_is_the_same_in_all_runs_is_refused(runs: Path) -> None:
    arms, _ = read_arms(find_runs([runs]))
    with pytest.raises(
        UserError, match=r"--transfer ffn_hidden_size is the same in all runs; they differ in .*hidden_size"
    ):
        families(arms, "ffn_hidden_size")


def test_the_report_has_picture_table_and_figures(runs: Path, tmp_path: Path) -> None:
    assert cli.main(["report", str(runs), "--transfer", "hidden-size", "--out", str(tmp_path)]) == 0
    page = (tmp_path / "report.md").read_text("utf-8")
    assert "## Learning rates across `hidden_size`" in page
    assert "![final loss against learning rate, by hidden_size](rate-transfer.png)" in page
    assert (tmp_path / "rate-transfer.png").stat().st_size > 10_000
    figures = json.loads((tmp_path / "report.json").read_text("utf-8"))["transfer"]
    assert figures["setting"] == "hidden_size"
    assert figures["families"][0]["lines"][0]["losses"]["0.02"]["count"] == 1
