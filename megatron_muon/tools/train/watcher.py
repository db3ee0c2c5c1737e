"""Shows one run of `megatron-muon train`: its heading, its events, and its end.

Of the ranks' output only this package's warnings, notes and errors are shown; train.log has all.
"""

from __future__ import annotations

import shlex
import signal
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_muon.megatron.places import LOG, SUMMARY
from megatron_muon.tools.screen import (
    LIVE_FIGURES,
    Screen,
    clock,
    printable,
    step_line,
    validation_line,
)
from megatron_muon.tools.train.run_summary import in_words

if TYPE_CHECKING:
    from megatron_muon.tools.train.train import Experiment, Outcome

_SHOWN = ("megatron-muon: warning: ", "megatron-muon: note: ", "pretrain_gpt.py: error: ")
"""Prefixes of the ranks' lines that are meant for the user."""


class Watcher:
    """Shows one run in lines, with a live line on a terminal."""

    def __init__(self) -> None:
        self.screen = Screen()
        self._step: Mapping[str, Any] = {}
        self._noted: set[str] = set()
        self._is_stopping = False

    def enter(self, stage: str | None) -> None:
        """Starts a stage; None means that steps are taken."""
        if stage and not (self._step or self._is_stopping or self.screen.live):
            self.screen.print(f"{stage} ...")
        if self._is_stopping:
            text = "stopping"
        elif stage is None and self._step:
            text = step_line(self._step, LIVE_FIGURES)
        else:
            text = stage or ""
        self.screen.update(text, self._step.get("step", 0), self._step.get("steps"))

    def head(self, experiment: Experiment, *, all_settings: bool) -> None:
        """Shows the run's size and places, and if requested all settings and the command."""
        resolved = experiment.resolved
        for note in resolved.notes:
            if all_settings or not note.startswith("environment from "):  # also in the heading
                self._note(f"megatron-muon: {note}")
        for line in heading(experiment):
            self.screen.print(line)
        if not all_settings:
            return
        self.screen.print(f"\nsettings of {experiment.request.config}")
        for flag in (*resolved.flags, *resolved.filled_in):
            value = shlex.join(flag.values) or "true"
            self.screen.print(f"  {flag.name:<36}  {value:<24}  {flag.source}")
        self.screen.print(f"\ncommand     {experiment.shown_command}\n")

    def event(self, event: Mapping[str, Any]) -> None:
        """Shows an event of the run."""
        match event["event"]:
            case "line":
                if event["line"].startswith(_SHOWN):
                    self._note(event["line"])
            case "signal":
                self._is_stopping = True
                self.enter(None)
                name = signal.Signals(event["signal"]).name
                self.screen.print(f"{name}: asking the ranks to end; a second signal kills them")
            case "stage":
                self.enter(event["stage"])
            case "step":
                self._step = event
                self._noted.clear()  # a warning repeated in the next interval is news
                self.screen.print(step_line(event))
                self.enter(None)
            case "validation":
                self.screen.print(validation_line(event), "bold")
            case "saved":
                took = clock(event["seconds"])
                where = f"took {took}  {event['folder']}"
                self.screen.print(f"checkpoint of step {event['step']:,}  {where}")

    def end(self, outcome: Outcome, experiment: Experiment) -> None:
        """Shows how the run ended, and the command to type next."""
        summary = outcome.summary
        show = self.screen.print
        root = experiment.folder.root
        if not outcome.started:
            show(f"already finished: {summary['iterations']} iterations; see {root / SUMMARY}")
            return
        show(f"\n{in_words(summary)}", "bold" if outcome.status == 0 else "bold red")
        if summary["error"]:
            show(f"why: {summary['error']}")
        for line in outcome.trace:
            show(f"  {line}")
        if summary["go_on"]:
            has_saved = summary["checkpoint"]
            what = "to go on" if has_saved else "nothing was saved; to start again"
            show(f"{what}: {summary['go_on']}")
        show(f"see {root / SUMMARY}, {root / LOG}")

    def _note(self, text: str) -> None:
        if text in self._noted:  # every rank says the same
            return
        self._noted.add(text)
        style = ""
        if text.startswith("pretrain_gpt.py: error"):
            style = "red"
        elif ": warning: " in text:
            style = "yellow"
        self.screen.print(text, style)


def heading(experiment: Experiment) -> list[str]:
    """The size and the places of a run, in a few lines."""
    resolved = experiment.resolved
    settings = resolved.settings
    steps = settings.get("train_iters") or f"{settings.get('train_samples')} samples"
    environment = " ".join(f"{name}={value}" for name, value in resolved.env.items())
    rows = {
        "model": _model(settings),
        "ranks": f"{resolved.ranks} on {resolved.device}{_sharding(settings)}",
        "steps": f"{steps}, {settings['global_batch_size']} sequences of {settings['seq_length']}",
        "environment": printable(environment),
        "run folder": experiment.folder.root,
        "going on": experiment.checkpoint and f"from {experiment.checkpoint}",
    }
    if resolved.filled_in:
        rows["filled in"] = f"{len(resolved.filled_in)} settings for this machine; see --dry-run"
    lines = [f"{experiment.request.name}: {settings['optimizer']}"]
    lines += [f"  {name:<11} {value}" for name, value in rows.items() if value]
    return lines


def _model(settings: Mapping[str, Any]) -> str:
    words = []
    for name in ("num_layers", "hidden_size", "num_attention_heads", "num_experts"):
        if settings.get(name):  # a checkpoint may set them
            words.append(f"{name} {settings[name]}")
    return ", ".join(words)


def _sharding(settings: Mapping[str, Any]) -> str:
    words = ""
    if settings.get("use_megatron_fsdp"):
        words += f", Megatron-FSDP {settings['data_parallel_sharding_strategy']}"
    for kind in ("tensor_model", "pipeline_model", "expert_model", "context"):
        size = settings.get(f"{kind}_parallel_size") or 1
        if size > 1:
            words += f", {kind.removesuffix('_model')} parallel {size}"
    return words
