"""Momentum files: room, and directories that cannot take them."""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_muon.errors import UserError
from megatron_muon.offload.files import MomentumFile, require_writable
from megatron_muon.offload.memory import PAGE, transfer_memory

# ------------------------------------------------------------------------------------------------ files


def test_a_file_has_its_space_and_no_name(tmp_path: Path) -> None:
    """Story: files of killed runs kept later runs out, and took locks, headers and a command to be rid of."""
    before = os.statvfs(tmp_path).f_bfree
    file = MomentumFile(tmp_path, 4096 * PAGE)
    assert list(tmp_path.iterdir()) == []
    assert os.fstat(file._file.fileno()).st_blocks * 512 >= 4096 * PAGE
    record, again = transfer_memory(PAGE), transfer_memory(PAGE)
    record.copy_(torch.arange(PAGE) % 251)
    file.write(4095 * PAGE, record)
    file.read(4095 * PAGE, again)
    assert torch.equal(record, again)
    with pytest.raises(OSError, match="ends within this record"):
        file.read(4096 * PAGE, again)
    file.close()
    assert os.statvfs(tmp_path).f_bfree > before - 4096


def test_a_disk_that_is_too_small(tmp_path: Path) -> None:
    """The limit on the size of files stands in for it; a child, because it holds for the whole process."""
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 * PAGE, 2 * PAGE))
        try:
            MomentumFile(tmp_path, 3 * PAGE)
        except OSError:
            os._exit(3)
        os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


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
