"""Reads what Megatron's training loop writes to TensorBoard. Needs neither torch nor megatron-core.

A directory may hold several event files, one for each start of the training. A later start takes over from
its first iteration on: what an earlier one wrote beyond that belongs to a history that was abandoned.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_muon.errors import UserError

LOSS_TAG = "lm loss"

_TEXT_SUFFIX = "/text_summary"  # torch's SummaryWriter.add_text appends it to the tag


@dataclass(frozen=True)
class Point:
    """One scalar: the iteration, the value, and the wall time in seconds since the epoch."""

    step: int
    value: float
    wall_time: float


@dataclass(frozen=True)
class RunEvents:
    """The events of a run.

    Attributes:
        scalars: Points by tag, in the order written. Tags "... vs samples" count samples, not iterations.
        args: Megatron's arguments as strings, by their name in its namespace (`seq_length`).
        train_seconds: Wall time from the start of the training loop to the last logged loss, summed over
            starts.
        starts: Of each start, when its training loop began and when it logged the last loss that no later start
            took back, in seconds since the epoch.
    """

    scalars: dict[str, list[Point]]
    args: dict[str, str]
    train_seconds: float
    starts: tuple[tuple[float, float], ...] = ()

    def points(self, tag: str) -> list[Point]:
        """Returns the points of a tag, none where it was never written."""
        return self.scalars.get(tag, [])

    def seconds_at(self, point: Point) -> float:
        """Returns the seconds that all starts together had trained when a point was written.

        As in `train_seconds`, what a later start trained again is not counted.
        """
        seconds = 0.0
        for began, end in self.starts:
            if point.wall_time < began:
                break
            latest = not any(began < other <= point.wall_time for other, _ in self.starts)
            seconds += (point.wall_time if latest else end) - began
        return seconds


WARMUP_STEPS = 10
"""Speed is measured after these: the first steps pay for caches and allocations."""


def validations(events: RunEvents) -> dict[str, list[Point]]:
    """Validation losses by name of the set, "" where there is one.

    At the last iteration Megatron evaluates the test set too and writes it under the same tag, later; hence the first
    point of each iteration.
    """
    prefix = f"{LOSS_TAG} validation"
    found = {}
    for tag, points in sorted(events.scalars.items()):
        if tag.startswith(prefix) and not tag.endswith((" ppl", " vs samples")) and points:
            first: dict[int, Point] = {}
            for point in points:
                first.setdefault(point.step, point)
            found[tag.removeprefix(prefix).removeprefix("-")] = list(first.values())
    return found


def after_warmup(points: Sequence[Point]) -> list[Point]:
    """The points after the warm-up; all where there are none."""
    return [point for point in points if point.step > WARMUP_STEPS] or list(points)


def read_events(directory: Path) -> RunEvents:
    """Reads all event files of a TensorBoard directory.

    Raises:
        UserError: The directory is missing or holds no event file.
    """
    if not directory.is_dir():
        raise UserError(f"no TensorBoard log at {str(directory)!r}; train with --tensorboard-dir {directory}")
    files = sorted(directory.glob("events.out.tfevents.*"))
    if not files:
        raise UserError(f"no event file in {str(directory)!r}; did the training start, on the last rank?")

    scalars: dict[str, list[Point]] = {}
    args: dict[str, str] = {}
    starts: list[tuple[float, float]] = []  # (began, next start began)
    loaded = [_load(file) for file in files]
    for events in sorted(loaded, key=lambda events: _first_time(events) or 0.0):
        began = _first_time(events)
        start = _start_step(events)
        for tag, points in scalars.items():
            if not tag.endswith(" vs samples"):
                scalars[tag] = [point for point in points if point.step <= start]
        for tag in events.Tags()["scalars"]:
            scalars.setdefault(tag, []).extend(Point(e.step, e.value, e.wall_time) for e in events.Scalars(tag))
        args.update(_texts(events))
        if began is not None:
            starts.append((began, float("inf")))
            if len(starts) > 1:
                starts[-2] = (starts[-2][0], began)

    losses = scalars.get(LOSS_TAG, [])
    trained = []
    for began, end in starts:
        times = [point.wall_time for point in losses if began <= point.wall_time < end]
        trained.append((began, max(times, default=began)))
    seconds = sum((end - began for began, end in trained), start=0.0)
    return RunEvents(scalars=scalars, args=args, train_seconds=seconds, starts=tuple(trained))


def _load(file: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(file), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    return events


def _first_time(events: Any) -> float | None:
    """Returns when Megatron wrote its arguments, just before the loop; else the time of the first scalar."""
    for kind, read in _readers(events):
        times = [read(tag)[0].wall_time for tag in events.Tags()[kind]]
        if times:
            return float(min(times))
    return None


def _readers(events: Any) -> tuple[tuple[str, Callable[[str], Any]], ...]:
    return ("tensors", events.Tensors), ("scalars", events.Scalars)


def _start_step(events: Any) -> int:
    """Returns the iteration that this start continued from; 0 for a fresh one."""
    steps = [events.Tensors(tag)[0].step for tag in events.Tags()["tensors"]]
    if not steps and LOSS_TAG in events.Tags()["scalars"]:
        steps = [events.Scalars(LOSS_TAG)[0].step - 1]
    return int(min(steps, default=0))


def _texts(events: Any) -> dict[str, str]:
    return {
        tag.removesuffix(_TEXT_SUFFIX): events.Tensors(tag)[-1].tensor_proto.string_val[0].decode("utf-8", "replace")
        for tag in events.Tags()["tensors"]
        if tag.endswith(_TEXT_SUFFIX)
    }
