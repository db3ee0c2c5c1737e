"""What a training tells, in words that fit a line: figures, sizes, times. Plain text, no torch.

A line is made of fields. Where it is wider than it may be, fields take their short form, and then the least important
ones are left out.
"""

from __future__ import annotations

import math
import shlex
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

WIDTH = 100
"""Columns that a printed line may take; commands and errors, which are copied, may take more."""


SPARE = 9
"""Fields that are left out before any is shortened."""


class Field(NamedTuple):
    """A part of a line: its text, a shorter one, and how soon it is left out; 0 is never."""

    text: str
    short: str
    leave: int = 0


def fit(fields: Iterable[Field], width: int) -> str:
    """The fields in a line of at most `width` columns."""
    left = list(fields)
    line = "  ".join(field.text for field in left)
    if len(line) > width:
        left = [field for field in left if field.leave < SPARE]
        line = "  ".join(field.text for field in left)
    if len(line) > width:
        line = "  ".join(field.short for field in left)
    while len(line) > width and any(field.leave for field in left):
        left.remove(max(left, key=lambda field: field.leave))
        line = "  ".join(field.short for field in left)
    return line[:width]


def step_line(told: Mapping[str, Any], width: int = WIDTH) -> str:
    """A log interval: the event `step` of `megatron.TOLD`."""
    number = f"step {_of(told['step'], told['steps'])}"
    details = []
    if (norm := told.get("grad_norm")) is not None:
        shown = f"{norm:.2f}" if norm < 1000 else f"{norm:.2e}"
        details.append(Field(f"grad norm {shown}", f"norm {shown}", 3))
    if told.get("lr") is not None:
        details.append(Field(f"lr {told['lr']:.1e}", f"lr {told['lr']:.1e}", 4))
    if told.get("muon_lr") is not None:
        details.append(Field(f"Muon's lr {told['muon_lr']:.1e}", f"Muon's {told['muon_lr']:.1e}", 5))
    if told.get("skipped"):
        details.append(Field(f"{told['skipped']} skipped", f"{told['skipped']} skipped"))
    speed = *_speed(told), *_memory(told, SPARE), *_left(told)
    return fit([Field(number, number), *_loss(told), *details, *speed], width)


def live_fields(told: Mapping[str, Any], step: int | None, steps: int | None) -> list[Field]:
    """What the live line shows: the last step, and the figures of the last log interval."""
    number = [] if step is None else [Field(f"step {_of(step, steps)}", _of(step, steps))]
    return [*number, *_loss(told), *_speed(told), *_memory(told, 3), *_left(told)]


def validation_line(told: Mapping[str, Any], width: int = WIDTH) -> str:
    """An evaluation: the event `validation`."""
    name = f" {told['set']}" if told["set"] else ""
    loss = told["loss"]
    fields = [Field(f"{told['data']} loss{name} {_number(loss, '.4f')}", f"{told['data']} loss{name} {loss:.4f}")]
    if math.isfinite(loss) and loss < 20:
        fields.append(Field(f"perplexity {math.exp(loss):,.2f}", f"ppl {math.exp(loss):,.2f}", 1))
    when = f"at step {told['step']:,}"
    if told["last"] and told["data"] == "validation":
        when = "after the last step, on other batches"
    return fit([*fields, Field(when, when, 3), Field(f"took {duration(told['seconds'])}", "", 2)], width)


def saved_line(told: Mapping[str, Any]) -> str:
    """A checkpoint: the event `saved`."""
    what = "being written" if told["background"] else f"saved in {duration(told['seconds'])}"
    return f"checkpoint of step {told['step']:,} {what}: {told['folder']}"


def wrapped(text: str, *, indent: int = 2, width: int = WIDTH) -> list[str]:
    """A note as lines; words, paths and flags stay whole."""
    return textwrap.wrap(
        text, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    ) or [text]


def command_lines(command: str, *, indent: int = 0, width: int = WIDTH) -> list[str]:
    """A command as lines that can be copied together: broken before flags, with backslashes."""
    groups: list[str] = []
    for word in map(shlex.quote, shlex.split(command)):
        if groups and not word.startswith("-"):
            groups[-1] += f" {word}"
        else:
            groups.append(word)
    lines = [" " * indent + groups[0]]
    for group in groups[1:]:
        if len(lines[-1]) + len(group) + len("  \\") > width:
            lines[-1] += " \\"
            lines.append(" " * (indent + 4) + group)
        else:
            lines[-1] += f" {group}"
    return lines


def duration(seconds: float) -> str:
    """Minutes and seconds, 2:41, with hours and days where there are any; a decimal below ten seconds."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours:02}:{minutes:02} h"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def clock(seconds: float) -> str:
    """As `duration`, for what runs on a screen: without decimals."""
    return f"0:{round(seconds):02}" if seconds < 9.95 else duration(seconds)


def size(count: float) -> str:
    """Bytes: 970 MB, 14.2 GB."""
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.0f} MB"


def _of(step: int, steps: int | None) -> str:
    return f"{step:>{len(str(steps))}}/{steps}" if steps else str(step)


def _number(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else "not a number"


def _loss(told: Mapping[str, Any]) -> list[Field]:
    loss = told.get("loss")
    return [] if loss is None else [Field(f"loss {_number(loss, '.4f')}", f"loss {_number(loss, '.4f')}")]


def _speed(told: Mapping[str, Any]) -> list[Field]:
    fields = []
    if (speed := told.get("tokens_per_s")) is not None:
        shown = f"{speed:,.0f}" if speed < 999_500 else f"{speed / 1e6:,.2f} M"
        fields.append(Field(f"{shown} tokens/s", f"{shown} tok/s"))
    if (mfu := told.get("mfu")) is not None:
        fields.append(Field(f"MFU {mfu:.1%}", f"MFU {mfu:.0%}", 1))
    if (share := told.get("optimizer_share")) is not None:
        fields.append(Field(f"optimizer {share:.0%}", f"opt {share:.0%}", 2))
    return fields


def _memory(told: Mapping[str, Any], leave: int) -> list[Field]:
    peak = told.get("peak_bytes")
    return [] if peak is None else [Field(size(peak), size(peak), leave)]


def _left(told: Mapping[str, Any]) -> list[Field]:
    left = told.get("seconds_left")
    return [] if left is None else [Field(f"{clock(left)} left", f"{clock(left)} left")]
