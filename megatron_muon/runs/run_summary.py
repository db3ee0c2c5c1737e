"""What summary.json of a run's folder says: the figures of `Record`, and what only the log tells.

    outcome           finished, stopped (by a signal, after a checkpoint: start it again), interrupted (Ctrl-C), killed
                      (by another signal, nothing saved), refused (a user's mistake) or failed
    status            exit status, see docs/experiments.md
    error             of a run that was refused, failed or killed: the line that says why, where there is one; else null
    go_on             the command that goes on from the last checkpoint, or starts again where there is none; null where
                      the run has finished, met a loss that is not a number, or was refused before its first step
    diverged          whether the loss stopped being a number, or ended above where it began by more than noise
    diverged_at       first iteration whose loss is not a number; null where it ended too high, or did not diverge
    diverged_why      in words, or null
    started, ended    ISO 8601, UTC; of the last start
    seconds           from `started` to `ended`
    train_seconds     in Megatron's training loop, all starts together; null where nothing was logged, as all below
    iterations        last iteration that was logged; 0 where there is none
    train_iters       iterations asked for; null where --train-samples asks for samples
    tokens            trained on, all starts together: samples times sequence length
    loss_first        training loss of the first logged iteration
    loss_last         mean training loss of the last 10 logged iterations, or of all where there are fewer
    validation_loss   last validation loss by name of the set, "validation" where there is one
    validation_iteration    where that is from
    skipped_iterations      steps skipped for non-finite gradients, of those logged
    step_ms           median time of an iteration after the first 10, or of all where there are fewer
    tokens_per_second median after the first 10 iterations, all ranks together
    optimizer_share   of an iteration, 0 to 1; where timers are logged
    parameters        of the model, as Megatron counts them on a model-parallel rank
    muon_parameters   those that Muon takes; null in a run without Muon
    world_size        ranks of all nodes
    checkpoint        latest checkpoint, or null
    name, optimizer, command, torchrun, config_hash, tensorboard_dir     as in run.json

A number that is not finite is null: the file is strict JSON.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_muon import exit_codes
from megatron_muon.runs.records import Record, read_record
from megatron_muon.runs.run_folder import RunFolder
from megatron_muon.runs.summary import validation_label

_OUTCOMES = {
    exit_codes.OK: "finished",
    exit_codes.USAGE: "refused",
    exit_codes.TEMPFAIL: "stopped",
    exit_codes.INTERRUPTED: "interrupted",
    129: "killed",
    137: "killed",
    143: "killed",
}

_PARAMETERS = re.compile(r"number of parameters on \(.*?\) model parallel rank \(.*?\): (\d+)")
_NOT_FINITE = re.compile(r"Unexpected result (?:nan|-?inf)\b")
_ERRORS = (
    re.compile(r"^pretrain_gpt\.py: error: (.+)$", re.MULTILINE),
    re.compile(r"^\[rank\d+\]: ((?:\w+\.)*\w+(?:Error|Exception)\b.*)$", re.MULTILINE),
)
"""What a rank prints of a user's mistake, and the last line of a traceback."""

_KILLED = re.compile(
    r"^ +rank +: (\d+) .*\n +exitcode +: -\d+ .*\n.*\n +traceback : Signal \d+ \((\w+)\)", re.MULTILINE
)
"""A rank in torchrun's report that a signal ended."""

_ITERATION = re.compile(r"iteration +(\d+)/ *\d+ \|.*?number of skipped iterations: +(\d+)")


def summary_of(
    folder: RunFolder, *, status: int, log: Path, run: Mapping[str, Any], began_at: int = 0
) -> dict[str, Any]:
    """The contents of summary.json but for its times.

    Args:
        folder: the run's.
        status: exit status.
        log: the output of all starts.
        run: contents of run.json.
        began_at: where the last start's output begins in `log`, in bytes.
    """
    settings = run["settings"]
    output = log.read_bytes() if log.exists() else b""
    text, latest = (piece.decode("utf-8", "replace") for piece in (output, output[began_at:]))
    outcome = _OUTCOMES.get(status, "failed")
    record = read_record(folder.root, places=folder)
    divergence = _divergence(record, latest)
    skipped = {int(number): int(count) for number, count in _ITERATION.findall(text)}
    # Which machine has the first rank, which tells these, is for torchrun to say.
    everywhere = [text, *(file.read_text("utf-8", errors="replace") for file in folder.root.glob("train.node-*.log"))]
    parameters = _PARAMETERS.findall("\n".join(everywhere))
    return {
        "name": run["name"],
        "outcome": outcome,
        "status": status,
        "error": _error(latest) if outcome in ("refused", "failed", "killed") else None,
        "go_on": _go_on(record, outcome, divergence),
        "iterations": record.iterations,
        "train_iters": settings.get("train_iters"),
        "tokens": record.tokens,
        "train_seconds": record.train_seconds if record.train else None,
        "loss_first": record.losses[0] if record.train else None,
        "loss_last": record.loss_last,
        **divergence,
        "validation_loss": record.validation_by_set if record.train else None,
        "validation_iteration": record.validation[-1].step if record.validation else None,
        "skipped_iterations": sum(skipped.values()),
        **{name: getattr(record, name) for name in ("step_ms", "tokens_per_second", "optimizer_share")},
        "parameters": int(parameters[-1]) if parameters else None,
        "muon_parameters": record.facts.get("muon_parameters"),
        "world_size": run["nodes"] * run["ranks"],
        "checkpoint": str(folder.checkpoint) if folder.checkpoint else None,
        **{name: run[name] for name in ("command", "torchrun", "config_hash", "tensorboard_dir")},
        "optimizer": settings.get("optimizer"),
    }


def _error(text: str) -> str | None:
    """The first line of the output that says why a run failed; else which rank a signal ended."""
    if said := next((match[1] for pattern in _ERRORS if (match := pattern.search(text))), None):
        return said
    if killed := _KILLED.search(text):
        why = "; where nobody sent it, the host's memory was full: see dmesg" if killed[2] == "SIGKILL" else ""
        return f"rank {killed[1]} was ended by {killed[2]}{why}"
    return None


def _go_on(record: Record, outcome: str, divergence: Mapping[str, Any]) -> str | None:
    began = bool(record.iterations or record.places.checkpoint)
    if outcome == "finished" or divergence["diverged_at"] or (outcome == "refused" and not began):
        return None
    return f"megatron-muon train --resume --out {shlex.quote(str(record.folder))}"


def _divergence(record: Record, text: str) -> dict[str, Any]:
    at, why = record.diverged_at, None
    if at is None and _NOT_FINITE.search(text):  # Megatron ends such a step before it is logged
        at = record.iterations + 1
    if at is not None:
        why = f"the loss or a gradient is not a number at iteration {at}"
    elif record.rose:
        why = f"the loss rose from {record.losses[0]:.3f} to {record.loss_last:.3f}"
    return {"diverged": why is not None, "diverged_at": at, "diverged_why": why}


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
