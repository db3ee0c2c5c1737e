"""Momentum files: room, and directories that cannot take them."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
import torch

from megatron_muon.offload.files import MomentumFile
from megatron_muon.offload.memory import PAGE, transfer_memory


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
