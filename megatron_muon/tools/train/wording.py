"""Turns events, figures, sizes and times into text that fits a line. Plain text, no torch.

A line is made of fields. Where it is wider than it may be, fields take their short form, and then the least important
ones are left out.
"""

from __future__ import annotations

import math
import shlex
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

WIDTH = 100
"""Columns that a printed line may take; commands and errors, which are copied, may take more."""


SPARE = 9
"""Fields that are left out before any is shortened."""


def printable(text: str) -> str:
    """The text with control characters, and bytes that are no text, as Python writes them."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


class Field(NamedTuple):
    """A part of a line: its text, a shorter form, and when it is dropped: the highest number first, 0 never."""

    text: str
    short: str = ""
    leave: int = 0


def fit(fields: Iterable[Field], width: int) -> str:
    """The fields in a line of at most `width` columns."""
    given = list(fields)
    lines = ["  ".join(field.text for field in given), "  ".join(field.text for field in given if field.leave < SPARE)]
    lines += ["  ".join(f.short or f.text for f in given if f.leave < level) for level in range(SPARE, 0, -1)]
    return next((line for line in lines if len(line) <= width), lines[-1][:width])


_FIGURES: dict[str, Callable[[Any], Field]] = {
    "loss": lambda loss: Field(f"loss {_number(loss, '.4f')}"),
    "grad_norm": lambda norm: Field(f"grad norm {_norm(norm)}", f"norm {_norm(norm)}", 3),
    "lr": lambda rate: Field(f"lr {rate:.1e}", leave=4),
    "muon_lr": lambda rate: Field(f"Muon's lr {rate:.1e}", f"Muon's {rate:.1e}", 5),
    "skipped": lambda steps: Field(f"{steps} skipped"),
    "tokens_per_s": lambda speed: Field(f"{_rate(speed)} tokens/s", f"{_rate(speed)} tok/s"),
    "mfu": lambda mfu: Field(f"MFU {mfu:.1%}", f"MFU {mfu:.0%}", 1),
    "optimizer_share": lambda share: Field(f"optimizer {share:.0%}", f"opt {share:.0%}", 2),
    "peak_bytes": lambda peak: Field(size(peak), leave=SPARE),
    "seconds_left": lambda left: Field(f"{clock(left)} left"),
}
"""How the figures of the event `step` are written, in the order of a line."""

_LIVE = ("loss", "tokens_per_s", "mfu", "optimizer_share", "peak_bytes", "seconds_left")


def step_line(event: Mapping[str, Any], width: int = WIDTH) -> str:
    """A log interval: the event `step` of `megatron.TOLD`."""
    figures = _figures({**event, "skipped": event.get("skipped") or None}, _FIGURES)
    return fit([Field(f"step {_of(event['step'], event['steps'])}"), *figures], width)


def live_fields(event: Mapping[str, Any], step: int, steps: int | None) -> list[Field]:
    """What the live line shows: the last step, and the figures of the last log interval; memory is not spare there."""
    figures = (field._replace(leave=min(field.leave, 3)) for field in _figures(event, _LIVE))
    return [Field(f"step {_of(step, steps)}", _of(step, steps)), *figures]


def validation_line(event: Mapping[str, Any], width: int = WIDTH) -> str:
    """An evaluation: the event `validation`."""
    name = f" {event['set']}" if event["set"] else ""
    loss = event["loss"]
    fields = [Field(f"{event['data']} loss{name} {_number(loss, '.4f')}")]
    if math.isfinite(loss) and loss < 20:
        fields.append(Field(f"perplexity {math.exp(loss):,.2f}", f"ppl {math.exp(loss):,.2f}", 1))
    when = f"at step {event['step']:,}"
    if event["last"] and event["data"] == "validation":
        when = "after training, on different batches"
    return fit([*fields, Field(when, leave=3), Field(f"took {duration(event['seconds'])}", leave=SPARE)], width)


def saved_line(event: Mapping[str, Any]) -> str:
    """A checkpoint: the event `saved`."""
    what = "is being written to" if event["background"] else f"saved in {duration(event['seconds'])} to"
    return f"checkpoint of step {event['step']:,} {what} {event['folder']}"


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
    """Like `duration`, without decimals, for times that tick on the screen."""
    return f"0:{round(seconds):02}" if seconds < 9.95 else duration(seconds)


def size(count: float) -> str:
    """Bytes: 970 MB, 14.2 GB."""
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.0f} MB"


def _of(step: int, steps: int | None) -> str:
    return f"{step:>{len(str(steps))}}/{steps}" if steps else str(step)


def _number(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else "not a number"


def _figures(event: Mapping[str, Any], names: Iterable[str]) -> list[Field]:
    return [_FIGURES[name](event[name]) for name in names if event.get(name) is not None]


def _norm(norm: float) -> str:
    return f"{norm:.2f}" if norm < 1000 else f"{norm:.2e}"


def _rate(speed: float) -> str:
    return f"{speed:,.0f}" if speed < 999_500 else f"{speed / 1e6:,.2f} M"
