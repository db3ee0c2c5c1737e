"""Files of momentum: one for each rank and parameter group, in a directory that one run has to itself.

    DIR/muon-momentum-RUN-iter0000000-rank00003-dense0.bin              locked by its rank while it lives

A file is a header (magic, version, length, checksum, JSON) in whole pages, then one record for each shard, at offsets
of whole pages. Its space is taken before the first step. It is scratch: no run ever reads a file that another one left.
Reads and writes go past the page cache where the file system can do that, so that errors show at once and where they
happen. No collectives here.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import mmap
import os
import socket
import struct
import tempfile
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import msgspec
import torch

from megatron_muon.checkpoint.locks import close, open_own
from megatron_muon.errors import UserError

PREFIX = "muon-momentum-"
PAGE = 4096
"""Alignment of offsets, lengths and addresses, which direct I/O asks for."""

_MAGIC = b"MUONMOM\n"
_VERSION = 3
_FRONT = struct.Struct("<8sIII")  # magic, version, bytes of the JSON, their CRC-32


@functools.cache
def boot_id() -> str:
    """What the system calls this start of the machine; empty where it does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""


@dataclass(frozen=True)
class Header:
    """What a file says about itself."""

    run: str
    iteration: int
    """The last one before its first step, or with `--muon-offload-keep` the one that it ended with."""
    rank: int
    part: str
    """The parameter group, as "dense0" or "experts1"."""
    dtype: str
    size: int
    """Bytes of all records."""
    records: tuple[tuple[str, int, int, int, int, int, int], ...] = ()
    """`[name, first row, rows, first column, columns, offset, bytes]` of each shard; the first has offset 0."""
    front: int = 0
    """Bytes before the first record, set as the file is made."""
    kept: bool = False
    """Its run came to an end and left it on purpose, so that it holds what it says."""
    keep: bool = False
    """Its run leaves it on purpose, however that ends."""
    save: str = ""
    """The folder that its run saves checkpoints in, the same for later starts of that run; empty without one."""
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    boot: str = field(default_factory=boot_id)

    @property
    def name(self) -> str:
        """The file's name."""
        return f"{PREFIX}{self.run}-iter{self.iteration:07d}-rank{self.rank:05d}-{self.part}.bin"

    def pages(self) -> bytes:
        """The header as it is stored, whole pages."""
        text = msgspec.json.encode(self)
        front = _FRONT.pack(_MAGIC, _VERSION, len(text), zlib.crc32(text))
        return (front + text).ljust(in_pages(len(front) + len(text)), b"\0")

    def room(self) -> int:
        """Bytes to leave before the first record: for the header as it is, and a page for its numbers to grow."""
        return len(self.pages()) + PAGE


def in_pages(size: int) -> int:
    """`size` bytes rounded up to whole pages."""
    return -(-size // PAGE) * PAGE


def read_header(path: Path) -> Header:
    """The header of a file; a UserError where it is not one of these files, of another version, or damaged."""
    try:
        with path.open("rb") as file:
            front = file.read(_FRONT.size)
            if len(front) < _FRONT.size or not front.startswith(_MAGIC):
                raise UserError(f"{path} is not a momentum file")
            _, version, length, checksum = _FRONT.unpack(front)
            if version != _VERSION:
                raise UserError(f"{path} has version {version}, this program knows {_VERSION}")
            text = file.read(length)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    with contextlib.suppress(ValueError):
        if zlib.crc32(text) == checksum:
            return msgspec.json.decode(text, type=Header)
    raise UserError(f"{path} has a damaged header")


class MomentumFile:
    """An open file of records at `path`; `direct` says whether reads and writes go past the page cache."""

    def __init__(self, directory: Path, header: Header) -> None:
        """Make the file, still empty, so that `close` can delete it whatever happens next."""
        self.path = directory / header.name
        self.header = replace(header, front=header.room())
        self.direct = False
        self._data = -1
        self._file = open_own(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)

    def take_space(self) -> None:
        """Lock the file, take its space and write its header; an OSError where there is no room for it."""
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.pwrite(self._file, self.header.pages(), 0)  # first: whoever finds the file can tell whose it is
        os.posix_fallocate(self._file, 0, self.header.front + self.header.size)
        os.fsync(self._file)
        try:
            self._data = open_own(self.path, os.O_RDWR | os.O_DIRECT)
            self.direct = True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._data = open_own(self.path, os.O_RDWR)

    def is_short(self) -> bool:
        """Whether the file has lost its end since its space was taken."""
        return os.fstat(self._data).st_size < self.header.front + self.header.size

    def read(self, offset: int, buffer: torch.Tensor) -> None:
        """Fill `buffer`, uint8, whole pages at an address of whole pages, from `offset`."""
        self._move(os.preadv, offset, buffer, "the file ends before this record")

    def write(self, offset: int, buffer: torch.Tensor) -> None:
        """Write `buffer`, as `read` takes it, at `offset`.

        A file that has been cut short is not made longer: what is missing between would read as zeros.
        """
        if os.fstat(self._data).st_size < offset + buffer.numel():
            raise OSError(errno.EIO, "the file has been cut short")
        self._move(os.pwritev, offset, buffer, "the file takes no more of this record")

    def _move(self, move: Callable[..., int], offset: int, buffer: torch.Tensor, stopped: str) -> None:
        view, done = memoryview(buffer.numpy()), 0
        while done < len(view):
            count = move(self._data, [view[done:]], offset + done)
            if count == 0:
                raise OSError(errno.EIO, stopped)
            done += count

    def close(self, *, keep_as: Header | None = None) -> None:
        """Delete the file, or give it the name and header `keep_as`."""
        if self._file < 0:
            return
        with contextlib.suppress(OSError):
            if keep_as is None:
                self.path.unlink(missing_ok=True)
            else:
                os.pwrite(self._file, keep_as.pages(), 0)
                self.path.rename(self.path.with_name(keep_as.name))
        for descriptor in (self._file, self._data):
            if descriptor >= 0:
                with contextlib.suppress(OSError):
                    close(descriptor)
        self._file = self._data = -1


@dataclass(frozen=True)
class Content:
    """What records hold.

    Attributes:
        what: for messages.
        part: in front of the parameter group in the names of files.
    """

    what: str = "momentum"
    part: str = ""


MOMENTUM = Content()

_LOST = 0xFF
"""Each byte of a lost record: fp32 and bf16 of such bytes are NaN, and so are the scales of int8."""


@dataclass(frozen=True)
class Failure:
    """The first failed read or write, and the matrices whose records could not be read."""

    doing: Literal["read", "write"]
    path: Path
    offset: int
    reason: str
    lost: tuple[str, ...] = ()
    content: Content = MOMENTUM

    def __str__(self) -> str:
        text = f"cannot {self.doing} {self.content.what} in {self.path} at offset {self.offset:,}: {self.reason}"
        if not self.lost:
            kept = "a second try worked" if self.doing == "read" else "what was to be written is kept in memory"
            return f"{text}; nothing is lost, {kept}"
        more = f" and {len(self.lost) - 1} more" if len(self.lost) > 1 else ""
        return (
            f"{text}; {self.content.what} of {self.lost[0]}{more} is lost on this rank; start again from a checkpoint"
        )


class DiskRecords:
    """Records in files, read and written whatever the disk does; any thread may, one record in one thread at a time.

    When a write fails, the record stays in memory. When a read fails twice, the record is lost for good: it reads as
    NaN in every storage format, so that no matrix is updated by it. `failure` tells what happened, lost records before
    all else. `places` has the file of each record and the offset in it, by index.

    Attributes:
        lost: indices of lost records.
    """

    def __init__(
        self, places: Mapping[int, tuple[MomentumFile, int]], names: Sequence[str], content: Content = MOMENTUM
    ) -> None:
        self.files = list({id(file): file for file, _ in places.values()}.values())
        self.failure: Failure | None = None
        self._places = places
        self._names = names
        self._content = content
        self._kept: dict[int, torch.Tensor] = {}  # records that could not be written
        self.lost: set[int] = set()
        self._guard = threading.Lock()

    def __contains__(self, index: int) -> bool:
        return index in self._places

    def in_short_files(self) -> list[int]:
        """Records in files that have been cut short."""
        short = {id(file) for file in self.files if file.is_short()}
        return [index for index, (file, _) in self._places.items() if id(file) in short]

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
                self.failure = Failure(doing, file.path, offset, reason, lost, self._content)
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
