"""The result of a run: summary.json, whose fields docs/experiments.md lists, and `summary`."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron_muon.errors import ExitStatus, UserError
from megatron_muon.megatron import FACTS
from megatron_muon.megatron.places import RUN, RunFolder, read_json
from megatron_muon.tools.parser import write_json
from megatron_muon.tools.train.records import ONLY_SET, figures_of
from megatron_muon.tools.train.run_folder import places_of

_OUTCOMES = {
    ExitStatus.OK: "finished",
    ExitStatus.USAGE: "refused",
    ExitStatus.TEMPFAIL: "stopped",
    ExitStatus.INTERRUPTED: "interrupted",
    **dict.fromkeys((129, 137, 143), "killed"),
}

_TORCHRUN_LINE = re.compile(r"[IWE]\d{4} ")
"""Beginning of the lines that torchrun logs."""

_REJECTED = re.compile(r"iteration (\d+): Unexpected result")
"""Error of a rank with --rerun-mode disabled at a number that is not finite."""

_TRACE_LINES = 16


def failure_of(
    ranks: Iterable[Mapping[str, Any]], output: Iterable[str]
) -> tuple[str | None, tuple[str, ...]]:
    """The error of the rank that failed first, in one line, and the last lines of its traceback.

    `ranks` are their reports, see `megatron.STATUS_FOLDER`. If none reported an error (a rank could
    not be imported), the lines are the end of the `output`.
    """
    failed = [rank for rank in ranks if rank.get("error")]
    if failed:
        first = min(failed, key=lambda rank: float(rank["time"]))
        error = str(first["error"])
        output = str(first.get("trace", "")).splitlines()
    else:
        error = None
    lines = [line.rstrip() for line in output if line.strip() and not _TORCHRUN_LINE.match(line)]
    return error, tuple(lines[-_TRACE_LINES:])


def summary_of(
    folder: RunFolder,
    *,
    status: int,
    error: str | None,
    run: Mapping[str, Any],
    diverged_at: int | None = None,
) -> dict[str, Any]:
    """The contents of summary.json, after a start with this `error` and run.json (`run`).

    `diverged_at` is the step at which Megatron ended the run for a number that is not finite.
    """
    figures = figures_of(folder)
    facts = read_json(folder.tensorboard / FACTS)
    settings = run["settings"]
    outcome = _OUTCOMES.get(status, "failed")
    loss_rose = figures.pop("rose")
    if figures["diverged_at"] is None:
        rejected = _REJECTED.search(error or "")
        figures["diverged_at"] = int(rejected[1]) if rejected else diverged_at
    why = None
    if figures["diverged_at"] is not None:
        why = f"the loss or a gradient is not a number at iteration {figures['diverged_at']}"
    elif loss_rose:
        why = f"the loss rose from {figures['loss_first']:.3f} to {figures['loss_last']:.3f}"
    now = datetime.now(UTC)
    elapsed = now - datetime.fromisoformat(run["started"])
    return {
        "name": run["name"],
        "outcome": outcome,
        "status": status,
        "error": error if outcome in ("refused", "failed", "killed") else None,
        "go_on": resume_command(folder.root) if _can_go_on(outcome, figures, settings) else None,
        "train_iters": settings.get("train_iters"),
        **figures,
        "diverged": why is not None,
        "diverged_why": why,
        "parameters": facts.get("parameters"),
        "muon_parameters": facts.get("muon_parameters"),
        "world_size": run["ranks"],
        **{name: run[name] for name in ("command", "torchrun", "config_hash", "tensorboard_dir")},
        "optimizer": settings.get("optimizer"),
        "started": run["started"],
        "ended": now.isoformat(timespec="seconds"),
        "seconds": round(elapsed.total_seconds(), 1),
    }


def _can_go_on(outcome: str, figures: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    if figures["diverged_at"] is not None:
        return False
    if outcome == "finished":  # also by --exit-duration-in-mins
        return bool(figures["iterations"] < (settings.get("train_iters") or 0))
    return outcome != "refused" or bool(figures["iterations"] or figures["checkpoint"])


def resume_command(folder: Path) -> str:
    """The command that continues a run."""
    return shlex.join(["megatron-muon", "train", "--resume", "--out", str(folder)])


def in_words(summary: Mapping[str, Any]) -> str:
    """The end of a run in a sentence, by its summary.json."""
    words = f"{summary['outcome']} with status {summary['status']}"
    words += f" after {summary['iterations']} iterations"
    if summary["loss_last"] is not None:
        words += f", training loss {summary['loss_last']:.4f}"
    for name, value in (summary["validation_loss"] or {}).items():
        label = "validation loss" if name == ONLY_SET else f"validation loss {name}"
        words += f", {label} " + ("not a number" if value is None else f"{value:.4f}")
    if summary["diverged"]:
        words += f"; DIVERGED: {summary['diverged_why']}"
    return words


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `megatron-muon summary`."""
    parser.description = "Show the figures of a run: losses, speed, and its latest checkpoint."
    parser.epilog = "examples:\n  megatron-muon summary runs/quickstart --json figures.json\n"
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder of the run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")


def run(args: argparse.Namespace) -> int:
    """Prints the figures, and writes them as JSON if requested."""
    places = places_of(args.run_dir, read_json(args.run_dir / RUN))
    figures = figures_of(places)
    if not figures["iterations"]:
        raise UserError(f"no steps are logged in {places.tensorboard}; give the folder of a run")
    write_json(args.json, figures)
    for name, value in figures.items():
        shown = f"{value:.6g}" if isinstance(value, float) else value
        print(f"{name:<21}{shown}")
    print(f"{'curves':<21}tensorboard --logdir {shlex.quote(str(places.tensorboard))}")
    return 0
