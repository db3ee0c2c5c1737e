"""The lock of a --save directory: one training at a time saves there.

A locked file (flock, by `filelock`), released by the system when its holder ends, killed or not: a
file that was left behind is no obstacle. Forks do not keep the lock. No torch.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from megatron_muon.errors import UserError

LOCK = ".training.lock"
PATIENCE_S = 0.3
"""How long a lock is tried, as a killed holder may take an instant to end."""

SECONDS_FOR_A_DEAD_MACHINE = 120.0
"""How long a file server may keep the lock of a dead machine; SLURM restarts its run elsewhere."""

_WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


@contextlib.contextmanager
def locked(save_dir: Path, *, wait_s: float = SECONDS_FOR_A_DEAD_MACHINE) -> Iterator[None]:
    """Hold the lock; a UserError if another process does. The file is deleted afterwards.

    The first rank holds it: ranks may outlive their launcher. Waits `wait_s` for a holder on
    another machine, which may be dead. A file system without locks is used with a note.
    """
    file = save_dir / LOCK
    lock = FileLock(file, poll_interval=0.02, fallback_to_soft=False)
    try:
        save_dir.mkdir(parents=True, exist_ok=True)
        _acquire(lock, file, wait_s)
    except Timeout:
        holder = f"another run writes to {save_dir} ({_holder(file)})"
        raise UserError(f"{holder}; wait for its end, or choose another folder") from None
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            why = f"{file}: cannot write there ({error.strerror})"
            raise UserError(f"{why}; choose a folder that this user may write") from error
        _note(f"{save_dir} is on a file system without locks; keep other runs away")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            file.unlink()
        lock.release()


def _acquire(lock: FileLock, file: Path, wait_s: float) -> None:
    try:
        lock.acquire(timeout=PATIENCE_S)
    except Timeout:
        holder = _holder(file)
        if socket.gethostname() in holder:
            raise
        _note(f"{file} is locked ({holder}); waiting {wait_s:.0f} s in case it is dead")
        lock.acquire(timeout=wait_s)
    since = datetime.now(UTC).isoformat(timespec="seconds")
    with contextlib.suppress(OSError):  # a full disk: the lock holds without a name in it
        file.write_text(f"process {os.getpid()} on {socket.gethostname()}, since {since}")


def _holder(file: Path) -> str:
    with contextlib.suppress(OSError):  # it has just ended
        return file.read_text()
    return "unknown"


def _note(text: str) -> None:
    print(f"megatron-muon: note: {text}", file=sys.stderr, flush=True)
