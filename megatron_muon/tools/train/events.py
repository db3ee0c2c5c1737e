"""Reads what Megatron's training loop writes to TensorBoard. Needs neither torch nor megatron-core.

Each start writes a file and takes over from its first iteration on; what an earlier one wrote beyond that is dropped.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from megatron_muon.megatron import LOSS
from megatron_muon.megatron.places import EVENT_FILES

WARMUP_STEPS = 10
"""Speed is measured after these: the first steps pay for caches and allocations."""

_OVER_SAMPLES = " vs samples"
SAMPLES = f"{LOSS}{_OVER_SAMPLES}"
"""Tag of the samples consumed, all starts together. Megatron writes losses with samples as their steps; here they are
values at iterations."""

_TEXT_SUFFIX = "/text_summary"  # torch's SummaryWriter.add_text appends it to the tag


class Point(NamedTuple):
    """One scalar; the wall time is in seconds since the epoch."""

    step: int
    value: float
    wall_time: float


@dataclass(frozen=True)
class RunEvents:
    """The events of a run.

    Attributes:
        scalars: points by tag, in the order written; of those over samples `SAMPLES` alone.
        args: Megatron's arguments as strings, by name (`seq_length`).
        starts: when the training loop of each began, and when it logged the last loss that no later start took back.
    """

    scalars: dict[str, list[Point]] = field(default_factory=dict)
    args: dict[str, str] = field(default_factory=dict)
    starts: list[tuple[float, float]] = field(default_factory=list)

    def points(self, tag: str) -> list[Point]:
        """The points of a tag; none where it was never written."""
        return self.scalars.get(tag, [])

    @property
    def train_seconds(self) -> float:
        """Wall time from the start of the training loop to the last logged loss, summed over starts."""
        return sum((end - began for began, end in self.starts), start=0.0)

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
        events.starts.append((began, max((time for time in times if began <= time < following), default=began)))
    return events


def _read_start(file: Path) -> tuple[float, int, RunEvents] | None:
    """An event file, when Megatron wrote its arguments, just before the loop, and the iteration it went on from."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = EventAccumulator(str(file), size_guidance={"scalars": 0, "tensors": 0}, purge_orphaned_data=False).Reload()
    points = {tag: [Point(p.step, p.value, p.wall_time) for p in log.Scalars(tag)] for tag in log.Tags()["scalars"]}
    found = RunEvents({tag: of_tag for tag, of_tag in points.items() if not tag.endswith(_OVER_SAMPLES)})
    counted = zip(points.get(LOSS, []), points.get(SAMPLES, []), strict=False)
    found.scalars[SAMPLES] = [Point(loss.step, count.step, loss.wall_time) for loss, count in counted]
    texts = {tag: log.Tensors(tag)[0] for tag in log.Tags()["tensors"] if tag.endswith(_TEXT_SUFFIX)}
    texts = {tag: text for tag, text in texts.items() if not tag.startswith("facts/")}  # of earlier versions
    for tag, text in texts.items():
        found.args[tag.removesuffix(_TEXT_SUFFIX)] = text.tensor_proto.string_val[0].decode("utf-8", "replace")
    began = [(text.wall_time, text.step) for text in texts.values()]
    began = began or [(first.wall_time, first.step - 1) for first, *_ in filter(None, found.scalars.values())]
    return (min(time for time, _ in began), min(step for _, step in began), found) if began else None
