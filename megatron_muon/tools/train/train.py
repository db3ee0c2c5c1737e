"""Runs one resolved experiment: writes its folder, runs its ranks, and summarizes its end.

`--resume` reads config.yaml, which has every setting but for the folder's own places.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron_muon.checkpoint.locks import locked
from megatron_muon.errors import ExitStatus
from megatron_muon.megatron import REPORTS
from megatron_muon.megatron.flags.config_file import Flag
from megatron_muon.megatron.places import CONFIG, LOG, RUN, SUMMARY, read_json
from megatron_muon.megatron.provenance import origin
from megatron_muon.tools.parser import write_json
from megatron_muon.tools.train import node, processes
from megatron_muon.tools.train.processes import Show
from megatron_muon.tools.train.resolve import FILLED_IN, Experiment

# needs no quotes in an experiment file
_PLAIN = re.compile(r"(?!(null|true|false)\Z)[A-Za-z0-9/_.][A-Za-z0-9/_.,+=@%-]*\Z", re.IGNORECASE)
_SECONDS_TO_SAVE = 600.0  # after a signal

_OUTCOMES: dict[int, str] = {
    ExitStatus.OK: "finished",
    ExitStatus.USAGE: "refused",
    ExitStatus.TEMPFAIL: "stopped",
    ExitStatus.INTERRUPTED: "interrupted",
}


def torchrun(experiment: Experiment) -> list[str]:
    """The arguments of torchrun: the resolved file, and the places that it leaves out."""
    program = [*processes.pretrain_program(), "--config", str(experiment.root / CONFIG)]
    for setting in experiment.settings:
        if setting.is_place:
            program += [setting.flag, *setting.values]
    if experiment.resumes and experiment.args.save is not None:
        program.append("--resume")
    return processes.torchrun(experiment.ranks, *program)


def execute(experiment: Experiment, *, show: Show) -> dict[str, Any]:
    """Runs an experiment to its end and writes its folder; returns the contents of summary.json.

    A UserError if another run uses the folder, or has used it since the experiment was resolved.
    """
    root = experiment.root
    with locked(Path(experiment.args.tensorboard_dir)):
        experiment.check_free()
        run = {
            "command": shlex.join(["megatron-muon", *sys.argv[1:]]),
            "torchrun": shlex.join(["torchrun", *torchrun(experiment)]),
            **origin(),
            "device": experiment.device,
            "ranks": experiment.ranks,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        before = read_json(root / SUMMARY) if experiment.resumes else {}
        root.mkdir(parents=True, exist_ok=True)
        (root / SUMMARY).unlink(missing_ok=True)
        write_json(root / RUN, run)
        kept = [each for each in experiment.settings if not each.is_place]
        flags = [(each.flag, each.values) for each in kept if each.source != FILLED_IN]
        heading = f"Resolved at {run['started']}; runs alone:\n{run['torchrun']}"
        text = config_text(flags, experiment.env, heading=heading)
        (root / CONFIG).write_text(text, "utf-8")
        status, last = _run_ranks(experiment, show)
        summary = summary_of(experiment, status, last, before)
        write_json(root / SUMMARY, summary)
    return summary


def _run_ranks(experiment: Experiment, show: Show) -> tuple[int, dict[str, Any]]:
    """Runs the ranks; the exit status of the run, and the last event of each kind."""
    last: dict[str, Any] = {"error": None}

    def take(event: Mapping[str, Any]) -> None:
        kind = event["event"]
        if kind == "line" and event["line"].startswith(node.ERROR):
            last["error"] = event["line"].removeprefix(node.ERROR)
        # the first validation of a step counts: other sets and the test set follow
        elif kind != "validation" or event["step"] != last.get(kind, {}).get("step"):
            last[kind] = event
        show(event)

    env = processes.environment(experiment.ranks)
    with tempfile.TemporaryDirectory(prefix="train-") as folder:
        reports = Path(folder, "events.jsonl")
        reports.touch()
        ended = processes.watch(
            [sys.executable, "-m", node.__name__, *torchrun(experiment)],
            experiment.root / LOG,
            env={**env, REPORTS: str(reports)},
            show=take,
            reports=reports,
            append=experiment.resumes,
            grace_s=_SECONDS_TO_SAVE,
        )
    if ended.signal == signal.SIGINT:
        return ExitStatus.INTERRUPTED, last
    if ended.signal is not None and ended.status != ExitStatus.TEMPFAIL:
        return 128 + ended.signal, last
    return ended.status, last


def summary_of(
    experiment: Experiment, status: int, last: Mapping[str, Any], before: Mapping[str, Any]
) -> dict[str, Any]:
    """The contents of summary.json; figures that this start lacks are those of `before`."""
    step = last.get("step", {})
    figures = {
        "iterations": max(last.get(kind, {}).get("step", 0) for kind in ("step", "saved")),
        "loss": step.get("loss"),
        "validation_loss": last.get("validation", {}).get("loss"),
        "tokens_per_second": step.get("tokens_per_s"),
        "optimizer_share": step.get("optimizer_share"),
        "checkpoint": last.get("saved", {}).get("folder"),
    }
    for name, value in figures.items():
        figures[name] = value or before.get(name, value)
    error = last["error"]
    is_finite = math.isfinite(step.get("loss") or 0.0)
    is_rejected = "diverged" in last or "Unexpected result" in (error or "")
    return {
        "outcome": _OUTCOMES.get(status, "failed"),
        "status": status,
        "error": error,
        **figures,
        "train_iters": experiment.args.train_iters,
        "diverged": is_rejected or not is_finite,
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def config_text(flags: Iterable[Flag], env: Mapping[str, str], *, heading: str) -> str:
    """An experiment file that `load_config` reads back as exactly these flags and variables."""
    lines = [f"# {line}" for line in heading.splitlines()]
    if env:
        lines.append("ENV_VARS:")
        lines += [f"  {name}: {_quoted(value)}" for name, value in env.items()]
    lines.append("MODEL_ARGS:")
    lines += [f"  {flag}: {_yaml(values)}" for flag, values in flags]
    return "\n".join(lines) + "\n"


def _yaml(values: tuple[str, ...]) -> str:
    if not values:
        return "true"
    items = [_quoted(value) for value in values]
    is_switch = values[0].lower() in ("true", "false")
    if len(values) == 1 and not is_switch and not values[0].startswith("["):
        return items[0]
    return f"[{', '.join(items)}]"


def _quoted(text: str) -> str:
    if _PLAIN.match(text):
        return text
    return json.dumps(text.replace("$", "$$"), ensure_ascii=False)
