"""Starts torchrun and its ranks, shows and keeps what they print, and leaves none of them behind, whatever happens.

Used by everything that trains or measures. Needs neither torch nor megatron-core: the command line uses it before
anything heavy is imported.

Signals: the ranks live in sessions of their own, so Ctrl-C reaches this process alone. It asks torchrun to end
(SIGTERM), torchrun asks the ranks, which with --exit-signal-handler finish their step and write a checkpoint first.
What has not ended in time is killed, and so is all at once when a second signal comes. Processes are found by their
parents and by a mark in their environment, so that ranks whose torchrun was killed are found too; both need /proc.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil

from megatron_muon.errors import RunFailedError

ROOT = Path(__file__).resolve().parents[2]
"""Holds the package, and pretrain_gpt.py in a checkout."""

TAIL_LINES = 40
SECONDS_TO_END = 15.0
"""How long processes may take to end after they were asked, where they have nothing to save."""

_MARK = "MEGATRON_MUON_LAUNCH"
"""Environment variable that all processes of one launch share."""


@dataclass(frozen=True)
class Ended:
    """How a launch ended.

    Attributes:
        status: exit status of the command; 128 + n where signal n ended it.
        signal: the signal that this process got and passed on, if any.
    """

    status: int
    signal: int | None = None


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def environment(ranks: int, *, nodes: int = 1, settings: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of the ranks: this package importable, gloo on the loopback, the cores shared evenly.

    Args:
        ranks: processes on this machine.
        nodes: machines; gloo stays on the loopback only where there is one.
        settings: ENV_VARS of an experiment file; what is set already wins over them.
    """
    env = {**(settings or {}), **os.environ}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), env.get("PYTHONPATH"))))
    env.setdefault("OMP_NUM_THREADS", str(max(1, cores() // ranks)))
    if sys.platform == "linux" and nodes == 1:
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return env


def torchrun(ranks: int, *program: str, more: Sequence[str] = ()) -> list[str]:
    """The command that runs `program` on `ranks` processes that meet on 127.0.0.1, at a free port.

    Args:
        ranks: processes.
        program: a script or `-m MODULE`, and its arguments.
        more: further flags for torchrun.
    """
    meet = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1")
    return [*_launcher("1", ranks), *meet, *more, *program]


@dataclass(frozen=True)
class Nodes:
    """The machines of a run, in torchrun's words.

    Attributes:
        count: --nnodes.
        rank: --node-rank, this machine's.
        endpoint: --rdzv-endpoint, HOST:PORT of one of them.
        run_id: --rdzv-id, the same on all of them.
    """

    count: int
    rank: int
    endpoint: str
    run_id: str = "none"


def torchrun_on_nodes(ranks: int, nodes: Nodes, *program: str, more: Sequence[str] = ()) -> list[str]:
    """The command of one of several machines, with `ranks` processes on each."""
    meet = ("--node-rank", str(nodes.rank), "--rdzv-backend", "c10d", "--rdzv-endpoint", nodes.endpoint)
    return [*_launcher(str(nodes.count), ranks), *meet, "--rdzv-id", nodes.run_id, *more, *program]


def _launcher(nodes: str, ranks: int) -> tuple[str, ...]:
    return (sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes, "--nproc-per-node", str(ranks))


def pretrain_program() -> tuple[str, ...]:
    """What torchrun runs to train: pretrain_gpt.py of a checkout, the same as a module of an installed package."""
    script = ROOT / "pretrain_gpt.py"
    if script.is_file():
        with contextlib.suppress(ValueError):
            return (str(script.relative_to(Path.cwd())),)
        return (str(script),)
    return ("-m", "megatron_muon.pretrain_gpt")


class Job:
    """A started command with its output in a log, and on the way shown to whoever asks.

    Not tied to signals or to the main thread, so several can be under way at once: see `watch` for the usual case.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        *,
        env: Mapping[str, str],
        show: Callable[[str], object] | None = None,
        on_line: Callable[[str], object] | None = None,
        append: bool = False,
        keeps: Sequence[int] = (),
    ) -> None:
        """Starts it.

        Args:
            command: what to run.
            log: where stdout and stderr go.
            env: its environment.
            show: gets all text as it comes, in pieces.
            on_line: gets every line, without its end.
            append: keep what the log holds.
            keeps: descriptors that the command inherits, such as that of a lock; what it starts does not.
        """
        self._mark = (_MARK, uuid.uuid4().hex)
        self._log = log.open("ab" if append else "wb", buffering=0)
        self._show, self._on_line = show, on_line
        self.process = subprocess.Popen(
            command,
            env={**env, **dict([self._mark])},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=keeps,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def ask_to_end(self) -> None:
        """Sends SIGTERM; torchrun passes it on to the ranks."""
        if self.process.poll() is None:
            self.process.terminate()

    def kill(self) -> None:
        """Ends all processes at once."""
        family = self._family()
        if self.process.poll() is None:
            self.process.kill()
        for one in family:
            with contextlib.suppress(psutil.Error):
                one.kill()

    def finish(self) -> int:
        """Waits for the command, ends what it left behind, closes the log; the exit status.

        A process that asked to end in vain is killed by a later call of `kill`, from a signal handler for instance.
        """
        status = self.process.wait()
        self.kill()
        self._reader.join(timeout=SECONDS_TO_END)
        self._log.close()
        return status if status >= 0 else 128 - status

    def _family(self) -> set[psutil.Process]:
        below = descendants(self.process.pid) if self.process.poll() is None else []
        return {*below, *_marked(*self._mark)}

    def _read(self) -> None:
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        rest, show = "", self._show
        assert self.process.stdout is not None
        descriptor = self.process.stdout.fileno()
        while piece := os.read(descriptor, 1 << 16):
            with contextlib.suppress(ValueError):  # closed: what comes after the end of all processes
                self._log.write(piece)
            text = decode(piece)
            if show is not None:
                try:
                    show(text)
                except OSError:  # whoever read along has read enough; the log goes on
                    show = None
            *lines, rest = (rest + text).split("\n")
            self._tell(lines)
        self._tell([rest] if rest else [])

    def _tell(self, lines: Sequence[str]) -> None:
        if self._on_line is not None:
            for line in lines:
                self._on_line(line)


class _Screen:
    """Shows a launch's output without the traceback with which torchrun ends after a signal; the log keeps it."""

    def __init__(self, show: Callable[[str], object]) -> None:
        self._show = show
        self._rest = ""
        self._traceback: list[str] | None = None
        self.ending = False

    def __call__(self, text: str) -> None:
        if not self.ending and not self._rest:
            self._show(text)
            return
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._line(f"{line}\n")

    def _line(self, line: str) -> None:
        if self._traceback is None and line.startswith("Traceback (most recent call last)"):
            self._traceback = []
        if self._traceback is None:
            self._show(line)
            return
        self._traceback.append(line)
        if not line.startswith((" ", "Traceback", "\n")):  # the exception: the last line
            if ".SignalException: " not in line:
                self._show("".join(self._traceback))
            self._traceback = None

    def close(self) -> None:
        """Shows what has not come to its end."""
        if rest := "".join(self._traceback or []) + self._rest:
            self._show(rest)


def watch(
    command: Sequence[str],
    log: Path,
    *,
    env: Mapping[str, str],
    show: Callable[[str], object] | None = None,
    on_line: Callable[[str], object] | None = None,
    append: bool = False,
    keeps: Sequence[int] = (),
    grace_s: float = SECONDS_TO_END,
    stop: threading.Event | None = None,
) -> Ended:
    """Runs a command to its end; SIGINT, SIGTERM and SIGHUP end it, and none of its processes outlives the call.

    Args:
        command: what to run.
        log: where its output goes.
        env: its environment.
        show: see `Job`; torchrun's own traceback after a signal is left out.
        on_line: see `Job`.
        append: see `Job`.
        keeps: see `Job`.
        grace_s: seconds from the first signal to the kill; a second signal kills at once.
        stop: when it is set, all goes as after Ctrl-C; for callers in other threads than the main one.
    """
    got: list[int] = []
    killer: list[threading.Timer] = []
    launched: list[Job] = []
    done = threading.Event()
    screen = _Screen(show) if show is not None else None

    def pass_on(number: int, _: FrameType | None) -> None:
        got.append(number)
        if screen is not None:
            screen.ending = True
        for job in launched:
            if len(got) == 1:
                job.ask_to_end()
                killer.append(threading.Timer(grace_s, job.kill))
                killer[0].daemon = True
                killer[0].start()
            else:
                job.kill()

    def pass_on_when(stop: threading.Event) -> None:
        while not done.is_set():
            if stop.wait(0.2):
                pass_on(signal.SIGINT, None)
                return

    with signals_handled(pass_on):
        try:
            job = Job(command, log, env=env, show=screen, on_line=on_line, append=append, keeps=keeps)
            launched.append(job)
            if got:  # it came while the process was being started
                job.ask_to_end()
            if stop is not None:
                threading.Thread(target=pass_on_when, args=(stop,), daemon=True).start()
            status = job.finish()
        finally:
            done.set()
            for timer in killer:
                timer.cancel()
            for job in launched:
                job.kill()
            if screen is not None:
                with contextlib.suppress(OSError):
                    screen.close()
    return Ended(status, got[0] if got else None)


@contextlib.contextmanager
def signals_handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Has the signals that end a program handled so; in the main thread only, as Python wants it.

    Args:
        handler: gets the number of SIGINT, SIGTERM or SIGHUP; a signal that is ignored stays so.
    """
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


@contextlib.contextmanager
def sigterm_unwinds() -> Iterator[None]:
    """Lets SIGTERM and SIGHUP unwind the stack, as Ctrl-C does, where no ranks are under way: helpers end with it."""

    def end(number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    with signals_handled(end):
        yield


def run_logged(command: Sequence[str], log: Path, *, env: Mapping[str, str], what: str) -> None:
    """Run a command to its end with all output in `log`; none of its processes outlives the call.

    Args:
        command: what to run.
        log: where stdout and stderr go.
        env: its environment.
        what: the run's name in the error message.

    Raises:
        RunFailedError: it ended with another status than 0; the end of its output has been printed.
        KeyboardInterrupt: Ctrl-C ended it.
        SystemExit: another signal ended it.
    """
    ended = watch(command, log, env=env)
    if ended.signal == signal.SIGINT:
        raise KeyboardInterrupt
    if ended.signal is not None:
        raise SystemExit(128 + ended.signal)
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


def _marked(name: str, value: str) -> list[psutil.Process]:
    """Processes with a variable of this value in their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(name) == value:
                found.append(process)
    return found
