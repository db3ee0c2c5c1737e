"""Files of momentum, and the memory that records pass through on their way: in whole pages, locked beside a GPU.

There is one file for each rank and kind of state, without a name, so that it is gone when the
process is. It holds one record for each shard, at offsets of whole pages, and its space is taken
before the first step. It is scratch: no run reads what another one left. No collectives here.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import mmap
import os
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

PAGE = 4096
"""Alignment of offsets, lengths and addresses, as direct I/O needs it."""


def in_pages(size: int) -> int:
    """`size` bytes rounded up to whole pages."""
    return -(-size // PAGE) * PAGE


def transfer_memory(size: int, *, locked: list[torch.Tensor] | None = None) -> torch.Tensor:
    """`size` zero bytes of host memory, at an address of whole pages, for direct I/O and for transfers to a GPU.

    With `locked` it is locked and added there, so that transfers go on beside computation: see
    `unlock`.

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
        if status := int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0)):
            raise RuntimeError(
                f"cannot lock {size:,} bytes of host memory for transfers: CUDA error {status}"
            )
        locked.append(memory)
    return memory


def unlock(locked: list[torch.Tensor] | None, streams: Sequence[Any], process: int) -> None:
    """Unlock memory once the transfers on `streams` are done; in a forked child, which does not have it, do nothing."""
    if os.getpid() != process:
        return
    for stream in streams:
        stream.synchronize()
    while locked:
        torch.cuda.cudart().cudaHostUnregister(locked.pop().data_ptr())


class MomentumFile:
    """An open file of `size` bytes in `directory`; an OSError where that has no room for it.

    `direct` says whether reads and writes go past the page cache, so that errors show at once and
    where they happen.
    """

    def __init__(self, directory: Path, size: int) -> None:
        self.directory, self.size = directory, size
        self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115 (open until `close`)
        descriptor = self._file.fileno()
        try:
            if size:  # else the system calls it invalid
                os.posix_fallocate(descriptor, 0, size)
        except OSError:
            self.close()
            raise
        try:
            fcntl.fcntl(
                descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_DIRECT
            )
            self.direct = True
        except OSError:  # a file system without direct I/O
            self.direct = False

    def read(self, offset: int, buffer: torch.Tensor) -> None:
        """Fill `buffer`, uint8, whole pages at an address of whole pages, from `offset`."""
        _move(os.preadv, self._file.fileno(), offset, buffer)

    def write(self, offset: int, buffer: torch.Tensor) -> None:
        """Write `buffer`, as `read` takes it, at `offset`."""
        _move(os.pwritev, self._file.fileno(), offset, buffer)

    def close(self) -> None:
        """Delete the file."""
        self._file.close()


def _move(move: Callable[..., int], descriptor: int, offset: int, buffer: torch.Tensor) -> None:
    view, done = memoryview(buffer.numpy()), 0
    while done < len(view):
        count = move(descriptor, [view[done:]], offset + done)
        if count == 0:
            raise OSError(errno.EIO, "the file ends within this record")
        done += count


# each byte of a lost record: fp32 and bf16 of such bytes are NaN, and so are the scales of int8
LOST_BYTE = 0xFF


class DiskRecords:
    """Records in a file, read and written whatever the disk does; any thread may, one record in one thread at a time.

    When a write fails, the record stays in memory. When a read fails twice, the record is lost for
    good: it reads as NaN in every storage format, so that no matrix is updated by it.

    Args:
        file: of all records; None where there are none.
        sizes: bytes of each record, by index.
        names: of the matrices, by index, and `what` is kept of them: for messages.

    Attributes:
        lost: indices of lost records.
        failure: what happened first, a loss before all else; None as long as all is well.
    """

    def __init__(
        self, file: MomentumFile | None, sizes: Mapping[int, int], names: Sequence[str], what: str
    ) -> None:
        self.file, self._file = file, cast(MomentumFile, file)  # without one there are no records
        self.failure: str | None = None
        self.lost: set[int] = set()
        self._offsets = dict(
            zip(sizes, itertools.accumulate(map(in_pages, sizes.values()), initial=0), strict=False)
        )
        self._names, self._what = names, what
        self._kept: dict[int, torch.Tensor] = {}  # records that could not be written
        self._guard = threading.Lock()

    def __contains__(self, index: int) -> bool:
        return index in self._offsets

    def read(self, index: int, buffer: torch.Tensor) -> None:
        """Fill `buffer`, whole pages, with a record."""
        if index in self._kept:
            buffer.copy_(self._kept[index])
        elif index not in self.lost:
            try:
                self._file.read(self._offsets[index], buffer)
            except OSError as first:
                try:
                    self._file.read(self._offsets[index], buffer)
                    self._fail("read", index, first, "nothing is lost, a second try worked")
                except OSError:
                    lost = (
                        f"{self._what} of {self._names[index]} is lost on this rank; start again"
                        " from a checkpoint"
                    )
                    self._fail("read", index, first, lost, is_lost=True)
        if index in self.lost:
            buffer.fill_(LOST_BYTE)

    def write(self, index: int, buffer: torch.Tensor) -> None:
        """Replace a record by `buffer`, whole pages, unless it is lost."""
        if index in self.lost:
            return
        try:
            self._file.write(self._offsets[index], buffer)
            self._kept.pop(index, None)
        except OSError as error:
            self._kept[index] = buffer.clone()
            self._fail(
                "write", index, error, "nothing is lost, what was to be written is kept in memory"
            )

    def _fail(
        self, doing: str, index: int, error: OSError, outcome: str, *, is_lost: bool = False
    ) -> None:
        with self._guard:
            if self.failure is None or (is_lost and not self.lost):
                place = f"a file of {self._file.directory} at offset {self._offsets[index]:,}"
                why = error.strerror or str(error)
                self.failure = f"cannot {doing} {self._what} in {place}: {why}; {outcome}"
            if is_lost:
                self.lost.add(index)


def scratch(directory: Path, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Memory for fp32 tensors of so many elements, in a file without a name that goes when they go.

    Where the directory has no room for them they are in memory, with a warning: a checkpoint comes
    first.
    """
    size = 4 * sum(sizes)
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, max(size, 1))
            memory = torch.frombuffer(mmap.mmap(file.fileno(), max(size, 1)), dtype=torch.uint8)
    except OSError as error:
        why = (
            f"{directory} has no {size:,} bytes for the momentum of a checkpoint ({error.strerror})"
        )
        print(f"megatron-muon: warning: {why}; they are taken from main memory", flush=True)
        memory = torch.empty(size, dtype=torch.uint8)
    return list(memory[:size].view(torch.float32).split(list(sizes)))
