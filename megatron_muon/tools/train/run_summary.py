"""What came of a run: summary.json, whose fields docs/experiments.md lists, and `megatron-muon summary`, a page."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron_muon.errors import ExitStatus
from megatron_muon.megatron.places import RunFolder
from megatron_muon.tools.parser import write_json
from megatron_muon.tools.screen import clock
from megatron_muon.tools.train.records import (
    LAST_STEPS,
    ONLY_SET,
    WARMUP_STEPS,
    Record,
    read_record,
)

EXAMPLES = """\
examples:
  megatron-muon summary runs/quickstart
  megatron-muon summary runs/quickstart --json figures.json
"""

_OUTCOMES = {
    ExitStatus.OK: "finished",
    ExitStatus.USAGE: "refused",
    ExitStatus.TEMPFAIL: "stopped",
    ExitStatus.INTERRUPTED: "interrupted",
    **dict.fromkeys((129, 137, 143), "killed"),
}
_OF_TORCHRUN = re.compile(r"[IWE]\d{4} ")
"""Begins the lines that torchrun logs."""

_REJECTED = re.compile(r"iteration (\d+): Unexpected result")
"""How a rank ends with --rerun-mode disabled, alone, at a number that is not finite."""

_TRACE_LINES = 16


def failure_of(
    ranks: Iterable[Mapping[str, Any]], output: Iterable[str]
) -> tuple[str | None, tuple[str, ...]]:
    """The line that says why a run failed, and the last lines that show how: of the rank that failed first.

    `ranks` are what each left of its end, see `megatron.STATUS_FOLDER`. Where none left an error
    (it could not be imported), the end of the `output` shows how.
    """
    first = min(
        (rank for rank in ranks if rank.get("error")),
        key=lambda rank: float(rank["time"]),
        default=None,
    )
    text = output if first is None else str(first.get("trace", "")).splitlines()
    lines = [line.rstrip() for line in text if line.strip() and not _OF_TORCHRUN.match(line)]
    return None if first is None else str(first["error"]), tuple(lines[-_TRACE_LINES:])


def summary_of(
    folder: RunFolder,
    *,
    status: int,
    error: str | None,
    run: Mapping[str, Any],
    diverged_at: int | None = None,
) -> dict[str, Any]:
    """The contents of summary.json, after a start with this `error` (see `failure_of`) and run.json (`run`).

    `diverged_at` is the step at which Megatron ended it for a number that is not finite.
    """
    outcome = _OUTCOMES.get(status, "failed")
    record = read_record(folder.root, places=folder)
    at, why = diverged_at if record.diverged_at is None else record.diverged_at, None
    if at is None and (found := _REJECTED.search(error or "")):
        at = int(found[1])
    if at is not None:
        why = f"the loss or a gradient is not a number at iteration {at}"
    elif record.rose:
        why = f"the loss rose from {record.losses[0]:.3f} to {record.loss_last:.3f}"
    # --exit-duration-in-mins
    stopped_early = record.iterations < (run["settings"].get("train_iters") or 0)
    is_over = (outcome == "finished" and not stopped_early) or at is not None
    is_over |= outcome == "refused" and not (record.iterations or folder.checkpoint)
    now = datetime.now(UTC)
    return {
        "name": run["name"],
        "outcome": outcome,
        "status": status,
        "error": error if outcome in ("refused", "failed", "killed") else None,
        "go_on": None if is_over else _go_on(folder.root),
        "train_iters": run["settings"].get("train_iters"),
        **record.figures,
        "diverged_at": at,
        "diverged": why is not None,
        "diverged_why": why,
        **{name: record.facts.get(name) for name in ("parameters", "muon_parameters")},
        "world_size": run["ranks"],
        **{name: run[name] for name in ("command", "torchrun", "config_hash", "tensorboard_dir")},
        "optimizer": run["settings"].get("optimizer"),
        "started": run["started"],
        "ended": now.isoformat(timespec="seconds"),
        "seconds": round((now - datetime.fromisoformat(run["started"])).total_seconds(), 1),
    }


def in_words(summary: Mapping[str, Any], *, why: bool = False) -> str:
    """How a run ended, from what its summary.json says; with `why`, the line that says what failed too."""
    words = (
        f"{summary['outcome']} with status {summary['status']} after {summary['iterations']}"
        " iterations"
    )
    if summary["loss_last"] is not None:
        words += f", training loss {summary['loss_last']:.4f}"
    for name, value in (summary["validation_loss"] or {}).items():
        words += f", {_label(name)} " + (f"{value:.4f}" if value is not None else "not a number")
    if summary["diverged"]:
        return f"{words}; DIVERGED: {summary['diverged_why']}"
    return f"{words}; {summary['error']}" if why and summary["error"] else words


def _label(validation_set: str) -> str:
    return "validation loss" if validation_set == ONLY_SET else f"validation loss {validation_set}"


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `megatron-muon summary`."""
    parser.description = (
        "Sum up a run: loss, validation loss, speed, and where its log and checkpoint lie."
    )
    parser.epilog = EXAMPLES
    parser.add_argument(
        "run_dir", type=Path, metavar="RUN_DIR", help="holds tensorboard/ and checkpoints/"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")


def run(args: argparse.Namespace) -> int:
    """Prints the summary, and writes it as JSON where asked."""
    record = read_record(args.run_dir, needs_steps=True)
    write_json(args.json, {"run_dir": str(record.folder), **record.figures})
    print(f"Run {record.folder}")
    for label, value in rows(record):
        print(f"{label:<17}{value}")
    return 0


def rows(record: Record) -> list[tuple[str, str]]:
    """The summary's lines as (label, value)."""
    loss = f"{record.losses[0]:.3f} -> {record.loss_last:.3f} in {record.iterations:,} iterations"
    lines = [("loss", f"{loss} (mean of the last {min(len(record.losses), LAST_STEPS)})")]
    if record.diverged_at is not None:
        when = f"from iteration {record.diverged_at:,} on"
        lines.append(
            ("warning", f"diverged: the loss is not a number {when}; lower the learning rate")
        )
    elif record.rose:
        lines.append(("warning", "the loss rose; lower the learning rate"))
    for name, value in record.validation_by_set.items():
        lines.append((_label(name), f"{value:.3f} at iteration {record.validation[-1].step:,}"))
    if not record.validation:
        lines.append(("validation loss", "none; --eval-iters and --eval-interval say how often"))
    early = ", slow first steps included" if record.iterations <= WARMUP_STEPS else ""
    speed = f"training took {clock(record.train_seconds)}"
    if record.tokens_per_second is not None and record.step_ms is not None:
        speed = (
            f"{record.tokens_per_second:,.0f} tokens/s, {record.step_ms:,.0f} ms per step{early};"
            f" {speed}"
        )
    if record.optimizer_share is not None:
        lines.append(("optimizer", f"{record.optimizer_share:.0%} of the step{early}"))
    lines += [
        ("speed", speed),
        ("checkpoint", str(record.places.checkpoint or "none saved")),
        ("curves", shlex.join(["tensorboard", "--logdir", str(record.places.tensorboard)])),
    ]
    return [*lines, *([("to go on", _go_on(record.folder))] if record.summary.get("go_on") else [])]


def _go_on(folder: Path) -> str:
    return shlex.join(["megatron-muon", "train", "--resume", "--out", str(folder)])
