"""The directory of momentum files: which run has it, and what becomes of the files that a killed run left there.

    DIR/muon-momentum.lock                                              held by every rank of the run that uses DIR

No collectives here.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_muon.checkpoint.locks import close, is_still, open_itself, open_own, sign, signature, try_lock
from megatron_muon.errors import UserError
from megatron_muon.offload.files import PREFIX, boot_id, read_header, require_writable

LOCK = "muon-momentum.lock"

_SECONDS_TO_CLAIM = 1.0


class RunDirectory:
    """A directory that this run, all of its ranks here, has to itself until `close`.

    Files that killed runs left there are deleted, where it is certain that those runs are dead (`reason_to_leave`).

    `run` names this start of the run, the same on all ranks; `save` is its checkpoint folder, as in `Header`. A
    UserError where the directory cannot be used: another run has it, or files that may be wanted lie there.
    """

    def __init__(self, directory: Path, run: str, *, save: str = "") -> None:
        self.path = directory
        self.run = run
        self._save = save
        self._flag = f"--muon-offload-dir {directory}"
        require_writable(directory)
        self._lock = self._claim()

    def close(self) -> None:
        """Leave the directory; the last rank that leaves takes the lock's file along."""
        if self._lock < 0:
            return
        with contextlib.suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (self.path / LOCK).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            close(self._lock)
        self._lock = -1

    def _claim(self) -> int:
        """The descriptor of the lock's file, locked for sharing, with this run's name in it.

        Whoever locks it alone writes the name; the others find it. Turning a lock of one's own into a shared one is not
        atomic, so the name is read again afterwards: of two runs that start at once one finds the other's. Another name
        is believed when it stays: somebody who only looked may have kept this run from writing its own.
        """
        give_up = time.monotonic() + _SECONDS_TO_CLAIM
        while True:
            with contextlib.ExitStack() as undo:
                try:
                    lock = open_own(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
                    undo.callback(close, lock)
                    holder = self._hold(lock)
                except OSError as error:
                    raise UserError(
                        f"{self._flag}: cannot lock {LOCK} there ({error.strerror}); remove it if no run uses the "
                        "directory, or choose another one"
                    ) from error
                if holder is not None and holder.get("run") == self.run:
                    undo.pop_all()
                    return lock
            if holder is not None and time.monotonic() > give_up:
                raise UserError(
                    f"{self._flag} is in use by run {holder.get('run', '?')} (process {holder.get('pid', '?')} on "
                    f"{holder.get('host', '?')}); choose another directory, or wait for its end"
                )
            time.sleep(0.02)

    def _hold(self, lock: int) -> dict[str, Any] | None:
        """Lock the lock's file for sharing; who holds it, None where it has just been taken away."""
        alone = try_lock(lock)
        if alone and is_still(lock, self.path / LOCK) and signature(lock).get("run") != self.run:
            try:
                self._clear()
            except UserError:
                (self.path / LOCK).unlink()  # this run's other ranks, which wait for it, look for themselves
                raise
            sign(lock, run=self.run)
        fcntl.flock(lock, fcntl.LOCK_SH)
        return signature(lock) if is_still(lock, self.path / LOCK) else None

    def _clear(self) -> None:
        """Delete what other runs have left, all of it or nothing. Whoever calls holds the lock alone."""
        found = [path for path in momentum_files(self.path) if f"-{self.run}-" not in path.name]
        stay = {path: reason for path in found if (reason := reason_to_leave(path, save=self._save)) is not None}
        size = 0
        for path in found if not stay else []:
            try:
                size += path.stat().st_size
                if not delete_unused(path):
                    stay[path] = "in use"
            except FileNotFoundError:
                continue
            except OSError as error:
                stay[path] = error.strerror or str(error)
        if stay:
            first, reason = next(iter(stay.items()))
            more = f" and {len(stay) - 1} more" if len(stay) > 1 else ""
            raise UserError(
                f"{self._flag} holds {first.name}{more}, left by another run ({reason}); momentum files are never read "
                f"again: type megatron-muon doctor --offload-dir {self.path} --remove, or choose another directory"
            )
        if found:
            print(
                f"megatron-muon: note: momentum files removed from {self.path}: {len(found)} ({size:,} bytes), left "
                "by a run that was killed",
                flush=True,
            )


def reason_to_leave(path: Path, *, save: str = "") -> str | None:
    """Why a momentum file may not be deleted unasked; None where its run is dead and did not mean to keep it.

    A lock tells for certain whether a process of this machine lives, and only since the machine was started; a file
    system may keep locks from other machines. So a file is given up if it was made since this machine was started, or
    on a machine of this one's name by an earlier start of the same run: one with the same checkpoint folder `save`.
    """
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return "not a file"
        header = read_header(path)
        if in_use(path):
            return "in use"
    except UserError as error:
        return str(error).removeprefix(f"{path} ").removeprefix(f"{path}: ")
    except OSError as error:
        return error.strerror or str(error)
    if header.keep:
        return "kept on purpose"
    if header.boot and header.boot == boot_id():
        return None
    if header.host != socket.gethostname():
        return f"made on {header.host}, where it may be in use"
    return None if save and header.save == save else "made before this machine was started"


def momentum_files(directory: Path) -> list[Path]:
    """What has a momentum file's name in a directory: files of any run, whole or damaged."""
    return sorted(path for path in directory.iterdir() if path.name.startswith(PREFIX))


def in_use(path: Path) -> bool:
    """Whether a living process holds this file; an OSError where it may not be opened, so that nobody can tell."""
    with _opened(path) as descriptor:
        return not try_lock(descriptor)


def delete_unused(path: Path) -> bool:
    """Delete a file that no living process holds; whether it did. An OSError where it may not be opened or deleted."""
    with _opened(path) as descriptor:
        unused = try_lock(descriptor) and is_still(descriptor, path)
        if unused:
            path.unlink()
        return unused


def holder(directory: Path) -> tuple[dict[str, Any], bool]:
    """The run, host and pid that the lock's file of a directory names, and whether that run lives."""
    try:
        with _opened(directory / LOCK) as lock:
            return signature(lock), not try_lock(lock)
    except FileNotFoundError:
        return {}, False


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A descriptor for locking alone, which on NFS must be for writing; where that is not allowed, one for reading."""
    try:
        descriptor = open_itself(path, os.O_RDWR)
    except OSError:
        descriptor = open_itself(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
