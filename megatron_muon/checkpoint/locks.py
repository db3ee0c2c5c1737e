"""Locks on folders: a locked file in the folder says that a living process uses it, and who.

A lock (flock) ends with the process that took it, however that ended, so a file that a killed
process left behind is taken over. No torch.
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
"""How long a lock is tried again: another process that only looks holds it for an instant."""

# which forks close: a lock would live as long as the last of a data loader's workers
_open_locks: set[int] = set()


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

        A holder on another machine, which may be dead, is waited for `wait_s`. Yields a descriptor
        that keeps the lock in a process that inherits it, None where the file system has no locks.
        """
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            lock = self._take(wait_s)
        except OSError as error:
            why = f"{self.file}: cannot write there ({error.strerror})"
            raise UserError(f"{why}; choose a folder that this user may write") from error
        try:
            yield lock
        finally:
            if lock is not None:
                with contextlib.suppress(OSError):
                    self.file.unlink()
                _close(lock)

    def refuse_if_held(self) -> None:
        """Refuse a lock that another process holds, or that cannot be taken."""
        if os.path.lexists(self.file):
            with self.held():
                pass

    def _take(self, wait_s: float) -> int | None:
        began, noted = time.monotonic(), False
        while True:
            # Never what a symbolic link points to: who holds a lock writes into it.
            lock = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
            _open_locks.add(lock)
            free = False
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                free = True
                # else its holder has deleted it since
                if os.path.samestat(os.fstat(lock), self.file.lstat()):
                    self._sign(lock)
                    return lock
            except (BlockingIOError, FileNotFoundError):
                pass
            except OSError as error:
                _close(lock)
                _note(
                    f"{self.file.parent} is on a file system without locks ({error.strerror}); keep"
                    " other runs away"
                )
                return None
            refusal, is_far = self._refusal(lock)
            _close(lock)
            waited = time.monotonic() - began
            if not free and waited > max(wait_s if is_far else 0.0, SECONDS_TO_LOOK):
                raise UserError(refusal)
            if is_far and waited > SECONDS_TO_LOOK and not noted:
                noted = True
                _note(f"{refusal}; trying for {wait_s:.0f} s, should that machine be dead")
            time.sleep(0.02)

    def _sign(self, lock: int) -> None:
        since = datetime.now(UTC).isoformat(timespec="seconds")
        signature = {"host": socket.gethostname(), "pid": os.getpid(), "since": since}
        with contextlib.suppress(OSError):  # a full disk: the lock holds without a name in it
            os.truncate(lock, 0)
            os.pwrite(lock, json.dumps(signature).encode(), 0)

    def _refusal(self, lock: int) -> tuple[str, bool]:
        """What to say of the holder, and whether that is on another machine."""
        found: dict[str, Any] = {}
        with contextlib.suppress(ValueError, TypeError):  # a holder that has yet to sign
            found = dict(json.loads(os.pread(lock, 4096, 0)))
        pid, host, since = (found.get(name, "?") for name in ("pid", "host", "since"))
        is_far = host not in ("?", socket.gethostname())
        return (
            (
                f"{self.taken} (process {pid} on {host}, since {since}); wait for its end, or"
                f" {self.remedy}"
            ),
            is_far,
        )


def _note(text: str) -> None:
    print(f"megatron-muon: note: {text}", file=sys.stderr, flush=True)


def _close(lock: int) -> None:
    _open_locks.discard(lock)
    os.close(lock)


def _close_in_child() -> None:
    while _open_locks:
        os.close(_open_locks.pop())


os.register_at_fork(after_in_child=_close_in_child)
