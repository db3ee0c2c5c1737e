"""Momentum files: headers, room, and directories that cannot take them."""

from __future__ import annotations

import os
import resource
import struct
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_muon.errors import UserError
from megatron_muon.offload.files import PAGE, Header, MomentumFile, read_header, require_writable
from megatron_muon.offload.ring import transfer_memory

RECORDS = (("layers.0.weight", 0, 2, 0, 4, 0, 32),)
HEADER = Header("0a1b2c3d", 7, 3, "dense0", "fp32", PAGE, RECORDS, 2 * PAGE, host="host", pid=42, boot="")


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
    record = transfer_memory(PAGE)
    record.copy_(torch.arange(PAGE) % 251)
    file.write(2 * PAGE, record)
    again = transfer_memory(PAGE)
    file.read(2 * PAGE, again)
    assert torch.equal(record, again)
    assert read_header(file.path) == HEADER


def test_a_file_that_was_cut_short(file: MomentumFile) -> None:
    os.truncate(file.path, 2 * PAGE)
    with pytest.raises(OSError, match="ends before this record"):
        file.read(2 * PAGE, transfer_memory(PAGE))


def test_a_file_that_was_cut_short_is_not_made_longer(file: MomentumFile) -> None:
    """A record behind the cut made a hole of those in front of it, which read as zeros."""
    front, size = file.header.front, file.header.size
    os.truncate(file.path, front)
    with pytest.raises(OSError, match="the file has been cut short"):
        file.write(front + size - PAGE, transfer_memory(PAGE))
    assert file.path.stat().st_size == front
    with pytest.raises(OSError):
        file.read(front, transfer_memory(PAGE))


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
    return struct.pack("<8sIII", b"MUONMOM\n", 3, len(text), zlib.crc32(text)) + text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (HEADER.pages().replace(b"dense0", b"dense1"), "damaged header"),
        (HEADER.pages()[:100], "damaged header"),
        (HEADER.pages()[:10], "not a momentum file"),
        (HEADER.pages()[:8] + struct.pack("<I", 9) + HEADER.pages()[12:], "has version 9, this program knows 3"),
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
