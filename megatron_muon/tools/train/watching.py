"""What `megatron-muon train` shows of a run: its heading, what its ranks tell, and how it ended.

Progress arrives as data, the events of `megatron.TOLD`. Of what the ranks print, only this package's warnings, notes
and errors are shown; all of it is in train.log.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_muon.tools.train import run_folder, traces, wording
from megatron_muon.tools.train.run_summary import in_words
from megatron_muon.tools.train.screen import STOPPING, Screen, Status

if TYPE_CHECKING:
    from megatron_muon.tools.train.train import Experiment, Outcome

_SHOWN = ("megatron-muon: warning: ", "megatron-muon: note: ", "pretrain_gpt.py: error: ")
"""Prefixes of the ranks' lines that are meant for the user."""

_OF_THE_MODEL = ("tensor", "pipeline", "expert")
"""Kinds of parallelism with which a rank holds only part of the model, apart from FSDP's sharding."""

_PATIENCE_S = 60.0
"""Without a live line: after so many seconds without news a line says what the run is doing; the next waits longer."""


class Watcher:
    """Shows one run on a screen.

    Args:
        verbose: show all output of the ranks instead of a line for each event.
        quiet: show only the heading, warnings, errors and the end.
    """

    def __init__(self, *, verbose: bool = False, quiet: bool = False) -> None:
        self.screen = Screen(live=not quiet)
        self.status = Status(self.screen)
        self._verbose, self._quiet = verbose, quiet
        self._noted: set[str] = set()
        self._patience, self._stops = _PATIENCE_S, False
        self._is_model_parallel = False

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
            for part in wording.wrapped(line, indent=14, width=self.screen.width):
                self.screen.print(part)
        if settings:
            self.screen.print(f"\nsettings of {experiment.request.config}")
            self.screen.print("\n".join(experiment.settings_lines))
            self.screen.print(f"\ncommand     {experiment.shown_command}\n")
        sizes = (experiment.resolved.settings.get(f"{kind}_model_parallel_size") for kind in _OF_THE_MODEL)
        self._is_model_parallel = any((size or 1) > 1 for size in sizes)
        ranks = experiment.resolved.ranks
        self.status.enter(f"starting {ranks} rank{'s' if ranks > 1 else ''}")

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
            self.screen.print(f"  model       {model_line(event, is_part=self._is_model_parallel)}")
        elif kind == "step":
            self.screen.print(wording.step_line(event, self.screen.width))
        elif kind == "validation":
            self.screen.print(wording.validation_line(event), "bold")
        elif kind == "saved":
            self.screen.print(wording.saved_line(event))

    def tick(self, got: int | None) -> None:
        """Called many times a second, with the signal that this process got or None."""
        if got is not None and not self._stops:
            self._stops = True
            self.status.enter(STOPPING)
            self.screen.print(f"{signal.Signals(got).name}: asking the ranks to end; a second signal kills them")
        if not (self.screen.live or self._quiet) and (silent := self.status.silent_for(self._patience)):
            self._patience *= 2
            doing = self.status.stage or f"after step {self.status.step}"
            self.screen.print(f"nothing new for {wording.clock(silent)}: {doing}")

    def end(self, outcome: Outcome, experiment: Experiment) -> None:
        """How it ended, and what to type next."""
        summary, log = outcome.summary, experiment.own_file(run_folder.LOG)
        file = experiment.own_file(run_folder.SUMMARY)
        if not outcome.started:
            self.screen.print(f"already finished: {summary['iterations']} iterations; see {file}")
        elif not summary:  # not the first machine
            self.screen.print(f"ended with status {outcome.status}; see {log}")
        else:
            words = wording.wrapped(in_words(summary), width=self.screen.width)
            self.screen.print("\n" + "\n".join(words), "bold" if outcome.status == 0 else "bold red")
            if summary["error"]:
                self.screen.print(f"why: {summary['error']}")
        for line in () if self._verbose else outcome.trace:
            self.screen.print(f"  {line}")
        if outcome.started and summary:
            if summary["go_on"]:
                to = "to go on" if summary["checkpoint"] else "nothing was saved; to start again"
                self.screen.print(f"{to}: {summary['go_on']}")
            self.screen.print(f"see {file}, {log}")
            if note := traces.note(experiment):
                self.screen.print(note)

    def _note(self, text: str) -> None:
        if text not in self._noted:  # every rank says the same
            self._noted.add(text)
            is_error = text.startswith("pretrain_gpt.py: error")
            for line in [text] if is_error else wording.wrapped(text, width=self.screen.width):
                self.screen.print(line, "red" if is_error else "yellow" if ": warning: " in text else "")


def heading(experiment: Experiment) -> list[str]:
    """What runs where, in a few lines."""
    resolved, nodes, settings = experiment.resolved, experiment.request.nodes, experiment.resolved.settings
    forms = {"num_layers": "{} layers", "hidden_size": "width {}", "num_attention_heads": "{} heads"}
    shape = [form.format(settings[key]) for key, form in forms.items() if settings.get(key)]
    if settings.get("num_experts"):
        shape.append(f"{settings['num_experts']} experts")
    model = f" with {', '.join(shape)}" if shape else ""  # which a checkpoint's arguments may tell
    lines = [f"{run_folder.name_of(Path(experiment.request.config))}: {settings['optimizer']} on a GPT{model}"]
    where = {"cuda": "GPU", "cpu": "CPU"}[resolved.device]
    ranks = f"{resolved.ranks} on {where}s" if resolved.ranks > 1 else f"1 on a {where}"
    if nodes.count > 1:
        ranks = f"{nodes.count} machines x {ranks}; this is machine {nodes.rank}"
    if settings.get("use_megatron_fsdp"):
        ranks += f", Megatron-FSDP {settings['data_parallel_sharding_strategy']}"
    for kind in (*_OF_THE_MODEL, "context"):
        size = settings.get(f"{kind}_parallel_size" if kind == "context" else f"{kind}_model_parallel_size") or 1
        if size > 1:
            ranks += f", {kind} parallel {size}"
    lines.append(f"  ranks       {ranks}")
    lines.append(f"  steps       {_steps(settings)}")
    if resolved.env:
        variables = " ".join(f"{name}={value}" for name, value in resolved.env.items())
        lines.append(f"  environment {wording.printable(variables)}")
    lines.append(f"  run folder  {experiment.folder.root}")
    if experiment.checkpoint is not None:
        lines.append(f"  going on    from {experiment.checkpoint}")
    if count := len(resolved.filled_in):
        flags = f"{count} flag{'s' if count > 1 else ''} that this machine needs"
        lines.append(f"  filled in   {flags}; --dry-run lists all settings")
    return lines


def _steps(settings: Mapping[str, Any]) -> str:
    text = (
        f"{settings['train_iters']:,}"
        if settings.get("train_iters")
        else f"{settings.get('train_samples') or '?'} samples"
    )
    if (batch := settings.get("global_batch_size")) and settings.get("seq_length"):
        text += f" of {batch * settings['seq_length']:,} tokens, {batch} sequences of {settings['seq_length']}"
    repeated = ("validation", "eval_interval", "eval_iters"), ("checkpoint", "save_interval", "save")
    every = [f"{what} every {settings[key]:,}" for what, key, on in repeated if settings.get(on) and settings.get(key)]
    return f"{text}; {', '.join(every)}" if every else text


def model_line(event: Mapping[str, Any], *, is_part: bool) -> str:
    """The size of the model and Muon's part of it: the event `model`."""
    text = f"{event['parameters']:,} parameters" + (" on a model-parallel rank" if is_part else "")
    if event.get("muon_parameters") is not None:
        ours = event["muon_parameters"]
        text += (
            f"; Muon's are {ours:,} over all ranks" if is_part else f", {ours / event['parameters']:.1%} of them Muon's"
        )
    return f"{text}, on {event['device']}" if event.get("device") else text
