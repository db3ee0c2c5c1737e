"""Arms: runs that differ in their seed alone, figures over their seeds, and which arms are the best.

Arithmetic only; sweeps and reports write and draw it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
"""What may differ between runs that are otherwise alike: places, profiling, and the progress of an earlier start."""


def display_name(optimizer: str) -> str:
    """The optimizer's name for people; Megatron's adam decouples weight decay."""
    return _NAMES.get(optimizer, optimizer)


@dataclass(frozen=True)
class Spread:
    """A figure over the `count` seeds that have it; `std` is the sample standard deviation, None for one seed."""

    mean: float
    std: float | None
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """The spread of the finite values; None if there are none."""
        numbers = [value for value in values if value is not None and math.isfinite(value)]
        if not numbers:
            return None
        std = statistics.stdev(numbers) if len(numbers) > 1 else None
        return cls(statistics.fmean(numbers), std, min(numbers), max(numbers), len(numbers))

    def __format__(self, form: str) -> str:
        return f"{self.mean:{form}}" + (f" ± {self.std:{form}}" if self.std is not None else "")


class Seeds[R: Any]:
    """Runs that differ in their seed alone; each has an `outcome`, `diverged`, and figures as attributes.

    Attributes:
        settings: what tells these runs from others, by name.
        compared_by: the attribute that is a run's final loss.
        sound: the runs that finished without diverging, over which means are taken.
        final: the final loss of the sound runs.
        counts: all runs are sound, so that the group may be the best of its kind.
    """

    def __init__(self, name: str, settings: tuple[tuple[str, str], ...], runs: Sequence[R], compared_by: str) -> None:
        self.name, self.settings, self.runs = name, settings, tuple(runs)
        self.finished = sum(run.outcome == "finished" for run in runs)
        self.diverged = sum(bool(run.diverged) for run in runs)
        self.sound = tuple(run for run in runs if run.outcome == "finished" and not run.diverged)
        self.final = self.spread(compared_by)
        self.counts = self.final is not None and len(self.sound) == len(runs)

    def spread(self, figure: str) -> Spread | None:
        """A figure of the sound runs."""
        return Spread.of(getattr(run, figure) for run in self.sound)


def ranked[S: Seeds[Any]](arms: Iterable[S]) -> list[S]:
    """Those that have a final loss, the lowest mean first."""
    return sorted((arm for arm in arms if arm.final), key=lambda arm: arm.final.mean if arm.final else math.inf)


def best_of[S: Seeds[Any]](arms: Iterable[S], kind: Callable[[S], Hashable]) -> list[S]:
    """The best of each kind, among those whose runs all finished without diverging."""
    best: dict[Hashable, S] = {}
    for arm in ranked(arm for arm in arms if arm.counts):
        best.setdefault(kind(arm), arm)
    return list(best.values())


@dataclass(frozen=True)
class CurvePoint(LossPoint):
    """Means over the seeds at a step, with the lowest and highest loss."""

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
        given = [args.get(key, "None") for key in (("muon_lr", "lr") if self.optimizer in MUONS else ("lr",))]
        return next((float(text) for text in given if text not in ("None", "nan")), None)

    @property
    def peak_bytes(self) -> int | None:
        """Largest peak memory of a rank in any run."""
        return max(run.peak_bytes or 0 for run in self.runs) or None

    @property
    def drawn(self) -> tuple[Record, ...]:
        """The sound runs; without any, all runs as far as they got."""
        return self.sound or self.runs

    def train(self, window: int) -> list[CurvePoint]:
        """Training losses over the seeds; each loss of a seed is the mean of the last `window` that were logged."""
        return _curve([run.train for run in self.drawn], window)

    def validation(self) -> list[CurvePoint]:
        """Validation losses over the seeds."""
        return _curve([run.validation for run in self.drawn])

    def step_parts(self) -> dict[str, float]:
        """Milliseconds of a training step by part: Muon's phases, the rest of the optimizer's step, all else."""
        step, optimizer = (Spread.of(getattr(run, name) for run in self.drawn) for name in ("step_ms", "optimizer_ms"))
        if step is None:
            return {}
        phases = {phase: Spread.of(run.phases_ms.get(phase) for run in self.drawn) for phase in PHASES}
        parts = {phase.replace("_", "-"): spread.mean for phase, spread in phases.items() if spread}
        known = sum(parts.values())
        if optimizer:
            parts["rest of the optimizer"] = max(optimizer.mean - known, 0.0)
            known = max(optimizer.mean, known)
        return {**parts, "rest of the step": max(step.mean - known, 0.0)}


def find_runs(places: Sequence[Path]) -> list[Path]:
    """The folders of runs at or below the places given, in order.

    Raises:
        UserError: a place holds no run.
    """
    found: dict[Path, None] = {}
    for place in places:
        below = [place] if is_run(place) else sorted(path for path in place.glob("**") if is_run(path))
        if not below:
            raise UserError(f"no run at or below {str(place)!r}; give folders of `megatron-muon train` or `sweep`")
        found.update(dict.fromkeys(below))
    return list(found)


def read_arms(folders: Iterable[Path]) -> tuple[list[Arm], list[Record]]:
    """The arms, and the runs left out because they ended before their first step.

    Raises:
        UserError: no run has logged a step.
    """
    records = [read_record(folder) for folder in folders]
    kept, empty = [run for run in records if run.train], [run for run in records if not run.train]
    if not kept:
        raise UserError(f"none of the {len(records)} runs has logged a step; see {records[0].folder}/train.log")
    have_flags = all(run.settings for run in kept)
    each = [_settings(run.settings if have_flags else run.args) for run in kept]
    every_key = dict.fromkeys(key for settings in each for key in settings)
    first = ("optimizer", "lr", "muon_lr")
    keys = sorted(
        (key for key in every_key if len({settings.get(key) for settings in each}) > 1),
        key=lambda key: first.index(key) if key in first else len(first),
    )
    groups: dict[tuple[tuple[str, str], ...], list[Record]] = {}
    for run, settings in zip(kept, each, strict=True):
        groups.setdefault(tuple((key, settings[key]) for key in keys if key in settings), []).append(run)
    compared_by = "validation_last" if any(run.validation for run in kept) else "loss_last"
    arms = []
    for group, runs in groups.items():
        name = ",".join(f"{key}={value}" for key, value in group)
        name = name or (runs[0].folder.resolve().name if len(runs) == 1 else f"optimizer={runs[0].optimizer}")
        arms.append(Arm(name, group, sorted(runs, key=lambda run: (run.seed or 0, str(run.folder))), compared_by))
    return sorted(arms, key=lambda arm: (arm.optimizer, arm.rate or 0.0, arm.name)), empty


def _settings(values: Mapping[str, str]) -> dict[str, str]:
    """What tells experiments apart; a --load of the run's own checkpoints does not."""
    own = {"load"} if values.get("load") in ("None", values.get("save")) else set()
    return {key: value for key, value in values.items() if key not in _NO_SETTINGS | own}


def _curve(runs: Sequence[Sequence[LossPoint]], window: int = 1) -> list[CurvePoint]:
    """Losses at the steps that all runs have, each the mean of a run's last `window`."""
    by_step = [
        {
            point.step: (point, statistics.fmean(other.loss for other in run[max(0, at + 1 - window) : at + 1]))
            for at, point in enumerate(run)
        }
        for run in runs
    ]
    found = []
    for step in sorted(set.intersection(*map(set, by_step))):
        points, losses = zip(*(run[step] for run in by_step), strict=True)
        if (loss := Spread.of(losses)) is not None:
            seconds = statistics.fmean(point.seconds for point in points)
            found.append(CurvePoint(step, points[0].tokens, seconds, loss.mean, loss.low, loss.high))
    return found
