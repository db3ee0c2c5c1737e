"""Turns events and times into text that fits a line. Plain text, no torch."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

WIDTH = 100
"""Columns that a printed line may take; commands and errors, which are copied, may take more."""

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

_SPARE = ("peak_bytes", "lr", "muon_lr", "grad_norm", "optimizer_share", "mfu", "tokens_per_s")
"""Figures that a line leaves out where it is too narrow, the first of these first."""


def printable(text: str) -> str:
    """The text with control characters, and bytes that are no text, as Python writes them."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def step_line(event: Mapping[str, Any], width: int = WIDTH) -> str:
    """A log interval: the event `step` of `megatron.TOLD`."""
    step, steps = event["step"], event.get("steps")
    shown = {"step": f"step {step:>{len(str(steps))}}/{steps}" if steps else f"step {step}"}
    shown |= {name: write(event[name]) for name, write in _FIGURES.items() if event.get(name) is not None}
    for spare in _SPARE:
        if len("  ".join(shown.values())) > width:
            shown.pop(spare, None)
    return "  ".join(shown.values())[:width]


def validation_line(event: Mapping[str, Any]) -> str:
    """An evaluation: the event `validation`."""
    loss = event["loss"]
    perplexity = f"  perplexity {math.exp(loss):,.2f}" if loss < 20 else ""
    return f"{event['what']} {_loss(loss)}{perplexity}  at step {event['step']:,}"


def wrapped(text: str, *, indent: int = 2, width: int = WIDTH) -> list[str]:
    """A note as lines; words, paths and flags stay whole."""
    return textwrap.wrap(text, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def clock(seconds: float) -> str:
    """Minutes and seconds, 2:41, with hours and days where there are any."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours:02}:{minutes:02} h"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _loss(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "not a number"
