"""Locks on folders: who is refused, what a dead holder leaves, and which processes keep a lock."""

from __future__ import annotations

import errno
import fcntl
import json
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

HOLD = (
    "import os, subprocess, sys; from pathlib import Path; from megatron_muon.checkpoint import"
    " locks\nwith locks.Lock(Path(sys.argv[1]), 'it is taken', 'choose another').held() as"
    " lock:\n    "
)
UNTIL_A_LINE = "print('held', flush=True); sys.stdin.readline()"
IN_A_CHILD = (
    "child = subprocess.Popen([sys.executable, '-c', 'input()'], pass_fds=[lock])\n"
    "    print('held', flush=True); os.kill(os.getpid(), 9)"
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "folder" / ".lock"


def lock_of(file: Path) -> locks.Lock:
    return locks.Lock(file, "it is taken", "choose another")


def held(file: Path, wait_s: float = 0.0):
    return lock_of(file).held(wait_s=wait_s)


def holder(file: Path, then: str = UNTIL_A_LINE) -> subprocess.Popen[str]:
    """A process that tries to take the lock, says so and goes on."""
    return subprocess.Popen(
        [sys.executable, "-c", HOLD + then, str(file)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_living_holder_is_named_and_a_killed_one_is_no_obstacle(file):
    with holder(file) as other:
        assert other.stdout.readline() == "held\n"
        who = re.escape(f"it is taken (process {other.pid} on {socket.gethostname()}, since 20")
        with (
            pytest.raises(UserError, match=rf"{who}.*\); wait for its end, or choose another$"),
            held(file),
        ):
            pass
        with pytest.raises(UserError, match=who):
            lock_of(file).refuse_if_held()
        other.kill()
    assert file.exists()
    lock_of(file).refuse_if_held()
    with held(file):
        assert json.loads(file.read_text())["pid"] == os.getpid()
    assert not file.exists()


def test_of_three_that_start_at_once_one_is_the_holder(file):
    others = [holder(file) for _ in range(3)]
    refused = 0
    while refused < 2:
        refused = sum(other.poll() is not None for other in others)
        time.sleep(0.02)
    (winner,) = (other for other in others if other.poll() is None)
    for other in others:
        out, err = other.communicate("\n", timeout=20)
        if other is winner:
            assert (other.returncode, out) == (0, "held\n")
        else:
            assert out == ""
            assert f"it is taken (process {winner.pid} on " in err


def test_a_fork_does_not_keep_a_lock(file):
    """A killed rank leaves its data loader's workers for some seconds, and they are forks."""
    with held(file):
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


def wait_until_free(take: Callable[[], None], refusal: type[Exception]) -> None:
    """Until the other process, which is about to give the lock up, has."""
    deadline = time.monotonic() + 20
    while True:
        try:
            return take()
        except refusal:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_a_child_that_inherits_the_descriptor_goes_on_holding(file):
    with holder(file, IN_A_CHILD) as parent:
        assert parent.stdout.readline() == "held\n"
        parent.wait()
        with pytest.raises(UserError, match=rf"process {parent.pid} on "), held(file):
            pass
        parent.stdin.write("\n")
    wait_until_free(lock_of(file).refuse_if_held, UserError)


def test_a_holder_on_another_machine_may_be_dead_and_is_waited_for(file, capsys):
    """A file server needs a while to see that; a job that SLURM puts on another node comes back
    before.
    """
    release = threading.Event()

    def hold() -> None:
        with held(file):
            file.write_text(json.dumps({"host": "node7", "pid": 12, "since": "then"}))
            release.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    while not (file.exists() and "node7" in file.read_text()):
        time.sleep(0.02)
    with pytest.raises(UserError, match=r"process 12 on node7, since then"), held(file):
        pass
    timer = threading.Timer(2 * locks.SECONDS_TO_LOOK, release.set)
    timer.start()
    with held(file, wait_s=20.0):
        assert (
            "process 12 on node7, since then); wait for its end, or choose another; trying for 20 s"
            in (capsys.readouterr().err)
        )
    thread.join()


def test_a_file_system_without_locks_is_told_and_used(file, capsys, monkeypatch):
    def flock(*_: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with held(file) as lock:
        assert lock is None
    assert (
        f"note: {file.parent} is on a file system without locks (No locks available)"
        in capsys.readouterr().err
    )


def test_a_folder_that_cannot_be_written_is_the_users_to_change(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(UserError, match=r"\.lock: cannot write there \(.*\); choose a folder"),
        held(tmp_path / "file" / ".lock"),
    ):
        pass


def test_whoever_only_looks_is_no_holder(file):
    """Two commands that looked at what a killed run left refused each other, naming the dead
    process.
    """
    file.parent.mkdir()
    file.write_text(json.dumps({"host": "h", "pid": 1}))
    look = (
        "import fcntl, sys, time; lock = open(sys.argv[1], 'r+'); fcntl.flock(lock,"
        " fcntl.LOCK_EX)\nprint('looking', flush=True); time.sleep(0.05)"
    )
    command = [sys.executable, "-c", look, str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "looking\n"
        lock_of(file).refuse_if_held()


def test_a_link_in_the_place_of_a_lock_is_refused_and_its_target_keeps_its_bytes(file, tmp_path):
    """The file that it pointed to was overwritten with the name of whoever took the lock."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    file.parent.mkdir()
    file.symlink_to(victim)
    for refused in (lambda: held(file).__enter__(), lock_of(file).refuse_if_held):
        with pytest.raises(UserError, match="Too many levels of symbolic links"):
            refused()
    assert victim.read_text() == "precious"
    victim.unlink()  # nor is a file made where a link points to nothing
    with pytest.raises(UserError, match="Too many levels of symbolic links"):
        held(file).__enter__()
    assert not victim.exists()
