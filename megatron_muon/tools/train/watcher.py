"""Shows one run of `megatron-muon train`: its heading, its events, and its end.

Of the ranks' output only this package's warnings, notes and errors are shown; train.log has all.
"""

from __future__ import annotations

import shlex
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_muon.megatron.places import LOG, SUMMARY
from megatron_muon.tools.screen import LIVE_FIGURES, Screen, step_line

if TYPE_CHECKING:
    from megatron_muon.tools.train.resolve import Experiment

_SHOWN = ("megatron-muon: warning: ", "megatron-muon: note: ", "pretrain_gpt.py: error: ")
"""Prefixes of the ranks' lines that are meant for the user."""


class Watcher:
    """Shows one run in lines, with a live line on a terminal."""

    def __init__(self) -> None:
        self.screen = Screen()
        self._step: Mapping[str, Any] = {}
        self._noted: set[str] = set()
        self._is_stopping = False
        self._has_fault = False

    def enter(self, stage: str) -> None:
        """Shows a stage: on the live line, or before the first step as a line."""
        if not (self._step or self.screen.live):
            self.screen.print(f"{stage} ...")
        if not self._is_stopping:
            self.screen.update(stage, self._step.get("step", 0), self._step.get("steps"))

    def head(self, experiment: Experiment, command: str, *, all_settings: bool) -> None:
        """Shows the run's size and places, and if requested all settings and the command."""
        for note in experiment.notes:
            if all_settings or not note.startswith("defaults filled in"):
                self._note(f"megatron-muon: {note}")
        args = experiment.args
        steps = args.train_iters or f"{args.train_samples} samples"
        batch = f"{args.global_batch_size} sequences of {args.seq_length}"
        self.screen.print(f"model       {args.num_layers} layers of {args.hidden_size}")
        self.screen.print(f"ranks       {experiment.ranks} on {experiment.device}")
        self.screen.print(f"steps       {steps}, {batch}, {args.optimizer}")
        self.screen.print(f"run folder  {experiment.root}")
        if not all_settings:
            return
        self.screen.print("\nsettings")
        for flag, values, source in experiment.settings:
            value = shlex.join(values) or "true"
            self.screen.print(f"  {flag:<36}  {value:<24}  {source}")
        self.screen.print(f"\ncommand     {command}\n")

    def event(self, event: Mapping[str, Any]) -> None:
        """Shows an event of the run."""
        match event["event"]:
            case "line":
                if event["line"].startswith(_SHOWN):
                    self._note(event["line"])
            case "signal":
                name = signal.Signals(event["signal"]).name
                self.screen.print(f"{name}: asking the ranks to end; a second signal kills them")
                self.enter("stopping")
                self._is_stopping = True
            case "stage":
                self.enter(event["stage"])
            case "step":
                self._step = event
                self._noted.clear()  # a warning repeated in the next interval is news
                self.screen.print(step_line(event))
                self.enter(step_line(event, LIVE_FIGURES))
            case "validation":
                line = f"validation loss {event['loss']:.4f}  at {event['at']}"
                self.screen.print(line, "bold")
            case "audit":
                self._has_fault = True
            case "saved":
                self.screen.print(f"checkpoint of step {event['step']}  {event['folder']}")

    def end(self, summary: Mapping[str, Any], root: Path) -> None:
        """Shows how the run ended, and the command to type next."""
        steps = summary["iterations"]
        text = f"{summary['outcome']} with status {summary['status']} after {steps} iterations"
        for name, label in (("loss", "training loss"), ("validation_loss", "validation loss")):
            if summary[name] is not None:
                text += f", {label} {summary[name]:.4f}"
        if summary["diverged"]:
            text += "; DIVERGED: the loss or a gradient is not a number"
        self.screen.print(f"\n{text}", "bold" if summary["status"] == 0 else "bold red")
        if summary["error"]:
            self.screen.print(f"why: {summary['error']}")
        is_unfinished = 0 < steps < (summary["train_iters"] or 0)
        is_sound = not (summary["diverged"] or self._has_fault)
        if is_unfinished and summary["checkpoint"] and is_sound:
            command = shlex.join(["megatron-muon", "train", "--resume", "--out", str(root)])
            self.screen.print(f"to go on: {command}")
        self.screen.print(f"see {root / SUMMARY}, {root / LOG}")

    def _note(self, text: str) -> None:
        if text in self._noted:  # every rank says the same
            return
        self._noted.add(text)
        self.screen.print(text, "" if ": note: " in text else "yellow")
