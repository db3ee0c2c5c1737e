"""Whole training runs that may be killed: a warm process (warm.py) forks the ranks of one run at a time.

The pool's workers end with the tasks that die in them, and would have to be started again.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from tests.support import pool, warm
from tests.support.cli import ROOT

SECONDS = 90.0


class Killable:
    """Starts runs, one after the other."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [str(warm.PYTHON), "-m", "tests.support.killable"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **warm.PROCESS.environment()},
        )
        self._pids: list[int] = []

    def start(self, folder: Path, *argv: str, ranks: int = 2) -> list[int]:
        """Start a run in `folder`; its ranks' process ids."""
        task = {"argv": argv, "folder": str(folder), "ranks": ranks}
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        self._pids = json.loads(self._process.stdout.readline())
        return self._pids

    def wait(self) -> list[int]:
        """The exit status of each rank: 1 for an exception, the signal's negative number for a signal."""
        statuses: list[int] = json.loads(self._process.stdout.readline())
        self._pids = []
        return statuses

    def kill(self) -> None:
        """End the run, if there is one."""
        if self._pids:
            for pid in self._pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.wait()

    def close(self) -> None:
        """End what runs, and the process itself."""
        self.kill()
        self._process.stdin.close()
        self._process.wait(30)


def wait_for_iteration(folder: Path, pids: list[int], number: int) -> None:
    """Wait until the run has finished this iteration; the last rank tells of it."""
    text = f"iteration {number:8}/"
    deadline = time.monotonic() + SECONDS
    log = folder / f"run-{pids[-1]}.log"
    while not log.exists() or text not in log.read_text(errors="replace"):
        said = log.read_text(errors="replace")[-3000:] if log.exists() else ""
        assert time.monotonic() < deadline, f"no iteration {number}\n{said}"
        assert any(map(psutil.pid_exists, pids)), f"the ranks ended before iteration {number}\n{said}"
        time.sleep(0.02)


def _main() -> None:
    for line in sys.stdin:
        task = json.loads(line)
        store = Path(task["folder"]) / f"store-{time.monotonic_ns()}"
        pids = [_fork(rank, task, store) for rank in range(task["ranks"])]
        print(json.dumps(pids), flush=True)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(json.dumps(statuses), flush=True)


def _fork(rank: int, task: dict[str, Any], store: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    kwargs = {"argv": task["argv"], "folder": task["folder"]}
    kind, _ = pool._answer(rank, "tests.support.training", "train", task["ranks"], str(store), None, kwargs)
    os._exit(int(kind != "done"))


if __name__ == "__main__":
    from megatron_muon.patching import Patches

    installed = Patches()  # a run takes back what a worker of the pool has installed
    _main()
