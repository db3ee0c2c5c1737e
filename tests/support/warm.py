"""A Python that has imported torch and Megatron before it is started, for the command lines of the
tests.

A run of a tiny model takes two seconds and its imports twenty. So one process imports all of it
once and forks for each `python ...` that a test runs, and for the workers of the pool. Where pytest
runs in several processes (`-n 2`) they share it. `warm_python` beside this module stands for the
interpreter: it hands its arguments, environment, folder and streams to that process, passes signals
on and ends with the child's status. A child has `warm_python` as `sys.executable` too, and torchrun
takes it from `PYTHON_EXEC`, so what a command starts is warm too.

What differs from a cold start: imports print nothing, CUDA is the CPU's stand-in from the start,
the interpreter is not taken down at the end, where threads that still run may crash it, and the
child is not a descendant of who started it. Tests of examples, of the bare command line, of how
often a run ends well and of how processes are found and ended start cold (`cli.run(...,
cold=True)`).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import linecache
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(__file__).resolve().with_name("warm_python")
COLD = sys.executable
SOCKET = "WARM_PYTHON_SOCKET"
"""Environment variable that tells `warm_python` where the process listens."""
SHARED = "WARM_PYTHON_OF_ALL"
"""Environment variable that tells pytest's workers the folder of the pytest that started them."""
START_S = 180


class WarmPython:
    """Starts the process, at the first command that wants it if nobody did before."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    @functools.cached_property
    def folder(self) -> Path:
        """For the socket, and for all temporary files of what the tests start: torchrun and killed
        runs leave some.
        """
        return Path(os.environ.get(SHARED) or tempfile.mkdtemp(prefix="warm-"))

    def environment(self) -> dict[str, str]:
        """What a warm command needs beside its own environment."""
        self.start()
        deadline = time.monotonic() + START_S
        address, log = self.folder / "socket", self.folder / "log"
        while not address.exists():
            ended = self._process is not None and self._process.poll() is not None
            if ended or time.monotonic() > deadline:
                raise RuntimeError(f"the warm process did not start\n{log.read_text()[-3000:]}")
            time.sleep(0.02)
        return {SOCKET: str(address), "PYTHON_EXEC": str(PYTHON)}

    def start(self, *, shared: bool = False) -> None:
        """Start it without waiting for its imports; `shared`: for the processes that this one
        starts too.
        """
        with self._lock:
            if self._process is not None or SHARED in os.environ:
                return
            environ = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(ROOT),
                "PYTHONWARNINGS": "ignore",
            }
            with (self.folder / "log").open("wb") as stream:
                self._process = subprocess.Popen(
                    [COLD, "-m", "tests.support.warm", str(self.folder / "socket")],
                    cwd=ROOT,
                    env=environ,
                    stdin=subprocess.PIPE,
                    stdout=stream,
                    stderr=stream,
                    start_new_session=True,
                )
            if shared:
                os.environ[SHARED] = str(self.folder)

    def close(self) -> None:
        """End the process and remove the folder."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            shutil.rmtree(self.folder, ignore_errors=True)


PROCESS = WarmPython()


def serve(address: str) -> dict[str, Any]:
    """Wait for commands; returns in the child that is to run one."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{address}.new")
    listener.listen(64)
    os.rename(f"{address}.new", address)  # who sees it can connect
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who watch
    while True:
        if (
            sys.stdin
            in select.select(
                [listener, sys.stdin],
                [],
                [],
            )[0]
        ):
            shutil.rmtree(Path(address).parent, ignore_errors=True)  # the tests were killed
            os._exit(0)
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            command, streams = _receive(connection)
            if (child := os.fork()) == 0:
                connection.close()
                for stream, number in zip(streams, (0, 1, 2), strict=True):
                    os.dup2(stream, number)
                    os.close(stream)
                return command
            _watch(connection, child)
        connection.close()


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    text, streams, *_ = socket.recv_fds(connection, 1 << 20, 3)
    while not text.endswith(b"\n"):
        text += connection.recv(1 << 20)
    return json.loads(text), streams


def _watch(connection: socket.socket, child: int) -> None:
    """Pass signals on to the child, and its end to who started it; if that one is gone, end the
    child.
    """
    ended = os.pidfd_open(child)
    while True:
        ready, _, _ = select.select([connection, ended], [], [])
        if ended in ready:
            with contextlib.suppress(OSError):
                connection.sendall(
                    f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n".encode()
                )
            os._exit(0)
        number = connection.recv(1)
        if number:
            os.kill(child, number[0])
        else:
            # it has a session of its own as soon as it runs
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            os.kill(child, signal.SIGKILL)
            os._exit(0)


def become(command: dict[str, Any]) -> tuple[str, str]:
    """Take on a command's folder, environment and arguments; what is to run: `-m`, `-c` or `file`,
    and its name.
    """
    os.setsid()
    os.chdir(command["cwd"])
    os.environ.clear()
    os.environ.update(command["environ"])
    sys.executable = str(PYTHON)
    tempfile.tempdir = None  # TMPDIR is another
    sys.stdout, sys.stderr = (
        os.fdopen(
            number, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
        )
        for number in (1, 2)
    )
    arguments = command["argv"]
    if arguments[0] == "-u":
        arguments = arguments[1:]
    sys.path[:] = [path for path in sys.path if path not in ("", str(ROOT))]
    added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = filter(None, added)
    if arguments[0] in ("-m", "-c"):
        sys.path.insert(0, command["cwd"])
        sys.argv[:] = arguments[:1] + arguments[2:]
        return arguments[0], arguments[1]
    sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
    sys.argv[:] = arguments
    return "file", arguments[0]


def import_everything() -> None:
    """What a training, a torchrun and a resolving process import."""
    import torch

    from megatron_muon import cpu

    torch.set_num_threads(1)
    cpu.install()

    import megatron.core.datasets.helpers
    import megatron.core.dist_checkpointing.gpt_checkpoint_interop
    import megatron.core.tokenizers.text.models
    import megatron.core.tokenizers.text.text_tokenizer
    import megatron.training.arguments
    import numpy.ma  # noqa: F401 - np.unique does at its first call
    import pytest  # noqa: F401 - the modules of tasks import it
    import torch._dynamo.trace_rules
    import torch.distributed.run

    import megatron_muon.megatron.factory
    import megatron_muon.megatron.flags.command_line
    import megatron_muon.megatron.launch
    import megatron_muon.megatron.model.gpt
    import megatron_muon.megatron.patches.install
    import megatron_muon.megatron.prepare
    import megatron_muon.offload.run
    import megatron_muon.tools.train.train_command

    # Megatron reads the help of its flags out of its sources for each of three parsers of a run, a
    # second in all.
    factory = megatron.training.argument_utils.ArgumentGroupFactory
    read = functools.cache(
        functools.partial(factory._get_field_docstrings, factory.__new__(factory))
    )
    factory._get_field_docstrings = lambda _self, config: read(config)
    megatron_muon.megatron.flags.command_line.build_parser()
    torch._dynamo.trace_rules.get_torch_obj_rule_map()
    # DTensor's fake tensors keep tracebacks, which quote the source
    for module in tuple(sys.modules.values()):
        if str(file := getattr(module, "__file__", "")).endswith(".py"):
            linecache.getlines(str(file))


def run(kind: str, name: str) -> None:
    """Run a command as the interpreter would."""
    if kind == "-m":
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    elif kind == "-c":
        exec(compile(name, "<string>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_path(name, run_name="__main__")


if __name__ == "__main__":
    import_everything()
    gc.freeze()  # what is shared stays shared: a collection in a child would write to every page
    kind, name = become(serve(sys.argv[1]))
    status: object = 1
    try:
        run(kind, name)
        status = 0
    except SystemExit as end:
        status = 0 if end.code is None else end.code
        if not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:  # as the interpreter does at its top level
        sys.excepthook(*sys.exc_info())
        if isinstance(sys.exc_info()[1], KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(status) & 0xFF)  # without taking a thousand modules down
