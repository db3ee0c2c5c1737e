"""Arms: runs that differ in their seed alone, figures over their seeds, and which arms are the best.

Arithmetic only; sweeps and reports write and draw it.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_muon.errors import UserError
from megatron_muon.megatron.flags.refusals import MUONS
from megatron_muon.tools.train.records import PHASES, LossPoint, Record, is_run, read_record

_NAMES = {"adam": "AdamW", "muon": "Muon", "adaptive_muon": "AdaptiveMuon", "lion": "Lion", "sgd": "SGD"}
_NO_SETTINGS = {
    *("seed", "save", "tensorboard_dir", "config", "rank", "local_rank", "data_cache_path"),
    *("wandb_project", "wandb_entity", "wandb_exp_name", "wandb_save_dir"),
    *("profile", "use_pytorch_profiler", "profile_step_start", "profile_step_end", "profile_ranks"),
    *("iteration", "consumed_train_samples", "consumed_valid_samples", "skipped_train_samples"),
    *("num_floating_point_operations_so_far", "ckpt_step"),
}
"""What may differ between runs that are otherwise alike: places, what was watched, how far an earlier start came."""


def display_name(optimizer: str) -> str:
    """For people; Megatron's adam decouples weight decay."""
    return _NAMES.get(optimizer, optimizer)


@dataclass(frozen=True)
class Spread:
    """A figure over the seeds that have it, `count` of them; `std` is the sample standard deviation, None with one."""

    mean: float
    std: float | None
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """Of the finite values; None if there are none."""
        numbers = [value for value in values if value is not None and math.isfinite(value)]
        if not numbers:
            return None
        std = statistics.stdev(numbers) if len(numbers) > 1 else None
        return cls(statistics.fmean(numbers), std, min(numbers), max(numbers), len(numbers))

    def __format__(self, form: str) -> str:
        """Mean, and deviation where there is one."""
        return f"{self.mean:{form}}" + (f" ± {self.std:{form}}" if self.std is not None else "")


@dataclass(frozen=True, eq=False)
class Seeds[R: Any]:
    """Runs that differ in their seed alone; each has an `outcome`, `diverged`, and figures as attributes.

    `settings` tell these runs from others; `compared_by` names the figure that is their final loss.
    """

    name: str
    settings: tuple[tuple[str, str], ...]
    runs: tuple[R, ...]
    compared_by: str

    @property
    def finished(self) -> int:
        """How many of its runs finished."""
        return sum(run.outcome == "finished" for run in self.runs)

    @property
    def diverged(self) -> int:
        """How many of its runs diverged."""
        return sum(bool(run.diverged) for run in self.runs)

    @property
    def sound(self) -> tuple[R, ...]:
        """Its runs that finished without diverging: those that means are taken over."""
        return tuple(run for run in self.runs if run.outcome == "finished" and not run.diverged)

    @property
    def final(self) -> Spread | None:
        """The final loss of its sound runs."""
        return self.spread(self.compared_by)

    @property
    def counts(self) -> bool:
        """Whether it may stand for its kind: all of its runs finished, none diverged."""
        return self.final is not None and len(self.sound) == len(self.runs)

    def spread(self, figure: str) -> Spread | None:
        """A figure of its sound runs."""
        return Spread.of(getattr(run, figure) for run in self.sound)


def ranked[S: Seeds[Any]](arms: Iterable[S]) -> list[S]:
    """Those that have a final loss, the lowest mean first."""
    found = [(final.mean, arm) for arm in arms if (final := arm.final) is not None]
    return [arm for _, arm in sorted(found, key=lambda pair: pair[0])]


def best_of[S: Seeds[Any]](arms: Iterable[S], kind: Callable[[S], Hashable]) -> list[S]:
    """The best of each kind."""
    best: dict[Hashable, S] = {}
    for arm in ranked(arm for arm in arms if arm.counts):
        best.setdefault(kind(arm), arm)
    return list(best.values())


@dataclass(frozen=True)
class CurvePoint(LossPoint):
    """Means over the seeds at a step, with the least and the most of the loss."""

    low: float
    high: float


class Arm(Seeds[Record]):
    """Runs with all that their folders tell, ordered by seed."""

    @property
    def optimizer(self) -> str:
        """The --optimizer of its runs."""
        return self.runs[0].optimizer

    @property
    def rate(self) -> float | None:
        """The learning rate of the matrices: --muon-lr of a Muon that has one, else --lr."""
        args = self.runs[0].args
        for key in ("muon_lr", "lr") if self.optimizer in MUONS else ("lr",):
            with contextlib.suppress(ValueError):  # "None"
                if math.isfinite(number := float(args.get(key, ""))):
                    return number
        return None

    @property
    def peak_bytes(self) -> int | None:
        """The most that a rank's memory held in any run."""
        return max(run.peak_bytes or 0 for run in self.runs) or None

    @property
    def drawn(self) -> tuple[Record, ...]:
        """Its sound runs; if it has none, all of them, as far as they got."""
        return self.sound or self.runs

    def train(self, window: int) -> list[CurvePoint]:
        """Training losses over the seeds; each loss of a seed is the mean of the last `window` that were logged."""
        return _curve([_smooth(run.train, window) for run in self.drawn])

    def validation(self) -> list[CurvePoint]:
        """Validation losses over the seeds."""
        return _curve([run.validation for run in self.drawn])

    def step_parts(self) -> dict[str, float]:
        """Milliseconds of a training step by part: Muon's phases, the rest of the optimizer's step, all else."""
        runs = self.drawn
        step, optimizer = Spread.of(run.step_ms for run in runs), Spread.of(run.optimizer_ms for run in runs)
        if step is None:
            return {}
        phases = {phase.replace("_", "-"): Spread.of(run.phases_ms.get(phase) for run in runs) for phase in PHASES}
        parts = {phase: spread.mean for phase, spread in phases.items() if spread}
        known = sum(parts.values())
        if optimizer:
            parts["rest of the optimizer"] = max(optimizer.mean - known, 0.0)
            known = max(optimizer.mean, known)
        return {**parts, "rest of the step": max(step.mean - known, 0.0)}


def find_runs(places: Sequence[Path]) -> list[Path]:
    """The folders of runs at or below the places given, in order; a place that holds none is a UserError."""
    found: dict[Path, None] = {}
    for place in places:
        below = [place] if is_run(place) else sorted(path for path in place.glob("**") if is_run(path))
        if not below:
            raise UserError(f"no run at or below {str(place)!r}; give folders of `megatron-muon train` or `sweep`")
        found.update(dict.fromkeys(below))
    return list(found)


def read_arms(folders: Iterable[Path]) -> tuple[list[Arm], list[Record]]:
    """The arms, and the runs left out because they ended before their first step."""
    records = [read_record(folder) for folder in folders]
    kept, empty = [run for run in records if run.train], [run for run in records if not run.train]
    if not kept:
        raise UserError(f"none of the {len(records)} runs has logged a step; see {records[0].folder}/train.log")
    have_flags = all(record.settings for record in kept)
    told_by = [_settings(record.settings if have_flags else record.args) for record in kept]
    keys = _differing_keys(told_by)
    groups: dict[tuple[tuple[str, str], ...], list[Record]] = {}
    for record, settings in zip(kept, told_by, strict=True):
        groups.setdefault(tuple((key, settings[key]) for key in keys if key in settings), []).append(record)
    compared_by = "validation_last" if any(run.validation for run in kept) else "loss_last"
    arms = []
    for group, runs in groups.items():
        runs.sort(key=lambda run: (run.seed or 0, str(run.folder)))
        name = ",".join(f"{key}={value}" for key, value in group)
        name = name or (runs[0].folder.resolve().name if len(runs) == 1 else f"optimizer={runs[0].optimizer}")
        arms.append(Arm(name, group, tuple(runs), compared_by))
    return sorted(arms, key=lambda arm: (arm.optimizer, arm.rate or 0.0, arm.name)), empty


def _settings(values: Mapping[str, str]) -> dict[str, str]:
    """What tells experiments apart; a --load of the run's own checkpoints does not."""
    own = {"load"} if values.get("load") in ("None", values.get("save")) else set()
    return {key: value for key, value in values.items() if key not in _NO_SETTINGS | own}


def _differing_keys(every: Sequence[Mapping[str, str]]) -> list[str]:
    """Keys whose values are not the same in all runs, the optimizer and rates first."""
    keys = dict.fromkeys(key for settings in every for key in settings)
    found = [key for key in keys if len({settings.get(key) for settings in every}) > 1]
    first = ("optimizer", "lr", "muon_lr")
    return sorted(found, key=lambda key: first.index(key) if key in first else len(first))


def _curve(runs: Sequence[Sequence[LossPoint]]) -> list[CurvePoint]:
    """The runs' losses at the steps that all of them have."""
    by_step = [{point.step: point for point in run} for run in runs]
    found = []
    for step in sorted(set.intersection(*map(set, by_step))) if by_step else []:
        points = [run[step] for run in by_step]
        if (loss := Spread.of(point.loss for point in points)) is not None:
            seconds = statistics.fmean(point.seconds for point in points)
            found.append(CurvePoint(step, points[0].tokens, seconds, loss.mean, loss.low, loss.high))
    return found


def _smooth(points: Sequence[LossPoint], window: int) -> list[LossPoint]:
    return [
        replace(point, loss=statistics.fmean(other.loss for other in points[max(0, at + 1 - window) : at + 1]))
        for at, point in enumerate(points)
    ]
