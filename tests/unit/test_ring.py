"""The staging ring: what it gives out never overlaps, and an empty ring always has room."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_muon.offload.files import PAGE, in_pages
from megatron_muon.offload.ring import Piece, Ring, aligned, lock, transfer_memory, unlock
from tests.support.streams import Driver

CPU = torch.device("cpu")
PAGES = 12


def ring() -> Ring:
    return Ring(transfer_memory(PAGES * PAGE))


# Each number takes so many bytes if positive, and otherwise gives back the piece of that place.
@given(st.lists(st.integers(-8, PAGES * PAGE), max_size=60))
def test_pieces_never_overlap_and_an_empty_ring_has_room(schedule: list[int]) -> None:
    staging, taken = ring(), []
    for number in schedule:
        if number > 0:
            piece = staging.take(number)
            if piece is None:
                assert taken, "an empty ring refused"
                continue
            assert piece.memory.numel() == in_pages(number)
            assert piece.memory.data_ptr() % PAGE == 0
            assert 0 <= piece.start <= piece.start + in_pages(number) <= staging.size
            for other in taken:
                assert piece.start + piece.memory.numel() <= other.start or other.start + other.memory.numel() <= (
                    piece.start
                )
            taken.append(piece)
        elif taken:
            taken.pop(number % len(taken)).give_back()
    for piece in taken:
        piece.give_back()
    whole = staging.take(staging.size)
    assert whole is not None
    assert whole.start == 0


@given(st.lists(st.integers(1, 4), min_size=1, max_size=40))
def test_in_order_a_third_of_it_is_always_to_be_had(pages: list[int]) -> None:
    """What the store relies on: pieces up to a third, given back in the order in which they were taken."""
    staging, taken = ring(), []
    for size in pages:
        while sum(piece.memory.numel() for piece in taken) + size * PAGE > PAGES * PAGE // 3:
            taken.pop(0).give_back()
        piece = staging.take(size * PAGE)
        assert piece is not None
        taken.append(piece)


def take(staging: Ring, pages: int) -> Piece:
    piece = staging.take(pages * PAGE)
    assert piece is not None
    return piece


def test_what_was_taken_last_can_be_taken_again() -> None:
    """Records that were read too early are given back while an older one is still in use."""
    staging = ring()
    first, *others = (take(staging, 3) for _ in range(4))
    assert staging.take(PAGE) is None
    for piece in others:
        piece.give_back()
    assert take(staging, 9).start == first.start + 3 * PAGE


@pytest.mark.parametrize("size", [0, 1, PAGE, PAGE + 1])
def test_memory_is_zero_and_at_whole_pages(size: int) -> None:
    for memory in (transfer_memory(size), aligned(size, device=CPU)):
        assert memory.numel() == size
        assert memory.data_ptr() % PAGE == 0
        assert not memory.any()
        memory.fill_(1)


def flags_of(memory: torch.Tensor) -> list[str]:
    """What the system says of the mapping that a tensor lies in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= memory.data_ptr() < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError("mapped nowhere")


def test_children_do_not_get_memory_of_transfers() -> None:
    """Story: a data loader that forks in the middle of direct I/O leaves its parent with pages that are not read."""
    memory = transfer_memory(4 * PAGE)
    assert "dc" in flags_of(memory)  # "do not copy area on fork", proc(5)
    assert "dc" not in flags_of(aligned(64 * PAGE, device=CPU))
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        memory[0] = 1
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV
    assert memory[0] == 0


def test_locked_memory_is_unlocked_once_and_only_by_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    locked = [lock(transfer_memory(size)) for size in (PAGE, 3 * PAGE)]
    sizes = {memory.data_ptr(): memory.numel() for memory in locked}
    assert driver.registered == sizes
    unlock(locked, [], os.getpid() + 1)
    assert driver.registered == sizes
    for _ in range(2):
        unlock(locked, [], os.getpid())
        assert (driver.registered, locked) == ({}, [])
    driver.limit = PAGE
    with pytest.raises(RuntimeError, match="cannot lock 8,192 bytes of host memory for transfers: CUDA error 2"):
        lock(transfer_memory(2 * PAGE))
