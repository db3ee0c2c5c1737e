"""Files of momentum: one for each rank and kind of state, without a name, so that they are gone when the process is.

A file holds one record for each shard, at offsets of whole pages, and its space is taken before the first step. It is
scratch: no run reads what another one left. Reads and writes go past the page cache where the file system can do that,
so that errors show at once and where they happen. No collectives here.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from megatron_muon.errors import UserError

PAGE = 4096
"""Alignment of offsets, lengths and addresses, which direct I/O asks for."""


def in_pages(size: int) -> int:
    """`size` bytes rounded up to whole pages."""
    return -(-size // PAGE) * PAGE


class MomentumFile:
    """An open file of `size` bytes in `directory`; an OSError where that has no room for it.

    Attributes:
        direct: whether reads and writes go past the page cache.
    """

    def __init__(self, directory: Path, size: int) -> None:
        self.directory = directory
        self.size = size
        self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115 (open until `close`)
        try:
            if size:  # else the system calls it invalid
                os.posix_fallocate(self._file.fileno(), 0, size)
        except OSError:
            self.close()
            raise
        self.direct = True
        try:
            fcntl.fcntl(self._file, fcntl.F_SETFL, fcntl.fcntl(self._file, fcntl.F_GETFL) | os.O_DIRECT)
        except OSError:  # a file system without direct I/O
            self.direct = False

    def read(self, offset: int, buffer: torch.Tensor) -> None:
        """Fill `buffer`, uint8, whole pages at an address of whole pages, from `offset`."""
        self._move(os.preadv, offset, buffer, "the file ends before this record")

    def write(self, offset: int, buffer: torch.Tensor) -> None:
        """Write `buffer`, as `read` takes it, at `offset`."""
        self._move(os.pwritev, offset, buffer, "the file takes no more of this record")

    def _move(self, move: Callable[..., int], offset: int, buffer: torch.Tensor, stopped: str) -> None:
        view, done = memoryview(buffer.numpy()), 0
        while done < len(view):
            count = move(self._file.fileno(), [view[done:]], offset + done)
            if count == 0:
                raise OSError(errno.EIO, stopped)
            done += count

    def close(self) -> None:
        """Delete the file."""
        self._file.close()


_LOST = 0xFF
"""Each byte of a lost record: fp32 and bf16 of such bytes are NaN, and so are the scales of int8."""


@dataclass(frozen=True)
class Failure:
    """The first failed read or write, and the matrices whose records could not be read."""

    doing: Literal["read", "write"]
    directory: Path
    offset: int
    reason: str
    lost: tuple[str, ...] = ()
    what: str = "momentum"

    def __str__(self) -> str:
        text = f"cannot {self.doing} {self.what} in a file of {self.directory} at offset {self.offset:,}: {self.reason}"
        if not self.lost:
            kept = "a second try worked" if self.doing == "read" else "what was to be written is kept in memory"
            return f"{text}; nothing is lost, {kept}"
        more = f" and {len(self.lost) - 1} more" if len(self.lost) > 1 else ""
        return f"{text}; {self.what} of {self.lost[0]}{more} is lost on this rank; start again from a checkpoint"


class DiskRecords:
    """Records in files, read and written whatever the disk does; any thread may, one record in one thread at a time.

    When a write fails, the record stays in memory. When a read fails twice, the record is lost for good: it reads as
    NaN in every storage format, so that no matrix is updated by it. `failure` tells what happened, lost records before
    all else. `places` has the file of each record and the offset in it, by index.

    Attributes:
        lost: indices of lost records.
    """

    def __init__(
        self, places: Mapping[int, tuple[MomentumFile, int]], names: Sequence[str], what: str = "momentum"
    ) -> None:
        self.files = list({id(file): file for file, _ in places.values()}.values())
        self.failure: Failure | None = None
        self._places = places
        self._names = names
        self._what = what
        self._kept: dict[int, torch.Tensor] = {}  # records that could not be written
        self.lost: set[int] = set()
        self._guard = threading.Lock()

    def __contains__(self, index: int) -> bool:
        return index in self._places

    def read(self, index: int, buffer: torch.Tensor) -> None:
        """Fill `buffer`, whole pages, with a record."""
        if index in self.lost:
            buffer.fill_(_LOST)
            return
        kept = self._kept.get(index)
        if kept is not None:
            buffer[: kept.numel()].copy_(kept)
            return
        file, offset = self._places[index]
        try:
            file.read(offset, buffer)
        except OSError as first:
            try:
                file.read(offset, buffer)
            except OSError:
                buffer.fill_(_LOST)
                self.lost.add(index)
            self._fail("read", index, first)

    def write(self, index: int, buffer: torch.Tensor) -> None:
        """Replace a record by `buffer`, whole pages, unless it is lost."""
        if index in self.lost:
            return
        file, offset = self._places[index]
        try:
            file.write(offset, buffer)
            self._kept.pop(index, None)
        except OSError as error:
            self._kept[index] = buffer.clone()
            self._fail("write", index, error)

    def _fail(self, doing: Literal["read", "write"], index: int, error: OSError) -> None:
        file, offset = self._places[index]
        lost = (self._names[index],) if index in self.lost else ()
        with self._guard:
            if self.failure is None or (lost and not self.failure.lost):
                reason = error.strerror or str(error)
                self.failure = Failure(doing, file.directory, offset, reason, lost, self._what)
            elif lost:
                self.failure = replace(self.failure, lost=self.failure.lost + lost)


def scratch(directory: Path, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Zeros for fp32 tensors of so many elements, in a file without a name that goes when they go.

    Where the directory has no room for them they are in memory, with a warning: a checkpoint comes first.
    """
    size = 4 * sum(sizes)
    if size == 0:
        return [torch.empty(0, dtype=torch.float32) for _ in sizes]
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, size)
            memory = torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.float32)
    except OSError as error:
        print(
            f"megatron-muon: warning: {directory} has no {size:,} bytes for the momentum of a checkpoint "
            f"({error.strerror}); they are taken from main memory",
            flush=True,
        )
        memory = torch.empty(sum(sizes), dtype=torch.float32)
    return list(memory.split(list(sizes)))


def require_writable(directory: Path) -> None:
    """Check --muon-offload-dir; a UserError where it is missing, not a directory, or not writable."""
    flag = f"--muon-offload-dir {directory}"
    try:
        if not directory.exists():
            raise UserError(f"{flag} does not exist; make it: mkdir -p {directory}")
        if not directory.is_dir():
            raise UserError(f"{flag} is not a directory; choose one on a local disk")
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        why = f"cannot write there ({error.strerror}); choose a directory that this user may write"
        raise UserError(f"{flag}: {why}") from error
