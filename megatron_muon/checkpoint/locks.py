"""Locks on folders: a locked file in the folder says that a living process uses it, and who.

A lock (flock) ends with the process that took it, however that ended, so a file that a killed process left behind is
taken over. No torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron_muon.errors import UserError

SECONDS_TO_LOOK = 0.3
"""How long a lock is tried again: whoever only looks holds it for an instant, whoever took it has yet to sign it."""

_PAUSE_S = 0.02
_descriptors: set[int] = set()


@dataclass(frozen=True)
class Lock:
    """A lock that one process at a time holds.

    Attributes:
        file: in the folder that it locks.
        taken: what it means that another process holds it, such as "a run is under way in runs/a".
        remedy: what to do then.
    """

    file: Path
    taken: str
    remedy: str

    @contextlib.contextmanager
    def held(self, *, wait_s: float = 0.0) -> Iterator[int | None]:
        """Hold the lock, or refuse it as a UserError; its folder is made before, its file deleted afterwards.

        A holder on another machine, which may be dead, is waited for `wait_s`. Yields a descriptor that keeps the lock
        in a process that inherits it, None where the file system has no locks.
        """
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            lock = self._take(wait_s)
        except OSError as error:
            raise UserError(
                f"{self.file.parent}: cannot write there ({error.strerror}); choose a folder that this user may write"
            ) from error
        try:
            yield lock
        finally:
            if lock is not None:
                with contextlib.suppress(OSError):
                    self.file.unlink()
                close(lock)

    def refuse_if_held(self) -> None:
        """Refuse a lock that another process holds, or that is another user's and may be held."""
        give_up = time.monotonic() + SECONDS_TO_LOOK
        while refusal := self._look():
            if time.monotonic() > give_up:
                raise UserError(refusal)
            time.sleep(_PAUSE_S)

    def _look(self) -> str | None:
        """Why the lock counts as held at this instant; None where it is free."""
        try:
            lock = open_itself(self.file, os.O_RDWR)
        except PermissionError as error:
            return (
                f"{self.file} cannot be opened ({error.strerror}), so perhaps {self.taken}; {self.remedy}, or have the "
                "file's owner delete it if nothing runs"
            )
        except OSError:
            return None
        try:
            return None if try_lock(lock) else self._refusal(lock)
        except OSError:  # a file system without locks
            return None
        finally:
            os.close(lock)

    def _take(self, wait_s: float) -> int | None:
        began = time.monotonic()
        told = False
        while True:
            lock = open_own(self.file, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                free = try_lock(lock)
            except OSError as error:
                close(lock)
                where = self.file.parent
                _note(f"{where}: its file system has no locks ({error.strerror}); keep other runs away from it")
                return None
            if free and is_still(lock, self.file):
                with contextlib.suppress(OSError):  # a full disk: the lock holds without a name in it
                    sign(lock, since=datetime.now(UTC).isoformat(timespec="seconds"))
                return lock
            waited = time.monotonic() - began
            far = signature(lock).get("host", socket.gethostname()) != socket.gethostname()
            refusal = self._refusal(lock)
            close(lock)
            if not free and waited > max(wait_s if far else 0.0, SECONDS_TO_LOOK):
                raise UserError(refusal)
            if far and waited > SECONDS_TO_LOOK and not told:
                told = True
                _note(f"{refusal}; trying for {wait_s:.0f} s, should that machine be dead")
            time.sleep(_PAUSE_S)

    def _refusal(self, lock: int) -> str:
        found = signature(lock)
        who = f"process {found.get('pid', '?')} on {found.get('host', '?')}, since {found.get('since', '?')}"
        return f"{self.taken} ({who}); wait for its end, or {self.remedy}"


def _note(text: str) -> None:
    print(f"megatron-muon: note: {text}", file=sys.stderr, flush=True)


def sign(lock: int, **more: str) -> None:
    """Write into a lock's file who holds it."""
    os.truncate(lock, 0)
    os.pwrite(lock, json.dumps({"host": socket.gethostname(), "pid": os.getpid(), **more}).encode(), 0)


def signature(lock: int) -> dict[str, Any]:
    """Who wrote their name into the lock's file."""
    with contextlib.suppress(ValueError):
        found = json.loads(os.pread(lock, 4096, 0))
        if isinstance(found, dict):
            return found
    return {}


def try_lock(descriptor: int) -> bool:
    """Lock an open file, if no other process has."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_still(descriptor: int, path: Path) -> bool:
    """Whether the open file is the one that `path` names."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def open_own(path: Path, flags: int, mode: int = 0o777) -> int:
    """A descriptor that children do not inherit: a lock would live as long as the last of them.

    A rank that is killed leaves its data loader's workers for some seconds, and they are forks.

    Raises:
        UserError: `path` is a symbolic link.
    """
    descriptor = open_itself(path, flags, mode)
    _descriptors.add(descriptor)
    return descriptor


def open_itself(path: Path, flags: int, mode: int = 0o777) -> int:
    """A descriptor of a file, never of what a symbolic link in its place points to: who holds a lock writes into it.

    Raises:
        UserError: `path` is a symbolic link.
    """
    try:
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    except OSError:
        if path.is_symlink():
            raise UserError(f"{path} is a symbolic link, and locks follow none; type rm {path}") from None
        raise


def close(descriptor: int) -> None:
    """Close what `open_own` opened."""
    _descriptors.discard(descriptor)
    os.close(descriptor)


def _forget_in_child() -> None:
    while _descriptors:
        with contextlib.suppress(OSError):
            os.close(_descriptors.pop())


os.register_at_fork(after_in_child=_forget_in_child)
