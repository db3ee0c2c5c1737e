"""Locks on folders: who is refused, and which processes keep a lock."""

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
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_muon.checkpoint import locks
from megatron_muon.errors import UserError

HOLD = """
import os, subprocess, sys
from pathlib import Path
from megatron_muon.checkpoint.locks import Lock
with Lock(Path(sys.argv[1]), "it is taken", "choose another").held() as lock:
    """
UNTIL_A_LINE = "print('held', flush=True); sys.stdin.readline()"
IN_A_CHILD = """subprocess.Popen([sys.executable, "-c", "input()"], pass_fds=[lock])
    print("held", flush=True)
    os.kill(os.getpid(), 9)"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "folder" / ".lock"


def lock_of(file: Path) -> locks.Lock:
    return locks.Lock(file, "it is taken", "choose another")


def holder(file: Path, then: str = UNTIL_A_LINE) -> subprocess.Popen[str]:
    """A process that tries to take the lock, says so and goes on."""
    command = [sys.executable, "-c", HOLD + then, str(file)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def wait_until_free(take: Callable[[], None], refusal: type[Exception]) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            return take()
        except refusal:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_a_living_holder_is_named_and_a_killed_one_is_no_obstacle(file):
    with holder(file) as other:
        assert other.stdout.readline() == "held\n"
        who = re.escape(f"it is taken (process {other.pid} on {socket.gethostname()}, since 20")
        with pytest.raises(UserError, match=rf"{who}.*\); wait for its end, or choose another$"):
            lock_of(file).held().__enter__()
        with pytest.raises(UserError, match=who):
            lock_of(file).refuse_if_held()
        other.kill()
    assert file.exists()
    lock_of(file).refuse_if_held()
    with lock_of(file).held():
        assert f"process {os.getpid()} on " in file.read_text()
    assert not file.exists()


def test_a_fork_does_not_keep_a_lock(file):
    """A killed rank leaves its data loader's workers for some seconds, and they are forks."""
    with lock_of(file).held():
        fork = os.fork()
        if fork == 0:
            time.sleep(60)
            os._exit(0)
        other = os.open(file, os.O_RDWR)
    try:
        wait_until_free(lambda: fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB), BlockingIOError)
    finally:
        os.close(other)
        os.kill(fork, 9)
        os.waitpid(fork, 0)


def test_a_child_that_inherits_the_descriptor_goes_on_holding(file):
    with holder(file, IN_A_CHILD) as parent:
        assert parent.stdout.readline() == "held\n"
        parent.wait()
        with pytest.raises(UserError, match=rf"process {parent.pid} on "):
            lock_of(file).held().__enter__()
        parent.stdin.write("\n")
    wait_until_free(lock_of(file).refuse_if_held, UserError)


def test_a_holder_on_another_machine_may_be_dead_and_is_waited_for(file, capsys):
    """A job that SLURM requeues on another node comes back before a file server sees that the
    first node is dead.
    """
    release = threading.Event()
    holds = threading.Event()

    def hold() -> None:
        with lock_of(file).held():
            file.write_text("process 12 on node7, since then")
            holds.set()
            release.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    assert holds.wait(20)
    with pytest.raises(UserError, match="process 12 on node7, since then"):
        lock_of(file).held().__enter__()
    threading.Timer(2 * locks.PATIENCE_S, release.set).start()
    with lock_of(file).held(wait_s=20.0):
        assert "(process 12 on node7, since then); waiting 20 s" in capsys.readouterr().err
    thread.join()


def test_a_file_system_without_locks_is_reported_and_used(file, capsys, monkeypatch):
    def flock(*_: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with lock_of(file).held() as lock:
        assert lock is None
    note = f"{file.parent} is on a file system without locks (No locks available)"
    assert note in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_the_users_to_change(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"\.lock: cannot write there \(.*\); choose a folder"):
        lock_of(tmp_path / "file" / ".lock").held().__enter__()


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_in_the_place_of_a_lock_is_refused_and_its_target_keeps_its_bytes(
    file, tmp_path, exists
):
    """The file that it pointed to was overwritten with the name of whoever took the lock."""
    victim = tmp_path / "victim"
    if exists:
        victim.write_text("precious")
    file.parent.mkdir()
    file.symlink_to(victim)
    for refused in (lock_of(file).held().__enter__, lock_of(file).refuse_if_held):
        with pytest.raises(UserError, match="Too many levels of symbolic links"):
            refused()
    assert victim.exists() == exists
    assert not exists or victim.read_text() == "precious"
