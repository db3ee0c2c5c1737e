"""Output of commands: lines, one live line below them on a terminal, progress bars, and wording.

In a pipe or a log, on a dumb terminal and with NO_COLOR, only plain lines are printed.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_UNREAD = contextlib.suppress(OSError)
"""The reader left (`| head`), or the terminal was closed: the run continues, or saves and ends."""


def is_terminal() -> bool:
    """Whether live lines and colors can be shown on stdout."""
    is_dumb = os.environ.get("TERM", "dumb") in ("dumb", "unknown")
    return sys.stdout.isatty() and not is_dumb and not os.environ.get("NO_COLOR")


class Screen:
    """A context that prints lines and, on a terminal, keeps one live line below them."""

    def __init__(self) -> None:
        self.live = is_terminal()
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Screen:
        # a character that cannot be encoded must not end a training
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")
        if self.live:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
            from rich.table import Column

            one_line = Column(no_wrap=True, overflow="ellipsis")
            text = TextColumn("{task.description}", markup=False, table_column=one_line)
            console = Console(highlight=False, force_terminal=True)
            columns = (BarColumn(12), text, TimeElapsedColumn())
            self._progress = Progress(*columns, console=console, transient=True)
            self._task = self._progress.add_task("", total=None)
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            with _UNREAD:
                self._progress.stop()

    def print(self, text: str, style: str = "") -> None:
        """Prints a line above the live one; the terminal wraps it."""
        with _UNREAD:
            if self._progress is None:
                print(text, flush=True)
                return
            from rich.text import Text

            self._progress.console.print(Text(text, style), soft_wrap=True)

    def update(self, text: str, done: int = 0, total: int | None = None) -> None:
        """Replaces the live line, if there is one."""
        if self._progress is not None and self._task is not None:
            with _UNREAD:
                self._progress.update(self._task, description=text, completed=done, total=total)


def _norm(value: float) -> str:
    return f"grad norm {value:.2f}" if value < 1000 else f"grad norm {value:.2e}"


def _speed(value: float) -> str:
    return f"{value:,.0f} tokens/s" if value < 999_500 else f"{value / 1e6:,.2f} M tokens/s"


_FIGURES: dict[str, Callable[[Any], str]] = {
    "loss": lambda value: f"loss {_loss(value)}",
    "grad_norm": _norm,
    "lr": lambda value: f"lr {value:.1e}",
    "muon_lr": lambda value: f"Muon lr {value:.1e}",
    "skipped": lambda value: f"{value} skipped",
    "tokens_per_s": _speed,
    "mfu": lambda value: f"MFU {value:.0%}",
    "optimizer_share": lambda value: f"optimizer {value:.0%}",
    "peak_bytes": lambda value: f"{value / 1e9:,.1f} GB",
    "seconds_left": lambda value: f"{clock(value)} left",
}
"""Format of the figures of the event `step`, in the order of a line."""

LIVE_FIGURES = ("loss", "tokens_per_s", "seconds_left")
"""Figures of the live line."""


def step_line(event: Mapping[str, Any], figures: Iterable[str] = tuple(_FIGURES)) -> str:
    """A log interval: the event `step` of `megatron.TOLD`."""
    step = event["step"]
    steps = event.get("steps")
    words = [f"step {step}"]
    if steps:
        aligned = str(step).rjust(len(str(steps)))
        words = [f"step {aligned}/{steps}"]
    for name in figures:
        value = event.get(name)
        if value is not None:
            words.append(_FIGURES[name](value))
    return "  ".join(words)


def validation_line(event: Mapping[str, Any]) -> str:
    """An evaluation: the event `validation`."""
    loss = event["loss"]
    words = f"{event['what']} {_loss(loss)}"
    if loss < 20:
        words += f"  perplexity {math.exp(loss):,.2f}"
    return f"{words}  at step {event['step']:,}"


def _loss(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "not a number"


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[int] = ()
) -> str:
    """A table in Markdown; `numbers` are the columns aligned to the right."""
    rule = ["---:" if column in numbers else "---" for column in range(len(head))]
    lines = []
    for cells in (head, rule, *rows):
        escaped = [cell.replace("|", r"\|") for cell in cells]
        lines.append(f"| {' | '.join(escaped)} |")
    return "\n".join(lines)


def printable(text: str) -> str:
    """The text with control characters escaped."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def clock(seconds: float) -> str:
    """Minutes and seconds, 2:41, with hours and days if there are any."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours:02}:{minutes:02} h"
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}"
