"""Reads what Megatron's training loop wrote to TensorBoard, without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_muon.megatron.places import EVENT_FILES

if TYPE_CHECKING:
    from tensorboard.backend.event_processing.event_accumulator import ScalarEvent

_TEXT_SUFFIX = "/text_summary"  # appended to the tag by torch's SummaryWriter.add_text


@dataclass
class RunEvents:
    """The events of a run."""

    scalars: dict[str, list[ScalarEvent]] = field(default_factory=dict)
    """Points by tag, in the order written; of tags in " vs samples" the steps are samples."""

    args: dict[str, str] = field(default_factory=dict)
    """Megatron's arguments as strings, by name (`seq_length`)."""

    def points(self, tag: str) -> list[ScalarEvent]:
        """The points of a tag; none if it was never written."""
        return self.scalars.get(tag, [])


def read_events(directory: Path) -> RunEvents:
    """Reads all event files of a TensorBoard directory; empty if there are none.

    Each start of a run writes a file, which takes over from its first iteration.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = RunEvents()
    for file in sorted(directory.glob(EVENT_FILES)):
        log = EventAccumulator(str(file), {"scalars": 0, "tensors": 0}).Reload()
        for tag in log.Tags()["scalars"]:
            points = log.Scalars(tag)
            before = [point for point in events.points(tag) if point.step < points[0].step]
            events.scalars[tag] = before + points
        for tag in log.Tags()["tensors"]:
            (text,) = log.Tensors(tag)[-1].tensor_proto.string_val
            events.args[tag.removesuffix(_TEXT_SUFFIX)] = text.decode("utf-8", "replace")
    return events
