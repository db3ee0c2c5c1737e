"""What one run did, read back from its folder: losses against steps, tokens and seconds, times, memory, outcome.

summary.json, `summary`, sweeps and reports are made of it. Megatron's training loop writes most of
it to TensorBoard: a file for each start, which takes over from its first iteration on; what an
earlier one wrote beyond that is dropped. Needs neither torch nor megatron-core.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from megatron_muon.errors import UserError
from megatron_muon.megatron import FACTS, LOSS
from megatron_muon.megatron.places import (
    CONFIG,
    EVENT_FILES,
    RUN,
    SUMMARY,
    TENSORBOARD,
    RunFolder,
    read_json,
)
from megatron_muon.tools.train import run_folder

WARMUP_STEPS = 10
"""Speed is measured after these: the first steps pay for caches and allocations."""

_OVER_SAMPLES = " vs samples"
_SAMPLES = f"{LOSS}{_OVER_SAMPLES}"
"""Tag of the samples consumed, all starts together. Megatron writes losses with samples as their steps; here they are
values at iterations."""

_TEXT_SUFFIX = "/text_summary"  # torch's SummaryWriter.add_text appends it to the tag

LAST_STEPS = 10
"""The final loss is the mean of this many logged steps."""

ONLY_SET = "validation"
"""The name of a run's validation set where it has one; several have names of their own."""


class Point(NamedTuple):
    """One scalar; the wall time is in seconds since the epoch."""

    step: int
    value: float
    wall_time: float


@dataclass(frozen=True)
class RunEvents:
    """The events of a run.

    Attributes:
        scalars: points by tag, in the order written; of those over samples `_SAMPLES` alone.
        args: Megatron's arguments as strings, by name (`seq_length`).
        starts: when the training loop of each began, and when it logged the last loss that no later
            start took back.
    """

    scalars: dict[str, list[Point]] = field(default_factory=dict)
    args: dict[str, str] = field(default_factory=dict)
    starts: list[tuple[float, float]] = field(default_factory=list)

    def points(self, tag: str) -> list[Point]:
        """The points of a tag; none where it was never written."""
        return self.scalars.get(tag, [])

    def seconds_at(self, point: Point) -> float:
        """Seconds that all starts together had trained when a point was written; steps trained again count once."""
        begun = [start for start in self.starts if start[0] <= point.wall_time]
        ends = [*(end for _, end in begun[:-1]), point.wall_time]
        return sum((end - began for (began, _), end in zip(begun, ends, strict=False)), start=0.0)


def read_events(directory: Path) -> RunEvents:
    """Reads all event files of a TensorBoard directory; empty where there are none."""
    events, begins = RunEvents(), list[float]()
    starts = filter(None, map(_read_start, sorted(directory.glob(EVENT_FILES))))
    for began, step, found in sorted(starts, key=lambda start: start[0]):
        begins.append(began)
        for tag, points in events.scalars.items():
            events.scalars[tag] = [point for point in points if point.step <= step]
        for tag, points in found.scalars.items():
            events.scalars.setdefault(tag, []).extend(points)
        events.args.update(found.args)
    times = [point.wall_time for point in events.points(LOSS)]
    for began, following in itertools.pairwise([*begins, math.inf]):
        events.starts.append(
            (began, max((time for time in times if began <= time < following), default=began))
        )
    return events


def _read_start(file: Path) -> tuple[float, int, RunEvents] | None:
    """An event file, when Megatron wrote its arguments, just before the loop, and the iteration it went on from."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = EventAccumulator(
        str(file), size_guidance={"scalars": 0, "tensors": 0}, purge_orphaned_data=False
    ).Reload()
    points = {
        tag: [Point(p.step, p.value, p.wall_time) for p in log.Scalars(tag)]
        for tag in log.Tags()["scalars"]
    }
    found = RunEvents(
        {tag: of_tag for tag, of_tag in points.items() if not tag.endswith(_OVER_SAMPLES)}
    )
    counted = zip(points.get(LOSS, []), points.get(_SAMPLES, []), strict=False)
    found.scalars[_SAMPLES] = [
        Point(loss.step, count.step, loss.wall_time) for loss, count in counted
    ]
    tags = [tag for tag in log.Tags()["tensors"] if tag.endswith(_TEXT_SUFFIX)]
    # of earlier versions
    texts = {tag: log.Tensors(tag)[0] for tag in tags if not tag.startswith("facts/")}
    for tag, text in texts.items():
        found.args[tag.removesuffix(_TEXT_SUFFIX)] = text.tensor_proto.string_val[0].decode(
            "utf-8", "replace"
        )
    began = [(text.wall_time, text.step) for text in texts.values()]
    began = began or [
        (first.wall_time, first.step - 1) for first, *_ in filter(None, found.scalars.values())
    ]
    return (
        (min(time for time, _ in began), min(step for _, step in began), found) if began else None
    )


@dataclass(frozen=True)
class LossPoint:
    """A loss, and where it was: iteration, tokens trained on, if known, and seconds in the training loop."""

    step: int
    tokens: int | None
    seconds: float
    loss: float


class Record:
    """A run. None stands for what its folder does not tell; a loss may be NaN; times are medians after the warm-up.

    Attributes:
        places: where its events and checkpoints lie now.
        run, summary, facts: contents of run.json, summary.json and facts.json; empty where there is
        none.
        args: Megatron's arguments as strings, by name.
        tokens, train_seconds: trained on; in Megatron's training loop, validation included; all
        starts together.
        loss_last: mean of the last `LAST_STEPS` of `losses`, the training losses that were logged.
        validation: validation losses, the mean of the sets where there are several;
            `validation_by_set`: their last.
        diverged_at: first iteration whose loss, or a gradient that Megatron ended the run for, is
            not a finite number.
        outcome: that of summary.json; else "finished" or "unfinished", by the iterations.
        step_ms, optimizer_ms, optimizer_share: of an iteration; of the optimizer's step in it;
        their ratio.
        tokens_per_second: of all ranks together.
        state_bytes, all_state_bytes: optimizer state of all ranks, wherever it lies, by kind and of
        all kinds.
        peak_bytes: the most that a rank's memory held; on a CPU a process's resident set.
    """

    def __init__(self, folder: Path, places: RunFolder, events: RunEvents) -> None:
        self.folder, self.places, self.events = folder, places, events
        self.run, self.summary = (read_json(folder / name) for name in (RUN, SUMMARY))
        self.facts = read_json(places.tensorboard / FACTS)
        self.args: Mapping[str, str] = events.args
        self.optimizer: str = (
            self.args.get("optimizer") or self.summary.get("optimizer") or "unknown"
        )
        self.seed = self.whole_number("seed")
        self.state_bytes: dict[str, int] = self.facts.get("state_bytes", {})
        self.all_state_bytes = sum(self.state_bytes.values()) or None
        peaks = [point.value for point in events.points("mem-max-allocated-bytes")]
        self.peak_bytes = round(max(peaks)) if peaks else None
        self._read_losses()
        self._read_validation()
        self._read_times()

    def _read_losses(self) -> None:
        self.train = self._losses(self.events.points(LOSS))
        self.losses = [point.loss for point in self.train]
        self.loss_last = statistics.fmean(self.losses[-LAST_STEPS:]) if self.train else None
        self.iterations = self.train[-1].step if self.train else 0
        self.tokens = self.train[-1].tokens if self.train else None
        self.train_seconds = self.train[-1].seconds if self.train else 0.0
        logged = (point.step for point in self.train if not math.isfinite(point.loss))
        self.diverged_at: int | None = next(
            logged, (self.summary if self.run else self.facts).get("diverged_at")
        )
        asked = self.whole_number("train_iters")
        is_finished = asked is not None and self.iterations >= asked
        self.outcome: str = self.summary.get("outcome") or (
            "finished" if is_finished else "unfinished"
        )

    def _read_validation(self) -> None:
        """At the last iteration Megatron writes the test set's loss under the same tag, later: the first counts."""
        prefix, by_step = f"{LOSS} validation", dict[int, list[Point]]()
        self.validation_by_set: dict[str, float] = {}
        for tag in sorted(
            tag
            for tag in self.events.scalars
            if tag.startswith(prefix) and not tag.endswith(" ppl")
        ):
            points = {point.step: point for point in reversed(self.events.points(tag))}
            for step, point in points.items():
                by_step.setdefault(step, []).append(point)
            if points:
                self.validation_by_set[tag[len(prefix) + 1 :] or ONLY_SET] = points[
                    max(points)
                ].value
        means = [
            Point(step, statistics.fmean(point.value for point in sets), sets[-1].wall_time)
            for step, sets in sorted(by_step.items())
        ]
        self.validation = self._losses(means)
        self.validation_last = self.validation[-1].loss if self.validation else None

    def _read_times(self) -> None:
        seconds = self._by_step("iteration-time") or {
            after.step: (after.wall_time - before.wall_time) / (after.step - before.step)
            for before, after in itertools.pairwise(self.events.points(LOSS))
            if after.step > before.step
        }
        batches, length = self._by_step("batch-size"), self.whole_number("seq_length")
        speeds = {
            step: batches[step] / each
            for step, each in seconds.items()
            if each > 0 and step in batches
        }
        # Of a start's first step Megatron writes timers divided by the log interval.
        every = self.whole_number("log_interval") or 1
        timers = {
            step: each
            for step, each in self._by_step("optimizer-time").items()
            if step % every == 0
        }
        self.step_ms, self.optimizer_ms = _median(seconds, 1e3), _median(timers, 1e3)
        self.tokens_per_second = _median(speeds, length) if length else None
        self.optimizer_share = _median(self._by_step("optimizer-share"))
        if self.optimizer_share is None and self.optimizer_ms and self.step_ms:
            self.optimizer_share = self.optimizer_ms / self.step_ms

    def _by_step(self, tag: str) -> dict[int, float]:
        return {point.step: point.value for point in self.events.points(tag)}

    def _losses(self, points: Sequence[Point]) -> tuple[LossPoint, ...]:
        samples, length = self._by_step(_SAMPLES), self.whole_number("seq_length")
        last = max(samples, default=0)

        def tokens(step: int) -> int | None:
            if not last or length is None:
                return None
            # Of a step between two logged ones, as many as of others on average.
            return length * round(samples.get(step, samples[last] * step / last))

        return tuple(
            LossPoint(point.step, tokens(point.step), self.events.seconds_at(point), point.value)
            for point in points
        )

    @property
    def figures(self) -> dict[str, Any]:
        """The figures that summary.json and `summary --json` share."""
        names = (
            "iterations",
            "tokens",
            "loss_last",
            "diverged_at",
            "step_ms",
            "tokens_per_second",
            "optimizer_share",
        )
        return {
            **{name: getattr(self, name) for name in names},
            "loss_first": self.losses[0] if self.losses else None,
            "train_seconds": self.train_seconds if self.train else None,
            "validation_loss": self.validation_by_set if self.train else None,
            "validation_iteration": self.validation[-1].step if self.validation else None,
            "skipped_iterations": len(self.events.points("skipped-iterations")),
            "checkpoint": str(self.places.checkpoint) if self.places.checkpoint else None,
        }

    def whole_number(self, name: str) -> int | None:
        """One of Megatron's arguments as a number."""
        text = self.args.get(name, "")
        return int(text) if text.isdigit() else None

    @cached_property
    def settings(self) -> Mapping[str, str]:
        """The flags of config.yaml without dashes and with underscores, values joined by blanks."""
        from megatron_muon.megatron.flags.config_file import load_config

        file = self.folder / CONFIG
        flags = load_config(file).flags if file.is_file() else ()
        return {
            name.lstrip("-").replace("-", "_"): " ".join(values) or "true" for name, values in flags
        }

    @property
    def rose(self) -> bool:
        """Whether the loss ended above where it began by more than noise.

        The mean of the last `LAST_STEPS` must be above the first by two of their standard
        deviations; in a run too short for that, where learning rates may still warm up, it must be
        twice the first.
        """
        late = self.losses[-LAST_STEPS:]
        if not late or not all(map(math.isfinite, late)):
            return False
        first, mean = self.losses[0], statistics.fmean(late)
        return mean > (
            2 * first if len(self.losses) < 2 * LAST_STEPS else first + 2 * statistics.stdev(late)
        )

    @property
    def diverged(self) -> bool:
        """Whether a loss was not a number, or the loss rose."""
        return (
            bool(self.summary["diverged"])
            if self.summary
            else self.diverged_at is not None or self.rose
        )


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run: it has what a launch wrote, or Megatron's events."""
    return (folder / RUN).is_file() or any((folder / TENSORBOARD).glob(EVENT_FILES))


def read_record(
    folder: Path, *, places: RunFolder | None = None, needs_steps: bool = False
) -> Record:
    """Reads the run in a folder, its files in `places` where these are known.

    Raises:
        UserError: the folder holds no run, or with `needs_steps` one that has logged no loss.
    """
    if not (folder.is_dir() if needs_steps or places else is_run(folder)):
        raise UserError(
            f"no run at {str(folder)!r}; give a folder of `megatron-muon train` or `megatron-muon"
            " sweep`"
        )
    places = places or run_folder.places_of(folder, read_json(folder / RUN))
    events = read_events(places.tensorboard)
    if needs_steps and not events.points(LOSS):
        raise UserError(
            f"the log in {str(places.tensorboard)!r} holds no {LOSS!r}; has the run made a step?"
        )
    return Record(folder, places, events)


def _median(by_step: Mapping[int, float], scale: float = 1.0) -> float | None:
    """The median after the warm-up, or of all steps where there are no more."""
    values = [value for step, value in by_step.items() if step > WARMUP_STEPS] or list(
        by_step.values()
    )
    return scale * statistics.median(values) if values else None
