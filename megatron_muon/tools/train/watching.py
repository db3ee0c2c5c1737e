"""What `megatron-muon train` shows of a run: its heading, its events (`train.Show`), and how it ended.

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


class Watcher:
    """Shows one run: `verbose` all output of the ranks, `quiet` only the heading, warnings, errors and the end."""

    def __init__(self, *, verbose: bool = False, quiet: bool = False) -> None:
        self.screen = Screen(live=not quiet)
        self.status = Status(self.screen)
        self._verbose, self._quiet = verbose, quiet
        self._noted: set[str] = set()

    def enter(self, stage: str) -> None:
        """Starts a stage before the first step; prints a line if there is no live line."""
        self.status.enter(stage)
        if not (self.screen.live or self._quiet or self._verbose):
            self.screen.print(f"{stage} ...")

    def head(self, experiment: Experiment, *, settings: bool) -> None:
        """What runs where; with all settings and the command where asked."""
        resolved, show = experiment.resolved, self.screen.print
        for note in resolved.notes:
            if settings or not note.startswith("environment from "):  # as the file says: nothing to act on
                self._note(f"megatron-muon: {note}")
        for line in heading(experiment):
            show("\n".join(wording.wrapped(line, indent=14, width=self.screen.width)))
        if settings:
            show(f"\nsettings of {experiment.request.config}")
            for flag in (*resolved.flags, *resolved.filled_in):
                show(f"  {flag.name:<36}  {shlex.join(flag.values) or 'true':<24}  {flag.source}")
            show(f"\ncommand     {experiment.shown_command}\n")

    def event(self, event: Mapping[str, Any]) -> None:
        """Shows an event of the run."""
        kind, show = event["event"], self.screen.print
        if kind == "line":
            if self._verbose:
                show(event["line"])
            elif event["line"].startswith(_SHOWN):
                self._note(event["line"])
        elif kind == "signal":
            self.status.enter(STOPPING)
            show(f"{signal.Signals(event['signal']).name}: asking the ranks to end; a second signal kills them")
        elif kind == "stage" and event["stage"] and not (self.status.figures or self.status.stage == STOPPING):
            self.enter(event["stage"])
        else:
            self.status.take(event)
        if kind == "step":
            self._noted.clear()  # what is said again in the next interval is news
        if self._quiet or self._verbose:
            return
        if kind == "step":
            show(wording.step_line(event, self.screen.width))
        elif kind == "validation":
            show(wording.validation_line(event), "bold")
        elif kind == "saved":
            took = wording.clock(event["seconds"])
            show(f"checkpoint of step {event['step']:,}  took {took}  {event['folder']}")

    def end(self, outcome: Outcome, experiment: Experiment) -> None:
        """How it ended, and what to type next."""
        summary, show = outcome.summary, self.screen.print
        file, log = (experiment.folder.root / name for name in (run_folder.SUMMARY, run_folder.LOG))
        if not outcome.started:
            show(f"already finished: {summary['iterations']} iterations; see {file}")
            return
        words = wording.wrapped(in_words(summary), width=self.screen.width)
        show("\n" + "\n".join(words), "bold" if outcome.status == 0 else "bold red")
        if summary["error"]:
            show(f"why: {summary['error']}")
        for line in () if self._verbose else outcome.trace:
            show(f"  {line}")
        if summary["go_on"]:
            show(f"{'to go on' if summary['checkpoint'] else 'nothing was saved; to start again'}: {summary['go_on']}")
        show(f"see {file}, {log}")

    def _note(self, text: str) -> None:
        if text not in self._noted:  # every rank says the same
            self._noted.add(text)
            is_error = text.startswith("pretrain_gpt.py: error")
            shown = text if is_error else "\n".join(wording.wrapped(text, width=self.screen.width))
            self.screen.print(shown, "red" if is_error else "yellow" if ": warning: " in text else "")


def heading(experiment: Experiment) -> list[str]:
    """What runs where, in a few lines."""
    resolved, settings = experiment.resolved, experiment.resolved.settings
    words = {"num_layers": "layers", "hidden_size": "wide", "num_attention_heads": "heads", "num_experts": "experts"}
    shape = ", ".join(f"{settings[key]} {word}" for key, word in words.items() if settings.get(key))
    ranks = f"{resolved.ranks} on {'GPUs' if resolved.device == 'cuda' else 'CPUs'}"
    if settings.get("use_megatron_fsdp"):
        ranks += f", Megatron-FSDP {settings['data_parallel_sharding_strategy']}"
    for kind in ("tensor_model", "pipeline_model", "expert_model", "context"):
        if (size := settings.get(f"{kind}_parallel_size") or 1) > 1:
            ranks += f", {kind.removesuffix('_model')} parallel {size}"
    count = settings.get("train_iters")
    steps = f"{count:,}" if count else f"{settings.get('train_samples') or '?'} samples"
    if (batch := settings.get("global_batch_size")) and (length := settings.get("seq_length")):
        steps = f"{steps} of {batch * length:,} tokens, {batch} sequences of {length}"
    name = run_folder.name_of(Path(experiment.request.config))
    env = wording.printable(" ".join(f"{name}={value}" for name, value in resolved.env.items()))
    rows = {
        "ranks": ranks,
        "steps": steps,
        "environment": env,
        "run folder": experiment.folder.root,
        "going on": experiment.checkpoint and f"from {experiment.checkpoint}",
        "filled in": resolved.filled_in
        and f"{len(resolved.filled_in)} (what this machine needs); --dry-run lists all settings",
    }
    return [
        f"{name}: {settings['optimizer']} on a GPT{shape and f' of {shape}'}",  # a checkpoint's arguments may tell
        *(f"  {row:<11} {value}" for row, value in rows.items() if value),
    ]
