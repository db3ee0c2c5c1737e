"""Starts torchrun and its ranks, reports their output, and leaves none of them behind. No torch.

Ranks run in sessions of their own, so Ctrl-C reaches this process alone, which sends them SIGTERM.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, NamedTuple, NoReturn

import psutil

from megatron_muon.megatron.provenance import cores

ROOT = Path(__file__).resolve().parents[3]  # a checkout has pretrain_gpt.py there

type Show = Callable[[Mapping[str, Any]], object]
"""Receives each event of a run: those of `megatron.REPORTS`; `line`, a line of the ranks' output;
and `signal`, once, with the number of the signal that this process received."""

_SECONDS_TO_END = 15.0  # where there is nothing to save
_SECONDS_BETWEEN_LOOKS = 0.05
_MARK = "MEGATRON_MUON_LAUNCH"  # variable shared by all processes of one launch, orphans too


class Ended(NamedTuple):
    """End of a launch: its exit status, 128 + n after signal n, and the signal received here."""

    status: int
    signal: int | None = None


def environment(ranks: int, *, port: int | None = None) -> dict[str, str]:
    """The environment of `ranks` local processes: cores shared evenly, gloo on loopback.

    `port` is the rendezvous of processes that are not started by torchrun.
    """
    env = dict(os.environ)
    if (ROOT / "pretrain_gpt.py").is_file():  # a checkout; an installed package needs no path
        entries = [str(ROOT), env.get("PYTHONPATH", "")]
        env["PYTHONPATH"] = os.pathsep.join(filter(None, entries))
    env.setdefault("OMP_NUM_THREADS", str(max(1, cores() // ranks)))
    nodes = env.get("GROUP_WORLD_SIZE", "1")  # set by torchrun
    if sys.platform == "linux" and nodes == "1":
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if port is not None:
        env.setdefault("MASTER_ADDR", "127.0.0.1")
        env["MASTER_PORT"] = str(port)
        env["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    return env


def torchrun(ranks: int, *program: str) -> list[str]:
    """Arguments of torchrun for `program`, a script or `-m MODULE`, on `ranks` processes."""
    local = ["--standalone", "--local-addr", "127.0.0.1"]
    return [*local, "--nproc-per-node", str(ranks), *program]


def pretrain_program() -> tuple[str, ...]:
    """The program that trains: pretrain_gpt.py of a checkout, or the installed module."""
    script = ROOT / "pretrain_gpt.py"
    return (str(script),) if script.is_file() else ("-m", "megatron_muon.pretrain_gpt")


def _new_lines(file: BinaryIO) -> list[str]:
    """Lines that others have appended to a file; an unfinished one is left for the next call."""
    *lines, unfinished = file.read().split(b"\n")
    file.seek(-len(unfinished), os.SEEK_CUR)
    return [line.decode("utf-8", "replace") for line in lines]


def watch(
    command: Sequence[str],
    log: Path,
    *,
    env: Mapping[str, str],
    show: Show = lambda _: None,
    reports: Path = Path(os.devnull),
    append: bool = False,
    grace_s: float = _SECONDS_TO_END,
) -> Ended:
    """Runs a command to its end; signals end it, and no process outlives the call.

    Args:
        log: receives stdout and stderr; `append` keeps its contents.
        show: receives each event within a twentieth of a second.
        reports: existing file to which processes of the command write events, a line of JSON each.
        grace_s: seconds from the first signal to the kill; a second signal kills at once.
    """
    mark = uuid.uuid4().hex
    received: list[int] = []
    deadline = math.inf

    def show_new() -> None:
        for line in _new_lines(lines):
            show({"event": "line", "line": line})
        for line in _new_lines(events):
            with contextlib.suppress(ValueError):  # cut short on a full disk
                show(json.loads(line))

    with (
        signals_handled(lambda number, _: received.append(number)),
        log.open("ab" if append else "wb") as output,
        log.open("rb") as lines,
        reports.open("rb") as events,
    ):
        lines.seek(output.tell())
        process = subprocess.Popen(
            command,
            env={**env, _MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while process.poll() is None:
                if received and deadline == math.inf:
                    process.terminate()
                    deadline = time.monotonic() + grace_s
                    show({"event": "signal", "signal": received[0]})
                if len(received) > 1 or time.monotonic() > deadline:
                    _kill(process, mark)
                show_new()
                time.sleep(_SECONDS_BETWEEN_LOOKS)
        finally:
            _kill(process, mark)  # orphans
            process.wait()
            show_new()
    status = process.returncode
    return Ended(status if status >= 0 else 128 - status, received[0] if received else None)


def _kill(launched: subprocess.Popen[bytes], mark: str) -> None:
    launched.kill()
    for process in psutil.process_iter(["environ"]):
        environ = process.info["environ"] or {}
        if environ.get(_MARK) == mark:
            with contextlib.suppress(psutil.Error):
                process.kill()


@contextlib.contextmanager
def signals_handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Installs `handler` for SIGINT, SIGTERM and SIGHUP, except those that are ignored."""
    with contextlib.ExitStack() as undo:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            before = signal.getsignal(number)
            if before not in (None, signal.SIG_IGN):
                signal.signal(number, handler)
                undo.callback(signal.signal, number, before)
        yield


def unwind(number: int, _: FrameType | None = None) -> NoReturn:
    """Ends this program as the signal would, after `finally` and `with`."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


def sigterm_unwinds() -> contextlib.AbstractContextManager[None]:
    """Makes SIGTERM and SIGHUP unwind the stack, as Ctrl-C does, before ranks are started."""
    return signals_handled(unwind)
