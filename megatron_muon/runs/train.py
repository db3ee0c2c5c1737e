"""Runs one experiment: settles it, writes its folder, launches torchrun, and sums up what came of it.

`prepare` settles and shows nothing, `execute` runs what was prepared; the command `megatron-muon train` does one after
the other, and so may whatever runs many. The folder's files are described in `run_folder` and `run_summary`.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron_muon import exit_codes
from megatron_muon.checkpoint import files
from megatron_muon.errors import UserError
from megatron_muon.megatron import STATUS_FILE
from megatron_muon.megatron.flags.config_file import UNSET_FLAG
from megatron_muon.runs import run_folder
from megatron_muon.runs.node import FIRST_START_ONLY, names_own_step
from megatron_muon.runs.processes import Ended, environment, pretrain_program, torchrun, watch
from megatron_muon.runs.provenance import origin
from megatron_muon.runs.resolve import FROM_LINE, FROM_SET, Request, Resolved, resolve_each
from megatron_muon.runs.run_folder import RunFolder
from megatron_muon.runs.run_summary import summary_of


@dataclass(frozen=True)
class Experiment:
    """A settled run: what was asked for, and what came of that."""

    request: Request
    resolved: Resolved

    @property
    def folder(self) -> RunFolder:
        """Where its files lie."""
        return self.resolved.folder

    @property
    def is_first_node(self) -> bool:
        """Whether this machine writes what there is once for all of them."""
        return self.request.nodes.rank == 0

    @property
    def config_file(self) -> Path:
        """The resolved experiment file that this machine's ranks read."""
        rank = self.request.nodes.rank
        return self.folder.root / (f"config.node-{rank}.yaml" if rank else run_folder.CONFIG)

    @property
    def log(self) -> Path:
        """Where this machine's output goes."""
        rank = self.request.nodes.rank
        return self.folder.root / (f"train.node-{rank}.log" if rank else run_folder.LOG)

    @property
    def ckpt_step(self) -> int | None:
        """The iteration of the run's own checkpoints that this start asks for: a --ckpt-step typed without a --load.

        One of an experiment file, or beside a --load of other checkpoints, says how the first start began.
        """
        typed = {flag.name: flag.values for flag in self.resolved.flags if flag.source in (FROM_SET, FROM_LINE)}
        is_own = self.request.resume and self.folder.checkpoint and names_own_step(typed)
        return int(typed["--ckpt-step"][0]) if is_own else None

    @property
    def checkpoint(self) -> Path | None:
        """What the run goes on from."""
        if self.ckpt_step is not None and self.folder.checkpoints is not None:
            return files.iteration_folder(self.folder.checkpoints, self.ckpt_step)
        return self.folder.checkpoint if self.request.resume else None

    @property
    def shown_command(self) -> str:
        """`torchrun` as a user would type it: by its name, and without what makes it wait longer."""
        command = self.torchrun(waits=False)
        return shlex.join(["torchrun", *command[command.index("torch.distributed.run") + 1 :]])

    def torchrun(self, *, waits: bool = True) -> list[str]:
        """The command that runs it.

        Args:
            waits: with the flag that gives ranks the request's `grace_s` seconds to save.
        """
        wait = ("--shutdown-timeout", str(self.request.grace_s)) if waits and self.resolved.can_wait else ()
        program = [*pretrain_program(), "--config", str(self.config_file)]
        if self.checkpoint is not None:
            left_out = {flag.name for flag in self.resolved.flags} & set(FIRST_START_ONLY)
            left_out -= {"--ckpt-step"} if self.ckpt_step is not None else set()
            program += ["--load", str(self.folder.checkpoints)]
            program += [token for flag in sorted(left_out) for token in (UNSET_FLAG, flag)]
        return torchrun(self.resolved.ranks, *program, nodes=self.request.nodes, more=wait)


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        status: exit status, see docs/experiments.md.
        summary: contents of summary.json; empty on other machines than the first.
        started: whether anything was started: False where the run was finished before.
    """

    status: int
    summary: Mapping[str, Any]
    started: bool = True


def prepare(request: Request, resolved: Resolved | UserError | None = None) -> Experiment:
    """Settles an experiment, unless it is `resolved` already; writes nothing but what `request.writes` allows.

    Raises:
        UserError: what the user got wrong, a folder that is taken included.
        RunFailedError: the process that settles failed; what it printed has been shown.
    """
    nodes = request.nodes
    if request.out is not None and nodes.rank == 0:  # told at once, where the flags have no say
        _refuse_taken(run_folder.locate({}, {}, out=request.out, default="")[0], request)
    if resolved is None:
        (resolved,) = resolve_each([request])
    if isinstance(resolved, UserError):
        raise resolved
    experiment = Experiment(request, resolved)
    if nodes.count > 1 and request.out is None and resolved.folder.root == Path(request.default_out):
        raise UserError("several nodes need one folder that all of them see; name it with --out DIR")
    if experiment.ckpt_step is not None and experiment.checkpoint is not None and not experiment.checkpoint.is_dir():
        held = ", ".join(map(str, files.iterations(experiment.checkpoint.parent)))
        raise UserError(
            f"--ckpt-step {experiment.ckpt_step}: {experiment.checkpoint.parent} has no checkpoint of that iteration; "
            f"it has {held or 'none'}"
        )
    if nodes.rank == 0:
        _refuse_taken(resolved.folder, request)
    return experiment


def _refuse_taken(folder: RunFolder, request: Request) -> None:
    run_folder.refuse_living(folder)
    run_folder.check_free(folder, resume=request.resume, overwrite=request.overwrite)


def execute(
    experiment: Experiment,
    *,
    on_line: Callable[[str], object] | None = None,
    stop: threading.Event | None = None,
    env: Mapping[str, str] | None = None,
) -> Outcome:
    """Runs what `prepare` returned to its end and writes its folder.

    Args:
        experiment: what to run.
        on_line: gets every line of the output as it comes.
        stop: ends the run as Ctrl-C does when it is set, for runs in threads of their own.
        env: variables for the ranks, which win over all others.

    Raises:
        UserError: another run is under way in the folder, or has been there since `prepare` looked.
    """
    folder, request = experiment.folder, experiment.request
    with contextlib.ExitStack() as stack:
        keeps = []
        if experiment.is_first_node:
            run_folder.refuse_living(folder)
            lock = stack.enter_context(run_folder.lock_of(folder.root).held())
            keeps = [] if lock is None else [lock]  # torchrun keeps it where it outlives this process
            run_folder.check_free(folder, resume=request.resume, overwrite=request.overwrite)
            if request.resume and experiment.ckpt_step is None and (done := _finished(experiment)):
                return Outcome(0, done, started=False)
            if request.overwrite:
                run_folder.clear(folder)
        folder.root.mkdir(parents=True, exist_ok=True)
        run = _run_record(experiment)
        experiment.config_file.write_text(_config_text(experiment, run), "utf-8")
        if experiment.is_first_node:
            (folder.root / run_folder.SUMMARY).unlink(missing_ok=True)
            run_folder.write_json(folder.root / run_folder.RUN, run)
        append = experiment.checkpoint is not None
        began_at = experiment.log.stat().st_size if append and experiment.log.exists() else 0
        status_file = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="train-")), "status")
        of_ranks = environment(experiment.resolved.ranks, nodes=request.nodes.count, settings=experiment.resolved.env)
        ended = watch(
            experiment.torchrun(),
            experiment.log,
            env={**of_ranks, **(env or {}), STATUS_FILE: str(status_file)},
            on_line=on_line,
            append=append,
            keeps=keeps,
            grace_s=request.grace_s,
            stop=stop,
        )
        status = _exit_status(ended, status_file)
        if not experiment.is_first_node:
            return Outcome(status, {})
        now = datetime.now(UTC)
        summary = run_folder.strict(
            {
                **summary_of(folder, status=status, log=experiment.log, run=run, began_at=began_at),
                "started": run["started"],
                "ended": now.isoformat(timespec="seconds"),
                "seconds": round((now - datetime.fromisoformat(run["started"])).total_seconds(), 1),
            }
        )
        run_folder.write_json(folder.root / run_folder.SUMMARY, summary)
        return Outcome(status, summary)


def _exit_status(ended: Ended, of_rank: Path) -> int:
    """The run's status: what a rank left in a file counts for more than torchrun's, which is 1 for anything but 0."""
    rank = None
    with contextlib.suppress(OSError, ValueError):
        rank = int(of_rank.read_text("utf-8"))
    if ended.signal == signal.SIGINT:
        return 128 + signal.SIGINT
    if ended.signal is not None:
        return rank if rank == exit_codes.TEMPFAIL else 128 + ended.signal
    if ended.status == 0:
        return 0
    return rank or ended.status


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


def _config_text(experiment: Experiment, run: Mapping[str, Any]) -> str:
    heading = f"Resolved from {', '.join(run['config_files'])} at {run['started']}; runs alone:\n{run['torchrun']}"
    return run_folder.config_text(experiment.resolved.flag_values, experiment.resolved.env, heading=heading)


def settings_lines(experiment: Experiment) -> list[str]:
    """The effective settings as lines: flag, value, where it comes from; what is filled in comes last."""
    flags = (*experiment.resolved.flags, *experiment.resolved.filled_in)
    rows = [(flag.name, shlex.join(flag.values) if flag.values else "true", flag.source) for flag in flags]
    widths = [min(max(len(row[column]) for row in rows), limit) for column, limit in ((0, 44), (1, 40))]
    return [f"  {name:<{widths[0]}}  {value:<{widths[1]}}  {source}" for name, value, source in rows]
