"""What one run did, read back from its folder: losses against steps, tokens and seconds, times, memory, outcome.

The one reader of a run's figures: summary.json, `summary`, sweeps and reports are made of it. They come from the run's
events and from `facts.json` beside them, which the training writes. A run without a summary, such as an array task's,
has what its events say. Needs neither torch nor megatron-core.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_muon.errors import UserError
from megatron_muon.megatron import FACTS
from megatron_muon.runs import run_folder
from megatron_muon.runs.events import LOSS_TAG, Point, RunEvents, after_warmup, read_events, validations

PHASES = ("momentum", "gather", "newton_schulz", "scatter", "apply")
"""Phases of a Muon step, as `muon/PHASE_ms` in the events, in their order."""

LAST_STEPS = 10
"""The final loss is the mean of this many logged steps."""

ONLY_SET = "validation"
"""The name of a run's validation set where it has one; several have names of their own."""


@dataclass(frozen=True)
class LossPoint:
    """A loss and where it was: iteration, tokens trained on, seconds in the training loop; None is not known."""

    step: int
    tokens: int | None
    seconds: float
    loss: float


@dataclass(frozen=True, eq=False)
class Record:
    """A run. None stands for what its folder does not tell; a loss may be NaN.

    `run`, `summary` and `facts` are run.json, summary.json and facts.json, empty where there is none; `places` is where
    events and checkpoints lie now.
    """

    folder: Path
    places: run_folder.RunFolder
    run: Mapping[str, Any]
    summary: Mapping[str, Any]
    facts: Mapping[str, Any]
    events: RunEvents

    @property
    def args(self) -> Mapping[str, str]:
        """Megatron's arguments as strings, by name."""
        return self.events.args

    @cached_property
    def settings(self) -> Mapping[str, str]:
        """The flags of config.yaml without dashes and with underscores, values joined by blanks."""
        from megatron_muon.megatron.flags.config_file import load_config

        file = self.folder / run_folder.CONFIG
        flags = load_config(file).flags if file.is_file() else ()
        return {name.lstrip("-").replace("-", "_"): " ".join(values) or "true" for name, values in flags}

    @property
    def optimizer(self) -> str:
        """Its --optimizer."""
        return self.args.get("optimizer") or self.summary.get("optimizer") or "unknown"

    @property
    def seed(self) -> int | None:
        """Its --seed."""
        return self.whole_number("seed")

    def whole_number(self, name: str) -> int | None:
        """One of Megatron's arguments as a number."""
        text = self.args.get(name, "")
        return int(text) if text.isdigit() else None

    # Losses

    @cached_property
    def train(self) -> tuple[LossPoint, ...]:
        """Training losses that were logged."""
        return self._losses(self.events.points(LOSS_TAG))

    @cached_property
    def validation(self) -> tuple[LossPoint, ...]:
        """Validation losses; the mean of the sets where there are several."""
        points = sorted(itertools.chain(*validations(self.events).values()), key=lambda point: point.step)
        by_step = [list(sets) for _, sets in itertools.groupby(points, key=lambda point: point.step)]
        means = (statistics.fmean(point.value for point in sets) for sets in by_step)
        return self._losses(
            [Point(sets[-1].step, mean, sets[-1].wall_time) for sets, mean in zip(by_step, means, strict=True)]
        )

    @property
    def validation_by_set(self) -> dict[str, float]:
        """The last validation loss by name of the set.

        The log does not tell the test set from the validation set; the validation set is evaluated first.
        """
        return {name or ONLY_SET: points[-1].value for name, points in validations(self.events).items()}

    @property
    def losses(self) -> list[float]:
        """Training losses in their order."""
        return [point.loss for point in self.train]

    @property
    def loss_last(self) -> float | None:
        """Mean training loss of the last `LAST_STEPS` logged iterations, or of all where there are fewer."""
        return statistics.fmean(self.losses[-LAST_STEPS:]) if self.train else None

    @property
    def validation_last(self) -> float | None:
        """The last validation loss."""
        return self.validation[-1].loss if self.validation else None

    @property
    def validation_best(self) -> LossPoint | None:
        """Where the validation loss was lowest."""
        numbers = (point for point in self.validation if math.isfinite(point.loss))
        return min(numbers, key=lambda point: point.loss, default=None)

    # How far, and how it ended

    @property
    def iterations(self) -> int:
        """The last that was logged."""
        return self.train[-1].step if self.train else 0

    @property
    def tokens(self) -> int | None:
        """Trained on, all starts together."""
        return self.train[-1].tokens if self.train else None

    @property
    def train_seconds(self) -> float:
        """In Megatron's training loop, all starts together, validation included."""
        return self.events.train_seconds

    @property
    def outcome(self) -> str:
        """That of summary.json; else "finished" or "unfinished", by the iterations."""
        if self.summary:
            return str(self.summary["outcome"])
        asked = self.whole_number("train_iters")
        return "finished" if asked is not None and self.iterations >= asked else "unfinished"

    @property
    def diverged_at(self) -> int | None:
        """First iteration whose loss, or a gradient that Megatron ended the run for, is not a finite number."""
        logged = (point.step for point in self.train if not math.isfinite(point.loss))
        return next(logged, self.facts.get("diverged_at"))

    @property
    def skipped_iterations(self) -> int:
        """Steps skipped for non-finite gradients."""
        return len(self.events.points("skipped-iterations"))

    @property
    def rose(self) -> bool:
        """Whether the loss ended above where it began by more than noise.

        The mean of the last `LAST_STEPS` must be above the first by two of their standard deviations. In a run too
        short for that, where the first ones are among the last or learning rates still warm up, it must be twice the
        first.
        """
        late = self.losses[-LAST_STEPS:]
        if not late or not all(map(math.isfinite, late)):
            return False
        first, mean = self.losses[0], statistics.fmean(late)
        return mean > (2 * first if len(self.losses) < 2 * LAST_STEPS else first + 2 * statistics.stdev(late))

    @property
    def diverged(self) -> bool:
        """Whether a loss was not a number, or the loss rose."""
        return bool(self.summary["diverged"]) if self.summary else self.diverged_at is not None or self.rose

    # Time

    @cached_property
    def _step_seconds(self) -> dict[int, float]:
        """Seconds of each iteration: Megatron's figure, or else from the times at which losses were written."""
        points = self.events.points("iteration-time") or [
            Point(after.step, (after.wall_time - before.wall_time) / (after.step - before.step), after.wall_time)
            for before, after in itertools.pairwise(self.events.points(LOSS_TAG))
            if after.step > before.step
        ]
        return _by_step(after_warmup(points))

    @property
    def step_ms(self) -> float | None:
        """Median of an iteration after the warm-up."""
        return _median(seconds * 1e3 for seconds in self._step_seconds.values())

    @property
    def tokens_per_second(self) -> float | None:
        """Median after the warm-up, all ranks together."""
        length, batches = self.whole_number("seq_length") or 0, _by_step(self.events.points("batch-size"))
        timed = ((step, seconds) for step, seconds in self._step_seconds.items() if length and seconds > 0)
        return _median(batches[step] * length / seconds for step, seconds in timed if step in batches)

    @property
    def optimizer_ms(self) -> float | None:
        """Median of the optimizer's step."""
        return _median(point.value * 1e3 for point in after_warmup(self.events.points("optimizer-time")))

    @property
    def optimizer_share(self) -> float | None:
        """Median share of an iteration that the optimizer's step took, 0 to 1."""
        optimizer, steps = _by_step(self.events.points("optimizer-time")), self._step_seconds
        shares = [optimizer[step] / seconds for step, seconds in steps.items() if step in optimizer and seconds > 0]
        if not shares and optimizer and steps:  # logged at other steps: a run shorter than its log interval
            return statistics.median(optimizer.values()) / statistics.median(steps.values())
        return _median(shares)

    @property
    def phases_ms(self) -> dict[str, float]:
        """Medians of the measured steps of Muon, by phase; empty without them."""
        measured = {phase: after_warmup(self.events.points(f"muon/{phase}_ms")) for phase in PHASES}
        return {phase: statistics.median(one.value for one in points) for phase, points in measured.items() if points}

    # Memory

    @property
    def state_bytes(self) -> dict[str, int]:
        """Optimizer state of all ranks together, wherever it lies; by kind."""
        return dict(self.facts.get("state_bytes", {}))

    @property
    def all_state_bytes(self) -> int | None:
        """Optimizer state of all kinds."""
        return sum(self.state_bytes.values()) if self.state_bytes else None

    @property
    def peak_bytes(self) -> int | None:
        """The most that a rank's memory held. On a CPU a process's resident set."""
        return max((round(point.value) for point in self.events.points("mem-max-allocated-bytes")), default=None)

    def _losses(self, points: Sequence[Point]) -> tuple[LossPoint, ...]:
        samples, length = self.events.samples, self.whole_number("seq_length")
        last = max(samples, default=0)

        def tokens(step: int) -> int | None:
            if not last or length is None:
                return None
            return length * samples.get(step, round(samples[last] * step / last))  # a step between two logged ones

        return tuple(
            LossPoint(point.step, tokens(point.step), self.events.seconds_at(point), point.value) for point in points
        )


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run: it has what a launch wrote, or Megatron's events."""
    return (folder / run_folder.RUN).is_file() or any((folder / run_folder.TENSORBOARD).glob("events.out.tfevents.*"))


def read_record(folder: Path, *, places: run_folder.RunFolder | None = None, needs_steps: bool = False) -> Record:
    """Reads the run in a folder, its files in `places` where these are known.

    Raises:
        UserError: the folder holds no run, or with `needs_steps` one that has logged no loss.
    """
    if not (folder.is_dir() if needs_steps or places else is_run(folder)):
        raise UserError(f"no run at {str(folder)!r}; give a folder of `megatron-muon train` or `megatron-muon sweep`")
    run, summary = (run_folder.read_json(folder / name) for name in (run_folder.RUN, run_folder.SUMMARY))
    places = places or run_folder.places_of(folder, run)
    try:
        events = read_events(places.tensorboard)
    except UserError:
        if needs_steps:
            raise
        events = RunEvents()
    if needs_steps and not events.points(LOSS_TAG):
        raise UserError(
            f"the log in {str(places.tensorboard)!r} holds no {LOSS_TAG!r}; the run ended before its first step"
        )
    return Record(folder, places, run, summary, run_folder.read_json(places.tensorboard / FACTS), events)


def _by_step(points: Iterable[Point]) -> dict[int, float]:
    return {point.step: point.value for point in points}


def _median(values: Iterable[float]) -> float | None:
    numbers = list(values)
    return statistics.median(numbers) if numbers else None
