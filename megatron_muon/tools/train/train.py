"""Runs one experiment: `prepare` resolves it; `execute` writes its folder, starts the ranks and sums it up.

Neither shows anything: that is a `Listener`'s. `run_folder` describes the folder's files.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import shlex
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from megatron_muon.checkpoint import files
from megatron_muon.errors import ExitStatus, UserError
from megatron_muon.megatron import OWNS_PLACES, STATUS_FOLDER, TOLD
from megatron_muon.megatron.flags.config_file import UNSET_FLAG
from megatron_muon.megatron.places import locate
from megatron_muon.megatron.provenance import origin
from megatron_muon.tools.train import node, processes, run_folder
from megatron_muon.tools.train.processes import Ended, Lines
from megatron_muon.tools.train.resolve import FROM_LINE, FROM_SET, Request, Resolved, resolve_each
from megatron_muon.tools.train.run_folder import RunFolder
from megatron_muon.tools.train.run_summary import failure_of, summary_of

_KEPT_LINES = 100
"""Of the output, to show the last of them that are not torchrun's if no rank left an error."""


@dataclass(frozen=True)
class Experiment:
    """A resolved run.

    Attributes:
        checkpoint: what the run goes on from.
        goes_back: whether a --ckpt-step that was typed without a --load names it. One of an experiment file, or beside
            a --load of other checkpoints, says how the first start began.
    """

    request: Request
    resolved: Resolved
    checkpoint: Path | None
    goes_back: bool

    @property
    def folder(self) -> RunFolder:
        """Where its files lie."""
        return self.resolved.folder

    def own_file(self, name: str) -> Path:
        """A file of which every machine has its own: config.yaml, which its ranks read, and train.log."""
        stem, suffix = name.split(".")
        rank = self.request.nodes.rank
        return self.folder.root / (f"{stem}.node-{rank}.{suffix}" if rank else name)

    @property
    def torchrun(self) -> list[str]:
        """The arguments of torchrun."""
        program = [*processes.pretrain_program(), "--config", str(self.own_file(run_folder.CONFIG))]
        if self.checkpoint is not None:
            left_out = {flag.name for flag in self.resolved.flags} & set(node.FIRST_START_ONLY)
            left_out -= {"--ckpt-step"} if self.goes_back else set()
            program += ["--load", str(self.folder.checkpoints)]
            program += [token for flag in sorted(left_out) for token in (UNSET_FLAG, flag)]
        return processes.torchrun(self.resolved.ranks, *program, nodes=self.request.nodes)

    @property
    def shown_command(self) -> str:
        """The run as a user would type it."""
        return shlex.join(["torchrun", *self.torchrun])


@dataclass(frozen=True)
class Outcome:
    """How a run ended: exit status, summary.json (empty on other machines than the first), whether it was started.

    `trace` are the lines that explain a failure, for whoever has not seen the output.
    """

    status: int
    summary: Mapping[str, Any]
    started: bool = True
    trace: tuple[str, ...] = ()


class Listener(Protocol):
    """Shows a run."""

    def line(self, line: str, /) -> object:
        """A line of the ranks' output without its end."""

    def event(self, told: Mapping[str, Any], /) -> object:
        """An event of `megatron.TOLD`."""

    def tick(self, got: int | None, /) -> object:
        """Twenty times a second: the signal that this process got so far, or None."""


def prepare(request: Request, resolved: Resolved | UserError | None = None) -> Experiment:
    """Resolves an experiment, unless it is `resolved` already; writes nothing but what `request.writes` allows.

    Raises:
        UserError: what the user got wrong, a folder that is taken included.
        RunFailedError: the process that resolves failed; what it printed has been shown.
    """
    nodes = request.nodes
    if request.out is not None and nodes.rank == 0:  # with --out the flags do not matter: refused before the slow part
        _refuse_taken(locate({}, {}, out=request.out, default="")[0], request)
    if resolved is None:
        (resolved,) = resolve_each([request])
    if isinstance(resolved, UserError):
        raise resolved
    if nodes.count > 1 and request.out is None and resolved.folder.root == Path(request.default_out):
        raise UserError("several nodes need one folder that all of them see; name it with --out DIR")
    checkpoint = resolved.folder.checkpoint if request.resume else None
    typed = {flag.name: flag.values for flag in resolved.flags if flag.source in (FROM_SET, FROM_LINE)}
    goes_back = checkpoint is not None and node.names_own_step(typed)
    if checkpoint is not None and goes_back:
        step, saves = int(typed["--ckpt-step"][0]), checkpoint.parent
        checkpoint = files.iteration_folder(saves, step)
        if not checkpoint.is_dir():
            held = ", ".join(map(str, files.iterations(saves))) or "none"
            raise UserError(f"--ckpt-step {step}: {saves} has no checkpoint of that iteration; it has {held}")
    if nodes.rank == 0:
        _refuse_taken(resolved.folder, request)
    return Experiment(request, resolved, checkpoint, goes_back)


def _refuse_taken(folder: RunFolder, request: Request) -> None:
    run_folder.refuse_living(folder)
    run_folder.check_free(folder, resume=request.resume, overwrite=request.overwrite)


def execute(
    experiment: Experiment,
    *,
    listener: Listener,
    stop: threading.Event | None = None,
    env: Mapping[str, str] | None = None,
) -> Outcome:
    """Runs what `prepare` returned to its end and writes its folder; `stop` as for `watch`.

    `env` overrides the ranks' other variables.

    Raises:
        UserError: another run is under way in the folder, or has been there since `prepare` looked.
    """
    folder, request = experiment.folder, experiment.request
    if request.nodes.rank:
        folder.root.mkdir(parents=True, exist_ok=True)
        status, _, trace = _launch(experiment, _run_record(experiment), [], listener, stop, env or {})
        return Outcome(status, {}, trace=trace if status else ())
    run_folder.refuse_living(folder)
    with run_folder.lock_of(folder.root).held() as lock:
        run_folder.check_free(folder, resume=request.resume, overwrite=request.overwrite)
        if request.resume and not experiment.goes_back and (done := _finished(experiment)):
            return Outcome(0, done, started=False)
        if request.overwrite:
            run_folder.clear(folder)
        run = _run_record(experiment)
        (folder.root / run_folder.SUMMARY).unlink(missing_ok=True)
        run_folder.forget_divergence(folder)
        run_folder.write_json(folder.root / run_folder.RUN, run)
        keeps = [] if lock is None else [lock]  # the ranks' parent keeps it where it outlives this process
        status, error, trace = _launch(experiment, run, keeps, listener, stop, env or {})
        summary = run_folder.strict(summary_of(folder, status=status, error=error, run=run))
        run_folder.write_json(folder.root / run_folder.SUMMARY, summary)
        by_signal = (128 + signal.SIGHUP, 128 + signal.SIGTERM)
        unexplained = summary["outcome"] in ("failed", "killed") and status not in by_signal and not summary["diverged"]
        return Outcome(status, summary, trace=trace if unexplained else ())


def _launch(
    experiment: Experiment,
    run: Mapping[str, Any],
    keeps: list[int],
    listener: Listener,
    stop: threading.Event | None,
    env: Mapping[str, str],
) -> tuple[int, str | None, tuple[str, ...]]:
    """The exit status of this machine's ranks, the line that says why they failed, and those that show it."""
    resolved, request = experiment.resolved, experiment.request
    heading = f"Resolved from {', '.join(run['config_files'])} at {run['started']}; runs alone:\n{run['torchrun']}"
    text = run_folder.config_text(resolved.flag_values, resolved.env, heading=heading)
    experiment.own_file(run_folder.CONFIG).write_text(text, "utf-8")
    base = processes.environment(resolved.ranks, nodes=request.nodes.count, settings=resolved.env)
    output = collections.deque[str](maxlen=_KEPT_LINES)
    with tempfile.TemporaryDirectory(prefix="train-") as ends:
        told = Lines(Path(ends, TOLD))

        def show_line(line: str) -> None:
            output.append(line)
            listener.line(line)

        def tick(got: int | None) -> None:
            for line in told.new():
                with contextlib.suppress(ValueError):  # cut short where the disk was full
                    listener.event(json.loads(line))
            listener.tick(got)

        ended = processes.watch(
            [sys.executable, "-m", node.__name__, *experiment.torchrun],
            experiment.own_file(run_folder.LOG),
            env={**base, **env, STATUS_FOLDER: ends, OWNS_PLACES: "1"},
            on_line=show_line,
            on_tick=tick,
            append=experiment.checkpoint is not None,
            keeps=keeps,
            grace_s=request.grace_s,
            stop=stop,
        )
        ranks = {file.stem: run_folder.read_json(file) for file in Path(ends).glob("*.json")}
    return _exit_status(ended, ranks.get("0", {}).get("status")), *failure_of(ranks.values(), output)


def _exit_status(ended: Ended, rank: int | None) -> int:
    """The run's status: the first rank's, if it left one."""
    if ended.signal == signal.SIGINT:
        return ExitStatus.INTERRUPTED
    if ended.signal is not None:
        return rank if rank == ExitStatus.TEMPFAIL else 128 + ended.signal
    return 0 if ended.status == 0 else rank or ended.status


def _finished(experiment: Experiment) -> dict[str, Any] | None:
    """The summary of a run that has done all that is asked for."""
    summary = run_folder.read_json(experiment.folder.root / run_folder.SUMMARY)
    done, asked = summary.get("iterations"), experiment.resolved.settings.get("train_iters")
    is_done = summary.get("outcome") == "finished" and asked is not None and done is not None and done >= asked
    return summary if is_done else None


def _run_record(experiment: Experiment) -> dict[str, Any]:
    """The contents of run.json."""
    resolved, folder, request = experiment.resolved, experiment.folder, experiment.request
    before = run_folder.read_json(folder.root / run_folder.RUN) if request.resume else {}
    return {
        "name": folder.root.resolve().name,
        "folder": str(folder.root),
        "command": request.command,
        "torchrun": experiment.shown_command,
        "directory": os.getcwd(),
        "host": socket.gethostname(),
        **origin(),
        "config_files": list(resolved.files),
        "config_hash": resolved.config_hash,
        "device": resolved.device,
        "nodes": request.nodes.count,
        "ranks": resolved.ranks,
        "settings": dict(resolved.settings),
        "filled_in": [token for flag in resolved.filled_in for token in (flag.name, *flag.values)],
        "tensorboard_dir": str(folder.tensorboard),
        "checkpoint_dir": str(folder.checkpoints) if folder.checkpoints else None,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "starts": before.get("starts", 0) + 1,
        "resumed_from": str(experiment.checkpoint) if experiment.checkpoint else None,
    }
