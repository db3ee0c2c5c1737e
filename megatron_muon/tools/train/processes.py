"""Starts torchrun and its ranks, hands on what they print, and leaves none of them behind. No torch.

The ranks live in sessions of their own, so Ctrl-C reaches this process alone. It sends SIGTERM to
what it launched, which hands it on to the ranks; what has not ended in time is killed, as is all at
once when a second signal comes.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import psutil

from megatron_muon.megatron.provenance import cores

ROOT = Path(__file__).resolve().parents[3]
"""Holds the package, and pretrain_gpt.py in a checkout."""

type Show = Callable[[Mapping[str, Any]], object]
"""Gets each event of a run: those of `megatron.TOLD`; `line`, of the ranks' output, with its text; `signal`, once, with
the number of the signal that this process got."""

_SECONDS_TO_END = 15.0  # where there is nothing to save
_MARK = "MEGATRON_MUON_LAUNCH"
"""Environment variable that all processes of one launch share, by which they are found whatever their parent is."""


class Ended(NamedTuple):
    """How a launch ended: its exit status, 128 + n after signal n, and the signal that this process got, if any."""

    status: int
    signal: int | None = None


def python_path(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variable that makes a checkout importable, before what `env` has of it; an installed package is anyway."""
    own = str(ROOT) if (ROOT / "pretrain_gpt.py").is_file() else ""
    return {"PYTHONPATH": os.pathsep.join(filter(None, (own, env.get("PYTHONPATH"))))}


def environment(
    ranks: int, *, settings: Mapping[str, str] | None = None, port: int | None = None
) -> dict[str, str]:
    """The environment of `ranks` processes on this machine: the cores shared evenly, gloo on the loopback.

    `settings` are ENV_VARS of an experiment file; what is set already wins over them. `port` is
    where processes meet that no torchrun of their own starts.
    """
    env = {**(settings or {}), **os.environ}
    env |= python_path(env)
    env.setdefault("OMP_NUM_THREADS", str(max(1, cores() // ranks)))
    # torchrun's number of nodes
    if sys.platform == "linux" and env.get("GROUP_WORLD_SIZE", "1") == "1":
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if port is not None:
        env.setdefault("MASTER_ADDR", "127.0.0.1")
        env |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    return env


def torchrun(ranks: int, *program: str) -> list[str]:
    """The arguments of torchrun that run `program`, a script or `-m MODULE`, on `ranks` processes of this machine."""
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    return ["--nnodes", "1", "--nproc-per-node", str(ranks), *meet, *program]


def pretrain_program() -> tuple[str, ...]:
    """What torchrun runs to train: pretrain_gpt.py of a checkout, the same as a module of an installed package."""
    script = ROOT / "pretrain_gpt.py"
    return (str(script),) if script.is_file() else ("-m", "megatron_muon.pretrain_gpt")


class Lines:
    """Reads the lines that other processes append to a file, from `start` bytes on."""

    def __init__(self, file: Path, start: int = 0) -> None:
        self._file, self._read, self._rest = file, start, b""

    def new(self, *, is_last: bool = False) -> list[str]:
        """Whole lines since the last time; with `is_last` the one that has no end too."""
        if not self._file.exists():
            return []
        with self._file.open("rb") as stream:
            stream.seek(self._read)
            *lines, self._rest = (self._rest + stream.read()).split(b"\n")
            self._read = stream.tell()
        if is_last and self._rest:
            lines.append(self._rest)
        return [line.decode("utf-8", "replace") for line in lines]


def watch(
    command: Sequence[str],
    log: Path,
    *,
    env: Mapping[str, str],
    show: Show = lambda _: None,
    reports: Path = Path(os.devnull),
    append: bool = False,
    keeps: Sequence[int] = (),
    grace_s: float = _SECONDS_TO_END,
    stop: threading.Event | None = None,
) -> Ended:
    """Runs a command to its end; SIGINT, SIGTERM and SIGHUP end it, and none of its processes outlives the call.

    Args:
        log: where stdout and stderr go; `append` keeps what it holds.
        show: gets every event, at most a twentieth of a second late.
        reports: where processes of the command write events, a line of JSON for each.
        keeps: descriptors that the command inherits, such as a lock's; its children do not.
        grace_s: seconds from the first signal to the kill; a second signal kills at once.
        stop: ends the run as Ctrl-C does when it is set, for callers outside the main thread.
    """
    mark, deadline, got = uuid.uuid4().hex, math.inf, list[int]()
    events = Lines(reports)

    def show_new(*, is_last: bool = False) -> None:
        for line in lines.new(is_last=is_last):
            show({"event": "line", "line": line})
        for line in events.new():
            with contextlib.suppress(ValueError):  # cut short where the disk was full
                show(json.loads(line))

    with (
        signals_handled(lambda number, _: got.append(number)),
        log.open("ab" if append else "wb") as output,
    ):
        lines = Lines(log, output.tell())
        process = subprocess.Popen(
            command,
            env={**env, _MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=keeps,
        )
        try:
            while process.poll() is None:
                if stop is not None and stop.is_set() and not got:
                    got.append(signal.SIGINT)
                if got and deadline == math.inf:
                    process.terminate()
                    deadline = time.monotonic() + grace_s
                    show({"event": "signal", "signal": got[0]})
                if len(got) > 1 or time.monotonic() > deadline:
                    _kill(process, mark)
                show_new()
                time.sleep(0.05)
        finally:
            _kill(process, mark)  # what it left behind
            process.wait()
            if got and deadline == math.inf:  # it came just before the end
                show({"event": "signal", "signal": got[0]})
            show_new(is_last=True)
    status = process.returncode
    return Ended(status if status >= 0 else 128 - status, got[0] if got else None)


def _kill(launched: subprocess.Popen[bytes], mark: str) -> None:
    launched.kill()
    for process in psutil.process_iter(["environ"]):
        if (process.info["environ"] or {}).get(_MARK) == mark:
            with contextlib.suppress(psutil.Error):
                process.kill()


@contextlib.contextmanager
def signals_handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Installs `handler` for those of SIGINT, SIGTERM and SIGHUP that are not ignored; in the main thread alone."""
    with contextlib.ExitStack() as undo:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            before = signal.getsignal(number)
            if threading.current_thread() is threading.main_thread() and before not in (
                None,
                signal.SIG_IGN,
            ):
                signal.signal(number, handler)
                undo.callback(signal.signal, number, before)
        yield


def unwind(number: int, _: FrameType | None = None) -> NoReturn:
    """Ends this program as the signal would, `finally` and `with` included."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


def sigterm_unwinds() -> contextlib.AbstractContextManager[None]:
    """Lets SIGTERM and SIGHUP unwind the stack, as Ctrl-C does, where no ranks are under way: helpers end with it."""
    return signals_handled(unwind)
