"""The folders of a run's checkpoints: which are complete, which one `latest` names, how one is written safely.

    SAVE_DIR/latest_checkpointed_iteration.txt     "8"
    SAVE_DIR/iter_0000008/.metadata                written last by torch's distributed checkpointing
    SAVE_DIR/iter_0000008/__0_0.distcp, ...        one file for each rank
    SAVE_DIR/iter_0000008/checksums.json           {"crc32": {".metadata": "1a2b3c4d", ...}, "of_this": "..."}
    SAVE_DIR/iter_0000012.saving/                  a save that has not finished
    SAVE_DIR/.training.lock                        while a training saves there; its first rank holds it

A checkpoint is written under its name with `.saving` and renamed when every file is there, so a
folder without that ending is complete unless somebody damaged it. A CRC-32 finds every flipped bit
and every file of another iteration, but is no protection against intent; `dcp.SummedFiles` makes
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
from pathlib import Path
from typing import IO, Any

from megatron_muon.checkpoint.locks import Lock
from megatron_muon.errors import UserError

TRACKER = "latest_checkpointed_iteration.txt"
CHECKSUMS = "checksums.json"
UNFINISHED = ".saving"
_REPLACED = ".replaced"
_ITERATION = re.compile(r"iter_(\d{7,})$")
_CHUNK = 1 << 22  # bytes of a file that are read at once

SECONDS_FOR_A_DEAD_MACHINE = 120.0
"""A file server may take so long to give up the locks of a machine that is dead, whose run SLURM starts elsewhere."""


def lock_of(save_dir: Path) -> Lock:
    """The lock of a --save directory, which the first rank holds: ranks may outlive whoever launched them."""
    taken = f"a training saves its checkpoints to {save_dir}"
    return Lock(save_dir / ".training.lock", taken, "give another --save DIR")


def iteration_folder(save_dir: Path, iteration: int | str) -> Path:
    """The folder of an iteration's checkpoint, or of the "release", as megatron-core names it."""
    return save_dir / (f"iter_{iteration:07d}" if isinstance(iteration, int) else iteration)


def iteration_of(folder: Path) -> int | None:
    """The iteration that a checkpoint's folder is named after; None for any other name."""
    match = _ITERATION.fullmatch(folder.name)
    return int(match[1]) if match else None


def iterations(save_dir: Path) -> list[int]:
    """The iterations that have a folder in `save_dir`, oldest first, complete or not."""
    return sorted(
        found for entry in save_dir.glob("iter_*") if (found := iteration_of(entry)) is not None
    )


def newest_complete(save_dir: Path, *, but: int | str | None = None) -> int | None:
    """The newest iteration whose checkpoint is complete, leaving out the iteration `but`."""
    others = (iteration for iteration in reversed(iterations(save_dir)) if iteration != but)
    return next(
        (iteration for iteration in others if not problems(iteration_folder(save_dir, iteration))),
        None,
    )


def latest(save_dir: Path) -> int | str | None:
    """What the tracker file names: an iteration, or "release"; None where there is none. Anything else is refused."""
    file = save_dir / TRACKER
    try:
        text = file.read_text("utf-8", errors="replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(
            f"{file} cannot be read ({error.strerror}); {resume_hint(save_dir, tracker=file)}"
        ) from None
    if text != "release" and not text.isdecimal():
        raise UserError(
            f"{file} holds {text[:40]!r} instead of an iteration;"
            f" {resume_hint(save_dir, tracker=file)}"
        )
    return text if text == "release" else int(text)


def find(directory: Path) -> Path:
    """The folder of the checkpoint that `directory` is, or that its tracker, or that of a run's folder, names."""
    if not directory.is_dir():
        raise UserError(
            f"{directory} is not a directory; give a run's --save directory, or one of its iter_"
            " folders"
        )
    if (directory / ".metadata").exists() or iteration_of(directory) is not None:
        return directory
    if (named := latest(directory)) is not None:
        return iteration_folder(directory, named)
    if (directory / "checkpoints").is_dir():  # a run's folder
        return find(directory / "checkpoints")
    raise UserError(f"{directory} has no {TRACKER}; {resume_hint(directory)}")


def resume_hint(
    save_dir: Path, *, but: int | str | None = None, tracker: Path | None = None
) -> str:
    """What to type to go on from the newest complete checkpoint, or to mend the tracker file, which is always read."""
    found = newest_complete(save_dir, but=but)
    if found is None:
        return f"{save_dir} holds no complete checkpoint to resume from"
    remedy = f"resume with --load {save_dir} --ckpt-step {found}"
    if tracker is not None:
        remedy = f"type {f'rm -r {tracker}; ' if tracker.is_dir() else ''}echo {found} > {tracker}"
    return f"the newest complete checkpoint is iteration {found}: {remedy}"


def problems(folder: Path, *, verify: bool = True, threads: int = 0) -> list[str]:
    """Why a checkpoint cannot be loaded, a line each; an empty list where it is complete.

    Compares the index with its checksum, unless `verify` is False, and the other files with the
    sizes that the index gives; with `threads` their checksums too, so many files at a time.
    """
    from megatron_muon.checkpoint.dcp import Reader

    if not folder.is_dir():
        return [f"{folder} does not exist"]
    if not (folder / ".metadata").is_file():
        return [f"{folder} has no .metadata: its save did not finish"]
    ends: dict[str, int] = {}
    try:
        sums = read_checksums(folder) if verify else None
        if sums and (found := changed(folder, sums, [".metadata"])):
            return found
        for place in Reader(folder).read_metadata().storage_data.values():
            ends[place.relative_path] = max(
                ends.get(place.relative_path, 0), place.offset + place.length
            )
    except UserError as error:
        return [f"{folder}: {error}"]
    except Exception as error:  # a damaged pickle raises whatever its bytes happen to mean
        return [f"{folder}/.metadata cannot be read ({type(error).__name__}: {error})"]
    found = []
    for name, end in sorted(ends.items()):
        try:
            size = (folder / name).stat().st_size if not (folder / name).is_dir() else 0
        except OSError as error:
            found.append(f"{folder / name} cannot be read ({error.strerror})")
        else:
            found += (
                [f"{folder / name} is cut short: {size:,} of {end:,} bytes"] if size < end else []
            )
    if sums and threads and not found:
        return changed(folder, sums, share(sums, 0, 1), threads=threads)
    return found


def _encoded(sums: Mapping[str, int]) -> str:
    """The text of a file of checksums."""
    written = {name: f"{sums[name]:08x}" for name in _in_order(sums)}
    own = zlib.crc32(json.dumps(written).encode())
    return json.dumps({"crc32": written, "of_this": f"{own:08x}"}, indent=1) + "\n"


def read_checksums(folder: Path) -> dict[str, int] | None:
    """The checksums of a checkpoint, by file; None where it was written without. A damaged file of them is refused."""
    try:
        text = (folder / CHECKSUMS).read_bytes()
        sums = {str(name): int(written, 16) for name, written in json.loads(text)["crc32"].items()}
        if _encoded(sums).encode() != text:
            raise ValueError("it does not have the checksum that it gives for itself")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"{folder / CHECKSUMS} is damaged: {error}; --no-verify-checkpoint loads without it"
        ) from None
    return sums


def without_checksums(folder: Path) -> str:
    """The note on a checkpoint without checksums."""
    return f"{folder} was written without checksums; what its files hold is not verified"


def changed(
    folder: Path, sums: Mapping[str, int], names: Iterable[str], *, threads: int = 1
) -> list[str]:
    """Which of the files `names` are not as they were written, a line each; `threads` are read at a time."""

    def look(name: str) -> str | None:
        crc, buffer = 0, memoryview(bytearray(_CHUNK))
        try:
            with (folder / name).open("rb", buffering=0) as stream:
                while length := stream.readinto(buffer):
                    crc = zlib.crc32(buffer[:length], crc)
        except OSError as error:
            return f"{folder / name} cannot be read ({error.strerror})"
        was = f"its CRC-32 is {crc:08x}, and was {sums[name]:08x} when it was written"
        return None if crc == sums[name] else f"{folder / name} is damaged: {was}"

    with ThreadPoolExecutor(threads) as pool:
        return [line for line in pool.map(look, names) if line]


def share(sums: Mapping[str, int], rank: int, ranks: int) -> list[str]:
    """The files that a rank compares for all: its own where the layout is the one that wrote them."""
    return _in_order(sums.keys() - {".metadata"})[rank::ranks]


def _in_order(names: Iterable[str]) -> list[str]:
    """`__2_0.distcp` before `__10_0.distcp`."""
    return sorted(names, key=lambda name: (len(name), name))


def delete_all(save_dir: Path) -> None:
    """Delete the checkpoints in `save_dir`, finished or not, and nothing else; then the folder if it is empty."""
    (save_dir / TRACKER).unlink(missing_ok=True)
    for folder in (*save_dir.glob("iter_*"), save_dir / "release"):
        shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # it is not there, or holds something else
        save_dir.rmdir()


def begin(folder: Path) -> Path:
    """Make room for a checkpoint: the folder to write it in, fresh; an empty `folder` is removed."""
    aside = folder.with_name(folder.name + UNFINISHED)
    if aside.exists():
        shutil.rmtree(aside)
    aside.mkdir(parents=True)
    # it is not there, or holds an earlier save of this iteration
    with contextlib.suppress(OSError):
        folder.rmdir()
    return aside


def finish(folder: Path, sums: Mapping[str, int] | None = None) -> None:
    """Give a finished save its name, in place of an earlier one of the same iteration, with the checksums of its files.

    Raises OSError where a file is missing or cut short; nothing is renamed then.
    """
    aside = folder.with_name(folder.name + UNFINISHED)
    if sums is not None:
        with written_at_once(aside / CHECKSUMS) as stream:
            stream.write(_encoded(sums))
    if found := problems(aside):
        raise OSError("; ".join(found))
    replaced = folder.with_name(folder.name + _REPLACED)
    if folder.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        folder.rename(replaced)
    aside.rename(folder)
    _sync(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def recover(save_dir: Path) -> None:
    """Finish what a kill between the two renames of `finish` left: one of the two checkpoints gets its name back."""
    for replaced in save_dir.glob(f"iter_*{_REPLACED}"):
        folder = replaced.with_name(replaced.name.removesuffix(_REPLACED))
        aside = folder.with_name(folder.name + UNFINISHED)
        if not folder.exists():
            (replaced if problems(aside) else aside).rename(folder)


@contextlib.contextmanager
def written_at_once(file: Path) -> Iterator[IO[Any]]:
    """Open a text file for writing that appears whole or not at all: readers see the old one until then."""
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
    """Bring renames in a folder to the disk; not every file system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
