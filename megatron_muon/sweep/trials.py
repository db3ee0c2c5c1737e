"""Runs a sweep: settles every run before the first starts, skips what is done, goes on where it was stopped.

Every run is one of `train`, in its own folder; `sweep_grid` says which there are, `sweep_results` what came of them.
Several may be under way at once, each in a thread, and a signal ends them all as Ctrl-C ends one.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from megatron_muon.errors import UserError
from megatron_muon.locks import Lock
from megatron_muon.runs import processes, run_folder
from megatron_muon.runs.resolve import FROM_FOLDER, FROM_LINE, FROM_SET, Request, Resolved, resolve_each
from megatron_muon.runs.run_folder import RunFolder
from megatron_muon.runs.train import Experiment, Outcome, execute, prepare
from megatron_muon.sweep.grid import Task

FRESH, RESUMED, AGAIN, DONE, CHANGED = "to do", "to resume", "to start again", "done", "changed"
"""States of a run before the sweep: AGAIN was cut off without a checkpoint, CHANGED was trained with other settings."""

PROGRESS = re.compile(r"iteration +(\d+)/ *(\d+) \|(?:.*?lm loss: (\S+))?")
"""Megatron's line of an iteration: its number, how many there are, the loss."""

_TRAINS = "before the start of training step"
_OF_OPTIMIZERS = re.compile(r"(optimizer|lr|min_lr|weight_decay|clip_grad|(muon|adaptive_muon|adam|lr)_\w+)\Z")
_LOCK = ".sweep.lock"
_SHOWN_CHANGES = 3


@dataclass(frozen=True, eq=False)
class Plan:
    """A settled run of a sweep.

    Attributes:
        task: which.
        request: what was asked for.
        resolved: its settings.
        state: one of the states above.
        changes: settings that differ from those it was trained with, in words.
    """

    task: Task
    request: Request
    resolved: Resolved
    state: str
    changes: tuple[str, ...] = ()

    @property
    def flags(self) -> list[str]:
        """What its command line adds to the experiment file, for pretrain_gpt.py."""
        added = [flag for flag in self.resolved.flags if flag.source in (FROM_SET, FROM_LINE, FROM_FOLDER)]
        tokens = [token for flag in added for token in _tokens(flag.name, flag.values)]
        here = {flag.name for flag in self.resolved.flags}
        absent = _flags_of(Path(self.request.config), here) - here
        return [*(token for name in sorted(absent) for token in ("--unset", name)), *tokens]


def settle(
    tasks: Sequence[Task],
    config: Path,
    *,
    sets: Sequence[tuple[str, str]] = (),
    flags: Sequence[str] = (),
    ranks: int | None = None,
    writes: bool = True,
) -> list[Plan]:
    """Settles all runs, so that a mistake is told before hours of training.

    Args:
        tasks: the runs.
        config: the experiment file.
        sets: settings of all runs.
        flags: flags of all runs.
        ranks: processes of each run.
        writes: see `Request`.

    Raises:
        UserError: what the user got wrong, with the point.
    """
    requests = [
        Request(
            config=str(config),
            sets=(*sets, *task.point.settings, ("seed", str(task.seed))),
            flags=tuple(flags),
            ranks=ranks,
            out=str(task.folder),
            writes=writes,
        )
        for task in tasks
    ]
    plans = []
    for task, request, answer in zip(tasks, requests, resolve_each(requests), strict=True):
        if isinstance(answer, UserError):
            raise UserError(f"{task.point.name}: {answer}")
        plans.append(Plan(task, request, answer, *_state(answer)))
    return plans


def settled_now(plans: Sequence[Plan]) -> list[Plan]:
    """The same with the states that their folders have now, for after a wait."""
    return [Plan(plan.task, plan.request, plan.resolved, *_state(plan.resolved)) for plan in plans]


def refuse_changed(plans: Sequence[Plan], *, overwrite: bool) -> None:
    """Refuses runs that were trained with other settings.

    Raises:
        UserError: says which, what differs, and what to type.
    """
    changed = [plan for plan in plans if plan.state == CHANGED]
    if changed and not overwrite:
        first = changed[0]
        some = "; ".join(first.changes[:_SHOWN_CHANGES]) + ("; ..." if len(first.changes) > _SHOWN_CHANGES else "")
        raise UserError(
            f"{len(changed)} of {len(plans)} runs have results of other settings, such as {first.task.folder} "
            f"({some}); give another folder with --out DIR, or train these anew with --overwrite (deletes them)"
        )


def check_devices(plans: Sequence[Plan], jobs: int) -> None:
    """Refuses more runs at once than there are GPUs for.

    Raises:
        UserError: says how many there are.
    """
    ranks, gpus = plans[0].resolved.ranks, plans[0].resolved.gpus
    if plans[0].resolved.device == "cuda" and jobs * ranks > gpus:
        raise UserError(
            f"--jobs {jobs} with {ranks} processes each needs {jobs * ranks} GPUs and there are {gpus}; "
            f"give --nproc {max(1, gpus // jobs)} or --jobs {max(1, gpus // ranks)}"
        )


def only_one(out: Path) -> contextlib.AbstractContextManager[object]:
    """Keeps a second sweep away from the folder.

    Raises:
        UserError: another one is at work there.
    """
    return Lock(out / _LOCK, f"a sweep is under way in {out}", "give another --out DIR").held()


@dataclass
class Watcher:
    """What a sweep tells of its runs while they run; called from several threads.

    Attributes:
        started: a run begins.
        line: a line of its output.
        ended: a run has ended.
    """

    started: Callable[[Plan], object]
    line: Callable[[Plan, str], object]
    ended: Callable[[Plan, Outcome], object]


@dataclass
class Sweep:
    """Runs under way, at most `jobs` at once.

    Attributes:
        plans: what is to be run, in this order.
        jobs: how many at once.
        grace_s: see `train.GRACE_SECONDS`.
        command: what the user typed.
        watcher: whom to tell.
    """

    plans: Sequence[Plan]
    jobs: int
    grace_s: int
    command: str
    watcher: Watcher
    signal: int | None = None
    _stop: threading.Event = field(default_factory=threading.Event)
    _indexing: threading.Semaphore = field(default_factory=threading.Semaphore)
    _indexed: set[tuple[Any, ...]] = field(default_factory=set)

    def run(self, *, every: Callable[[], object], pause_s: float = 0.5) -> None:
        """Runs all, to their end or the first signal; raises what a thread raised.

        Args:
            every: called in this thread, after each pause.
            pause_s: how often.
        """
        slots = list(range(self.jobs))
        waiting = list(self.plans)
        running: dict[Future[None], int] = {}
        with self._signals(), ThreadPoolExecutor(self.jobs) as pool:
            try:
                while running or (waiting and not self._stop.is_set()):
                    while waiting and slots and not self._stop.is_set():
                        slot = slots.pop(0)
                        running[pool.submit(self._one, waiting.pop(0), slot)] = slot
                    done, _ = wait(running, timeout=pause_s, return_when=FIRST_COMPLETED)
                    for future in done:
                        slots.append(running.pop(future))
                        future.result()
                    every()
            except BaseException:
                self._stop.set()
                raise

    def _one(self, plan: Plan, slot: int) -> None:
        """A run in its thread.

        Megatron writes the index of a data set into a folder that runs share, before the first step: two runs that may
        want the same one, which no run has used yet, do so one after the other.
        """
        data = _data_of(plan.task)
        held = False
        if data not in self._indexed:
            self._indexing.acquire()
            held = True

        def release() -> None:
            nonlocal held
            if held:
                held = False
                self._indexing.release()

        def on_line(line: str) -> None:
            if held and (_TRAINS in line or PROGRESS.search(line)):
                self._indexed.add(data)
                release()
            self.watcher.line(plan, line)

        try:
            if data in self._indexed:  # while this one waited
                release()
            if self._stop.is_set():
                return
            self.watcher.started(plan)
            experiment = prepare(
                plan.request,
                resume=plan.state == RESUMED,
                overwrite=plan.state in (AGAIN, CHANGED),
                grace_s=self.grace_s,
                command=self.command,
                resolved=plan.resolved,
            )
            env = _share(experiment, slot, self.jobs)
            self.watcher.ended(plan, execute(experiment, on_line=on_line, stop=self._stop, env=env))
        finally:
            release()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """The first signal ends all runs as Ctrl-C does, the second kills them."""

        def handle(number: int, _: FrameType | None) -> None:
            if self.signal is None:
                self.signal = number
                self._stop.set()
            else:
                kill_all()

        with processes.signals_handled(handle):
            yield


def kill_all() -> None:
    """Kills all processes below this one at once."""
    for process in processes.descendants(os.getpid()):
        with contextlib.suppress(psutil.Error):
            process.kill()


def _data_of(task: Task) -> tuple[Any, ...]:
    """What the index of a run's data set may depend on: its seed, and all settings but those of optimizers."""
    return task.seed, tuple(
        setting for setting in task.point.settings if not _OF_OPTIMIZERS.match(setting[0].replace("-", "_"))
    )


def _share(experiment: Experiment, slot: int, jobs: int) -> dict[str, str]:
    """The part of the machine that one of several runs gets: cores, and GPUs."""
    if jobs == 1:
        return {}
    ranks, env = experiment.resolved.ranks, {}
    if "OMP_NUM_THREADS" not in {**experiment.resolved.env, **os.environ}:
        env["OMP_NUM_THREADS"] = str(max(1, processes.cores() // (jobs * ranks)))
    if experiment.resolved.device == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = visible.split(",") if visible else [str(number) for number in range(experiment.resolved.gpus)]
        env["CUDA_VISIBLE_DEVICES"] = ",".join(devices[slot * ranks : (slot + 1) * ranks])
    return env


def _state(resolved: Resolved) -> tuple[str, tuple[str, ...]]:
    """The state of a run's folder, and what differs where it is of other settings."""
    folder = resolved.folder
    run, summary = (run_folder.read_json(folder.root / name) for name in (run_folder.RUN, run_folder.SUMMARY))
    if not run:
        if folder.has_steps or folder.checkpoint:
            return CHANGED, ("started by something else than a sweep",)
        return FRESH, ()
    flags = [(flag.name, flag.values) for flag in resolved.flags]
    if run.get("config_hash") != run_folder.config_hash(flags, resolved.env):
        if not (summary.get("iterations") or folder.has_steps or folder.checkpoint):
            return FRESH, ()  # a start that came to nothing
        return CHANGED, _changes(folder, flags, resolved.env)
    if summary.get("outcome") == "finished" or (summary.get("outcome") == "failed" and summary.get("diverged")):
        return DONE, ()
    return (RESUMED if folder.checkpoint else AGAIN), ()


def _changes(
    folder: RunFolder, flags: Sequence[tuple[str, tuple[str, ...]]], env: Mapping[str, str]
) -> tuple[str, ...]:
    """The settings that differ between a folder's config.yaml and a run, as `--lr 0.1, now 0.2`."""
    from megatron_muon.megatron.flags.config_file import load_config

    try:
        before = load_config(folder.root / run_folder.CONFIG)
    except UserError:
        return ("its config.yaml cannot be read",)
    old: dict[str, Any] = {**before.env, **dict(before.flags)}
    new: dict[str, Any] = {**env, **dict(flags)}
    names = [name for name in {**old, **new} if name not in run_folder.PLACES and old.get(name) != new.get(name)]
    return tuple(f"{name} was {_shown(old.get(name))}, now {_shown(new.get(name))}" for name in names)


def _shown(values: str | tuple[str, ...] | None) -> str:
    if values is None:
        return "not given"
    return values if isinstance(values, str) else " ".join(values) or "true"


def _tokens(name: str, values: tuple[str, ...]) -> list[str]:
    if len(values) == 1 and values[0].startswith("-"):
        return [f"{name}={values[0]}"]
    return [name, *values]


def _flags_of(config: Path, given: set[str]) -> set[str]:
    """All flags of an experiment file; placeholders of flags that are given otherwise may be unset."""
    from megatron_muon.megatron.flags.config_file import load_config

    found = load_config(config, overridden={"--save", "--tensorboard-dir", "--load", *given})
    return {name for name, _ in found.flags} | set(found.overridden)
