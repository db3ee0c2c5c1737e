"""What `megatron-muon train` shows of a run: its heading, the events of `megatron.TOLD`, and how it ended.

Of what the ranks print, only this package's warnings, notes and errors are shown; all of it is in train.log.
"""

from __future__ import annotations

import shlex
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_muon.tools.train import run_folder, wording
from megatron_muon.tools.train.run_summary import in_words
from megatron_muon.tools.train.screen import STOPPING, Screen, Status

if TYPE_CHECKING:
    from megatron_muon.tools.train.train import Experiment, Outcome

_SHOWN = ("megatron-muon: warning: ", "megatron-muon: note: ", "pretrain_gpt.py: error: ")
"""Prefixes of the ranks' lines that are meant for the user."""

_PATIENCE_S = 60.0
"""Without a live line: after so many seconds without news a line says what the run is doing; the next waits longer."""


class Watcher:
    """Shows one run: `verbose` all output of the ranks, `quiet` only the heading, warnings, errors and the end."""

    def __init__(self, *, verbose: bool = False, quiet: bool = False) -> None:
        self.screen = Screen(live=not quiet)
        self.status = Status(self.screen)
        self._verbose, self._quiet = verbose, quiet
        self._noted: set[str] = set()
        self._patience = _PATIENCE_S

    def enter(self, stage: str) -> None:
        """Starts a stage before there are ranks; prints a line if there is no live line."""
        self.status.enter(stage)
        if not (self.screen.live or self._quiet):
            self.screen.print(f"{stage} ...")

    def head(self, experiment: Experiment, *, settings: bool) -> None:
        """What runs where; with all settings and the command where asked."""
        for note in experiment.resolved.notes:
            if settings or not note.startswith("environment from "):  # as the file says: nothing to act on
                self._note(f"megatron-muon: {note}")
        for line in heading(experiment):
            self._print_wrapped(line)
        if settings:
            self.screen.print(f"\nsettings of {experiment.request.config}")
            for flag in (*experiment.resolved.flags, *experiment.resolved.filled_in):
                self.screen.print(f"  {flag.name:<36}  {shlex.join(flag.values) or 'true':<24}  {flag.source}")
            self.screen.print(f"\ncommand     {experiment.shown_command}\n")
        self.status.enter(f"starting the ranks ({experiment.resolved.ranks})")

    def line(self, line: str) -> None:
        """A line of the ranks' output."""
        if self._verbose:
            self.screen.print(line)
        elif line.startswith(_SHOWN):
            self._note(line)

    def event(self, event: Mapping[str, Any]) -> None:
        """An event of the training."""
        self.status.take(event)
        self._patience = _PATIENCE_S
        kind = event["event"]
        if kind == "step":
            self._noted.clear()  # what is said again in the next interval is news
        if self._quiet or self._verbose:
            return
        if kind == "model":
            self._print_wrapped(f"  model       {model_line(event)}")
        elif kind == "step":
            self.screen.print(wording.step_line(event, self.screen.width))
        elif kind == "validation":
            self.screen.print(wording.validation_line(event), "bold")
        elif kind == "saved":
            self.screen.print(wording.saved_line(event))

    def tick(self, got: int | None) -> None:
        """Called many times a second, with the signal that this process got or None."""
        if got is not None and self.status.stage != STOPPING:
            self.status.enter(STOPPING)
            self.screen.print(f"{signal.Signals(got).name}: asking the ranks to end; a second signal kills them")
        if not (self.screen.live or self._quiet) and (silent := self.status.silent_for(self._patience)):
            self._patience *= 2
            doing = self.status.stage or f"after step {self.status.step}"
            self.screen.print(f"nothing new for {wording.clock(silent)}: {doing}")

    def end(self, outcome: Outcome, experiment: Experiment) -> None:
        """How it ended, and what to type next."""
        summary, show = outcome.summary, self.screen.print
        file, log = experiment.own_file(run_folder.SUMMARY), experiment.own_file(run_folder.LOG)
        if not outcome.started:
            show(f"already finished: {summary['iterations']} iterations; see {file}")
            return
        if summary:
            words = wording.wrapped(in_words(summary), width=self.screen.width)
            show("\n" + "\n".join(words), "bold" if outcome.status == 0 else "bold red")
            if summary["error"]:
                show(f"why: {summary['error']}")
        for line in () if self._verbose else outcome.trace:
            show(f"  {line}")
        if not summary:  # not the first machine
            show(f"ended with status {outcome.status}; see {log}")
            return
        if summary["go_on"]:
            show(f"{'to go on' if summary['checkpoint'] else 'nothing was saved; to start again'}: {summary['go_on']}")
        if experiment.request.profile:
            began = (experiment.folder.root / run_folder.RUN).stat().st_mtime
            traces = [trace for trace in run_folder.traces_of(experiment.folder) if trace.stat().st_mtime >= began]
            show(f"trace: {traces[0]}" if traces else "no trace: this start did not take the steps to record")
        show(f"see {file}, {log}")

    def _print_wrapped(self, line: str) -> None:
        for part in wording.wrapped(line, indent=14, width=self.screen.width):
            self.screen.print(part)

    def _note(self, text: str) -> None:
        if text not in self._noted:  # every rank says the same
            self._noted.add(text)
            is_error = text.startswith("pretrain_gpt.py: error")
            for line in [text] if is_error else wording.wrapped(text, width=self.screen.width):
                self.screen.print(line, "red" if is_error else "yellow" if ": warning: " in text else "")


def heading(experiment: Experiment) -> list[str]:
    """What runs where, in a few lines."""
    resolved, nodes, settings = experiment.resolved, experiment.request.nodes, experiment.resolved.settings
    words = {"num_layers": "layers", "hidden_size": "wide", "num_attention_heads": "heads", "num_experts": "experts"}
    shape = ", ".join(f"{settings[key]} {word}" for key, word in words.items() if settings.get(key))
    ranks = f"{resolved.ranks} on {'GPUs' if resolved.device == 'cuda' else 'CPUs'}"
    if nodes.count > 1:
        ranks = f"{nodes.count} machines x {ranks}; this is machine {nodes.rank}"
    if settings.get("use_megatron_fsdp"):
        ranks += f", Megatron-FSDP {settings['data_parallel_sharding_strategy']}"
    for kind in ("tensor_model", "pipeline_model", "expert_model", "context"):
        if (size := settings.get(f"{kind}_parallel_size") or 1) > 1:
            ranks += f", {kind.removesuffix('_model')} parallel {size}"
    name = run_folder.name_of(Path(experiment.request.config))
    lines = [
        f"{name}: {settings['optimizer']} on a GPT{shape and f' of {shape}'}",  # a checkpoint's arguments may tell
        f"  ranks       {ranks}",
        f"  steps       {_steps(settings)}",
    ]
    if resolved.env:
        variables = " ".join(f"{name}={value}" for name, value in resolved.env.items())
        lines.append(f"  environment {wording.printable(variables)}")
    lines.append(f"  run folder  {experiment.folder.root}")
    if experiment.checkpoint is not None:
        lines.append(f"  going on    from {experiment.checkpoint}")
    if resolved.filled_in:
        lines.append(f"  filled in   {len(resolved.filled_in)} (what this machine needs); --dry-run lists all settings")
    return lines


def _steps(settings: Mapping[str, Any]) -> str:
    count = settings.get("train_iters")
    text = f"{count:,}" if count else f"{settings.get('train_samples') or '?'} samples"
    if (batch := settings.get("global_batch_size")) and settings.get("seq_length"):
        text += f" of {batch * settings['seq_length']:,} tokens, {batch} sequences of {settings['seq_length']}"
    return text


def model_line(event: Mapping[str, Any]) -> str:
    """The size of the model and Muon's part of it: the event `model`."""
    text = f"{event['parameters']:,} parameters on a model-parallel rank"
    if (muon := event.get("muon_parameters")) is not None:
        text += f"; Muon has {muon:,} over all ranks"
    return f"{text}, on {event['device']}" if event.get("device") else text
