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
import json
import mmap
import os
import struct
import tempfile
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from megatron_muon.errors import UserError
from megatron_muon.locks import close, open_own

PREFIX = "muon-momentum-"
PAGE = 4096
"""Alignment of offsets, lengths and addresses, which direct I/O asks for."""

_MAGIC = b"MUONMOM\n"
_VERSION = 2
_FRONT = struct.Struct("<8sIII")  # magic, version, bytes of the JSON, their CRC-32


@dataclass(frozen=True)
class Header:
    """What a file says about itself.

    Attributes:
        run: the run that made it.
        iteration: the last iteration before its first step, or with `--muon-offload-keep` the one that it ended with.
        rank: of the world.
        part: the parameter group, as "dense0" or "experts1".
        dtype: the storage format of its records.
        host: the machine.
        pid: the process.
        records: `[name, first row, rows, first column, columns, offset, bytes]` of each shard.
        size: bytes of the whole file.
        kept: whether its run came to an end and left it on purpose, so that it holds what it says.
        keep: whether its run leaves it on purpose, however that ends.
        boot: the start of the machine, as the system names it.
        save: the folder that its run saves checkpoints in, the same for later starts of that run; empty without one.
    """

    run: str
    iteration: int
    rank: int
    part: str
    dtype: str
    host: str
    pid: int
    records: tuple[tuple[str, int, int, int, int, int, int], ...]
    size: int
    kept: bool = False
    keep: bool = False
    boot: str = ""
    save: str = ""

    @property
    def name(self) -> str:
        """The file's name."""
        return f"{PREFIX}{self.run}-iter{self.iteration:07d}-rank{self.rank:05d}-{self.part}.bin"

    def pages(self) -> bytes:
        """The header as it is stored, whole pages."""
        text = json.dumps(asdict(self)).encode()
        front = _FRONT.pack(_MAGIC, _VERSION, len(text), zlib.crc32(text))
        return (front + text).ljust(in_pages(len(front) + len(text)), b"\0")


def in_pages(size: int) -> int:
    """`size` bytes rounded up to whole pages."""
    return -(-size // PAGE) * PAGE


def header_bytes(header: Header) -> int:
    """Room for the header, also after its numbers have grown."""
    return in_pages(len(header.pages()) + 64)


def read_header(path: Path) -> Header:
    """The header of a file.

    Raises:
        UserError: it is not one of these files, of another version, or damaged.
    """
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
    if len(text) < length or zlib.crc32(text) != checksum:
        raise UserError(f"{path} has a damaged header")
    try:
        values = json.loads(text)
        return Header(**{**values, "records": tuple(tuple(record) for record in values["records"])})
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} has a damaged header") from error


class MomentumFile:
    """An open file of records.

    Attributes:
        path: where it is.
        direct: whether reads and writes go past the page cache.
    """

    def __init__(self, directory: Path, header: Header) -> None:
        """Make the file, still empty, so that `close` can delete it whatever happens next.

        Raises:
            OSError: it exists, or cannot be made.
        """
        self.path = directory / header.name
        self.header = header
        self.direct = False
        self._data = -1
        self._file = open_own(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)

    def take_space(self) -> None:
        """Lock the file, take its space and write its header.

        Raises:
            OSError: there is no room for it.
        """
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.pwrite(self._file, self.header.pages(), 0)  # first: whoever finds the file can tell whose it is
        os.posix_fallocate(self._file, 0, self.header.size)
        os.fsync(self._file)
        self.direct, self._data = _open_for_data(self.path)

    def read(self, offset: int, buffer: torch.Tensor) -> None:
        """Fill `buffer`, uint8, whole pages at an address of whole pages, from `offset`.

        Raises:
            OSError: what the system said, or EIO where the file has become too short.
        """
        view, done = memoryview(buffer.numpy()), 0
        while done < len(view):
            count = os.preadv(self._data, [view[done:]], offset + done)
            if count == 0:
                raise OSError(errno.EIO, "the file ends before this record")
            done += count

    def write(self, offset: int, buffer: torch.Tensor) -> None:
        """Write `buffer`, as `read` takes it, at `offset`.

        Raises:
            OSError: what the system said, or EIO where it takes nothing.
        """
        view, done = memoryview(buffer.numpy()), 0
        while done < len(view):
            count = os.pwritev(self._data, [view[done:]], offset + done)
            if count == 0:
                raise OSError(errno.EIO, "the file takes no more of this record")
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


def _open_for_data(path: Path) -> tuple[bool, int]:
    """A descriptor for the records, past the page cache if the file system can."""
    try:
        return True, open_own(path, os.O_RDWR | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return False, open_own(path, os.O_RDWR)


def temporary_memory(directory: Path, size: int) -> torch.Tensor:
    """`size` zero bytes in a file without a name, which goes when the tensor goes.

    Raises:
        OSError: there is no room for it.
    """
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    with tempfile.TemporaryFile(dir=directory) as file:
        os.posix_fallocate(file.fileno(), 0, size)
        return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)


def require_writable(directory: Path) -> None:
    """Check --muon-offload-dir.

    Raises:
        UserError: it is missing, not a directory, or not writable.
    """
    try:
        if not directory.exists():
            raise UserError(f"--muon-offload-dir {directory} does not exist; make it: mkdir -p {directory}")
        if not directory.is_dir():
            raise UserError(f"--muon-offload-dir {directory} is not a directory; choose one on a local disk")
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UserError(
            f"--muon-offload-dir {directory}: cannot write there ({error.strerror}); choose a directory that this "
            "user may write"
        ) from error
