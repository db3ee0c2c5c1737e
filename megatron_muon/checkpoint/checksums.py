"""Checksums of a checkpoint's files: stored beside them, compared before they are loaded.

    SAVE_DIR/iter_0000500/checksums.json    {"crc32": {".metadata": "1a2b3c4d", "__0_0.distcp": ...}, "of_this": ...}

A CRC-32 finds every flipped bit and every file of another iteration. It is no protection against intent. The file holds
a checksum of itself too. `summed_files` makes the checksums while files are written.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron_muon.errors import UserError

NAME = "checksums.json"
_CHUNK = 1 << 22


def encode(sums: Mapping[str, int]) -> str:
    """The text of a file of checksums."""
    written = {name: f"{sums[name]:08x}" for name in _in_order(sums)}
    own = zlib.crc32(json.dumps(written).encode())
    return json.dumps({"crc32": written, "of_this": f"{own:08x}"}, indent=1) + "\n"


def read(folder: Path) -> dict[str, int] | None:
    """The checksums of a checkpoint, by file; None where it was written without. A damaged file of them is refused."""
    try:
        text = (folder / NAME).read_bytes()
        sums = {str(name): int(written, 16) for name, written in json.loads(text)["crc32"].items()}
        if encode(sums).encode() != text:
            raise ValueError("it does not have the checksum that it gives for itself")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{folder / NAME} is damaged: {error}; --no-verify-checkpoint loads without it") from None
    return sums


def absent(folder: Path) -> str:
    """The note on a checkpoint without checksums."""
    return f"{folder} was written without checksums; what its files hold is not verified"


def changed(folder: Path, sums: Mapping[str, int], names: Iterable[str], *, threads: int = 1) -> list[str]:
    """Which of the files `names` are not as they were written, a line each; `threads` are read at a time."""

    def look(name: str) -> str | None:
        try:
            found = _of_file(folder / name)
        except OSError as error:
            return f"{folder / name} cannot be read ({error.strerror})"
        was = f"its CRC-32 is {found:08x}, and was {sums[name]:08x} when it was written"
        return None if found == sums[name] else f"{folder / name} is damaged: {was}"

    with ThreadPoolExecutor(threads) as pool:
        return [line for line in pool.map(look, names) if line]


def share(sums: Mapping[str, int], rank: int, ranks: int) -> list[str]:
    """The files that a rank compares for all: its own where the layout is the one that wrote them."""
    return _in_order(sums.keys() - {".metadata"})[rank::ranks]


def _in_order(names: Iterable[str]) -> list[str]:
    """`__2_0.distcp` before `__10_0.distcp`."""
    return sorted(names, key=lambda name: (len(name), name))


def _of_file(file: Path) -> int:
    crc, buffer = 0, memoryview(bytearray(_CHUNK))
    with file.open("rb", buffering=0) as stream:
        while length := stream.readinto(buffer):
            crc = zlib.crc32(buffer[:length], crc)
    return crc
