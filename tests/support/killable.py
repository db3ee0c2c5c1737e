"""Whole training runs that may be killed, in workers of their own: the pool's may train
meanwhile.
"""

from __future__ import annotations

import time
from pathlib import Path

import psutil

from tests.support.pool import Pool, _Worker
from tests.support.training import train

SECONDS = 90.0


class Killable:
    """Starts runs, one after the other."""

    def __init__(self) -> None:
        self._pool = Pool()
        self._ranks: list[_Worker] = []

    def start(self, folder: Path, *argv: str, ranks: int = 2) -> list[int]:
        """Start a run in `folder`; its ranks' process ids."""
        self._ranks = self._pool.start(ranks, train, argv=argv, folder=str(folder))
        return [worker.answer()[1] for worker in self._ranks]

    def wait(self) -> list[int]:
        """The exit status of each rank: 1 for an exception, the signal's negative number for a
        signal.
        """
        answers = [worker.answer() for worker in self._ranks]
        self._ranks = []
        return [what if kind == "died" else int(kind != "done") for kind, what in answers]

    def kill(self) -> None:
        """End the run, if there is one."""
        if self._ranks:
            self._pool.kill()
        self._ranks = []

    def close(self) -> None:
        """End the workers."""
        self._pool.kill()


def wait_for_iteration(folder: Path, pids: list[int], number: int) -> None:
    """Wait until the run has finished this iteration; the last rank tells of it."""
    text = f"iteration {number:8}/"
    deadline = time.monotonic() + SECONDS
    log = folder / f"run-{pids[-1]}.log"
    while not log.exists() or text not in log.read_text(errors="replace"):
        said = log.read_text(errors="replace")[-3000:] if log.exists() else ""
        assert time.monotonic() < deadline, f"no iteration {number}\n{said}"
        assert any(map(psutil.pid_exists, pids)), (
            f"the ranks ended before iteration {number}\n{said}"
        )
        time.sleep(0.02)
