"""Runs one experiment: `prepare` resolves it; `execute` writes its folder and runs its ranks.

Neither prints: `execute` passes on each event of the run (`Show`). `run_folder` describes the
folder's files.
"""

from __future__ import annotations

import collections
import os
import shlex
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron_muon.errors import ExitStatus
from megatron_muon.megatron import OWNS_PLACES, STATUS_FOLDER, TOLD
from megatron_muon.megatron.flags.config_file import UNSET_FLAG
from megatron_muon.megatron.places import CONFIG, LOG, RUN, SUMMARY, RunFolder, locate, read_json
from megatron_muon.megatron.provenance import origin
from megatron_muon.tools.train import node, processes, run_folder
from megatron_muon.tools.train.processes import Ended, Show
from megatron_muon.tools.train.resolve import Request, Resolved, resolve
from megatron_muon.tools.train.run_summary import failure_of, summary_of

_KEPT_LINES = 100
"""Last lines of the output, some of which are shown if no rank left an error."""

_SECONDS_TO_SAVE = 600.0
"""Time for the ranks to finish their step and save, after a signal."""


@dataclass(frozen=True)
class Experiment:
    """A resolved run, and the checkpoint that it continues."""

    request: Request
    resolved: Resolved
    checkpoint: Path | None

    @property
    def folder(self) -> RunFolder:
        """The places of its files."""
        return self.resolved.folder

    @property
    def torchrun(self) -> list[str]:
        """The arguments of torchrun."""
        program = [*processes.pretrain_program(), "--config", str(self.folder.root / CONFIG)]
        if self.checkpoint is not None:
            program += ["--load", str(self.folder.checkpoints)]
            for flag in self.resolved.flags:
                if flag.name in node.FIRST_START_ONLY:
                    program += [UNSET_FLAG, flag.name]
        return processes.torchrun(self.resolved.ranks, *program)

    @property
    def shown_command(self) -> str:
        """The run as a user would type it."""
        return shlex.join(["torchrun", *self.torchrun])


@dataclass(frozen=True)
class Outcome:
    """The end of a run: its exit status, summary.json, and whether it was started.

    `trace` are lines that explain a failure.
    """

    status: int
    summary: Mapping[str, Any]
    started: bool = True
    trace: tuple[str, ...] = ()


def prepare(request: Request) -> Experiment:
    """Resolves a run; a dry run writes nothing.

    Raises:
        UserError: a mistake of the user, or a folder that is taken.
        RunFailedError: the process that resolves failed; its output has been shown.
    """
    if request.out is not None:  # before the slow part
        folder, _ = locate({}, {}, out=request.out, default="")
        run_folder.check_free(folder, resume=request.resume)
    resolved = resolve(request)
    run_folder.check_free(resolved.folder, resume=request.resume)
    checkpoint = resolved.folder.checkpoint if request.resume else None
    return Experiment(request, resolved, checkpoint)


def execute(experiment: Experiment, *, show: Show) -> Outcome:
    """Runs a prepared experiment to its end and writes its folder.

    Raises:
        UserError: another run uses the folder, or has used it since `prepare`.
    """
    folder = experiment.folder
    request = experiment.request
    resolved = experiment.resolved
    run_folder.check_free(folder, resume=request.resume)
    with run_folder.claimed(folder.root) as lock:
        run_folder.check_free(folder, resume=request.resume)
        if request.resume and (done := _finished(experiment)):
            return Outcome(0, done, started=False)
        run = _run_record(experiment)
        (folder.root / SUMMARY).unlink(missing_ok=True)
        run_folder.write_json(folder.root / RUN, run)
        heading = f"Resolved from {', '.join(run['config_files'])} at {run['started']}; runs alone:"
        heading += f"\n{run['torchrun']}"
        text = run_folder.config_text(resolved.flag_values, resolved.env, heading=heading)
        (folder.root / CONFIG).write_text(text, "utf-8")
        return _launch(experiment, run, lock, show)


def _launch(experiment: Experiment, run: Mapping[str, Any], lock: int, show: Show) -> Outcome:
    """Runs the ranks, whose parent inherits the `lock`; writes summary.json."""
    folder = experiment.folder
    output = collections.deque[str](maxlen=_KEPT_LINES)
    diverged: list[int] = []

    def take(event: Mapping[str, Any]) -> None:
        if event["event"] == "line":
            output.append(event["line"])
        elif event["event"] == "diverged":
            diverged.append(event["step"])
        show(event)

    env = processes.environment(run["ranks"], settings=experiment.resolved.env)
    with tempfile.TemporaryDirectory(prefix="train-") as ends:
        reports = Path(ends, TOLD)
        reports.touch()  # without it the ranks report nothing
        ended = processes.watch(
            [sys.executable, "-m", node.__name__, *experiment.torchrun],
            folder.root / LOG,
            env={**env, STATUS_FOLDER: ends, OWNS_PLACES: "1"},
            show=take,
            reports=reports,
            append=experiment.checkpoint is not None,
            keeps=[lock],
            grace_s=_SECONDS_TO_SAVE,
        )
        ranks = {file.stem: read_json(file) for file in Path(ends).glob("*.json")}
    status = _exit_status(ended, ranks.get("0", {}).get("status"))
    error, trace = failure_of(ranks.values(), output)
    diverged_at = diverged[0] if diverged else None
    found = summary_of(folder, status=status, error=error, run=run, diverged_at=diverged_at)
    run_folder.write_json(folder.root / SUMMARY, found)
    summary = read_json(folder.root / SUMMARY)
    is_failure = summary["outcome"] == "failed" or status == 128 + signal.SIGKILL
    explains = is_failure and not summary["diverged"]
    return Outcome(status, summary, trace=trace if explains else ())


def _exit_status(ended: Ended, rank: int | None) -> int:
    """The run's status: the first rank's, if it left one."""
    if ended.signal == signal.SIGINT:
        return ExitStatus.INTERRUPTED
    if ended.signal is not None:
        return rank if rank == ExitStatus.TEMPFAIL else 128 + ended.signal
    if ended.status == 0:
        return 0
    return rank or ended.status


def _finished(experiment: Experiment) -> dict[str, Any] | None:
    """The summary of a run that has taken all its steps."""
    summary = read_json(experiment.folder.root / SUMMARY)
    steps = experiment.resolved.settings.get("train_iters")
    if summary.get("outcome") != "finished" or steps is None:
        return None
    return summary if (summary.get("iterations") or 0) >= steps else None


def _run_record(experiment: Experiment) -> dict[str, Any]:
    """The contents of run.json."""
    resolved = experiment.resolved
    folder = experiment.folder
    request = experiment.request
    before = read_json(folder.root / RUN) if request.resume else {}
    filled_in: list[str] = []
    for flag in resolved.filled_in:
        filled_in += [flag.name, *flag.values]
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
        "filled_in": filled_in,
        "tensorboard_dir": str(folder.tensorboard),
        "checkpoint_dir": str(folder.checkpoints) if folder.checkpoints else None,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "starts": before.get("starts", 0) + 1,
        "resumed_from": str(experiment.checkpoint) if experiment.checkpoint else None,
    }
