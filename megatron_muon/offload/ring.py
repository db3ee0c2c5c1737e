"""A fixed piece of memory from which records are staged, given out and taken back in a circle.

Whoever takes first usually gives back first, so that a circle wastes little and never grows.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_muon.offload.files import PAGE, in_pages


@dataclass(eq=False)
class Piece:
    """Bytes of a ring from `start` on: uint8, whole pages at an address of whole pages."""

    ring: Ring
    start: int
    memory: torch.Tensor
    free: bool = False

    @property
    def end(self) -> int:
        """The first byte of the ring behind it."""
        return self.start + self.memory.numel()

    def give_back(self) -> None:
        """The piece is no longer used; its memory is free when all older pieces, or all younger ones, are."""
        self.free = True
        taken = self.ring.taken
        while taken and taken[0].free:
            taken.popleft()
        while taken and taken[-1].free:
            taken.pop()


class Ring:
    """Memory for staging: whole pages at an address of whole pages."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.size = memory.numel()
        self.taken = deque[Piece]()  # oldest first

    def take(self, size: int) -> Piece | None:
        """`size` bytes, rounded up to whole pages; None where that much does not lie together and free."""
        size = in_pages(size)
        tail, head = (self.taken[0].start, self.taken[-1].end) if self.taken else (self.size, 0)
        wrapped = bool(self.taken) and head <= tail
        start, end = head, tail if wrapped else self.size
        if not wrapped and size > end - start:  # no room at the end: at the front, before the oldest
            start, end = 0, tail if self.taken else 0
        if size > end - start:
            return None
        piece = Piece(self, start, self.memory[start : start + size])
        self.taken.append(piece)
        return piece


def aligned(size: int, *, device: torch.device) -> torch.Tensor:
    """`size` zero bytes at an address of whole pages."""
    memory = torch.zeros(size + PAGE, dtype=torch.uint8, device=device)
    start = -memory.data_ptr() % PAGE
    return memory[start : start + size]


def transfer_memory(size: int) -> torch.Tensor:
    """`size` zero bytes of host memory, whole pages, for direct I/O and for transfers to a GPU.

    Forked children do not get it: a fork in the middle of direct I/O, or with memory locked, may give this process new
    pages while the transfer goes on with the old ones (see "NOTES" in open(2)). torch's own pinned allocator rounds up
    to powers of two, which can double what a large store takes.
    """
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    memory = mmap.mmap(-1, in_pages(size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTFORK)
    return torch.frombuffer(memory, dtype=torch.uint8)[:size]


def lock(memory: torch.Tensor) -> torch.Tensor:
    """Lock host memory, so that transfers to a GPU go on beside computation; `unlock` before it is given back."""
    status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    if status != 0:
        raise RuntimeError(f"cannot lock {memory.numel():,} bytes of host memory for transfers: CUDA error {status}")
    return memory


def unlock(locked: list[torch.Tensor], streams: Sequence[Any], process: int) -> None:
    """Unlock memory once the transfers on `streams` are done; in a forked child, which does not have it, do nothing."""
    if os.getpid() != process:
        return
    for stream in streams:
        stream.synchronize()
    while locked:
        torch.cuda.cudart().cudaHostUnregister(locked.pop().data_ptr())
