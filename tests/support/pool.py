"""A pool of worker processes that run one function on several gloo ranks.

The workers live for the whole test run, forked from the process that has imported torch and
Megatron (warm.py). A worker forks a child for each task: gloo keeps threads of every process group
until its process ends (a few hundred tasks would leave thousands of them polling), and what a task
leaves behind cannot reach the next one. A task that fails, hangs or dies ends the pool, and the
next one starts a fresh one.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import importlib
import multiprocessing.connection
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.support import warm

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests" / "functional"
COLLECTIVE_S = 60
ANSWER_S = 300
GRACE_S = 5  # for the other ranks, once one has failed
TAIL_LINES = 30
AUDIT_COUNTS = "AUDIT_COUNTS"
"""Environment variable: the file to which tasks, all audited then, append counts (audited.py)."""


class RankError(AssertionError):
    """A rank raised, died or hung; the message holds what each rank has to say."""


class Pool:
    """Workers, started when a task needs them."""

    def __init__(self) -> None:
        self._around: tuple[str, str] | None = None
        if AUDIT_COUNTS in os.environ:
            self._around = "tests.support.audited", "audited"
        self._workers: list[_Worker] = []
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-", dir=warm.PROCESS.folder))
        self._tasks = 0

    def __call__(
        self,
        world_size: int,
        function: Callable[..., Any],
        *,
        timeout_s: float = ANSWER_S,
        **kwargs: Any,
    ) -> list[Any]:
        """Run `function(rank, world_size, **kwargs)` on every rank; what the ranks returned, by
        rank.

        Args:
            world_size: number of ranks.
            function: a function of a module's top level; the workers import it by name.
            timeout_s: after that the pool is killed and the task has failed.
            kwargs: pickled, for every rank alike.

        Raises:
            RankError: a rank raised, died, or did not answer in time.
        """
        try:
            answers = _collect(self.start(world_size, function, **kwargs), timeout_s)
        except BaseException:
            self.kill()
            raise
        if any(kind != "done" for kind, _ in answers):
            report = "\n".join(
                f"--- rank {rank} of {world_size}: {kind}\n{text if kind != 'done' else ''}"
                for rank, (kind, text) in enumerate(answers)
            )
            self.kill()
            raise RankError(f"{function.__qualname__} failed on {world_size} ranks\n{report}")
        return [result for _, result in answers]

    def start(
        self,
        world_size: int,
        function: Callable[..., Any],
        **kwargs: Any,
    ) -> list[_Worker]:
        """Start a task; the first answer of each worker is ("started", process id)."""
        for index in range(len(self._workers), world_size):
            self._workers.append(_Worker(index, self._folder))
        self._tasks += 1
        store = self._folder / f"store-{self._tasks}"
        name = (function.__module__, function.__qualname__)
        task = pickle.dumps((*name, world_size, str(store), self._around, kwargs))
        workers = self._workers[:world_size]
        for worker in workers:
            worker.connection.send_bytes(task)
        return workers

    @contextlib.contextmanager
    def _within(self, module: str, name: str) -> Iterator[Pool]:
        self._around = module, name
        try:
            yield self
        finally:
            self._around = None

    def delayed(self) -> contextlib.AbstractContextManager[Pool]:
        """Tasks run with delayed collectives (delayed.py) meanwhile."""
        return self._within("tests.support.delayed", "delayed_collectives")

    def two_memories(self) -> contextlib.AbstractContextManager[Pool]:
        """Tasks run where a GPU's memory is not the host's (two_memories.py) meanwhile."""
        return self._within("tests.support.two_memories", "two_memories")

    def audited(self) -> contextlib.AbstractContextManager[Pool]:
        """Every step is audited meanwhile, and a fault is an error (audited.py)."""
        return self._within("tests.support.audited", "audited")

    def interpreted(self) -> contextlib.AbstractContextManager[Pool]:
        """Tasks run with interpreted kernels (interpreted.py) meanwhile."""
        return self._within("tests.support.interpreted", "interpreted")

    def kill(self) -> None:
        """End the workers at once."""
        for worker in self._workers:
            worker.connection.close()
            worker.signal(signal.SIGKILL)
            worker.process.wait()
        self._workers = []


class _Worker:
    """One worker process and the parent's end of its pipe. What it sends is pickled without torch's
    shared memory.
    """

    def __init__(self, index: int, folder: Path) -> None:
        self.log = folder / f"worker-{index}-{time.monotonic_ns()}.log"
        address = str(self.log.with_suffix(".pipe"))
        path = os.pathsep.join([str(ROOT), str(TESTS)])
        with multiprocessing.connection.Listener(address) as listener, self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [str(warm.PYTHON), "-m", "tests.support.pool", str(index), address],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                env={
                    **os.environ,
                    "PYTHONPATH": path,
                    "TMPDIR": str(folder),
                    **warm.PROCESS.environment(),
                },
            )
            self.connection = listener.accept()
        self.pid = self.connection.recv()

    def signal(self, number: int) -> None:
        """Send a signal to the worker and the process that runs its task."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def answer(self) -> tuple[str, Any]:
        """Wait for what becomes of a task: ("started", id), ("done", result), ("raised", text),
        ("died", status).
        """
        try:
            found: tuple[str, Any] = self.connection.recv()
        except (EOFError, ConnectionError):
            found = "died", self.process.wait()
        return found

    def tail(self) -> str:
        """The last lines that the worker wrote."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:])


def _collect(workers: list[_Worker], timeout_s: float) -> list[tuple[str, Any]]:
    """One answer of each worker; ("hung", text) of those that do not answer in time."""
    answers: dict[_Worker, tuple[str, Any]] = {}
    deadline = time.monotonic() + timeout_s
    while len(answers) < len(workers):
        waiting = {worker.connection: worker for worker in workers if worker not in answers}
        ready = multiprocessing.connection.wait(
            list(waiting), max(0.0, deadline - time.monotonic())
        )
        if not ready:
            for worker in waiting.values():
                worker.signal(signal.SIGUSR1)  # see faulthandler below: it says where it is
            time.sleep(0.5)
            for worker in waiting.values():
                answers[worker] = ("hung", f"no answer in time\n{worker.tail()}")
        for connection in ready:
            worker = waiting[connection]
            kind, what = worker.answer()
            if kind == "started":
                continue
            answers[worker] = kind, f"status {what}\n{worker.tail()}" if kind == "died" else what
            if kind != "done":
                deadline = min(deadline, time.monotonic() + GRACE_S)
    return [answers[worker] for worker in workers]


def _work(index: int, address: str) -> None:
    """A worker's life: one task after the other until the parent hangs up."""
    faulthandler.register(signal.SIGUSR1)
    connection = multiprocessing.connection.Client(address)
    connection.send(os.getpid())
    from megatron_muon.megatron.patches.fsdp import patch_megatron_fsdp
    from megatron_muon.patching import Patches

    global installed  # a task that is a whole training run takes them back and installs its own
    installed = Patches()  # the patches of a run that do not concern megatron.training
    patch_megatron_fsdp(installed)
    while True:
        try:
            task = connection.recv()
        except (EOFError, ConnectionError):
            return
        importlib.import_module(task[0])  # once for all tasks of a module
        # what is shared with children stays shared: a collection in one would write to every page
        gc.freeze()
        child = os.fork()
        if child == 0:
            connection.send(("started", os.getpid()))
            connection.send_bytes(_answer(index, *task))
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status:
            connection.send(("died", status))


def _answer(
    rank: int,
    module: str,
    name: str,
    world_size: int,
    store: str,
    around: Any,
    kwargs: dict[str, Any],
) -> bytes:
    import torch.distributed as dist

    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=COLLECTIVE_S),
        )
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(world_size),
            LOCAL_RANK=str(rank),
            LOCAL_WORLD_SIZE=str(world_size),
        )
        # as torchrun does; the process group is there
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        function = getattr(importlib.import_module(module), name)
        with contextlib.ExitStack() as stack:
            if around is not None:
                of, manager = around
                stack.enter_context(getattr(importlib.import_module(of), manager)())
            result = function(rank, world_size, **kwargs)
        answer = pickle.dumps(("done", result))
        dist.barrier()
    except BaseException:
        return pickle.dumps(("raised", traceback.format_exc()))
    return answer


if __name__ == "__main__":
    _work(int(sys.argv[1]), sys.argv[2])
