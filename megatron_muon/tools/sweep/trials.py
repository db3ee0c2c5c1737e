"""Runs a sweep: resolves every run before the first starts, skips what is done, resumes what was stopped.

Every run is one of `tools.train.train`, in its own folder; `grid` says which there are, `results` sums them up. Several
may be under way at once, each in a thread, and a signal ends them all as Ctrl-C ends one.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import psutil

from megatron_muon.errors import UserError
from megatron_muon.megatron import FIRST_STEP
from megatron_muon.megatron.flags.config_file import UNSET_FLAG, as_argv, load_config
from megatron_muon.megatron.places import RUN, SUMMARY, read_json
from megatron_muon.megatron.provenance import cores
from megatron_muon.tools.screen import Screen, Status, clock
from megatron_muon.tools.sweep.grid import Task
from megatron_muon.tools.train import processes
from megatron_muon.tools.train.resolve import FROM_FOLDER, FROM_LINE, FROM_SET, Request, Resolved, resolve_each
from megatron_muon.tools.train.run_summary import in_words
from megatron_muon.tools.train.train import execute, prepare

FRESH, RESUMED, AGAIN, DONE, CHANGED = "to do", "to resume", "to start again", "done", "changed"
"""States of a run before the sweep: AGAIN was cut off without a checkpoint, CHANGED was trained with other settings."""


@dataclass(frozen=True, eq=False)
class Plan:
    """A run of a sweep with its settings resolved."""

    task: Task
    request: Request
    resolved: Resolved

    @property
    def state(self) -> str:
        """Its state, from what lies in its folder now."""
        folder = self.resolved.folder
        run, summary = (read_json(folder.root / name) for name in (RUN, SUMMARY))
        if run.get("config_hash") != self.resolved.config_hash:
            return CHANGED if summary.get("iterations") or folder.has_steps or folder.checkpoint else FRESH
        if summary.get("outcome") == "finished" or (summary.get("outcome") == "failed" and summary.get("diverged")):
            return DONE
        return RESUMED if folder.checkpoint else AGAIN

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
        replace(every, sets=(*every.sets, *task.settings, ("seed", str(task.seed))), out=str(task.folder))
        for task in tasks
    ]
    plans = []
    for task, request, answer in zip(tasks, requests, resolve_each(requests), strict=True):
        if isinstance(answer, UserError):
            raise UserError(f"{task.point}: {answer}")
        plans.append(Plan(task, request, answer))
    return plans


def refuse_changed(plans: Sequence[Plan]) -> None:
    """Raises a UserError for runs that were trained with other settings."""
    if changed := [plan.task.folder for plan in plans if plan.state == CHANGED]:
        raise UserError(
            f"{len(changed)} of {len(plans)} runs have results of other settings, such as {changed[0]}; give another "
            "folder with --out DIR, or delete these and train them anew with --overwrite"
        )


class Sweep:
    """Runs those of `plans` that are not done, in their order, at most `jobs` at once, and shows each on `screen`.

    `signal` is the first that was received.
    """

    def __init__(self, plans: Sequence[Plan], jobs: int) -> None:
        self.signal: int | None = None
        self.screen = Screen()
        self.to_do = [plan for plan in plans if plan.state != DONE]
        self._total, self._ended, self._jobs, self._began = len(plans), 0, jobs, time.monotonic()
        self._stop = threading.Event()
        self._free_slots = list(range(jobs))
        self._starting = threading.Lock()

    def run(self, ended: Callable[[], object]) -> None:
        """Runs all, to their end or the first signal; calls `ended`, in this thread, when one has ended."""
        with self.screen, processes.signals_handled(self._on_signal), ThreadPoolExecutor(self._jobs) as pool:
            try:
                for future in as_completed([pool.submit(self._one, plan) for plan in self.to_do]):
                    if (summary := future.result()) is not None:
                        self._show_end(*summary)
                        ended()
            except BaseException:  # Ctrl-C too: no run is left behind
                self._stop.set()
                raise

    def _one(self, plan: Plan) -> tuple[Plan, Mapping[str, Any]] | None:
        """A run in its thread, and its summary; None where the sweep was stopped before.

        Megatron writes the index of a data set into a folder that runs share, before the first step: runs start one
        after the other.
        """
        with contextlib.ExitStack() as starting:
            starting.enter_context(self._starting)
            if self._stop.is_set():
                return None
            state, slot = plan.state, self._free_slots.pop()
            request = replace(plan.request, resume=state == RESUMED, overwrite=state in (AGAIN, CHANGED))
            group = os.environ.get("WANDB_RUN_GROUP") or plan.task.folder.resolve().parents[1].name
            status = Status(self.screen, "starting", name=plan.task.name)

            def show(event: Mapping[str, Any]) -> None:
                if event["event"] == "step" or event.get("stage") == FIRST_STEP:
                    starting.close()
                status.take(event)

            if not self.screen.live:
                self.screen.print(f"{plan.task.name}: {'resumed' if state == RESUMED else 'started'}")
            try:
                outcome = execute(
                    prepare(request, plan.resolved),
                    show=show,
                    stop=self._stop,
                    env={"WANDB_RUN_GROUP": group, **_share(plan.resolved, slot, self._jobs)},
                )
            finally:
                status.end()
                self._free_slots.append(slot)
        return plan, outcome.summary

    def _show_end(self, plan: Plan, summary: Mapping[str, Any]) -> None:
        self._ended += 1
        left = (time.monotonic() - self._began) / self._ended * (len(self.to_do) - self._ended)
        done = self._total - len(self.to_do) + self._ended
        self.screen.print(
            f"[{done}/{self._total}] {plan.task.name}: {in_words(summary, why=True)}, {summary['seconds']:.0f} s; "
            f"about {clock(left)} left"
        )

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        """The first signal ends all runs as Ctrl-C does, the second kills them."""
        if self.signal is None:
            self.signal = number
            self._stop.set()
            return
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                process.kill()


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
