"""Files of momentum, and memory for records on their way: whole pages, locked for a GPU.

Each rank has one file for each kind of state, without a name, so that it vanishes with the process.
It holds one record for each shard, at offsets of whole pages, and its space is taken before the
first step. It is scratch: no run reads the file of another. No collectives here.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

PAGE = 4096
"""Alignment of offsets, lengths and addresses for direct I/O."""


def in_pages(size: int) -> int:
    """`size` bytes rounded up to whole pages."""
    return -(-size // PAGE) * PAGE


def transfer_memory(size: int, *, locked: list[torch.Tensor] | None = None) -> torch.Tensor:
    """`size` zero bytes of page-aligned host memory, for direct I/O and transfers to a GPU.

    With `locked`, it is locked and added to that list, so that transfers run beside computation;
    see `unlock`.

    Forked children do not get it: a fork in the middle of direct I/O, or with memory locked, may
    give this process new pages while the transfer goes on with the old ones (see "NOTES" in
    open(2)). torch's own pinned allocator rounds up to powers of two, which can double what a large
    store takes.
    """
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    pages = mmap.mmap(-1, in_pages(size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_DONTFORK)
    memory = torch.frombuffer(pages, dtype=torch.uint8)[:size]
    if locked is not None:
        status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0))
        if status:
            raise RuntimeError(
                f"cannot lock {size:,} bytes of host memory for transfers: CUDA error {status}"
            )
        locked.append(memory)
    return memory


def unlock(locked: list[torch.Tensor] | None, streams: Sequence[Any], process: int) -> None:
    """Unlock memory after the transfers on `streams`; does nothing in a fork, which has none."""
    if os.getpid() != process:
        return
    for stream in streams:
        stream.synchronize()
    while locked:
        torch.cuda.cudart().cudaHostUnregister(locked.pop().data_ptr())


class MomentumFile:
    """An open file of `size` bytes in `directory`; an OSError if that has no room for it.

    Reads and writes bypass the page cache, if possible, so that errors show at once.
    """

    def __init__(self, directory: Path, size: int) -> None:
        self.directory, self.size = directory, size
        self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115 (open until `close`)
        descriptor = self._file.fileno()
        if size:  # 0 is an invalid size
            os.posix_fallocate(descriptor, 0, size)
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        with contextlib.suppress(OSError):  # a file system without direct I/O
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)

    def read(self, offset: int, buffer: torch.Tensor) -> None:
        """Fill `buffer`, uint8, page-aligned whole pages, from `offset`."""
        _move(os.preadv, self._file.fileno(), offset, buffer)

    def write(self, offset: int, buffer: torch.Tensor) -> None:
        """Write `buffer`, as for `read`, at `offset`."""
        _move(os.pwritev, self._file.fileno(), offset, buffer)

    def close(self) -> None:
        """Delete the file."""
        self._file.close()


def _move(move: Callable[..., int], descriptor: int, offset: int, buffer: torch.Tensor) -> None:
    view = memoryview(buffer.numpy())
    done = 0
    while done < len(view):
        count = move(descriptor, [view[done:]], offset + done)
        if count == 0:
            raise OSError(errno.EIO, "the file ends within this record")
        done += count


LOST_BYTE = 0xFF
"""Each byte of a lost record: fp32 and bf16 of such bytes are NaN, and so are int8's scales."""


class DiskRecords:
    """Records in a file; a failing disk raises no errors. One thread at a time for each record.

    A record that cannot be read or written is lost: it reads as NaN in every storage format, so
    that no matrix is updated by it.

    Args:
        file: of all records; None if there are none.
        sizes: bytes of each record, by index.
        names: of the matrices, by index, for messages, like `what`, the kind of state.

    Attributes:
        lost: indices of lost records.
        failure: a message on the first failure; None without failures.
    """

    def __init__(
        self, file: MomentumFile | None, sizes: Mapping[int, int], names: Sequence[str], what: str
    ) -> None:
        self.file = file
        self._directory = file.directory if file else None
        self.failure: str | None = None
        self.lost: set[int] = set()
        self._offsets: dict[int, int] = {}
        end = 0
        for index, size in sizes.items():
            self._offsets[index] = end
            end += in_pages(size)
        self._names, self._what = names, what

    def __contains__(self, index: int) -> bool:
        return index in self._offsets

    def read(self, index: int, buffer: torch.Tensor) -> None:
        """Fill `buffer`, whole pages, with a record."""
        self._try(index, "read", buffer)
        if index in self.lost:
            buffer.fill_(LOST_BYTE)

    def write(self, index: int, buffer: torch.Tensor) -> None:
        """Replace a record by `buffer`, whole pages, unless it is lost."""
        self._try(index, "write", buffer)

    def _try(self, index: int, doing: str, buffer: torch.Tensor) -> None:
        if index in self.lost:
            return
        offset = self._offsets[index]
        try:
            getattr(self.file, doing)(offset, buffer)
        except OSError as error:
            self.lost.add(index)
            place = f"a file of {self._directory} at offset {offset:,}"
            failure = f"cannot {doing} {self._what} in {place}: {error.strerror or error}"
            lost = f"{self._what} of {self._names[index]} is lost on this rank"
            self.failure = self.failure or f"{failure}; {lost}; start again from a checkpoint"


def scratch(directory: Path, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Memory for fp32 tensors of `sizes` elements, in a file that vanishes with them.

    If the directory has no room they are in main memory, with a warning: a checkpoint comes first.
    """
    size = max(4 * sum(sizes), 4)
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, size)
            memory = torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.float32)
    except OSError as error:
        why = f"no {size:,} bytes for the momentum of a checkpoint ({error.strerror})"
        print(f"megatron-muon: warning: {directory} has {why}; using main memory", flush=True)
        memory = torch.empty(size // 4, dtype=torch.float32)
    return list(memory[: sum(sizes)].split(list(sizes)))
