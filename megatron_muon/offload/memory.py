"""Host and device memory for staging records: in whole pages, and locked where transfers go to a GPU."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import Any

import torch

PAGE = 4096
"""Alignment of offsets, lengths and addresses, which direct I/O asks for."""


def in_pages(size: int) -> int:
    """`size` bytes rounded up to whole pages."""
    return -(-size // PAGE) * PAGE


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
