"""The head of an index (`PREFIX.idx`) of Megatron's data: how many documents there are, and of which type the ids."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_muon.errors import UserError

_HEAD = struct.Struct("<9sQBQQ")
"""Magic, version, type of the ids, number of sequences, number of bounds between documents (_IndexWriter)."""
_MAGIC, _VERSION = b"MMIDIDX\0\0", 1
_BYTES_OF_SEQUENCE, _BYTES_OF_BOUND = 4 + 8, 8


@dataclass(frozen=True)
class IndexHead:
    """What an index says first.

    Attributes:
        dtype: of the token ids.
        documents: number of sequences, each of them a document.
    """

    dtype: np.dtype[Any]
    documents: int


def read_head(prefix: str) -> IndexHead:
    """The head of the index of a prefix.

    Raises:
        UserError: the file cannot be read, is not an index, or is cut short.
    """
    from megatron.core.datasets.indexed_dataset import DType

    file = Path(prefix + ".idx")
    try:
        with file.open("rb") as index:
            head = index.read(_HEAD.size)
        size = file.stat().st_size
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}); give this user the right to read it") from None
    try:
        magic, version, code, sequences, bounds = _HEAD.unpack(head)
        dtype = np.dtype(DType.dtype_from_code(code))
        whole = _HEAD.size + sequences * _BYTES_OF_SEQUENCE + bounds * _BYTES_OF_BOUND
        is_index = (magic, version) == (_MAGIC, _VERSION) and dtype.kind in "iu" and size >= whole
    except (struct.error, ValueError):  # too short, or of a type that Megatron does not know
        is_index = False
    if not is_index:
        raise UserError(
            f"{file} is not an index of Megatron's data, or is damaged; type: "
            f"megatron-muon data prepare --input TEXT --output {prefix}"
        )
    return IndexHead(dtype, sequences)
