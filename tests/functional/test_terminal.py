"""What `megatron-muon train` shows of real trainings of one rank: on a terminal, and when they
fail.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import termios
import time
from pathlib import Path

import pytest

from megatron_muon.megatron import FIRST_STEP, REPORTS
from tests.functional.test_train import command, write_config
from tests.support import cli, warm
from tests.support.training import train

pytestmark = pytest.mark.timeout(300)

_COLOURS, _MOVES = re.compile(r"\x1b\[[0-9;]*m"), re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


def write_run(folder: Path, corpus: tuple[str, ...], batch: int = 4) -> None:
    flags = f"--global-batch-size {batch} --train-iters 6 --eval-iters 1 --eval-interval 3".split()
    write_config(folder / "tiny.yaml", *cli.TINY, *corpus, *cli.MUON, *flags, "--log-interval", "1")


@pytest.mark.wide
def test_on_a_terminal_there_is_one_live_line(tmp_path, corpus):
    """It goes when the run has ended, the cursor comes back, and no line was wider than the
    terminal.

    It is drawn eight times in a second, so steps take longer than that.
    """
    columns = 80
    write_run(tmp_path, corpus, batch=64)
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
    environ = cli.environment() | {"TERM": "xterm-256color"}
    for name in ("NO_COLOR", "COLUMNS", "LINES"):
        environ.pop(name, None)
    line = [
        str(warm.PYTHON),
        *command(
            "train",
            "--config",
            "tiny.yaml",
            "--out",
            "x",
        )[1:],
    ]
    process = subprocess.Popen(
        line,
        cwd=tmp_path,
        env=environ,
        stdin=follower,
        stdout=follower,
        stderr=follower,
        start_new_session=True,
    )
    os.close(follower)
    shown, deadline = b"", time.monotonic() + cli.SECONDS
    try:
        while time.monotonic() < deadline:
            try:
                shown += os.read(leader, 65536)
            except OSError:  # all who had the terminal have closed it
                break
        assert process.wait(timeout=30) == 0, shown.decode()[-3000:]
    finally:
        cli.end_tree(process)
        os.close(leader)
    text = shown.decode()
    lines = _MOVES.sub("\n", _COLOURS.sub("", text)).splitlines()
    live = [each for each in lines if "━" in each]
    assert not [each for each in live if len(each) > columns]
    for stage in ("checking the settings of tiny.yaml", "starting the ranks (1)"):
        assert any(stage in each for each in lines), stage
    figures = r"━.* step [2-6]/6  loss \d\.\d{4}  [\d,]+ tokens/s  "
    assert any(re.search(figures, each) for each in live), live
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1
    end = text[text.rindex("\x1b[?25h") :]
    assert "finished with status 0 after 6 iterations" in end
    assert "━" not in end


def train_and_tell(
    rank: int, world_size: int, *, argv: list[str], folder: str, reports: str
) -> tuple[int, str]:
    """In a worker: a run that reports to a launcher."""
    os.environ |= {
        REPORTS: reports,
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
    }
    return train(rank, world_size, argv=argv, folder=folder)


STEPS = """
    --micro-batch-size 1 --global-batch-size 2 --train-iters 2 --eval-iters 1 --eval-interval 1
    --save saves --save-interval 2 --tensorboard-dir events --log-interval 1 --device cpu
"""


def test_a_training_reports_all_that_it_does_in_its_order(ranks, tmp_path, corpus):
    """A stage that is not reported leaves the live line at the one before."""
    argv = [*cli.TINY, *corpus, *cli.MUON, *STEPS.split()]
    told = tmp_path / "told"
    answers = ranks(2, train_and_tell, argv=argv, folder=str(tmp_path), reports=str(told))
    assert [status for status, _ in answers] == [0, 0], answers[0][1][-3000:]
    events = [json.loads(line) for line in told.read_text().splitlines()]
    stages = [event["stage"] for event in events if event["event"] == "stage"]
    assert stages[-1] == "ending the ranks"
    expected = ["initializing Megatron", "building the model", "reading the data", FIRST_STEP]
    order = iter(stages)
    assert all(stage in order for stage in (*expected, "evaluating", "saving a checkpoint"))
    reported = [event for event in events if event["event"] == "step"]
    assert [event["step"] for event in reported] == [1, 2]
    assert all(event["loss"] > 0 and event["lr"] == 0.01 for event in reported)
    assert {"validation", "saved"} < {event["event"] for event in events}
