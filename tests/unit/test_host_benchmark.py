"""The host's own time of a step is measured with the plan's owners and waves on narrow matrices."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.host import narrow
from megatron_muon.core.layout import Layout, row_sharded


def test_matrices_keep_rows_shards_and_kinds() -> None:
    wide = Layout(2, (row_sharded("a", (64, 4096), [40, 24]), row_sharded("b", (64, 512), [0, 64])))
    found = narrow(wide)
    assert [matrix.shape for matrix in found.matrices] == [(64, 16), (64, 8)]
    assert [(shard.rank, shard.rows, shard.cols) for shard in found.matrices[0].shards] == [(0, 40, 16), (1, 24, 16)]


def test_a_shipped_model_is_measured() -> None:
    command = [sys.executable, "-m", "benchmarks.host", "--configs", "configs/quickstart.yaml", "--ranks", "4"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    *_, line = run.stdout.splitlines()
    _, model, ranks, measured, _ = (cell.strip() for cell in line.split("|"))
    assert (model, ranks) == ("quickstart", "4")
    assert float(measured) > 0.0
