"""Reads what Megatron's training loop wrote to TensorBoard: the figures of summary.json.

Each start of a run writes an event file, which takes over from its first iteration; later points of
earlier files are dropped. Needs neither torch nor megatron-core.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from megatron_muon.megatron import LOSS
from megatron_muon.megatron.places import EVENT_FILES, RunFolder

WARMUP_STEPS = 10
"""Speed is measured after these: the first steps pay for caches and allocations."""

LAST_STEPS = 10
"""The final loss is the mean of this many logged steps."""

ONLY_SET = "validation"
"""Name of a run's validation set if there is one; several have names of their own."""

_OVER_SAMPLES = " vs samples"
"""Suffix of the tags under which Megatron repeats scalars, with samples as their steps."""

_TEXT_SUFFIX = "/text_summary"  # appended to the tag by torch's SummaryWriter.add_text


class Point(NamedTuple):
    """One scalar; the wall time is in seconds since the epoch."""

    step: int
    value: float
    wall_time: float


@dataclass
class RunEvents:
    """The events of a run.

    Attributes:
        scalars: points by tag, in the order written, without those over samples.
        args: Megatron's arguments as strings, by name (`seq_length`).
        samples: number of samples consumed.
        train_seconds: time in the training loop over all starts; repeated steps count once.
    """

    scalars: dict[str, list[Point]] = field(default_factory=dict)
    args: dict[str, str] = field(default_factory=dict)
    samples: int = 0
    train_seconds: float = 0.0

    def points(self, tag: str) -> list[Point]:
        """The points of a tag; none if it was never written."""
        return self.scalars.get(tag, [])

    def median(self, tag: str) -> float | None:
        """The median of a tag after the warm-up, or of all points if there are no more."""
        points = self.points(tag)
        late = [point.value for point in points if point.step > WARMUP_STEPS]
        values = late or [point.value for point in points]
        return statistics.median(values) if values else None


class _Start(NamedTuple):
    """One event file: the time of its arguments, just before the loop, and its first iteration."""

    began: float
    iteration: int
    events: RunEvents


def read_events(directory: Path) -> RunEvents:
    """Reads all event files of a TensorBoard directory; empty if there are none."""
    found = [_read_start(file) for file in sorted(directory.glob(EVENT_FILES))]
    starts = sorted(filter(None, found), key=lambda start: start.began)
    events = RunEvents()
    for start in starts:
        for tag, points in events.scalars.items():
            kept = [point for point in points if point.step <= start.iteration]
            events.scalars[tag] = kept
        for tag, points in start.events.scalars.items():
            events.scalars.setdefault(tag, []).extend(points)
        events.args.update(start.events.args)
        events.samples = start.events.samples or events.samples
    times = [point.wall_time for point in events.points(LOSS)]
    begins = [start.began for start in starts]
    for began, following in itertools.pairwise([*begins, math.inf]):
        last = max((time for time in times if began <= time < following), default=began)
        events.train_seconds += last - began
    return events


def _read_start(file: Path) -> _Start | None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sizes = {"scalars": 0, "tensors": 0}  # all
    log = EventAccumulator(str(file), size_guidance=sizes, purge_orphaned_data=False)
    log.Reload()
    events = RunEvents()
    began: list[tuple[float, int]] = []
    for tag in log.Tags()["scalars"]:
        points = [Point(p.step, p.value, p.wall_time) for p in log.Scalars(tag)]
        if tag == f"{LOSS}{_OVER_SAMPLES}":
            events.samples = points[-1].step
        elif not tag.endswith(_OVER_SAMPLES):
            events.scalars[tag] = points
            began.append((points[0].wall_time, points[0].step - 1))
    for tag in [tag for tag in log.Tags()["tensors"] if tag.endswith(_TEXT_SUFFIX)]:
        text = log.Tensors(tag)[0]
        value = text.tensor_proto.string_val[0].decode("utf-8", "replace")
        events.args[tag.removesuffix(_TEXT_SUFFIX)] = value
        began.append((text.wall_time, text.step))
    return _Start(*min(began), events) if began else None


def figures_of(folder: RunFolder) -> dict[str, Any]:
    """The figures that summary.json and `megatron-muon summary` share; None if unknown."""
    events = read_events(folder.tensorboard)
    logged = events.points(LOSS)
    losses = [point.value for point in logged]
    not_finite = [point.step for point in logged if not math.isfinite(point.value)]
    length = int(events.args.get("seq_length", 0))
    batch = int(events.args.get("global_batch_size", 0))
    speed = events.median("tokens-per-second")
    validation, validated_at = _validation(events)
    return {
        "iterations": logged[-1].step if logged else 0,
        "tokens": length * events.samples or None,
        "loss_first": losses[0] if losses else None,
        "loss_last": statistics.fmean(losses[-LAST_STEPS:]) if losses else None,
        "diverged_at": not_finite[0] if not_finite else None,
        "rose": rose(losses),
        "step_ms": 1e3 * length * batch / speed if speed else None,
        "tokens_per_second": speed,
        "optimizer_share": events.median("optimizer-share"),
        "train_seconds": events.train_seconds if losses else None,
        "validation_loss": validation if losses else None,
        "validation_iteration": validated_at,
        "skipped_iterations": len(events.points("skipped-iterations")),
        "checkpoint": str(folder.checkpoint) if folder.checkpoint else None,
    }


def _validation(events: RunEvents) -> tuple[dict[str, float], int | None]:
    """The last validation loss of each set, and its iteration.

    At the last iteration Megatron writes the test set's loss under the same tag, later, so the
    first loss of an iteration counts.
    """
    prefix = f"{LOSS} validation"
    found: dict[str, float] = {}
    last: int | None = None
    for tag in sorted(events.scalars):
        points = events.points(tag)
        if not tag.startswith(prefix) or tag.endswith(" ppl") or not points:
            continue
        last = points[-1].step
        first = next(point for point in points if point.step == last)
        found[tag[len(prefix) + 1 :] or ONLY_SET] = first.value
    return found, last


def rose(losses: Sequence[float]) -> bool:
    """Whether the loss ended above its first value by more than noise.

    The mean of the last `LAST_STEPS` must exceed the first by two of their standard deviations; in
    a shorter run, where learning rates may still warm up, it must be twice the first.
    """
    late = losses[-LAST_STEPS:]
    if not late or not all(map(math.isfinite, late)):
        return False
    first = losses[0]
    mean = statistics.fmean(late)
    if len(losses) < 2 * LAST_STEPS:
        return mean > 2 * first
    return mean > first + 2 * statistics.stdev(late)
