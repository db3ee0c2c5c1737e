"""What one run did, read back from its folder: losses against steps, tokens and seconds, times, memory, outcome.

For sweeps and reports, which compare runs. Figures come from Megatron's events, the log and summary.json; a run
without a summary, such as an array task's, has what its events say. Needs neither torch nor megatron-core.
"""

from __future__ import annotations

import bisect
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_muon.errors import UserError
from megatron_muon.runs import run_folder
from megatron_muon.runs.events import LOSS_TAG, Point, RunEvents, after_warmup, read_events, validations
from megatron_muon.runs.summary import LAST_STEPS, has_risen

PHASES = ("momentum", "gather", "newton_schulz", "scatter", "apply")
"""Phases of a Muon step, as `muon/PHASE_ms` in the events, in their order."""

_STATE = re.compile(r"optimizer state: (.*?): (device [\d,.]+ MB.*)$", re.MULTILINE)
_PLACES = re.compile(r"device ([\d,.]+) MB, host ([\d,.]+) MB, disk ([\d,.]+) MB")
_PEAK = re.compile(r"\[Rank \d+\].*?memory \(MB\).*?max allocated: ([\d.]+)")


@dataclass(frozen=True)
class LossPoint:
    """A loss and where it was: iteration, tokens trained on, seconds in the training loop; None is not known."""

    step: int
    tokens: int | None
    seconds: float
    loss: float


@dataclass(frozen=True)
class Record:
    """A run. None stands for what its folder does not tell.

    Attributes:
        folder: its folder.
        settings: the resolved flags without dashes and with underscores, values joined by blanks.
        args: Megatron's arguments as strings, by name.
        summary: contents of summary.json; empty where there is none.
        run: contents of run.json; empty where there is none.
        train: training losses that were logged.
        validation: validation losses; the mean of the sets where there are several.
        step_ms: median of an iteration after the warm-up.
        optimizer_ms: median of the optimizer's step.
        phases_ms: medians of the measured steps of Muon, by phase; empty without them.
        tokens_per_second: median, all ranks together.
        state_bytes: optimizer state of all ranks together, wherever it lies; by kind.
        peak_bytes: the most that a rank's memory held. On a CPU a process's resident set.
    """

    folder: Path
    settings: Mapping[str, str]
    args: Mapping[str, str]
    summary: Mapping[str, Any]
    run: Mapping[str, Any]
    train: tuple[LossPoint, ...]
    validation: tuple[LossPoint, ...]
    step_ms: float | None
    optimizer_ms: float | None
    phases_ms: Mapping[str, float]
    tokens_per_second: float | None
    train_seconds: float
    state_bytes: Mapping[str, int]
    peak_bytes: int | None

    @property
    def optimizer(self) -> str:
        """Its --optimizer."""
        return self.args.get("optimizer") or self.summary.get("optimizer") or "unknown"

    @property
    def seed(self) -> int | None:
        """Its --seed."""
        text = self.args.get("seed", "")
        return int(text) if text.isdigit() else None

    @property
    def outcome(self) -> str:
        """That of summary.json; else "finished" or "unfinished", by the iterations."""
        if self.summary:
            return str(self.summary["outcome"])
        asked = self.args.get("train_iters", "")
        return "finished" if asked.isdigit() and self.iterations >= int(asked) else "unfinished"

    @property
    def iterations(self) -> int:
        """The last that was logged."""
        return self.train[-1].step if self.train else 0

    @property
    def diverged(self) -> bool:
        """Whether its loss became no number, or ended above where it began by more than noise."""
        if self.summary:
            return bool(self.summary["diverged"])
        losses = [point.loss for point in self.train]
        return not all(map(math.isfinite, losses)) or has_risen(losses)

    @property
    def tokens(self) -> int | None:
        """Trained on."""
        return self.train[-1].tokens if self.train else None

    @property
    def loss_last(self) -> float | None:
        """Mean training loss of the last logged iterations."""
        losses = [point.loss for point in self.train[-LAST_STEPS:]]
        return _finite(statistics.fmean(losses)) if losses else None

    @property
    def validation_last(self) -> float | None:
        """The last validation loss."""
        return _finite(self.validation[-1].loss) if self.validation else None

    @property
    def validation_best(self) -> LossPoint | None:
        """Where the validation loss was lowest."""
        numbers = [point for point in self.validation if math.isfinite(point.loss)]
        return min(numbers, key=lambda point: point.loss) if numbers else None

    @property
    def all_state_bytes(self) -> int | None:
        """Optimizer state of all kinds."""
        return sum(self.state_bytes.values()) if self.state_bytes else None


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run: it has what a launch wrote, or Megatron's events."""
    return (folder / run_folder.RUN).is_file() or any((folder / run_folder.TENSORBOARD).glob("events.out.tfevents.*"))


def read_record(folder: Path) -> Record:
    """Reads a run.

    Raises:
        UserError: the folder holds no run, or one that ended before its first step.
    """
    run, summary = (run_folder.read_json(folder / name) for name in (run_folder.RUN, run_folder.SUMMARY))
    if not is_run(folder):
        raise UserError(f"no run at {str(folder)!r}; give a folder of `megatron-muon train` or `megatron-muon sweep`")
    tensorboard = folder / run_folder.TENSORBOARD
    if not tensorboard.is_dir():  # beside the folder, as run.json says; a folder that was moved has it within
        tensorboard = Path(run.get("tensorboard_dir") or tensorboard)
    try:
        events = read_events(tensorboard)
    except UserError:
        events = RunEvents({}, {}, 0.0)
    log = folder / run_folder.LOG
    text = log.read_text("utf-8", errors="replace") if log.exists() else ""
    step_ms = _median_after_warmup(events.points("iteration-time"))
    return Record(
        folder=folder,
        settings=_settings(folder),
        args=events.args,
        summary=summary,
        run=run,
        train=_losses(events, events.points(LOSS_TAG)),
        validation=_losses(events, _validation(events)),
        step_ms=step_ms if step_ms is not None else summary.get("step_ms"),
        optimizer_ms=_median_after_warmup(events.points("optimizer-time")),
        phases_ms=_phases(events),
        tokens_per_second=summary.get("tokens_per_second"),
        train_seconds=events.train_seconds,
        state_bytes=state_bytes(text),
        peak_bytes=_peak(events, text),
    )


def state_bytes(log: str) -> dict[str, int]:
    """Bytes of optimizer state by kind, from the last `optimizer state:` line of each; of all ranks together."""
    found = {}
    for kind, line in _STATE.findall(log):
        places = _PLACES.findall(line)[-1]
        found[kind.split(",")[0]] = sum(round(float(place.replace(",", "")) * 1e6) for place in places)
    return found


def _settings(folder: Path) -> dict[str, str]:
    """The flags of config.yaml."""
    from megatron_muon.megatron.flags.config_file import load_config

    file = folder / run_folder.CONFIG
    if not file.is_file():
        return {}
    flags = load_config(file).flags
    return {name.lstrip("-").replace("-", "_"): " ".join(values) or "true" for name, values in flags}


def _validation(events: RunEvents) -> list[Point]:
    """Validation losses, the mean of the sets where there are several."""
    by_step: dict[int, list[Point]] = {}
    for points in validations(events).values():
        for point in points:
            by_step.setdefault(point.step, []).append(point)
    return [
        Point(step, statistics.fmean(point.value for point in points), points[-1].wall_time)
        for step, points in sorted(by_step.items())
    ]


def _losses(events: RunEvents, points: Sequence[Point]) -> tuple[LossPoint, ...]:
    samples = sorted(events.points(f"{LOSS_TAG} vs samples"), key=lambda point: point.wall_time)
    times = [point.wall_time for point in samples]
    by_step = {point.step: _nearest(samples, times, point.wall_time) for point in events.points(LOSS_TAG)}
    length = events.args.get("seq_length", "")
    last = max(by_step, default=0)
    found = []
    for point in points:
        count = by_step.get(point.step)
        if count is None and last:  # a step between two logged ones
            count = round(by_step[last] * point.step / last)
        tokens = count * int(length) if count and length.isdigit() else None
        found.append(LossPoint(point.step, tokens, events.seconds_at(point), point.value))
    return tuple(found)


def _nearest(samples: Sequence[Point], times: Sequence[float], time: float) -> int:
    """Samples consumed at a time; Megatron writes them as the step of points beside the losses'."""
    if not samples:
        return 0
    at = bisect.bisect(times, time)
    return min(samples[max(at - 1, 0) : at + 1], key=lambda point: abs(point.wall_time - time)).step


def _phases(events: RunEvents) -> dict[str, float]:
    medians = {phase: _median_after_warmup(events.points(f"muon/{phase}_ms"), scale=1.0) for phase in PHASES}
    return {phase: median for phase, median in medians.items() if median is not None}


def _median_after_warmup(points: Sequence[Point], *, scale: float = 1e3) -> float | None:
    return statistics.median(point.value for point in after_warmup(points)) * scale if points else None


def _peak(events: RunEvents, log: str) -> int | None:
    peaks = [point.value for point in events.points("mem-max-allocated-bytes")]
    peaks += [float(text) * 2**20 for text in _PEAK.findall(log)]
    return round(max(peaks)) if peaks else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
