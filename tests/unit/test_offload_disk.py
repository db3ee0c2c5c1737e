"""Momentum files and memory for staging: room, forks, and locks on memory."""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path

import pytest
import torch

from megatron_muon.offload.disk import PAGE, MomentumFile, transfer_memory, unlock
from tests.support.streams import Driver


def test_a_file_has_its_space_and_no_name(tmp_path: Path) -> None:
    """Story: files of killed runs kept later runs out, and took locks, headers and a command to be
    rid of.
    """
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


@pytest.mark.parametrize("size", [0, 1, PAGE, PAGE + 1])
def test_memory_is_zero_and_at_whole_pages(size: int) -> None:
    memory = transfer_memory(size)
    assert memory.numel() == size
    assert memory.data_ptr() % PAGE == 0
    assert not memory.any()
    memory.fill_(1)


def test_children_do_not_get_memory_of_transfers() -> None:
    """Story: a data loader that forks in the middle of direct I/O leaves its parent with pages that
    are not read.
    """
    memory = transfer_memory(4 * PAGE)
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        memory[0] = 1
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV
    assert memory[0] == 0


def test_locked_memory_is_unlocked_once_and_only_by_its_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    locked: list[torch.Tensor] = []
    for size in (PAGE, 3 * PAGE):
        transfer_memory(size, locked=locked)
    sizes = {memory.data_ptr(): memory.numel() for memory in locked}
    assert driver.registered == sizes
    unlock(locked, [], os.getpid() + 1)
    assert driver.registered == sizes
    for _ in range(2):
        unlock(locked, [], os.getpid())
        assert (driver.registered, locked) == ({}, [])
    driver.limit = PAGE
    with pytest.raises(
        RuntimeError, match="cannot lock 8,192 bytes of host memory for transfers: CUDA error 2"
    ):
        transfer_memory(2 * PAGE, locked=locked)
