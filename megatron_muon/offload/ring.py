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
    """Some of a ring's memory, whole pages at an address of whole pages.

    Attributes:
        ring: the ring.
        start: its first byte there.
        memory: its bytes, uint8.
        free: whether it has been given back.
    """

    ring: Ring
    start: int
    memory: torch.Tensor
    free: bool = False

    def give_back(self) -> None:
        """The piece is no longer used; its memory is free when all older pieces, or all younger ones, are."""
        self.free = True
        self.ring.drop_free()


class Ring:
    """Memory for staging.

    Args:
        memory: whole pages at an address of whole pages.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.size = memory.numel()
        self._taken: deque[Piece] = deque()  # oldest first

    def take(self, size: int) -> Piece | None:
        """`size` bytes, rounded up to whole pages; None where that much does not lie together and free."""
        size = in_pages(size)
        start: int | None = 0
        if self._taken:
            tail = self._taken[0].start
            head = self._taken[-1].start + self._taken[-1].memory.numel()
            if head > tail and size > self.size - head:  # no room at the end: at the front, before the oldest
                start = 0 if size <= tail else None
            else:
                start = head if head > tail or size <= tail - head else None
        elif size > self.size:
            start = None
        if start is None:
            return None
        piece = Piece(self, start, self.memory[start : start + size])
        self._taken.append(piece)
        return piece

    def drop_free(self) -> None:
        """Forget the pieces at both ends that have been given back."""
        while self._taken and self._taken[0].free:
            self._taken.popleft()
        while self._taken and self._taken[-1].free:
            self._taken.pop()


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
    status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(status) != 0:
        raise RuntimeError(
            f"cannot lock {memory.numel():,} bytes of host memory for transfers: CUDA error {int(status)}"
        )
    return memory


def unlock(locked: list[torch.Tensor], streams: Sequence[Any], process: int) -> None:
    """Unlock memory once the transfers on `streams` are done; in a forked child, which does not have it, do nothing."""
    if os.getpid() != process:
        return
    for stream in streams:
        stream.synchronize()
    while locked:
        torch.cuda.cudart().cudaHostUnregister(locked.pop().data_ptr())
