"""The folders of a run's checkpoints: which are complete, which is the latest, how one is written.

    SAVE_DIR/latest_checkpointed_iteration.txt     "8"
    SAVE_DIR/iter_0000008/.metadata                torch's index, written last
    SAVE_DIR/iter_0000008/__0_0.distcp, ...        one file for each rank
    SAVE_DIR/iter_0000008/checksums.json           {"crc32": {".metadata": "1a2b3c4d", ...}, ...}
    SAVE_DIR/iter_0000012.saving/                  a save that has not finished
    SAVE_DIR/.training.lock                        held by the first rank of a training

A checkpoint is written under its name with `.saving` and renamed when every file is there, so a
folder without that ending is complete unless it was damaged later. A CRC-32 finds every flipped bit
and every file of another iteration, but does not protect against intent; `dcp.SummedFiles` computes
them while files are written. No collectives here.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import IO, Any

from megatron_muon.errors import UserError

TRACKER = "latest_checkpointed_iteration.txt"
CHECKSUMS = "checksums.json"
UNFINISHED = ".saving"
_INDEX = ".metadata"
_REPLACED = ".replaced"
_ITERATION = re.compile(r"iter_(\d{7,})$")
_READ_BYTES = 1 << 22


def iteration_folder(save_dir: Path, iteration: int | str) -> Path:
    """The folder of an iteration's checkpoint, or of the "release", as megatron-core names it."""
    return save_dir / (f"iter_{iteration:07d}" if isinstance(iteration, int) else iteration)


def iteration_of(folder: Path) -> int | None:
    """The iteration that a checkpoint's folder is named after; None for any other name."""
    match = _ITERATION.fullmatch(folder.name)
    return int(match[1]) if match else None


def _with_ending(folder: Path, ending: str) -> Path:
    return folder.with_name(folder.name + ending)


def iterations(save_dir: Path) -> list[int]:
    """The iterations that have a folder in `save_dir`, oldest first, complete or not."""
    found = map(iteration_of, save_dir.glob("iter_*"))
    return sorted(iteration for iteration in found if iteration is not None)


def newest_complete(save_dir: Path, *, but: int | str | None = None) -> int | None:
    """The newest iteration whose checkpoint is complete, leaving out the iteration `but`."""
    for iteration in reversed(iterations(save_dir)):
        if iteration != but and not problems(iteration_folder(save_dir, iteration)):
            return iteration
    return None


def latest(save_dir: Path) -> int | str | None:
    """The iteration in the tracker file, or "release"; None without one. Refuses anything else."""
    file = save_dir / TRACKER
    try:
        text = file.read_text("utf-8", errors="replace").strip()
    except FileNotFoundError:
        return None
    if text == "release":
        return text
    if text.isdecimal():
        return int(text)
    newest = newest_complete(save_dir)
    remedy = f"type echo {newest} > {file}" if newest else "delete it"
    raise UserError(f"{file} holds {text[:40]!r} instead of an iteration; {remedy}")


def find(directory: Path) -> Path:
    """The checkpoint's folder: `directory`, or the latest in a --save directory or run's folder."""
    if not directory.is_dir():
        raise UserError(
            f"{directory} is not a directory; give a run's --save directory, or one of its iter_"
            " folders"
        )
    if (directory / _INDEX).exists() or iteration_of(directory) is not None:
        return directory
    if (named := latest(directory)) is not None:
        return iteration_folder(directory, named)
    if (directory / "checkpoints").is_dir():  # a run's folder
        return find(directory / "checkpoints")
    raise UserError(f"{directory} has no {TRACKER}; {resume_hint(directory)}")


def resume_hint(save_dir: Path, *, but: int | str | None = None) -> str:
    """How to resume from the newest complete checkpoint."""
    found = newest_complete(save_dir, but=but)
    if found is None:
        return f"{save_dir} holds no complete checkpoint to resume from"
    newest = f"the newest complete checkpoint is iteration {found}"
    return f"{newest}: resume with --load {save_dir} --ckpt-step {found}"


def problems(folder: Path, *, verify: bool = True, threads: int = 0) -> list[str]:
    """Reasons why a checkpoint cannot be loaded, a line each; an empty list if it is complete.

    Compares the index with its checksum, unless `verify` is False, and the other files with the
    sizes in the index. With `threads`, also their checksums, that many files at a time.
    """
    if not folder.is_dir():
        return [f"{folder} does not exist"]
    if not (folder / _INDEX).is_file():
        return [f"{folder} has no {_INDEX}: its save did not finish"]
    try:
        sums = read_checksums(folder) if verify else None
        if sums and (found := changed(folder, sums, [_INDEX])):
            return found
        sizes = _sizes(folder)
    except UserError as error:
        return [f"{folder}: {error}"]
    except Exception as error:  # a damaged pickle raises whatever its bytes happen to mean
        return [f"{folder / _INDEX} cannot be read ({type(error).__name__}: {error})"]
    looked = [_missing_bytes(folder / name, sizes[name]) for name in sorted(sizes)]
    found = [problem for problem in looked if problem]
    if sums and threads and not found:
        return changed(folder, sums, share(sums, 0, 1), threads=threads)
    return found


def _sizes(folder: Path) -> dict[str, int]:
    """Bytes that each file of a checkpoint has at least, by its index."""
    from megatron_muon.checkpoint.dcp import Reader  # imports torch

    sizes: dict[str, int] = {}
    for entry in Reader(folder).read_metadata().storage_data.values():
        end = entry.offset + entry.length
        sizes[entry.relative_path] = max(end, sizes.get(entry.relative_path, 0))
    return sizes


def _missing_bytes(file: Path, wanted: int) -> str | None:
    try:
        size = file.stat().st_size
    except OSError as error:
        return f"{file} cannot be read ({error.strerror})"
    return f"{file} is cut short: {size:,} of {wanted:,} bytes" if size < wanted else None


def _encoded(sums: Mapping[str, int]) -> str:
    """The text of checksums.json, including its own checksum."""
    written = {name: f"{sums[name]:08x}" for name in _in_order(sums)}
    own = zlib.crc32(json.dumps(written).encode())
    return json.dumps({"crc32": written, "of_this": f"{own:08x}"}, indent=1) + "\n"


def read_checksums(folder: Path) -> dict[str, int] | None:
    """The checksums of a checkpoint, by file; None if written without. Refuses a damaged file."""
    try:
        text = (folder / CHECKSUMS).read_bytes()
        sums = {name: int(crc, 16) for name, crc in json.loads(text)["crc32"].items()}
        if _encoded(sums).encode() != text:
            raise ValueError("it does not match its own checksum")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        why = f"{folder / CHECKSUMS} is damaged: {error}"
        raise UserError(f"{why}; --no-verify-checkpoint loads without it") from None
    return sums


def without_checksums(folder: Path) -> str:
    """The note on a checkpoint without checksums."""
    return f"{folder} was written without checksums; the content of its files is not verified"


def changed(
    folder: Path, sums: Mapping[str, int], names: Iterable[str], *, threads: int = 1
) -> list[str]:
    """Files of `names` that are not as they were written, a line each."""
    with ThreadPoolExecutor(threads) as pool:
        return [line for line in pool.map(partial(_damage, folder, sums), names) if line]


def _damage(folder: Path, sums: Mapping[str, int], name: str) -> str | None:
    crc, buffer = 0, memoryview(bytearray(_READ_BYTES))
    try:
        with (folder / name).open("rb", buffering=0) as stream:
            while length := stream.readinto(buffer):
                crc = zlib.crc32(buffer[:length], crc)
    except OSError as error:
        return f"{folder / name} cannot be read ({error.strerror})"
    if crc == sums[name]:
        return None
    was = f"its CRC-32 is {crc:08x}, and was {sums[name]:08x} when it was written"
    return f"{folder / name} is damaged: {was}"


def share(sums: Mapping[str, int], rank: int, ranks: int) -> list[str]:
    """The files that a rank verifies for all; its own if the layout is the one that wrote them."""
    return _in_order(sums.keys() - {_INDEX})[rank::ranks]


def _in_order(names: Iterable[str]) -> list[str]:
    """Sorted, with `__2_0.distcp` before `__10_0.distcp`."""
    return sorted(names, key=lambda name: (len(name), name))


def begin(folder: Path) -> Path:
    """Make a fresh folder to write a checkpoint in; an empty `folder` is removed."""
    aside = _with_ending(folder, UNFINISHED)
    if aside.exists():
        shutil.rmtree(aside)
    aside.mkdir(parents=True)
    with contextlib.suppress(OSError):  # it does not exist, or holds an earlier save
        folder.rmdir()
    return aside


def finish(folder: Path, sums: Mapping[str, int] | None = None) -> None:
    """Rename a finished save to its name, in place of an earlier one of the same iteration.

    Writes the checksums `sums` of its files. Raises OSError, without renaming, if a file is missing
    or cut short.
    """
    aside = _with_ending(folder, UNFINISHED)
    if sums is not None:
        with written_at_once(aside / CHECKSUMS) as stream:
            stream.write(_encoded(sums))
    if found := problems(aside):
        raise OSError("; ".join(found))
    replaced = _with_ending(folder, _REPLACED)
    if folder.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        folder.rename(replaced)
    aside.rename(folder)
    _sync(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def recover(save_dir: Path) -> None:
    """Complete a `finish` that was killed between its renames: one save gets its name back."""
    for replaced in save_dir.glob(f"iter_*{_REPLACED}"):
        folder = replaced.with_name(replaced.name.removesuffix(_REPLACED))
        aside = _with_ending(folder, UNFINISHED)
        if not folder.exists():
            (replaced if problems(aside) else aside).rename(folder)


@contextlib.contextmanager
def written_at_once(file: Path) -> Iterator[IO[Any]]:
    """Open a text file for writing; it replaces the old one at the end, whole or not at all."""
    aside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with aside.open("w", encoding="utf-8") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        aside.replace(file)
        _sync(file.parent)
    finally:
        aside.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    """Flush renames in a folder to the disk; not every file system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
