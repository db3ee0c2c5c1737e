"""Locks on folders, held while a run or a training uses them.

A lock is a locked file (flock, by `filelock`), released by the system when its holder ends, killed
or not: a file that was left behind is no obstacle. Forks do not keep a lock. No torch.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_muon.errors import UserError

if TYPE_CHECKING:
    from filelock import FileLock

PATIENCE_S = 0.3
"""How long a lock is tried: a process that only looks holds it for an instant."""

_WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


@dataclass(frozen=True)
class Lock:
    """A lock that one process at a time holds.

    Attributes:
        file: in the folder that it locks.
        taken: describes a lock held by another process, such as "a run is under way in runs/a".
        remedy: an alternative to waiting for its end.
    """

    file: Path
    taken: str
    remedy: str

    @contextlib.contextmanager
    def held(self, *, wait_s: float = 0.0) -> Iterator[int | None]:
        """Hold the lock; a UserError if another process does. The file is deleted afterwards.

        Waits `wait_s` for a holder on another machine, which may be dead: a file server needs a
        while to notice. Yields a descriptor that keeps the lock in a child that inherits it; None
        on a file system without locks, with a note.
        """
        from filelock import FileLock, Timeout  # 40 ms that most commands do not need

        descriptors: list[int] = []
        lock = FileLock(self.file, poll_interval=0.02, on_acquired=descriptors.append)
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self._acquire(lock, wait_s)
        except Timeout:
            holder = f"{self.taken} ({self._holder()})"
            raise UserError(f"{holder}; wait for its end, or {self.remedy}") from None
        except OSError as error:
            self._require_without_locks(error)
        try:
            yield descriptors[0] if descriptors else None
        finally:
            with contextlib.suppress(OSError):
                self.file.unlink()
            lock.release()

    def refuse_if_held(self) -> None:
        """Refuse a lock that another process holds, or that cannot be taken."""
        if os.path.lexists(self.file):
            with self.held():
                pass

    def _acquire(self, lock: FileLock, wait_s: float) -> None:
        from filelock import Timeout

        try:
            lock.acquire(timeout=PATIENCE_S)
        except Timeout:
            if not wait_s or socket.gethostname() in self._holder():
                raise
            _note(f"{self.taken} ({self._holder()}); waiting {wait_s:.0f} s in case it is dead")
            lock.acquire(timeout=wait_s)
        since = datetime.now(UTC).isoformat(timespec="seconds")
        with contextlib.suppress(OSError):  # a full disk: the lock holds without a name in it
            self.file.write_text(f"process {os.getpid()} on {socket.gethostname()}, since {since}")

    def _holder(self) -> str:
        with contextlib.suppress(OSError):
            return self.file.read_text("utf-8", errors="replace")
        return "unknown"

    def _require_without_locks(self, error: OSError) -> None:
        if error.errno not in _WITHOUT_LOCKS:
            why = f"{self.file}: cannot write there ({error.strerror})"
            raise UserError(f"{why}; choose a folder that this user may write") from error
        _note(
            f"{self.file.parent} is on a file system without locks ({error.strerror}); keep other"
            " runs away"
        )


def _note(text: str) -> None:
    print(f"megatron-muon: note: {text}", file=sys.stderr, flush=True)
