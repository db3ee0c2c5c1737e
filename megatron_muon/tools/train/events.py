"""Reads what Megatron's training loop writes to TensorBoard. Needs neither torch nor megatron-core.

Each start writes a file and takes over from its first iteration on; what an earlier one wrote beyond that is dropped.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from megatron_muon.errors import UserError
from megatron_muon.megatron import FACTS_PREFIX, LOSS
from megatron_muon.megatron.places import EVENT_FILES

WARMUP_STEPS = 10
"""Speed is measured after these: the first steps pay for caches and allocations."""

_TEXT_SUFFIX = "/text_summary"  # torch's SummaryWriter.add_text appends it to the tag
_OVER_SAMPLES = " vs samples"


class Point(NamedTuple):
    """One scalar; the wall time is in seconds since the epoch."""

    step: int
    value: float
    wall_time: float


@dataclass(frozen=True)
class RunEvents:
    """The events of a run.

    Attributes:
        scalars: points by tag, in the order written. Tags "... vs samples" count samples, not iterations; those of
            abandoned iterations are among them.
        args: Megatron's arguments as strings, by name (`seq_length`).
        samples: samples consumed, all starts together, by logged iteration.
        starts: when the training loop of each began, and when it logged the last loss that no later start took back.
    """

    scalars: dict[str, list[Point]] = field(default_factory=dict)
    args: dict[str, str] = field(default_factory=dict)
    samples: dict[int, int] = field(default_factory=dict)
    starts: list[tuple[float, float]] = field(default_factory=list)

    @property
    def train_seconds(self) -> float:
        """Wall time from the start of the training loop to the last logged loss, summed over starts."""
        return sum((end - began for began, end in self.starts), start=0.0)

    def points(self, tag: str) -> list[Point]:
        """The points of a tag; none where it was never written."""
        return self.scalars.get(tag, [])

    def seconds_at(self, point: Point) -> float:
        """Seconds that all starts together had trained when a point was written; steps trained again count once."""
        begun = [start for start in self.starts if start[0] <= point.wall_time]
        ends = [end for _, end in begun[:-1]] + [point.wall_time]
        return sum((end - began for (began, _), end in zip(begun, ends, strict=False)), start=0.0)


def read_events(directory: Path) -> RunEvents:
    """Reads all event files of a TensorBoard directory.

    Raises:
        UserError: the directory is missing or holds no event file.
    """
    if not directory.is_dir():
        raise UserError(f"no TensorBoard log at {str(directory)!r}; train with --tensorboard-dir {directory}")
    files = sorted(directory.glob(EVENT_FILES))
    if not files:
        raise UserError(f"no event file in {str(directory)!r}; did the training start, on the last rank?")
    events = RunEvents()
    starts = sorted((start for file in files if (start := _read_start(file))), key=lambda start: start.began)
    for start in starts:
        for step in [step for step in events.samples if step > start.step]:
            del events.samples[step]
        for tag, points in events.scalars.items():
            if not tag.endswith(_OVER_SAMPLES):
                events.scalars[tag] = [point for point in points if point.step <= start.step]
        for tag, points in start.scalars.items():
            events.scalars.setdefault(tag, []).extend(points)
        events.args.update(start.args)
        written = zip(start.scalars.get(LOSS, []), start.scalars.get(f"{LOSS}{_OVER_SAMPLES}", []), strict=False)
        events.samples.update((loss.step, count.step) for loss, count in written)
    times = [point.wall_time for point in events.points(LOSS)]
    for first, following in itertools.pairwise([*(start.began for start in starts), math.inf]):
        events.starts.append((first, max((time for time in times if first <= time < following), default=first)))
    return events


class _Start(NamedTuple):
    """An event file: when Megatron wrote its arguments, just before the loop, and the iteration it continued from."""

    began: float
    step: int
    scalars: dict[str, list[Point]]
    args: dict[str, str]


def _read_start(file: Path) -> _Start | None:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    scalars: dict[str, list[Point]] = {}
    args: dict[str, str] = {}
    began: list[tuple[float, int]] = []
    for event in LegacyEventFileLoader(str(file)).Load():
        for value in event.summary.value:
            if value.HasField("simple_value"):
                scalars.setdefault(value.tag, []).append(Point(event.step, value.simple_value, event.wall_time))
            elif value.tag.endswith(_TEXT_SUFFIX) and not value.tag.startswith(FACTS_PREFIX):  # they come earlier
                args[value.tag.removesuffix(_TEXT_SUFFIX)] = value.tensor.string_val[0].decode("utf-8", "replace")
                began.append((event.wall_time, event.step))
    began = began or [(points[0].wall_time, points[0].step - 1) for points in scalars.values()]
    if not began:
        return None
    times, steps = zip(*began, strict=True)
    return _Start(min(times), min(steps), scalars, args)
