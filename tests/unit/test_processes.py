"""Launching and ending processes: nothing is left behind, nothing of the output is lost. Real
processes, no ranks.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from megatron_muon.tools.train.processes import Ended, watch

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")

CHILD = (
    "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'import time;"
    " time.sleep(60)'], "
)
CHILD += "start_new_session=True); print(child.pid, flush=True); "
"""Starts a process in a session of its own, as torchrun does, and tells its number."""

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready',"
    " flush=True); time.sleep(60)"
)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def is_gone(pid: int) -> bool:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


def signal_when(log: Path, text: str, *numbers: int) -> threading.Thread:
    """Sends signals to this process, one after the other, once `log` holds `text`."""

    def send() -> None:
        deadline = time.monotonic() + 20
        while not (log.exists() and text in log.read_text()) and time.monotonic() < deadline:
            time.sleep(0.02)
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(0.3)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@pytest.fixture(autouse=True)
def heeds_interrupts() -> Iterator[None]:
    """SIGINT as in a terminal: who runs the tests in the background of a script has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler  # handlers are put back
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("end", "status"),
    [("sys.exit(0)", 0), ("sys.exit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137)],
)
def test_ranks_that_outlive_their_launcher_are_ended(tmp_path, end, status):
    """The parent of orphans is no longer the launcher: only the mark in their environment tells
    whose they are.
    """
    assert watch(
        python(CHILD + end),
        tmp_path / "log",
        env=dict(os.environ),
    ) == Ended(status)
    assert is_gone(int((tmp_path / "log").read_text()))


SAVES = (
    "import signal, sys, time\n"
    "def save(*_): time.sleep(0.5); print('saved', flush=True); sys.exit(75)\n"
    "signal.signal(signal.SIGTERM, save); print('ready', flush=True); time.sleep(60)"
)


@pytest.mark.parametrize(
    ("code", "signals", "grace_s", "ended"),
    [
        (STUBBORN, [signal.SIGTERM], 0.2, Ended(137, signal.SIGTERM)),  # not in time
        # a second one kills at once
        (STUBBORN, [signal.SIGINT, signal.SIGINT], 60, Ended(137, signal.SIGINT)),
        (SAVES, [signal.SIGTERM], 30, Ended(75, signal.SIGTERM)),
    ],
)
def test_a_signal_gives_time_to_save_and_no_more(tmp_path, code, signals, grace_s, ended):
    sender = signal_when(tmp_path / "log", "ready", *signals)
    began = time.monotonic()
    assert (
        watch(
            python(code),
            tmp_path / "log",
            env=dict(os.environ),
            grace_s=grace_s,
        )
        == ended
    )
    sender.join()
    assert time.monotonic() - began < 25
    assert ("saved" in (tmp_path / "log").read_text()) is (code == SAVES)


def test_all_output_is_shown_and_logged(tmp_path):
    """Pieces may end within a character or a line; a start that continues a run adds to the log."""
    code = (
        "import sys\n"
        "for byte in 'zwölf\\nüber'.encode():\n"
        "    sys.stdout.buffer.write(bytes([byte])); sys.stdout.flush()"
    )
    lines: list[str] = []
    log = tmp_path / "log"

    def run(code: str, **how: bool) -> None:
        env = dict(os.environ)
        watch(
            python(code),
            log,
            env=env,
            show=lambda event: lines.append(event["line"]),
            **how,
        )

    run(code)
    assert log.read_text("utf-8") == "zwölf\nüber"
    assert lines == ["zwölf"]
    run("print('on')", append=True)
    assert log.read_text("utf-8") == "zwölf\nüberon\n"
    assert lines[1:] == ["on"]
