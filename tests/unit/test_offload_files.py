"""Momentum files and their directory: headers, locks, room, and whose files may not be touched."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_muon.errors import UserError
from megatron_muon.offload import files
from megatron_muon.offload.files import LOCK, PAGE, Header, MomentumFile, RunDirectory, read_header, require_writable
from megatron_muon.offload.ring import aligned

HEADER = Header("0a1b2c3d", 7, 3, "dense0", "fp32", "host", 42, (("layers.0.weight", 0, 2, 0, 4, 8192, 32),), 3 * PAGE)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[MomentumFile]:
    file = MomentumFile(tmp_path, HEADER)
    file.take_space()
    yield file
    file.close()


# ------------------------------------------------------------------------------------------------ files


def test_a_file_says_what_it_is(file: MomentumFile) -> None:
    assert file.path.name == "muon-momentum-0a1b2c3d-iter0000007-rank00003-dense0.bin"
    assert file.path.stat().st_size == 3 * PAGE
    assert file.path.stat().st_blocks * 512 >= 3 * PAGE, "its space is taken"
    assert read_header(file.path) == HEADER


def test_records_and_a_header_do_not_meet(file: MomentumFile) -> None:
    record = aligned(PAGE, device=torch.device("cpu"))
    record.copy_(torch.arange(PAGE) % 251)
    file.write(2 * PAGE, record)
    again = aligned(PAGE, device=torch.device("cpu"))
    file.read(2 * PAGE, again)
    assert torch.equal(record, again)
    assert read_header(file.path) == HEADER


def test_a_file_that_was_cut_short(file: MomentumFile) -> None:
    os.truncate(file.path, 2 * PAGE)
    with pytest.raises(OSError, match="ends before this record"):
        file.read(2 * PAGE, aligned(PAGE, device=torch.device("cpu")))


def test_closed_it_is_gone_or_kept_under_its_last_iteration(file: MomentumFile, tmp_path: Path) -> None:
    file.close(keep_as=replace(HEADER, iteration=12, kept=True))
    (kept,) = tmp_path.iterdir()
    assert kept.name == "muon-momentum-0a1b2c3d-iter0000012-rank00003-dense0.bin"
    assert read_header(kept) == replace(HEADER, iteration=12, kept=True)
    other = MomentumFile(tmp_path, HEADER)
    other.take_space()
    other.close()
    assert list(tmp_path.iterdir()) == [kept]


def test_a_disk_that_is_too_small(tmp_path: Path) -> None:
    """The limit on the size of files stands in for it; a child, because it holds for the whole process."""
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 * PAGE, 2 * PAGE))
        file = MomentumFile(tmp_path, HEADER)
        try:
            file.take_space()
        except OSError:
            file.close()
            os._exit(3)
        os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert list(tmp_path.iterdir()) == []


@given(st.binary(max_size=200))
def test_junk_is_never_a_header(junk: bytes) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(junk)
        file.flush()
        with pytest.raises(UserError, match="not a momentum file"):
            read_header(Path(file.name))


def signed(text: bytes) -> bytes:
    return struct.pack("<8sIII", b"MUONMOM\n", 1, len(text), zlib.crc32(text)) + text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (HEADER.pages().replace(b"dense0", b"dense1"), "damaged header"),
        (HEADER.pages()[:100], "damaged header"),
        (HEADER.pages()[:10], "not a momentum file"),
        (HEADER.pages()[:8] + struct.pack("<I", 9) + HEADER.pages()[12:], "has version 9, this program knows 1"),
        (signed(b"[]"), "damaged header"),
        (signed(b'{"run": "x", "records": []}'), "damaged header"),
        (signed(b'{"run": '), "damaged header"),
    ],
)
def test_damaged_headers_are_told_apart(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / HEADER.name
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_header(path)


# ------------------------------------------------------------------------------------------------ directories


@pytest.fixture
def a_user() -> Iterator[None]:
    """Permissions do not bind root, so it is somebody else for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    yield
    os.seteuid(0)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can reach, unlike pytest's."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{tmp_path}/absent does not exist; make it: mkdir -p {tmp_path}/absent"):
        require_writable(tmp_path / "absent")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file is not a directory"):
        require_writable(tmp_path / "file")


def test_a_directory_without_write_permission(open_folder: Path, request: pytest.FixtureRequest) -> None:
    (open_folder / "closed").mkdir(mode=0o700)
    (open_folder / "closed").chmod(0o500 if os.geteuid() else 0o700)
    (open_folder / "closed" / "below").mkdir() if os.geteuid() == 0 else None
    request.getfixturevalue("a_user")
    with pytest.raises(UserError, match=r"cannot write there \(Permission denied\); choose a directory"):
        require_writable(open_folder / "closed")
    if (os.getuid(), os.geteuid()) == (0, 65534):  # not even to be looked at
        with pytest.raises(UserError, match=r"below: cannot write there \(Permission denied\)"):
            require_writable(open_folder / "closed" / "below")


def test_a_directory_of_the_system() -> None:
    with pytest.raises(UserError, match="--muon-offload-dir /proc: cannot write there"):
        require_writable(Path("/proc"))


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
    for directory in opened:
        directory.close()
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
        f"--muon-offload-dir {tmp_path} holds {HEADER.name} and 1 more, left by another run; momentum files are never "
        f"read again: type megatron-muon doctor --offload-dir {tmp_path} --remove, or choose another directory"
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


def test_a_forked_child_does_not_keep_the_locks(tmp_path: Path) -> None:
    """A killed rank's data loader workers live on for some seconds; its files are left over at once."""
    ready, go = os.pipe(), os.pipe()
    rank = os.fork()
    if rank == 0:
        directory, file = RunDirectory(tmp_path, "killed"), MomentumFile(tmp_path, HEADER)
        file.take_space()
        if os.fork() == 0:  # the worker, until the test has closed its end
            os.write(ready[1], b"x")
            os.close(go[1])
            os.read(go[0], 1)
            os._exit(0)
        os.read(go[0], 1)
        directory.close()
    os.read(ready[0], 1)
    assert files.in_use(tmp_path / HEADER.name)
    os.kill(rank, signal.SIGKILL)
    os.waitpid(rank, 0)
    assert not files.in_use(tmp_path / HEADER.name)
    assert files.holder(tmp_path)[1] is False
    for descriptor in (*ready, *go):
        os.close(descriptor)


def test_only_what_no_process_holds_is_deleted(file: MomentumFile) -> None:
    assert files.in_use(file.path)
    assert not files.delete_unused(file.path)
    ended = file.path.with_name("muon-momentum-ended")
    make = f"import fcntl, os; fcntl.flock(os.open({str(ended)!r}, os.O_CREAT | os.O_RDWR), fcntl.LOCK_EX)"
    subprocess.run([sys.executable, "-c", make], check=True)
    assert not files.in_use(ended)
    assert files.delete_unused(ended)
    assert file.path.exists()
    assert not ended.exists()
