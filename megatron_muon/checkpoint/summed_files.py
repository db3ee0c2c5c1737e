"""The file system through which a checkpoint is written, with checksums made on the way: no file is read again."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem


class SummedFiles(FileSystem):
    """The file system, with the CRC-32 in `sums` of each file that was written through it, by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[str, int] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Open a file to be written from its beginning to its end."""
        with super().create_stream(path, mode) as stream, ThreadPoolExecutor(1) as beside:
            summed = _SummedStream(stream, beside)
            yield summed
        self.sums[Path(path).name] = summed.crc

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Give a file another name."""
        super().rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)


class _SummedStream:
    """What torch's writer uses of a stream. It cannot seek: a sum would miss what is written anew."""

    def __init__(self, stream: Any, beside: Executor) -> None:
        self.crc = 0
        self._write, self._beside = stream.write, beside
        self.tell, self.flush, self.fileno, self.close = stream.tell, stream.flush, stream.fileno, stream.close

    def write(self, data: Any) -> int:
        summing = self._beside.submit(zlib.crc32, data, self.crc)  # neither holds the interpreter's lock
        try:
            return int(self._write(data))
        finally:
            self.crc = summing.result()
