"""Runs one experiment: `prepare` resolves it; `execute` writes its folder, starts the ranks and sums it up.

Neither shows anything: `execute` hands on each event of the run (`Show`). `run_folder` describes
the folder's files.
"""

from __future__ import annotations

import collections
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
from typing import Any, NamedTuple

from megatron_muon.errors import ExitStatus, UserError
from megatron_muon.megatron import OWNS_PLACES, STATUS_FOLDER, TOLD
from megatron_muon.megatron.flags.config_file import UNSET_FLAG
from megatron_muon.megatron.places import CONFIG, LOG, RUN, SUMMARY, RunFolder, locate, read_json
from megatron_muon.megatron.provenance import origin
from megatron_muon.tools.train import node, processes, run_folder
from megatron_muon.tools.train.processes import Ended, Show
from megatron_muon.tools.train.resolve import Request, Resolved, resolve_each
from megatron_muon.tools.train.run_summary import failure_of, summary_of

_KEPT_LINES = 100
"""Of the output, to show the last of them that are not torchrun's if no rank left an error."""


@dataclass(frozen=True)
class Experiment:
    """A resolved run, and the checkpoint that it goes on from."""

    request: Request
    resolved: Resolved
    checkpoint: Path | None

    @property
    def folder(self) -> RunFolder:
        """Where its files lie."""
        return self.resolved.folder

    @property
    def torchrun(self) -> list[str]:
        """The arguments of torchrun."""
        program = [*processes.pretrain_program(), "--config", str(self.folder.root / CONFIG)]
        if self.checkpoint is not None:
            left_out = {flag.name for flag in self.resolved.flags} & set(node.FIRST_START_ONLY)
            program += ["--load", str(self.folder.checkpoints)]
            program += [token for flag in sorted(left_out) for token in (UNSET_FLAG, flag)]
        return processes.torchrun(self.resolved.ranks, *program)

    @property
    def shown_command(self) -> str:
        """The run as a user would type it."""
        return shlex.join(["torchrun", *self.torchrun])


class Outcome(NamedTuple):
    """How a run ended: exit status, summary.json, and whether it was started.

    `trace` are the lines that explain a failure, for whoever has not seen the output.
    """

    status: int
    summary: Mapping[str, Any]
    started: bool = True
    trace: tuple[str, ...] = ()


def prepare(request: Request, resolved: Resolved | UserError | None = None) -> Experiment:
    """Resolves an experiment, unless it is `resolved` already; writes nothing but what `request.writes` allows.

    Raises:
        UserError: what the user got wrong, a folder that is taken included.
        RunFailedError: the process that resolves failed; what it printed has been shown.
    """
    if request.out is not None:  # with --out the flags do not matter: refused before the slow part
        _refuse_taken(locate({}, {}, out=request.out, default="")[0], request)
    if resolved is None:
        (resolved,) = resolve_each([request])
    if isinstance(resolved, UserError):
        raise resolved
    _refuse_taken(resolved.folder, request)
    return Experiment(request, resolved, resolved.folder.checkpoint if request.resume else None)


def _refuse_taken(folder: RunFolder, request: Request) -> None:
    run_folder.refuse_living(folder)
    run_folder.check_free(folder, resume=request.resume, overwrite=request.overwrite)


def execute(
    experiment: Experiment,
    *,
    show: Show,
    stop: threading.Event | None = None,
    env: Mapping[str, str] | None = None,
) -> Outcome:
    """Runs what `prepare` returned to its end and writes its folder; `stop` as for `watch`.

    `env` overrides the ranks' other variables.

    Raises:
        UserError: another run is under way in the folder, or has been there since `prepare` looked.
    """
    folder, request, resolved = experiment.folder, experiment.request, experiment.resolved
    run_folder.refuse_living(folder)
    with run_folder.lock_of(folder.root).held() as lock:
        run_folder.check_free(folder, resume=request.resume, overwrite=request.overwrite)
        if request.resume and (done := _finished(experiment)):
            return Outcome(0, done, started=False)
        if request.overwrite:
            run_folder.clear(folder)
        run = _run_record(experiment)
        (folder.root / SUMMARY).unlink(missing_ok=True)
        run_folder.write_json(folder.root / RUN, run)
        heading = (
            f"Resolved from {', '.join(run['config_files'])} at {run['started']}; runs"
            f" alone:\n{run['torchrun']}"
        )
        text = run_folder.config_text(resolved.flag_values, resolved.env, heading=heading)
        (folder.root / CONFIG).write_text(text, "utf-8")
        return _launch(experiment, run, lock, show, stop, env or {})


def _launch(
    experiment: Experiment,
    run: Mapping[str, Any],
    lock: int | None,
    show: Show,
    stop: threading.Event | None,
    env: Mapping[str, str],
) -> Outcome:
    """Runs this machine's ranks, whose parent keeps the descriptor `lock` where it outlives this process; sums up."""
    folder, base = (
        experiment.folder,
        processes.environment(run["ranks"], settings=experiment.resolved.env),
    )
    output, diverged = collections.deque[str](maxlen=_KEPT_LINES), list[int]()

    def take(event: Mapping[str, Any]) -> None:
        if event["event"] == "line":
            output.append(event["line"])
        elif event["event"] == "diverged":
            diverged.append(event["step"])
        show(event)

    with tempfile.TemporaryDirectory(prefix="train-") as ends:
        Path(ends, TOLD).touch()  # without this file the ranks report nothing
        ended = processes.watch(
            [sys.executable, "-m", node.__name__, *experiment.torchrun],
            folder.root / LOG,
            env={**base, **env, STATUS_FOLDER: ends, OWNS_PLACES: "1"},
            show=take,
            reports=Path(ends, TOLD),
            append=experiment.checkpoint is not None,
            keeps=[] if lock is None else [lock],
            grace_s=experiment.request.grace_s,
            stop=stop,
        )
        ranks = {file.stem: read_json(file) for file in Path(ends).glob("*.json")}
    status = _exit_status(ended, ranks.get("0", {}).get("status"))
    error, trace = failure_of(ranks.values(), output)
    summary = summary_of(
        folder, status=status, error=error, run=run, diverged_at=next(iter(diverged), None)
    )
    run_folder.write_json(folder.root / SUMMARY, summary)
    summary = read_json(folder.root / SUMMARY)
    is_failure = summary["outcome"] == "failed" or status == 128 + signal.SIGKILL
    return Outcome(status, summary, trace=trace if is_failure and not summary["diverged"] else ())


def _exit_status(ended: Ended, rank: int | None) -> int:
    """The run's status: the first rank's, if it left one."""
    if ended.signal == signal.SIGINT:
        return ExitStatus.INTERRUPTED
    if ended.signal is not None:
        return rank if rank == ExitStatus.TEMPFAIL else 128 + ended.signal
    return 0 if ended.status == 0 else rank or ended.status


def _finished(experiment: Experiment) -> dict[str, Any] | None:
    """The summary of a run that has done all that is asked for."""
    summary = read_json(experiment.folder.root / SUMMARY)
    done, asked = summary.get("iterations"), experiment.resolved.settings.get("train_iters")
    is_done = (
        summary.get("outcome") == "finished"
        and asked is not None
        and done is not None
        and done >= asked
    )
    return summary if is_done else None


def _run_record(experiment: Experiment) -> dict[str, Any]:
    """The contents of run.json."""
    resolved, folder, request = experiment.resolved, experiment.folder, experiment.request
    before = read_json(folder.root / RUN) if request.resume else {}
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
        "ranks": resolved.ranks,
        "settings": dict(resolved.settings),
        "filled_in": [token for flag in resolved.filled_in for token in (flag.name, *flag.values)],
        "tensorboard_dir": str(folder.tensorboard),
        "checkpoint_dir": str(folder.checkpoints) if folder.checkpoints else None,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "starts": before.get("starts", 0) + 1,
        "resumed_from": str(experiment.checkpoint) if experiment.checkpoint else None,
    }
