"""How a run ended: the contents of summary.json, whose fields docs/experiments.md lists, and a line of words."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from megatron_muon.errors import ExitStatus
from megatron_muon.tools.train.records import read_record
from megatron_muon.tools.train.run_folder import RunFolder
from megatron_muon.tools.train.summary import validation_label

_OUTCOMES = {
    ExitStatus.OK: "finished",
    ExitStatus.USAGE: "refused",
    ExitStatus.TEMPFAIL: "stopped",
    ExitStatus.INTERRUPTED: "interrupted",
    **dict.fromkeys((129, 137, 143), "killed"),
}

_KILLED = re.compile(
    r"^ +rank +: (\d+) .*\n +exitcode +: -\d+ .*\n.*\n +traceback : Signal \d+ \((\w+)\)", re.MULTILINE
)
"""A rank that a signal ended, in torchrun's report: such a rank cannot report it."""

_FIRST_KILLED = re.compile(
    r"^Root Cause .*\n.*\n.*\n.*\n +rank +: (\d+) .*\n.*\n.*\n +traceback : Signal \d+ \((?!SIGTERM)(\w+)\)",
    re.MULTILINE,
)
"""The same of the rank that failed first: what the others then say follows from it."""


_REPORT = re.compile(r"^[EW]\d{4} .*(Sending process \d+ closing signal|failed \(exitcode)", re.MULTILINE)
"""The first line of torchrun's report of a failed rank: what matters stands above it."""

_TRACE_LINES = 16


def failure_of(ranks: Iterable[Mapping[str, Any]], output: str) -> tuple[str | None, tuple[str, ...]]:
    """The line that says why a run failed, and the last lines that show how.

    Of the rank that failed first: its error and the end of its traceback, or which signal ended it. Where no rank left
    an error (it could not be imported, it crashed): the end of what was printed before torchrun took notice.

    Args:
        ranks: what each left of its end, see `megatron.STATUS_FOLDER`.
        output: what the run printed.
    """
    first = min((rank for rank in ranks if rank.get("error")), key=lambda rank: float(rank["time"]), default=None)
    if first is not None and first["status"] == ExitStatus.USAGE:
        return str(first["error"]), ()
    killed = (_KILLED if first is None else _FIRST_KILLED).search(output)
    error: str | None = None
    if first is not None:
        error, text = str(first["error"]), "" if killed else str(first.get("trace", ""))
    else:
        report = _REPORT.search(output)
        before = output[: report.start()] if report else ""
        text = before if before.strip() else output
    if killed:
        why = "; if nobody sent it, the host ran out of memory: see dmesg" if killed[2] == "SIGKILL" else ""
        error = f"rank {killed[1]} was ended by {killed[2]}{why}"
    return error, tuple(line.rstrip() for line in text.splitlines() if line.strip())[-_TRACE_LINES:]


def summary_of(folder: RunFolder, *, status: int, error: str | None, run: Mapping[str, Any]) -> dict[str, Any]:
    """The contents of summary.json but for its times.

    Args:
        folder: the run's.
        status: exit status.
        error: of the last start, see `failure_of`.
        run: contents of run.json.
    """
    outcome = _OUTCOMES.get(status, "failed")
    record = read_record(folder.root, places=folder)
    at, why = record.diverged_at, None
    if at is not None:
        why = f"the loss or a gradient is not a number at iteration {at}"
    elif record.rose:
        why = f"the loss rose from {record.losses[0]:.3f} to {record.loss_last:.3f}"
    is_over = outcome == "finished" or at is not None
    is_over |= outcome == "refused" and not (record.iterations or folder.checkpoint)
    return {
        "name": run["name"],
        "outcome": outcome,
        "status": status,
        "error": error if outcome in ("refused", "failed", "killed") else None,
        "go_on": None if is_over else f"megatron-muon train --resume --out {shlex.quote(str(folder.root))}",
        "iterations": record.iterations,
        "train_iters": run["settings"].get("train_iters"),
        "tokens": record.tokens,
        "train_seconds": record.train_seconds if record.train else None,
        "loss_first": record.losses[0] if record.train else None,
        "loss_last": record.loss_last,
        "diverged": why is not None,
        "diverged_at": at,
        "diverged_why": why,
        "validation_loss": record.validation_by_set if record.train else None,
        "validation_iteration": record.validation[-1].step if record.validation else None,
        "skipped_iterations": record.skipped_iterations,
        **{name: getattr(record, name) for name in ("step_ms", "tokens_per_second", "optimizer_share")},
        **{name: record.facts.get(name) for name in ("parameters", "muon_parameters")},
        "world_size": run["nodes"] * run["ranks"],
        "checkpoint": str(folder.checkpoint) if folder.checkpoint else None,
        **{name: run[name] for name in ("command", "torchrun", "config_hash", "tensorboard_dir")},
        "optimizer": run["settings"].get("optimizer"),
    }


def in_words(summary: Mapping[str, Any], *, why: bool = False) -> str:
    """How a run ended, from what its summary.json says; with `why`, the line that says what failed too."""
    words = f"{summary['outcome']} with status {summary['status']} after {summary['iterations']} iterations"
    if summary["loss_last"] is not None:
        words += f", training loss {summary['loss_last']:.4f}"
    for name, value in (summary["validation_loss"] or {}).items():
        words += f", {validation_label(name)} " + (f"{value:.4f}" if value is not None else "not a number")
    if summary["diverged"]:
        return f"{words}; DIVERGED: {summary['diverged_why']}"
    return f"{words}; {summary['error']}" if why and summary["error"] else words
