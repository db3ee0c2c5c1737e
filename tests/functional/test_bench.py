"""`python -m benchmarks.step` on two gloo ranks: all figures are there, collectives carry what the plan says."""

import json
import sys

import pytest

from tests.support import cli

pytestmark = pytest.mark.timeout(150)


def test_bench_step(tmp_path):
    command = [sys.executable, "-m", "benchmarks.step", "--ranks", "2", "--hidden-size", "64"]
    setting = ["--num-layers", "1", "--repeat", "2", "--ns-dtype", "fp32", "--device", "cpu", "--team-size", "1", "2"]
    setting += ["--variants", "cautious", "hyperball"]
    (tmp_path / "momentum").mkdir()
    setting += ["--offload", "cpu", "nvme", "--offload-dir", "momentum", "--momentum-dtype", "bf16"]
    run = cli.run([*command, *setting, "--json", "figures.json"], tmp_path, seconds=120).checked()
    assert "owner" in run.output
    assert "floor: Newton-Schulz" in run.output

    figures = json.loads((tmp_path / "figures.json").read_text("utf-8"))
    floor = figures["floor_ms"]
    assert floor["ns"] > 0
    assert floor["exchange"] > 0
    assert floor["total"] == pytest.approx(floor["ns"] + floor["exchange"])
    methods = {"owner", "allgather", "allgather-tuned", "adam", "team-1", "team-2", "owner+cpu", "owner+nvme"}
    assert set(figures["methods"]) == methods | {"cautious", "hyperball"}
    for values in figures["methods"].values():
        assert 0 < values["min_ms"] <= values["median_ms"]
        assert values["phases_ms"]
        assert values["exchange_bytes_counted_per_rank"] == values["exchange_bytes_per_rank"]
        assert values["peak_extra_bytes"] > 0
    elements = 12 * 64 * 64
    assert figures["parameters"] == elements
    # Each rank holds half of every matrix: all-gather brings the other half, the owner scheme as much there and back.
    assert figures["methods"]["allgather"]["exchange_bytes_per_rank"] == elements // 2 * 4
    assert figures["methods"]["owner"]["exchange_bytes_per_rank"] >= elements // 2 * 4
    assert figures["methods"]["adam"]["exchange_bytes_per_rank"] == 0
    # All are small: auto forms no team. Teams of two cut each of the six blocks, and add up its Gram matrix in fp32 at
    # least twice; each time a rank receives half of it, twice.
    assert figures["plan"] == figures["methods"]["team-1"]["plan"]
    assert figures["plan"]["matrices_of_teams"] == {}
    assert figures["methods"]["team-2"]["plan"]["matrices_of_teams"] == {"2": 4}
    assert figures["methods"]["team-2"]["exchange_bytes_per_rank"] >= 6 * 2 * 64 * 64 * 4
    phases = figures["methods"]["owner"]["phases_ms"]
    assert {"momentum", "gather_wait", "orthogonalize", "send_back", "scatter_wait", "apply"} <= set(phases)

    assert list((tmp_path / "momentum").iterdir()) == []
    of_rank = elements // 2 * 2  # half of every matrix, as bf16, in whole pages
    assert figures["methods"]["owner+cpu"]["momentum_bytes"]["host"] == of_rank
    assert figures["methods"]["owner+nvme"]["momentum_bytes"]["disk"] == of_rank
    assert figures["methods"]["owner+nvme"]["momentum_bytes"]["device"] == 0
    assert figures["ratios"]["owner+nvme_over_owner"] > 0
    assert figures["disk"]["read_gb_per_s"] > 0
    assert figures["disk"]["transfer_ms"] > 0
    assert {"machine", "versions", "commit", "command"} <= set(figures)
