"""A sweep: which runs there are, in what state, how they are run, and the table of their results.

Every point of its `--grid`s is run with every seed: one `--grid` is a product of its keys' values,
several are alternatives. All runs are resolved before the first starts; what is done is skipped,
what was stopped resumed. Several may be under way at once, each in a thread, and a signal ends them
all as Ctrl-C ends one.

The final loss that points are compared by is the last validation loss, or the training loss where
there is no validation. A point counts for the best when all of its seeds have finished and none has
diverged.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import itertools
import os
import re
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import psutil

from megatron_muon.checkpoint import folders
from megatron_muon.errors import UserError
from megatron_muon.megatron import FIRST_STEP
from megatron_muon.megatron.flags.config_file import UNSET_FLAG, as_argv, load_config
from megatron_muon.megatron.places import RUN, SUMMARY, read_json
from megatron_muon.megatron.provenance import cores
from megatron_muon.tools.report.arms import MEASURE, Arm, at_edges, best_of
from megatron_muon.tools.screen import Screen, Status, clock
from megatron_muon.tools.train import processes, run_folder
from megatron_muon.tools.train.resolve import (
    FROM_FOLDER,
    FROM_LINE,
    FROM_SET,
    Request,
    Resolved,
    resolve_each,
)
from megatron_muon.tools.train.run_summary import in_words
from megatron_muon.tools.train.train import execute, prepare

FRESH, RESUMED, AGAIN, DONE, CHANGED = "to do", "to resume", "to start again", "done", "changed"
"""States of a run before the sweep: AGAIN was cut off without a checkpoint, CHANGED was trained with other settings."""

CSV, JSON = "results.csv", "results.json"

FIGURES = (
    *(
        "iterations",
        "tokens",
        "loss_last",
        "validation_loss",
        "step_ms",
        "tokens_per_second",
        "seconds",
    ),
    "train_seconds",
)
"""Columns of results.csv between `diverged` and `folder`, named as in summary.json; docs/experiments.md has them."""

_COLUMNS = {"validation_loss": ".4f", "loss_last": ".4f", "step_ms": ",.1f"}
"""Figures of the printed table."""


@dataclass(frozen=True)
class Task:
    """One run of a sweep: a point, named by its settings as they are typed for `--set`, with a seed and a folder."""

    point: str
    settings: tuple[tuple[str, str], ...]
    seed: int
    folder: Path

    @property
    def name(self) -> str:
        """For people: optimizer=muon,lr=0.008 seed=1."""
        return f"{self.point} seed={self.seed}"


def tasks_of(grids: Sequence[Sequence[str]], seeds: int, out: Path) -> list[Task]:
    """Every point, none twice, with the seeds 1 to `seeds`: all points with the first seed, then with the second.

    A UserError names a word of a `--grid` that is not KEY=VALUE,VALUE.
    """
    points = dict.fromkeys(point for words in grids for point in _points(words))
    tasks = []
    for seed, point in itertools.product(range(1, seeds + 1), points):
        name = ",".join(f"{key}={value}" for key, value in point)
        tasks.append(Task(name, point, seed, out / folder_of(name) / f"seed={seed}"))
    return tasks


def folder_of(point: str) -> str:
    """A point's name as a folder: without slashes or blanks, not too long, and never that of another point."""
    plain = re.sub(r"[^\w+,=.@:-]", "-", point, flags=re.ASCII)[:150]
    return plain if plain == point else f"{plain}-{hashlib.sha256(point.encode()).hexdigest()[:8]}"


def _points(words: Sequence[str]) -> Iterator[tuple[tuple[str, str], ...]]:
    grid: dict[str, list[str]] = {}
    for word in words:
        first, *values = next(csv.reader([word], skipinitialspace=True), []) or [""]
        key, _, value = first.partition("=")
        key = key.lstrip("-").replace("-", "_").lower()
        if not key.isidentifier() or not all([value, *values]) or key in grid:
            raise UserError(
                f"--grid {' '.join(words)}: write KEY=VALUE,VALUE for each key once, such as"
                f" optimizer=adam,muon lr=1e-3,2e-3; found {word!r}"
            )
        grid[key] = [value, *values]
    for combination in itertools.product(*grid.values()):
        yield tuple(zip(grid, combination, strict=True))


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
            return (
                CHANGED
                if summary.get("iterations") or folder.has_steps or folder.checkpoint
                else FRESH
            )
        if summary.get("outcome") == "finished" or (
            summary.get("outcome") == "failed" and summary.get("diverged")
        ):
            return DONE
        return RESUMED if folder.checkpoint else AGAIN

    def flags(self) -> list[str]:
        """What its command line adds to the experiment file, for pretrain_gpt.py."""
        sources = (FROM_SET, FROM_LINE, FROM_FOLDER)
        added = as_argv(
            (flag.name, flag.values) for flag in self.resolved.flags if flag.source in sources
        )
        here = {flag.name for flag in self.resolved.flags}
        # Placeholders of flags that are given otherwise may be unset.
        file = load_config(
            self.request.config, overridden={"--save", "--tensorboard-dir", "--load", *here}
        )
        in_file = {name for name, _ in file.flags} | file.overridden
        return [*(token for name in sorted(in_file - here) for token in (UNSET_FLAG, name)), *added]


def resolve(tasks: Sequence[Task], every: Request) -> list[Plan]:
    """Resolves all runs, so that a mistake is found before hours of training; `every` is what all have in common."""
    requests = [
        replace(
            every,
            sets=(*every.sets, *task.settings, ("seed", str(task.seed))),
            out=str(task.folder),
        )
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
            f"{len(changed)} of {len(plans)} runs have results of other settings, such as"
            f" {changed[0]}; give another folder with --out DIR, or delete these and train them"
            " anew with --overwrite"
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
        with (
            self.screen,
            processes.signals_handled(self._on_signal),
            ThreadPoolExecutor(self._jobs) as pool,
        ):
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

        Megatron writes the index of a data set into a folder that runs share, before the first
        step: runs start one after the other.
        """
        with contextlib.ExitStack() as starting:
            starting.enter_context(self._starting)
            if self._stop.is_set():
                return None
            state, slot = plan.state, self._free_slots.pop()
            request = replace(
                plan.request, resume=state == RESUMED, overwrite=state in (AGAIN, CHANGED)
            )
            group = os.environ.get("WANDB_RUN_GROUP") or plan.task.folder.resolve().parents[1].name
            status = Status(self.screen, "starting", name=plan.task.name)

            def show(event: Mapping[str, Any]) -> None:
                if event["event"] == "step" or event.get("stage") == FIRST_STEP:
                    starting.close()
                status.take(event)

            if not self.screen.live:
                self.screen.print(
                    f"{plan.task.name}: {'resumed' if state == RESUMED else 'started'}"
                )
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
            f"[{done}/{self._total}] {plan.task.name}: {in_words(summary, why=True)},"
            f" {summary['seconds']:.0f} s; about {clock(left)} left"
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
        devices = (
            visible.split(",") if visible else [str(number) for number in range(resolved.gpus)]
        )
        env["CUDA_VISIBLE_DEVICES"] = ",".join(devices[slot * ranks : (slot + 1) * ranks])
    return env


def row_of(task: Task) -> dict[str, Any]:
    """The row of a run, read from its folder."""
    run, summary = (read_json(task.folder / name) for name in (RUN, SUMMARY))
    validation = (summary.get("validation_loss") or {}).values()
    figures = {name: summary.get(name) for name in FIGURES}
    figures["validation_loss"] = (
        statistics.fmean(validation) if validation and None not in validation else None
    )
    return {
        **{"point": task.point, **dict(task.settings), "seed": task.seed},
        "outcome": summary.get("outcome") or ("cut off" if run else "not started"),
        **{"diverged": bool(summary.get("diverged")), **figures, "folder": str(task.folder)},
    }


class Results:
    """The runs and points, the best of each optimizer and data, and which column they are compared by."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.rows = [row_of(task) for task in tasks]
        has_validation = any(row["validation_loss"] is not None for row in self.rows)
        self.final = "validation_loss" if has_validation else "loss_last"
        self.points = []
        for name, settings in dict((task.point, task.settings) for task in tasks).items():
            runs = [SimpleNamespace(**row) for row in self.rows if row["point"] == name]
            self.points.append(Arm(name, dict(settings), runs, self.final))
        self.best = best_of(
            self.points, lambda point: tuple(map(point.settings.get, ("optimizer", *MEASURE)))
        )
        self.notes = [note for best in self.best for note in at_edges(best, self.points)]

    def write(self, out: Path, head: Mapping[str, Any]) -> None:
        """Writes results.csv and results.json, which begins with `head`, each whole or not at all."""
        keys = (key for point in self.points for key in point.settings)
        columns = dict.fromkeys(["point", *keys, *self.rows[0]])
        with folders.written_at_once(out / CSV) as stream:
            writer = csv.DictWriter(stream, [*columns], lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows)
        points = [
            {
                "point": point.name,
                "settings": point.settings,
                "seeds": len(point.runs),
                "finished": point.finished,
            }
            | {"diverged": point.diverged, "best": point in self.best}
            | {name: point.spread(name) for name in FIGURES}
            for point in self.points
        ]
        found = {
            "compared_by": self.final,
            "points": points,
            "notes": self.notes,
            "runs": self.rows,
        }
        run_folder.write_json(out / JSON, {**head, **found})

    def table(self) -> str:
        """A line for each point."""
        lines = [["point", "runs", *_COLUMNS, ""]]
        for point in self.points:
            spreads = ((point.spread(name), form) for name, form in _COLUMNS.items())
            cells = ["-" if spread is None else f"{spread:{form}}" for spread, form in spreads]
            remark = point.remark(is_best=point in self.best)
            lines.append([point.name, f"{point.finished}/{len(point.runs)}", *cells, remark])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
