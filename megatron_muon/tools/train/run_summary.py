"""How a run ended: the contents of summary.json, whose fields docs/experiments.md lists, and a line of words."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from megatron_muon.errors import ExitStatus
from megatron_muon.tools.train.records import read_record, validation_label
from megatron_muon.tools.train.run_folder import RunFolder

_OUTCOMES = {
    ExitStatus.OK: "finished",
    ExitStatus.USAGE: "refused",
    ExitStatus.TEMPFAIL: "stopped",
    ExitStatus.INTERRUPTED: "interrupted",
    **dict.fromkeys((129, 137, 143), "killed"),
}
_OF_TORCHRUN = re.compile(r"[IWE]\d{4} ")
"""Begins the lines that torchrun logs."""

_TRACE_LINES = 16


def failure_of(ranks: Iterable[Mapping[str, Any]], output: Iterable[str]) -> tuple[str | None, tuple[str, ...]]:
    """The line that says why a run failed, and the last lines that show how: of the rank that failed first.

    Where no rank left an error (it could not be imported): the end of what was printed.

    Args:
        ranks: what each left of its end, see `megatron.STATUS_FOLDER`.
        output: the last lines that the run printed.
    """
    first = min((rank for rank in ranks if rank.get("error")), key=lambda rank: float(rank["time"]), default=None)
    text = output if first is None else str(first.get("trace", "")).splitlines()
    lines = [line.rstrip() for line in text if line.strip() and not _OF_TORCHRUN.match(line)]
    return None if first is None else str(first["error"]), tuple(lines[-_TRACE_LINES:])


def summary_of(folder: RunFolder, *, status: int, error: str | None, run: Mapping[str, Any]) -> dict[str, Any]:
    """The contents of summary.json.

    Args:
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
    now = datetime.now(UTC)
    return {
        "name": run["name"],
        "outcome": outcome,
        "status": status,
        "error": error if outcome in ("refused", "failed", "killed") else None,
        "go_on": None if is_over else f"megatron-muon train --resume --out {shlex.quote(str(folder.root))}",
        "train_iters": run["settings"].get("train_iters"),
        **record.figures,
        "diverged": why is not None,
        "diverged_why": why,
        **{name: record.facts.get(name) for name in ("parameters", "muon_parameters")},
        "world_size": run["nodes"] * run["ranks"],
        **{name: run[name] for name in ("command", "torchrun", "config_hash", "tensorboard_dir")},
        "optimizer": run["settings"].get("optimizer"),
        "started": run["started"],
        "ended": now.isoformat(timespec="seconds"),
        "seconds": round((now - datetime.fromisoformat(run["started"])).total_seconds(), 1),
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
