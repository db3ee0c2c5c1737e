"""Safe reading and checksummed writing through torch's distributed checkpointing.

A pickle may call any function that Python can import. torch's distributed checkpointing reads
tensors with weights-only semantics, but its index (`.metadata`) and the entries that are not
tensors with the plain unpickler. Here an index may name the classes that torch's writer puts there,
and an entry whatever `torch.load(weights_only=True)` accepts: plain values, tensors, and the
classes that megatron-core registers for its checkpoints when it is imported. Anything else is
refused, by name. Checksums are computed on the way to the disk, so no file is read again.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import zlib
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import IO, Any, ClassVar

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from megatron_muon.errors import UserError

_DCP = "torch.distributed.checkpoint"
_INDEX_CLASSES = {
    "collections": "OrderedDict",
    "pathlib": "PosixPath",
    "pathlib._local": "PosixPath",  # as Python 3.13 names it
    "torch": "Size",
    "torch.serialization": "_get_layout",
    f"{_DCP}.filesystem": "_StorageInfo _StoragePrefix",
    f"{_DCP}.metadata": (
        "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta "
        "TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING"
    ),
    # megatron-core's torch_dist keeps its plans of a save there:
    f"{_DCP}.planner": "BytesIOWriteData SavePlan TensorWriteData WriteItem WriteItemType",
}
"""Names that an index may use, by module."""

_LOAD_BUILD: Any = pickle._Unpickler.dispatch[pickle.BUILD[0]]


def _untrusted(name: str) -> UserError:
    which = f".metadata names {name}, which no checkpoint needs"
    return UserError(f"{which}; it was not run: do not trust this file")


class _IndexUnpickler(pickle._Unpickler):
    """Unpickles an index; only its dataclasses get state, as classes belong to the whole process.

    In Python, three times slower than in C, where setting state cannot be overridden.
    """

    stack: list[Any]
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def load_build(self) -> None:
        changed = self.stack[-2]
        if not is_dataclass(type(changed)):
            kind = changed if isinstance(changed, type) else type(changed)
            raise _untrusted(f"changes of {kind.__module__}.{kind.__qualname__}")
        _LOAD_BUILD(self)

    dispatch[pickle.BUILD[0]] = load_build

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if name in _INDEX_CLASSES.get(module, "").split() or is_dtype:
            return super().find_class(module, name)
        raise _untrusted(f"{module}.{name}")


def load_entry(name: str, stream: IO[bytes]) -> Any:
    """Load the entry `name`, which is not a tensor, as written by `torch.save`.

    Raises UserError if it is damaged or names functions or classes that are not allowed; none of
    them is run.
    """
    try:
        return torch.load(stream, weights_only=True)
    except Exception as error:  # damaged bytes raise whatever they happen to mean
        cause = error.__context__ or error  # torch's own text is about weights_only
        reason = str(cause).partition(". ")[0]  # after it torch tells how to allow any class
        raise UserError(f"entry {name!r} cannot be read ({reason})") from error


class _UnreadableError(BaseException):
    """Not an Exception: torch 2.11's load would drop it and report only a missing index."""


class Reader(FileSystemReader):
    """torch's reader of a checkpoint's folder, with an index that names known classes only."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index of the checkpoint, or of one rank's part of it; raises as `load_entry` does."""
        if "rank" in kwargs and (reason := getattr(self, "_unread", None)):
            raise _UnreadableError(reason)  # the whole index was there, so there are no parts
        try:
            with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as stream:
                metadata = _IndexUnpickler(stream).load()
            if not isinstance(metadata, Metadata):
                raise UserError(f".metadata holds a {type(metadata).__name__} in place of an index")
        except FileNotFoundError:
            raise  # a rank's own part may exist
        except Exception as error:
            self._unread = error
            raise
        metadata.storage_meta = getattr(metadata, "storage_meta", None) or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class Planner(DefaultLoadPlanner):
    """torch's planner of a load, which runs no code of an entry."""

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Store an entry that is not a tensor in the state dict."""
        name = read_item.dest_index.fqn
        loaded = load_entry(name, value)
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], loaded)
        else:
            self.state_dict[name] = loaded


class SummedFiles(FileSystem):
    """The file system; `sums` has the CRC-32 of each file written through it, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[str, int] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Open a file to be written from its beginning to its end."""
        with super().create_stream(path, mode) as stream:
            summed = _SummedStream(stream)
            yield summed
        self.sums[Path(path).name] = summed.crc

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Give a file another name."""
        super().rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)


class _SummedStream:
    """A stream for torch's writer, without seeking: a sum would miss bytes that are rewritten."""

    def __init__(self, stream: Any) -> None:
        self.crc = 0
        self._write = stream.write
        for name in ("tell", "flush", "fileno", "close"):
            setattr(self, name, getattr(stream, name))

    def write(self, data: Any) -> int:
        self.crc = zlib.crc32(data, self.crc)
        return int(self._write(data))
