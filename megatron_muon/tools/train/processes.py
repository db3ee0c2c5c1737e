"""Starts torchrun and its ranks, shows and keeps what they print, and leaves none of them behind. No torch.

Signals: the ranks live in sessions of their own, so Ctrl-C reaches this process alone. It asks torchrun to end
(SIGTERM), torchrun asks the ranks, which with --exit-signal-handler finish their step and write a checkpoint first.
What has not ended in time is killed, and so is all at once when a second signal comes. Processes are found by their
parents and by a mark in their environment, so that ranks whose torchrun was killed are found too.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, NoReturn

import psutil

from megatron_muon.errors import RunFailedError
from megatron_muon.megatron.provenance import cores

ROOT = Path(__file__).resolve().parents[3]
"""Holds the package, and pretrain_gpt.py in a checkout."""

TAIL_LINES = 40
SECONDS_TO_END = 15.0
"""How long processes may take to end after they were asked, where they have nothing to save."""

_MARK = "MEGATRON_MUON_LAUNCH"
"""Environment variable that all processes of one launch share."""


@dataclass(frozen=True)
class Ended:
    """How a launch ended: its exit status, 128 + n after signal n, and the signal that this process got, if any."""

    status: int
    signal: int | None = None


def python_path(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variable that makes a checkout importable, before what `env` has of it; an installed package is anyway."""
    own = str(ROOT) if (ROOT / "pretrain_gpt.py").is_file() else ""
    return {"PYTHONPATH": os.pathsep.join(filter(None, (own, env.get("PYTHONPATH"))))}


def environment(ranks: int, *, nodes: int = 1, settings: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of `ranks` processes on this machine: the cores shared evenly, gloo of one node on the loopback.

    `settings` are ENV_VARS of an experiment file; what is set already wins over them.
    """
    env = {**(settings or {}), **os.environ}
    env |= python_path(env)
    env.setdefault("OMP_NUM_THREADS", str(max(1, cores() // ranks)))
    if sys.platform == "linux" and nodes == 1:
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return env


@dataclass(frozen=True)
class Nodes:
    """The machines of a run: torchrun's --nnodes, --node-rank (this machine's), --rdzv-endpoint and --rdzv-id."""

    count: int = 1
    rank: int = 0
    endpoint: str = "127.0.0.1:0"
    run_id: str = "none"


THIS_MACHINE = Nodes()


def torchrun(ranks: int, *program: str, nodes: Nodes = THIS_MACHINE) -> list[str]:
    """The command that runs `program`, a script or `-m MODULE` with its arguments, on `ranks` processes per machine."""
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", nodes.endpoint]
    if nodes.count == 1:
        meet += ["--local-addr", "127.0.0.1"]
    else:
        meet = ["--node-rank", str(nodes.rank), *meet, "--rdzv-id", nodes.run_id]
    size = ("--nnodes", str(nodes.count), "--nproc-per-node", str(ranks))
    return [sys.executable, "-m", "torch.distributed.run", *size, *meet, *program]


def pretrain_program() -> tuple[str, ...]:
    """What torchrun runs to train: pretrain_gpt.py of a checkout, the same as a module of an installed package."""
    script, here = ROOT / "pretrain_gpt.py", Path.cwd()
    if not script.is_file():
        return ("-m", "megatron_muon.pretrain_gpt")
    return (str(script.relative_to(here) if script.is_relative_to(here) else script),)


def watch(
    command: Sequence[str],
    log: Path,
    *,
    env: Mapping[str, str],
    on_line: Callable[[str], object] | None = None,
    append: bool = False,
    keeps: Sequence[int] = (),
    grace_s: float = SECONDS_TO_END,
    stop: threading.Event | None = None,
    on_tick: Callable[[int | None], object] | None = None,
) -> Ended:
    """Runs a command to its end; SIGINT, SIGTERM and SIGHUP end it, and none of its processes outlives the call.

    Args:
        command: what to run, in the environment `env`.
        log: where stdout and stderr go; `append` keeps what it holds.
        on_line: gets every line without its end, but for torchrun's own traceback after a signal.
        keeps: descriptors that the command inherits, such as a lock's; its children do not.
        grace_s: seconds from the first signal to the kill; a second signal kills at once.
        stop: ends the run as Ctrl-C does when it is set, for callers outside the main thread.
        on_tick: is called twenty times a second, and once after the end, with the signal that this process got or None.
    """
    mark, deadline = uuid.uuid4().hex, math.inf
    got: list[int] = []
    tick = while_read(on_tick)
    with (
        signals_handled(lambda number, _: got.append(number)),
        log.open("ab" if append else "wb", buffering=0) as output,
    ):
        process = subprocess.Popen(
            command,
            env={**env, _MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=keeps,
        )
        reader = threading.Thread(target=_copy_lines, args=(process.stdout, output, on_line), daemon=True)
        reader.start()
        try:
            while process.poll() is None:
                if stop is not None and stop.is_set() and not got:
                    got.append(signal.SIGINT)
                if got and deadline == math.inf:
                    process.terminate()  # torchrun passes it on to the ranks
                    deadline = time.monotonic() + grace_s
                if len(got) > 1 or time.monotonic() > deadline:
                    _kill(process, mark)
                tick(got[0] if got else None)
                time.sleep(0.05)
        finally:
            _kill(process, mark)  # what it left behind
            reader.join(timeout=SECONDS_TO_END)
            tick(got[0] if got else None)
    status = process.returncode
    return Ended(status if status >= 0 else 128 - status, got[0] if got else None)


def _kill(process: subprocess.Popen[bytes], mark: str) -> None:
    """Kills a launch: the descendants of its process, and every process with its mark, whatever its parent is now."""
    marked = [one for one in psutil.process_iter(["environ"]) if (one.info["environ"] or {}).get(_MARK) == mark]
    for one in {*(descendants(process.pid) if process.poll() is None else ()), *marked}:
        with contextlib.suppress(psutil.Error):
            one.kill()


def _copy_lines(stream: IO[bytes], log: IO[bytes], on_line: Callable[[str], object] | None) -> None:
    def logged() -> Iterator[str]:
        for line in stream:
            with contextlib.suppress(ValueError):  # closed: what comes after the end of all processes
                log.write(line)
            yield line.decode("utf-8", "replace").removesuffix("\n")

    show = while_read(on_line)
    for line in _without_traceback_of_signals(logged()):
        show(line)


def while_read[T](call: Callable[[T], object] | None) -> Callable[[T], None]:
    """Calls `call` until the reader of our output is gone (`| head`); the run and its log continue."""

    def called(value: T) -> None:
        nonlocal call
        try:
            if call is not None:
                call(value)
        except OSError:
            call = None

    return called


def _without_traceback_of_signals(lines: Iterable[str]) -> Iterator[str]:
    """Leaves out the traceback with which torchrun ends after a signal."""
    held: list[str] = []
    for line in lines:
        held.append(line)
        if held[0].startswith("Traceback (most recent call last)"):
            if not line or line.startswith((" ", "Traceback")):
                continue  # up to the exception, the last line
            if ".SignalException: " in line:
                held.clear()
        yield from held
        held.clear()
    yield from held


@contextlib.contextmanager
def signals_handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Installs `handler` for those of SIGINT, SIGTERM and SIGHUP that are not ignored; in the main thread alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    before = {number: old for number, old in before.items() if old not in (None, signal.SIG_IGN)}  # nohup ignores
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def unwind(number: int, _: FrameType | None = None) -> NoReturn:
    """Ends this program as the signal would, `finally` and `with` included."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


def sigterm_unwinds() -> contextlib.AbstractContextManager[None]:
    """Lets SIGTERM and SIGHUP unwind the stack, as Ctrl-C does, where no ranks are under way: helpers end with it."""
    return signals_handled(unwind)


def run_logged(command: Sequence[str], log: Path, *, env: Mapping[str, str], what: str) -> None:
    """Runs a command, `what` in messages, to its end with all output in `log`; see `watch`.

    Raises:
        RunFailedError: it ended with another status than 0; the end of its output has been printed.
        KeyboardInterrupt: Ctrl-C ended it.
        SystemExit: another signal ended it.
    """
    ended = watch(command, log, env=env)
    if ended.signal is not None:
        unwind(ended.signal)
    if ended.status:
        lines = log.read_text("utf-8", errors="replace").splitlines()[-TAIL_LINES:]
        print("\n".join(lines), file=sys.stderr)
        raise RunFailedError(
            f"{what} ended with status {ended.status}; the last {len(lines)} lines of its log are above"
        )


def descendants(pid: int) -> list[psutil.Process]:
    """Processes below `pid`."""
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.Error:
        return []
