"""`megatron-muon doctor --offload-dir`: whose files of momentum lie in a directory, and which of them no run needs.

Files of a run that was killed on this machine are a `note`: the next run removes them. Others that no living process
holds keep the next run from starting, so they are `wrong` until they are removed. Only files with the names of momentum
files are looked at, and nothing else is ever deleted.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

from megatron_muon.errors import UserError, quiet_imports
from megatron_muon.tools.doctor import NOTE, OK, WRONG, Finding

with quiet_imports():
    from megatron_muon.offload.directory import LOCK, delete_unused, holder, in_use, momentum_files, reason_to_leave
    from megatron_muon.offload.files import PREFIX, read_header


def offload(directory: Path, *, remove: bool) -> Iterator[Finding]:
    """What lies in a --muon-offload-dir, file by file; with `remove`, what is not in use is deleted."""
    try:
        found = momentum_files(directory)  # first, so that whoever made them had the lock by now
        owner, held = holder(directory)
    except OSError as error:
        yield Finding("offload", WRONG, f"{directory}: {error.strerror}")
        return
    except UserError as error:
        yield Finding("offload", WRONG, str(error))
        return
    if held:
        who = f"run {owner.get('run', '?')} (process {owner.get('pid', '?')} on {owner.get('host', '?')})"
        yield Finding("offload", OK, f"{directory} is in use by {who}")
    elif not found:
        yield Finding("offload", OK, f"{directory} holds no momentum files")
    for path in found:
        of_living_run = held and path.name.startswith(f"{PREFIX}{owner.get('run')}-")
        state, text = _file(path, of_living_run=of_living_run, remove=remove)
        yield Finding("momentum file", state, f"{path.name}: {text}")  # a column of names would leave text no room
    lock = directory / LOCK
    if not held and lock.exists():
        if not remove:
            yield Finding(LOCK, NOTE, "left by a run that has ended; the next one takes it over")
            return
        try:
            if delete_unused(lock):
                yield Finding(LOCK, OK, "left by a run that has ended; removed")
        except OSError as error:
            yield Finding(LOCK, WRONG, f"{error.strerror}; its owner may remove it")


def _file(path: Path, *, of_living_run: bool, remove: bool) -> tuple[str, str]:
    try:
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode):
            return WRONG, "not a file, so not of a run; remove it by hand"
        described, size = _described(path)
        cut_short = found.st_size < size
        text = f"{described}, {found.st_size:,}{f' of {size:,}' if cut_short else ''} bytes"
        if of_living_run or in_use(path):
            return (WRONG, f"{text}, in use: its end is lost") if cut_short else (OK, f"{text}, in use")
        if not remove:
            if reason_to_leave(path) is None:
                return NOTE, f"{text}, left over; the next run removes it, and so does --remove"
            return WRONG, f"{text}, left over; to remove it type --remove"
        if delete_unused(path):
            return OK, f"{text}, left over; removed"
        return OK, f"{text}, in use"
    except FileNotFoundError:
        return OK, "gone by now"
    except OSError as error:
        return WRONG, f"{error.strerror}; its owner may remove it"


def _described(path: Path) -> tuple[str, int]:
    """Whose file it is, and how many bytes it should have, 0 where that is not known."""
    try:
        header = read_header(path)
    except UserError as error:
        return str(error).removeprefix(f"{path} ").removeprefix(f"{path}: "), 0
    since = "kept with iteration" if header.kept else "begun at"
    return (
        f"run {header.run}, rank {header.rank}, {header.part} as {header.dtype}, {since} {header.iteration}, "
        f"by process {header.pid} on {header.host}"
    ), header.front + header.size
