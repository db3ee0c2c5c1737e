"""Runs a sweep: resolves every run before the first starts, skips what is done, resumes what was stopped.

Every run is one of `tools.train.train`, in its own folder; `grid` says which there are, `results` sums them up. Several
may be under way at once, each in a thread, and a signal ends them all as Ctrl-C ends one.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from megatron_muon.checkpoint.locks import Lock
from megatron_muon.errors import UserError
from megatron_muon.megatron import FIRST_STEP
from megatron_muon.megatron.flags.config_file import UNSET_FLAG, as_argv, load_config
from megatron_muon.megatron.places import PLACES
from megatron_muon.megatron.provenance import cores
from megatron_muon.tools.sweep.grid import Task
from megatron_muon.tools.train import processes, run_folder, wording
from megatron_muon.tools.train.resolve import FROM_FOLDER, FROM_LINE, FROM_SET, Request, Resolved, resolve_each
from megatron_muon.tools.train.run_summary import in_words
from megatron_muon.tools.train.screen import Screen, Status
from megatron_muon.tools.train.train import Outcome, execute, prepare

FRESH, RESUMED, AGAIN, DONE, CHANGED = "to do", "to resume", "to start again", "done", "changed"
"""States of a run before the sweep: AGAIN was cut off without a checkpoint, CHANGED was trained with other settings."""

_OF_OPTIMIZERS = re.compile(r"(optimizer|lr|min_lr|weight_decay|clip_grad|(muon|adaptive_muon|adam|lr)_\w+)\Z")
_LINE_EVERY_S = 60.0


@dataclass(frozen=True, eq=False)
class Plan:
    """A run of a sweep with its settings resolved."""

    task: Task
    request: Request
    resolved: Resolved

    @cached_property
    def state(self) -> str:
        """Its state when this is first asked for."""
        folder = self.resolved.folder
        run, summary = (run_folder.read_json(folder.root / name) for name in (run_folder.RUN, run_folder.SUMMARY))
        if run.get("config_hash") != self.resolved.config_hash:
            return CHANGED if summary.get("iterations") or folder.has_steps or folder.checkpoint else FRESH
        if summary.get("outcome") == "finished" or (summary.get("outcome") == "failed" and summary.get("diverged")):
            return DONE
        return RESUMED if folder.checkpoint else AGAIN

    def changes(self) -> list[str]:
        """Where its settings have changed, those that differ, as `--lr was 0.1, now 0.2`."""
        if self.state != CHANGED:
            return []
        try:
            before = load_config(self.resolved.folder.root / run_folder.CONFIG)
        except (UserError, OSError):
            return ["its config.yaml cannot be read"]
        old: dict[str, Any] = {**before.env, **dict(before.flags)}
        new: dict[str, Any] = {**self.resolved.env, **dict(self.resolved.flag_values)}
        names = [name for name in {**old, **new} if name not in PLACES and old.get(name) != new.get(name)]
        return [f"{name} was {_shown(old.get(name))}, now {_shown(new.get(name))}" for name in names]

    def flags(self) -> list[str]:
        """What its command line adds to the experiment file, for pretrain_gpt.py."""
        sources = (FROM_SET, FROM_LINE, FROM_FOLDER)
        added = as_argv((flag.name, flag.values) for flag in self.resolved.flags if flag.source in sources)
        here = {flag.name for flag in self.resolved.flags}
        # Placeholders of flags that are given otherwise may be unset.
        file = load_config(self.request.config, overridden={"--save", "--tensorboard-dir", "--load", *here})
        in_file = {name for name, _ in file.flags} | file.overridden
        return [*(token for name in sorted(in_file - here) for token in (UNSET_FLAG, name)), *added]


def resolve(tasks: Sequence[Task], every: Request) -> list[Plan]:
    """Resolves all runs, so that a mistake is found before hours of training; `every` is what all have in common."""
    requests = [
        replace(every, sets=(*every.sets, *task.point.settings, ("seed", str(task.seed))), out=str(task.folder))
        for task in tasks
    ]
    plans = []
    for task, request, answer in zip(tasks, requests, resolve_each(requests), strict=True):
        if isinstance(answer, UserError):
            raise UserError(f"{task.point.name}: {answer}")
        plans.append(Plan(task, request, answer))
    return plans


def refuse_changed(plans: Sequence[Plan]) -> None:
    """Raises a UserError for runs that were trained with other settings: which, what differs, and what to type."""
    if changed := [plan for plan in plans if plan.state == CHANGED]:
        raise UserError(
            f"{len(changed)} of {len(plans)} runs have results of other settings, such as {changed[0].task.folder} "
            f"({'; '.join(changed[0].changes()[:3])}); give another folder with --out DIR, or train these anew with "
            f"--overwrite (deletes them)"
        )


def only_one(out: Path) -> contextlib.AbstractContextManager[object]:
    """Keeps a second sweep away from the folder: that one gets a UserError."""
    return Lock(out / ".sweep.lock", f"a sweep is under way in {out}", "give another --out DIR").held()


class Sweep:
    """Runs those of `plans` that are not done, in their order, at most `jobs` at once, and shows each on `screen`.

    When the first run knows its speed, a line says how long all take. `signal` is the first that was received.
    """

    def __init__(self, plans: Sequence[Plan], jobs: int) -> None:
        self.signal: int | None = None
        self.screen = Screen()
        self.stop = threading.Event()
        self.to_do = [plan for plan in plans if plan.state != DONE]
        self._total, self._left, self._jobs, self._start = len(plans), len(self.to_do), jobs, time.monotonic()
        self._said_how_long = False
        self._slots: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(jobs):
            self._slots.put(slot)
        self._indexing = threading.Lock()
        self._indexed: set[tuple[Any, ...]] = set()

    def run(self, ended: Callable[[Plan, Outcome], object]) -> None:
        """Runs all, to their end or the first signal; calls `ended`, in this thread, for each that was started."""
        with processes.signals_handled(self._on_signal), ThreadPoolExecutor(self._jobs) as pool:
            try:
                for future in as_completed([pool.submit(self._one, plan) for plan in self.to_do]):
                    if (found := future.result()) is not None:
                        ended(*found)
            except BaseException:  # Ctrl-C too: no run is left behind
                self.stop.set()
                raise

    def first_speed(self, seconds_left: float) -> None:
        """Says once how long all runs take, by what one of the first has left."""
        if not self._said_how_long:
            self._said_how_long = True
            seconds = -(-len(self.to_do) // self._jobs) * (time.monotonic() - self._start + seconds_left)
            self.screen.print(f"about {wording.clock(seconds)} for all, by the speed of the first run")

    def ended(self, plan: Plan, outcome: Outcome) -> None:
        """Shows how a run ended."""
        self._left -= 1
        words, done = in_words(outcome.summary, why=True), self._total - self._left
        self.screen.print(f"[{done}/{self._total}] {plan.task.name}: {words}, {outcome.summary['seconds']:.0f} s")

    def _one(self, plan: Plan) -> tuple[Plan, Outcome] | None:
        """A run in its thread; None where the sweep was stopped before.

        Megatron writes the index of a data set into a folder that runs share, before the first step: two runs that may
        want the same one, which no run has used yet, do so one after the other.
        """
        data = _data_of(plan.task)
        with contextlib.ExitStack() as until_indexed:
            if data not in self._indexed:
                until_indexed.enter_context(self._indexing)
            if data in self._indexed:  # while this one waited
                until_indexed.close()
            if self.stop.is_set():
                return None

            def indexed() -> None:
                self._indexed.add(data)
                until_indexed.close()

            request = replace(plan.request, resume=plan.state == RESUMED, overwrite=plan.state in (AGAIN, CHANGED))
            slot, listener = self._slots.get(), Listener(plan, self, indexed)
            env = _share(plan.resolved, slot, self._jobs) | _group(plan.task)
            try:
                outcome = execute(prepare(request, plan.resolved), show=listener.event, stop=self.stop, env=env)
            finally:
                listener.status.end()
                self._slots.put(slot)
        self.ended(plan, outcome)
        return plan, outcome

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        """The first signal ends all runs as Ctrl-C does, the second kills them."""
        if self.signal is None:
            self.signal = number
            self.stop.set()
            return
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                process.kill()


class Listener:
    """Shows one run of a sweep: a live line on a terminal, else its start and a line each minute."""

    def __init__(self, plan: Plan, sweep: Sweep, indexed: Callable[[], object]) -> None:
        self.status = Status(sweep.screen, "starting", name=plan.task.name)
        self._name, self._sweep, self._indexed, self._printed = plan.task.name, sweep, indexed, time.monotonic()
        if not sweep.screen.live:
            sweep.screen.print(f"{self._name}: {'resumed' if plan.state == RESUMED else 'started'}")

    def event(self, event: Mapping[str, Any]) -> None:
        """An event of the run, see `train.Show`; its log has its lines, and signals reach the sweep."""
        if event["event"] == "step" or event.get("stage") == FIRST_STEP:
            self._indexed()
        self.status.take(event)
        if (left := event.get("seconds_left")) is not None:
            self._sweep.first_speed(left)
        now = time.monotonic()
        if not self._sweep.screen.live and event["event"] == "step" and now - self._printed >= _LINE_EVERY_S:
            self._printed = now
            self._sweep.screen.print(f"{self._name}: {wording.step_line(event)}")


def _data_of(task: Task) -> tuple[Any, ...]:
    """What the index of a run's data set may depend on: its seed, and all settings but those of optimizers."""
    return task.seed, tuple(
        setting for setting in task.point.settings if not _OF_OPTIMIZERS.match(setting[0].replace("-", "_"))
    )


def _group(task: Task) -> dict[str, str]:
    """The Weights & Biases group of a sweep's runs, unless the environment names one: the sweep's folder."""
    return {} if "WANDB_RUN_GROUP" in os.environ else {"WANDB_RUN_GROUP": task.folder.resolve().parents[1].name}


def _share(resolved: Resolved, slot: int, jobs: int) -> dict[str, str]:
    """The part of the machine that one of several runs gets: cores, and GPUs."""
    if jobs == 1:
        return {}
    ranks, env = resolved.ranks, {}
    if "OMP_NUM_THREADS" not in {**resolved.env, **os.environ}:
        env["OMP_NUM_THREADS"] = str(max(1, cores() // (jobs * ranks)))
    if resolved.device == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = visible.split(",") if visible else [str(number) for number in range(resolved.gpus)]
        env["CUDA_VISIBLE_DEVICES"] = ",".join(devices[slot * ranks : (slot + 1) * ranks])
    return env


def _shown(values: str | tuple[str, ...] | None) -> str:
    if values is None:
        return "not given"
    return values if isinstance(values, str) else " ".join(values) or "true"
