"""Checksums of a checkpoint's files: stored beside them, compared before they are loaded.

    SAVE_DIR/iter_0000500/checksums.json    {"crc32": {".metadata": "1a2b3c4d", "__0_0.distcp": ...}, "of_this": ...}

A CRC-32 finds every flipped bit and every file of another iteration. It is no protection against intent. The file holds
a checksum of itself too. `megatron/checkpoint/saving.py` makes the checksums while files are written.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron_muon.errors import UserError

NAME = "checksums.json"
_WITHOUT = "--no-verify-checkpoint loads without it"
_CHUNK = 1 << 22


def encode(sums: Mapping[str, int]) -> str:
    """The text of a file of checksums."""
    written = {name: f"{sums[name]:08x}" for name in sorted(sums, key=_in_order)}
    own = zlib.crc32(json.dumps(written).encode())
    return json.dumps({"crc32": written, "of_this": f"{own:08x}"}, indent=1) + "\n"


def read(folder: Path) -> dict[str, int] | None:
    """The checksums of a checkpoint, by file; None where it was written without. A damaged file of them is refused."""
    file = folder / NAME
    try:
        text = file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}); {_WITHOUT}") from None
    try:
        sums = {str(name): int(written, 16) for name, written in json.loads(text)["crc32"].items()}
        whole = encode(sums).encode() == text
    except (ValueError, TypeError, KeyError, AttributeError):
        whole = False
    if not whole:
        raise UserError(f"{file} is damaged: it does not have the checksum that it gives for itself; {_WITHOUT}")
    return sums


def absent(folder: Path) -> str:
    """What to say of a checkpoint without checksums."""
    return f"{folder} was written without checksums; what its files hold is not verified"


def changed(folder: Path, sums: Mapping[str, int], names: Iterable[str], *, threads: int = 1) -> list[str]:
    """Which of the files `names` are not as they were written, a line each; `threads` are read at a time."""

    def look(name: str) -> str | None:
        try:
            found = _of_file(folder / name)
        except OSError as error:
            return f"{folder / name} cannot be read ({error.strerror})"
        if found == sums[name]:
            return None
        return f"{folder / name} is damaged: its CRC-32 is {found:08x}, and was {sums[name]:08x} when it was written"

    with ThreadPoolExecutor(threads) as pool:
        return [line for line in pool.map(look, names) if line]


def share(sums: Mapping[str, int], rank: int, ranks: int) -> list[str]:
    """The files that a rank compares for all: its own where the layout is the one that wrote them."""
    return sorted(sums.keys() - {".metadata"}, key=_in_order)[rank::ranks]


def _in_order(name: str) -> tuple[int, str]:
    """Sorts `__2_0.distcp` before `__10_0.distcp`."""
    return len(name), name


def _of_file(file: Path) -> int:
    crc, buffer = 0, memoryview(bytearray(_CHUNK))
    with file.open("rb", buffering=0) as stream:
        while length := stream.readinto(buffer):
            crc = zlib.crc32(buffer[:length], crc)
    return crc
