"""The lock of a --save directory: who is refused, and which processes keep it."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
import subprocess
import sys
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from megatron_muon.checkpoint import locks
from megatron_muon.errors import UserError

HOLD = """
import sys
from pathlib import Path
from megatron_muon.checkpoint.locks import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "folder" / locks.LOCK


def lock_of(file: Path, wait_s: float = 0.0) -> AbstractContextManager[None]:
    return locks.locked(file.parent, wait_s=wait_s)


def holder(file: Path) -> subprocess.Popen[str]:
    """A process that takes the lock until it reads a line."""
    command = [sys.executable, "-c", HOLD, str(file.parent)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def test_a_living_holder_is_named_and_a_killed_one_is_no_obstacle(file):
    with holder(file) as other:
        assert other.stdout.readline() == "held\n"
        who = re.escape(
            f"{file.parent} (process {other.pid} on {socket.gethostname()}, since 20",
        )
        with pytest.raises(
            UserError, match=rf"{who}.*\); wait for its end, or choose another folder$"
        ):
            lock_of(file).__enter__()
        other.kill()
    assert file.exists()
    with lock_of(file):
        assert f"process {os.getpid()} on " in file.read_text()
    assert not file.exists()


def test_a_fork_does_not_keep_a_lock(file):
    """A killed rank leaves its data loader's workers for some seconds, and they are forks."""
    with lock_of(file):
        fork = os.fork()
        if fork == 0:
            time.sleep(60)
            os._exit(0)
        other = os.open(file, os.O_RDWR)
    try:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(other)
        os.kill(fork, 9)
        os.waitpid(fork, 0)


def test_a_holder_on_another_machine_may_be_dead_and_is_waited_for(file, capsys):
    """A job that SLURM requeues on another node comes back before a file server sees that the
    first node is dead.
    """
    release = threading.Event()
    holds = threading.Event()

    def hold() -> None:
        with lock_of(file):
            file.write_text("process 12 on node7, since then")
            holds.set()
            release.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    assert holds.wait(20)
    with pytest.raises(UserError, match="process 12 on node7, since then"):
        lock_of(file).__enter__()
    threading.Timer(2 * locks.PATIENCE_S, release.set).start()
    with lock_of(file, 20.0):
        assert "(process 12 on node7, since then); waiting 20 s" in capsys.readouterr().err
    thread.join()


def test_a_file_system_without_locks_is_reported_and_used(file, capsys, monkeypatch):
    def flock(*_: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with lock_of(file):
        pass
    note = f"{file.parent} is on a file system without locks"
    assert note in capsys.readouterr().err


def test_a_link_in_the_place_of_a_lock_is_refused_and_its_target_keeps_its_bytes(file, tmp_path):
    """The file that it pointed to was overwritten with the name of whoever took the lock."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    file.parent.mkdir()
    file.symlink_to(victim)
    with pytest.raises(UserError, match=r"cannot write there .Too many levels"):
        lock_of(file).__enter__()
    assert victim.read_text() == "precious"
