"""What `megatron-muon train` shows of a run: its heading, what its ranks tell, and how it ended.

What a run did travels as data: the events of `megatron.TOLD`. Of the ranks' own output only this package's warnings,
notes and errors are shown, as they stand; all of it is in train.log.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_muon.runs import run_folder, traces, wording
from megatron_muon.runs.run_summary import in_words
from megatron_muon.runs.screen import Screen, Status

if TYPE_CHECKING:
    from megatron_muon.runs.train import Experiment, Outcome

_SHOWN = ("megatron-muon: warning: ", "megatron-muon: note: ", "pretrain_gpt.py: error: ")
"""How lines of the ranks begin that are meant for whoever started the run."""

_PATIENCE_S = 60.0
"""Where there is no live line: seconds without news after which a line says what goes on; then twice as long."""


class Watcher:
    """Shows one run on a screen.

    Args:
        verbose: all output of the ranks as it comes, too.
        quiet: nothing of the training but warnings and errors.
    """

    def __init__(self, *, verbose: bool = False, quiet: bool = False, live: bool | None = None) -> None:
        self.status = Status()
        self.screen = Screen(lambda width, plain: [self.status.line(width, plain=plain)], live=False if quiet else live)
        self._verbose, self._quiet = verbose, quiet
        self._noted: set[str] = set()
        self._patience, self._stops = _PATIENCE_S, False
        self._is_model_parallel = False

    def enter(self, stage: str) -> None:
        """What goes on before there are ranks; a line of its own where no live line can say it."""
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
        self._is_model_parallel = is_model_parallel(experiment.resolved.settings)
        ranks = experiment.resolved.ranks
        self.status.enter(f"starting {ranks} rank{'s' if ranks > 1 else ''}")

    def line(self, line: str) -> None:
        """A line of the ranks' output."""
        if self._verbose:
            self.screen.print(line)
        elif line.startswith(_SHOWN):
            self._note(line)

    def event(self, told: Mapping[str, Any]) -> None:
        """An event of the training."""
        self.status.take(told)
        self._patience = _PATIENCE_S
        if self._stops:
            self.status.stage = "stopping"
        if self._quiet or self._verbose:
            return
        width, kind = self.screen.width, told["event"]
        if kind == "model":
            self.screen.print(f"  model       {model_line(told, is_part=self._is_model_parallel)}")
        elif kind == "step":
            self.screen.print(wording.step_line(told, width))
        elif kind == "validation":
            self.screen.print(wording.validation_line(told, width), "bold")
        elif kind == "saved":
            self.screen.print(wording.saved_line(told))

    def tick(self, got: int | None) -> None:
        """Is called all the time, with the signal that this process got or None."""
        if got is not None and not self._stops:
            self._stops = True
            self.status.enter("stopping")
            self.screen.print(f"{signal.Signals(got).name}: asking the ranks to end; a second signal kills them")
        silent = time.monotonic() - self.status.heard
        if silent > self._patience and not (self.screen.live or self._quiet):
            self._patience *= 2
            doing = self.status.stage or f"after step {self.status.step}"
            self.screen.print(f"nothing new for {wording.clock(silent)}: {doing}")

    def end(self, outcome: Outcome, experiment: Experiment) -> None:
        """How it ended, and what to type next."""
        summary, log = outcome.summary, experiment.own_file(run_folder.LOG)
        if not outcome.started:
            self.screen.print(f"finished before: {summary['iterations']} iterations; see {_file(experiment)}")
        elif not summary:  # of another machine than the first
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
            self.screen.print(f"see {_file(experiment)}, {log}")
        if outcome.started and (note := traces.note(experiment)):
            self.screen.print(note)

    def _note(self, text: str) -> None:
        if text not in self._noted:  # every rank says the same
            self._noted.add(text)
            is_error = text.startswith("pretrain_gpt.py: error")
            for line in [text] if is_error else wording.wrapped(text, width=self.screen.width):
                self.screen.print(line, "red" if is_error else "yellow" if ": warning: " in text else "")


def heading(experiment: Experiment) -> list[str]:
    """What runs where, in a few lines."""
    resolved, nodes = experiment.resolved, experiment.request.nodes
    told = resolved.settings
    lines = [run_folder.name_of(Path(experiment.request.config)) if not experiment.request.keeps_places else
             experiment.folder.root.name]  # fmt: skip
    model = [f"{told['num_layers']} layers of {told['hidden_size']}", f"{told['num_attention_heads']} heads"]
    if told.get("num_experts"):
        model.append(f"{told['num_experts']} experts")
    lines[0] += f": {told['optimizer']} on a GPT with {', '.join(model)}"
    where = {"cuda": "GPU", "cpu": "CPU"}[resolved.device]
    ranks = f"{resolved.ranks} on {where}s" if resolved.ranks > 1 else f"1 on a {where}"
    if nodes.count > 1:
        ranks = f"{nodes.count} machines x {ranks}; this is number {nodes.rank}"
    if told.get("use_megatron_fsdp"):
        ranks += f", Megatron-FSDP {told['data_parallel_sharding_strategy']}"
    for name, word in (("tensor", "tensor"), ("pipeline", "pipeline"), ("context", "context"), ("expert", "expert")):
        suffix = "_model_parallel_size" if name != "context" else "_parallel_size"
        if (told.get(name + suffix) or 1) > 1:
            ranks += f", {word} parallel {told[name + suffix]}"
    lines.append(f"  ranks       {ranks}")
    lines.append(f"  steps       {_steps(told)}")
    lines.append(f"  run folder  {experiment.folder.root}")
    if experiment.checkpoint is not None:
        lines.append(f"  going on    from {experiment.checkpoint}")
    if count := len(resolved.filled_in):
        flags = f"{count} flag{'s' if count > 1 else ''} that this machine needs"
        lines.append(f"  filled in   {flags}; --dry-run lists all settings")
    return lines


def _steps(told: Mapping[str, Any]) -> str:
    text = f"{told['train_iters']:,}" if told.get("train_iters") else f"{told.get('train_samples') or '?'} samples"
    if (batch := told.get("global_batch_size")) and told.get("seq_length"):
        text += f" of {batch * told['seq_length']:,} tokens, {batch} sequences of {told['seq_length']}"
    repeated = ("validation", "eval_interval", "eval_iters"), ("checkpoint", "save_interval", "save")
    every = [f"{what} every {told[key]:,}" for what, key, on in repeated if told.get(on) and told.get(key)]
    return f"{text}; {', '.join(every)}" if every else text


def is_model_parallel(settings: Mapping[str, Any]) -> bool:
    """Whether a rank has a part of the model only, apart from what FSDP shards."""
    names = (f"{name}_model_parallel_size" for name in ("tensor", "pipeline", "expert"))
    return any((settings.get(name) or 1) > 1 for name in names)


def model_line(told: Mapping[str, Any], *, is_part: bool) -> str:
    """How large the model is and what Muon has of it: the event `model`."""
    text = f"{told['parameters']:,} parameters" + (" of a model-parallel rank" if is_part else "")
    if told.get("muon_parameters") is not None:
        ours = told["muon_parameters"]
        text += f", {ours:,} in all are Muon's" if is_part else f", {ours / told['parameters']:.1%} of them Muon's"
    return f"{text}, on {told['device']}" if told.get("device") else text


def _file(experiment: Experiment) -> Path:
    return experiment.folder.root / run_folder.SUMMARY
