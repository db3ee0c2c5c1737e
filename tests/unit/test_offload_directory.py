"""The directory of momentum files: one run at a time, and whose files are deleted, refused or left alone."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_muon.errors import UserError
from megatron_muon.offload import directory
from megatron_muon.offload.directory import LOCK, RunDirectory, reason_to_leave
from megatron_muon.offload.files import PAGE, Header, MomentumFile, boot_id
from megatron_muon.tools.doctor import WRONG
from megatron_muon.tools.doctor.offload import offload

RECORDS = (("layers.0.weight", 0, 2, 0, 4, 0, 32),)
HEADER = Header("0a1b2c3d", 7, 3, "dense0", "fp32", PAGE, RECORDS, 2 * PAGE, host="host", pid=42, boot="")
HERE = replace(HEADER, host=socket.gethostname(), boot=boot_id(), save="/runs/a/checkpoints")


@pytest.fixture
def file(tmp_path: Path) -> Iterator[MomentumFile]:
    file = MomentumFile(tmp_path, HEADER)
    file.take_space()
    yield file
    file.close()


def test_one_run_at_a_time_and_all_of_its_ranks(tmp_path: Path) -> None:
    ranks = [RunDirectory(tmp_path, "first") for _ in range(3)]
    with pytest.raises(UserError, match=rf"in use by run first \(process {os.getpid()} on "):
        RunDirectory(tmp_path, "second")
    ranks.pop().close()
    ranks.append(RunDirectory(tmp_path, "first"))
    with pytest.raises(UserError, match="in use by run first"):
        RunDirectory(tmp_path, "second")
    for rank in ranks:
        rank.close()
    assert list(tmp_path.iterdir()) == []
    RunDirectory(tmp_path, "second").close()


def test_of_runs_that_start_at_once_one_gets_the_directory(tmp_path: Path) -> None:
    """Eight ranks of each of two runs, all at once: one run has all of its ranks in, the other none."""
    start, got = threading.Barrier(16), {"one": 0, "two": 0}
    opened: list[RunDirectory] = []

    def claim(run: str) -> None:
        start.wait()
        try:
            opened.append(RunDirectory(tmp_path, run))
            got[run] += 1
        except UserError as error:
            assert "in use by run" in str(error)  # noqa: PT017

    threads = [threading.Thread(target=claim, args=(run,)) for run in got for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got.values()) == [0, 8]
    for taken in opened:
        taken.close()
    assert list(tmp_path.iterdir()) == []


def test_files_of_another_run_are_refused_and_others_left_alone(tmp_path: Path) -> None:
    """Every rank says the same, also where the lock of the run that was killed still lies there."""
    for name in (HEADER.name, "muon-momentum-junk", "weights.bin"):
        (tmp_path / name).write_bytes(b"junk")
    (tmp_path / LOCK).write_text('{"run": "killed", "pid": 1, "host": "there"}')
    said: list[str] = []

    def claim() -> None:
        with pytest.raises(UserError) as refusal:
            RunDirectory(tmp_path, "next")
        said.append(str(refusal.value))

    threads = [threading.Thread(target=claim) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(said) == 6
    assert set(said) == {
        f"--muon-offload-dir {tmp_path} holds {HEADER.name} and 1 more, left by another run (is not a momentum file); "
        f"momentum files are never read again: type megatron-muon doctor --offload-dir {tmp_path} --remove, or choose "
        "another directory"
    }
    assert {path.name for path in tmp_path.iterdir()} == {HEADER.name, "muon-momentum-junk", "weights.bin"}


def test_a_lock_that_nobody_holds_is_taken_over(tmp_path: Path) -> None:
    for left in ("", "junk", '{"run": "killed"}', "[]"):
        (tmp_path / LOCK).write_text(left)
        RunDirectory(tmp_path, "next").close()
        assert list(tmp_path.iterdir()) == []


def test_somebody_who_looks_does_not_keep_a_run_out(tmp_path: Path) -> None:
    """`doctor` locks the lock's file for a moment, as a run that would write its name into it."""
    with (tmp_path / LOCK).open("w") as looked_at:
        looked_at.write('{"run": "killed"}')
        looked_at.flush()
        fcntl.flock(looked_at, fcntl.LOCK_SH)
        release = threading.Timer(0.3, fcntl.flock, (looked_at, fcntl.LOCK_UN))
        release.start()
        RunDirectory(tmp_path, "next").close()
        release.join()


def test_a_lock_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / LOCK).mkdir()
    with pytest.raises(UserError, match=rf"cannot lock {LOCK} there \(Is a directory\)"):
        RunDirectory(tmp_path, "next")


def test_a_link_in_the_place_of_the_lock_is_refused_and_its_target_keeps_its_bytes(tmp_path: Path) -> None:
    """The file that it pointed to was overwritten with the name of the run."""
    victim, momentum = tmp_path / "victim", tmp_path / "momentum"
    victim.write_text("precious")
    momentum.mkdir()
    (momentum / LOCK).symlink_to(victim)
    with pytest.raises(UserError, match=rf"{LOCK} is a symbolic link, and locks follow none; type rm "):
        RunDirectory(momentum, "run")
    (finding,) = offload(momentum, remove=True)
    assert (finding.state, "is a symbolic link" in finding.text) == (WRONG, True)
    assert victim.read_text() == "precious"


def test_a_forked_child_does_not_keep_the_locks(tmp_path: Path) -> None:
    """A killed rank's data loader workers live on for some seconds; its files are left over at once."""
    ready, go = os.pipe(), os.pipe()
    rank = os.fork()
    if rank == 0:
        taken, file = RunDirectory(tmp_path, "killed"), MomentumFile(tmp_path, HEADER)
        file.take_space()
        if os.fork() == 0:  # the worker, until the test has closed its end
            os.write(ready[1], b"x")
            os.close(go[1])
            os.read(go[0], 1)
            os._exit(0)
        os.read(go[0], 1)
        taken.close()
    os.read(ready[0], 1)
    assert directory.in_use(tmp_path / HEADER.name)
    os.kill(rank, signal.SIGKILL)
    os.waitpid(rank, 0)
    assert not directory.in_use(tmp_path / HEADER.name)
    assert directory.holder(tmp_path)[1] is False
    for descriptor in (*ready, *go):
        os.close(descriptor)


def test_only_what_no_process_holds_is_deleted(file: MomentumFile) -> None:
    assert directory.in_use(file.path)
    assert not directory.delete_unused(file.path)
    ended = file.path.with_name("muon-momentum-ended")
    make = f"import fcntl, os; fcntl.flock(os.open({str(ended)!r}, os.O_CREAT | os.O_RDWR), fcntl.LOCK_EX)"
    subprocess.run([sys.executable, "-c", make], check=True)
    assert not directory.in_use(ended)
    assert directory.delete_unused(ended)
    assert file.path.exists()
    assert not ended.exists()


def test_a_file_system_that_locks_only_what_may_be_written(
    file: MomentumFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS: `doctor --remove` and the start after a kill ended in `Bad file descriptor`."""
    flock = fcntl.flock

    def of_nfs(descriptor: int, operation: int) -> None:
        if operation & fcntl.LOCK_EX and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", of_nfs)
    left = tmp_path / "muon-momentum-left"
    left.touch()
    (tmp_path / LOCK).touch()
    assert directory.holder(tmp_path) == ({}, False)
    assert directory.in_use(file.path)
    assert not directory.in_use(left)
    assert not directory.delete_unused(file.path)
    assert directory.delete_unused(left)


# ------------------------------------------------------------------------------------------------ after a kill


def kill_a_run(folder: Path, header: Header, *, ranks: int = 2) -> None:
    """Processes that have taken the directory and their files are killed."""
    for rank in range(ranks):
        ready, told = os.pipe()
        pid = os.fork()
        if pid == 0:
            taken, file = RunDirectory(folder, header.run), MomentumFile(folder, replace(header, rank=rank))
            file.take_space()
            os.write(told, b"x")
            signal.pause()
            os._exit(taken._lock)
        os.read(ready, 1)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ready)
        os.close(told)


def test_a_killed_runs_files_go_at_the_next_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Story: every restart was refused until somebody typed `doctor --remove`, also at night."""
    (tmp_path / "weights.bin").touch()
    kill_a_run(tmp_path, HERE)
    assert len(list(tmp_path.iterdir())) == 4
    ranks = [RunDirectory(tmp_path, "next") for _ in range(2)]
    assert {path.name for path in tmp_path.iterdir()} == {LOCK, "weights.bin"}
    assert capsys.readouterr().out == (
        f"megatron-muon: note: momentum files removed from {tmp_path}: 2 ({2 * 3 * PAGE:,} bytes), left by a run "
        "that was killed\n"
    )
    for rank in ranks:
        rank.close()


def test_a_kill_before_the_space_was_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taking the space of a large file lasts; whose file it is stands in it by then."""
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    pid = os.fork()
    if pid == 0:
        MomentumFile(tmp_path, HERE).take_space()
    os.waitpid(pid, 0)
    assert reason_to_leave(tmp_path / HERE.name) is None


def test_whose_files_are_left_alone(tmp_path: Path) -> None:
    """All that may be in use or wanted, and then also what could go, so that one refusal names what is there."""
    before = replace(HERE, boot="before")
    elsewhere = replace(HEADER, host="node7", boot="other", save=HERE.save)
    cases = {
        HERE: None,
        replace(HERE, host="renamed"): None,  # a container's name changes, its kernel does not
        replace(HERE, keep=True): "kept on purpose",
        before: None,  # of the same run
        replace(before, save="/runs/b/checkpoints"): "made before this machine was started",
        replace(before, save=""): "made before this machine was started",
        replace(HERE, boot="", save=""): "made before this machine was started",
        elsewhere: "made on node7, where it may be in use",
    }
    for header, reason in cases.items():
        (tmp_path / header.name).write_bytes(header.pages())
        assert reason_to_leave(tmp_path / header.name, save=HERE.save) == reason
    assert reason_to_leave(tmp_path / HEADER.name, save="") == cases[elsewhere]

    (tmp_path / HERE.name).write_bytes(HERE.pages())
    other = replace(elsewhere, rank=0)
    (tmp_path / other.name).write_bytes(other.pages())
    with pytest.raises(UserError, match=rf"holds {other.name}, left by another run \(made on node7, where it may be"):
        RunDirectory(tmp_path, "next", save=HERE.save)
    assert {path.name for path in tmp_path.iterdir()} == {HERE.name, other.name}


def test_a_living_runs_files_are_left_alone(tmp_path: Path) -> None:
    """Its own lock keeps a file, also where the directory's is lost or kept from other machines."""
    file = MomentumFile(tmp_path, HERE)
    file.take_space()
    assert reason_to_leave(file.path, save=HERE.save) == "in use"
    with pytest.raises(UserError, match=r"left by another run \(in use\)"):
        RunDirectory(tmp_path, "next", save=HERE.save)
    assert file.path.exists()
    file.close()


def test_what_is_not_a_file_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "muon-momentum-link").symlink_to(tmp_path / "weights.bin")
    os.mkfifo(tmp_path / "muon-momentum-fifo")
    for path in tmp_path.iterdir():
        assert reason_to_leave(path) == "not a file"
