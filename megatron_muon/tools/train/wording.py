"""Turns events, figures and times into text that fits a line. Plain text, no torch."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any

WIDTH = 100
"""Columns that a printed line may take; commands and errors, which are copied, may take more."""


def printable(text: str) -> str:
    """The text with control characters, and bytes that are no text, as Python writes them."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


_FIGURES: dict[str, Callable[[Any], str]] = {
    "loss": lambda loss: f"loss {_loss(loss)}",
    "grad_norm": lambda norm: f"grad norm {norm:.2f}" if norm < 1000 else f"grad norm {norm:.2e}",
    "lr": lambda rate: f"lr {rate:.1e}",
    "muon_lr": lambda rate: f"Muon's lr {rate:.1e}",
    "skipped": lambda steps: f"{steps} skipped",
    "tokens_per_s": lambda speed: f"{speed:,.0f} tokens/s" if speed < 999_500 else f"{speed / 1e6:,.2f} M tokens/s",
    "mfu": lambda mfu: f"MFU {mfu:.0%}",
    "optimizer_share": lambda share: f"optimizer {share:.0%}",
    "peak_bytes": lambda peak: f"{peak / 1e9:,.1f} GB",
    "seconds_left": lambda left: f"{clock(left)} left",
}
"""How the figures of the event `step` are written, in the order of a line."""

_SPARE = ("peak_bytes", "lr", "muon_lr", "grad_norm", "optimizer_share", "mfu")
"""Figures that a line leaves out where it is too narrow, the first of these first."""

_LIVE = ("loss", "tokens_per_s", "mfu", "optimizer_share", "seconds_left")


def step_line(event: Mapping[str, Any], width: int = WIDTH) -> str:
    """A log interval: the event `step` of `megatron.TOLD`."""
    figures = _figures({**event, "skipped": event.get("skipped") or None}, _FIGURES)
    shown = {"step": f"step {steps_of(event)}", **figures}
    for spare in _SPARE:
        if len("  ".join(shown.values())) > width:
            shown.pop(spare, None)
    return "  ".join(shown.values())[:width]


def live_line(event: Mapping[str, Any]) -> str:
    """The figures of the last log interval for a live line."""
    return "  ".join(_figures(event, _LIVE).values())


def steps_of(event: Mapping[str, Any]) -> str:
    """How many steps are done, of how many."""
    steps = event.get("steps")
    return f"{event['step']:>{len(str(steps))}}/{steps}" if steps else str(event["step"])


def validation_line(event: Mapping[str, Any]) -> str:
    """An evaluation: the event `validation`."""
    loss = event["loss"]
    line = f"{event['data']} loss{event['set'] and ' ' + event['set']} {_loss(loss)}"
    if loss < 20:
        line += f"  perplexity {math.exp(loss):,.2f}"
    return f"{line}  at step {event['step']:,}  took {duration(event['seconds'])}"


def saved_line(event: Mapping[str, Any]) -> str:
    """A checkpoint: the event `saved`."""
    what = "is being written to" if event["background"] else f"saved in {duration(event['seconds'])} to"
    return f"checkpoint of step {event['step']:,} {what} {event['folder']}"


def wrapped(text: str, *, indent: int = 2, width: int = WIDTH) -> list[str]:
    """A note as lines; words, paths and flags stay whole."""
    return textwrap.wrap(text, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def duration(seconds: float) -> str:
    """Minutes and seconds, 2:41, with hours and days where there are any; a decimal below ten seconds."""
    return f"{seconds:.1f} s" if seconds < 9.95 else clock(seconds)


def clock(seconds: float) -> str:
    """Like `duration`, without decimals, for times that tick on the screen."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours:02}:{minutes:02} h"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _loss(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "not a number"


def _figures(event: Mapping[str, Any], names: Iterable[str]) -> dict[str, str]:
    return {name: _FIGURES[name](event[name]) for name in names if event.get(name) is not None}
