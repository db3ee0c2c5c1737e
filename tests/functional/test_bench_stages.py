"""`python -m benchmarks.stages` on two simulated nodes: the messages are those of the plan, and all rows come back."""

import re
import sys

import pytest

from benchmarks import stages
from tests.functional import cli

pytestmark = pytest.mark.timeout(150)

RANKS, NODE = 4, 2


@pytest.mark.wide
def test_both_are_measured(tmp_path):
    sizes = ["--ranks", f"{RANKS}", "--node-ranks", f"{NODE}", "--hidden-size", "64", "--num-layers", "2", "--kib", "1"]
    command = [sys.executable, "-m", "benchmarks.stages", *sizes, "--repeat", "1", "--warmup", "0"]
    output = cli.run(command, tmp_path, seconds=120).checked().output

    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in re.findall(r"^\| \d.*", output, re.MULTILINE)]
    (straight, staged), peers = (
        [dict(zip(names, row, strict=True)) for row in rows if len(row) == len(names)]
        for names in (stages.EXCHANGE, stages.MESSAGES)
    )
    assert (straight["stages"], staged["stages"]) == ("1", "2")
    waves = int(straight["waves"])
    assert int(staged["waves"]) == waves
    # There and back in every wave, to each other rank; or to those of this place and then to those of this node.
    assert int(straight["messages"]) == 2 * waves * RANKS * (RANKS - 1)
    assert int(staged["messages"]) == 2 * waves * RANKS * (RANKS // NODE - 1 + NODE - 1)
    assert int(straight["peers"]) > int(staged["peers"]) == 1
    assert straight["ratio"] == "1.00"
    assert float(staged["median ms"]) > 0
    assert [row["peers"] for row in peers] == ["1", "3"]
    assert all(float(row["in groups, ms"]) > 0 and float(row["among all, ms"]) > 0 for row in peers)
