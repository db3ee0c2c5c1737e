"""The scripts of examples/ run as their first lines say."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.functional import cli

pytestmark = pytest.mark.timeout(300)


@pytest.mark.wide
def test_own_training_loop_learns(tmp_path: Path) -> None:
    """Uniform guesses among 64 tokens would stay at 4.16."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = cli.run([*torchrun, str(cli.ROOT / "examples" / "own_training_loop.py")], tmp_path, cold=True).checked()
    assert re.search(r"^muon +8 ", run.output, re.MULTILINE)
    losses = [float(loss) for loss in re.findall(r"^step +\d+ +loss ([\d.]+)", run.output, re.MULTILINE)]
    assert len(losses) == 6
    assert losses[-1] < 1.0 < losses[0] < 4.2
