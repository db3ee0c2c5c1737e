"""Output of `train`: lines, one live line below them on a terminal, and their wording.

In a pipe, in a log and on a dumb terminal only plain lines are printed.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

# The reader left (`| head`), or the terminal was closed: the run goes on.
_UNREAD = contextlib.suppress(OSError)


class Screen:
    """A context that prints lines and, on a terminal, keeps one live line below them."""

    def __init__(self) -> None:
        console = Console(file=sys.stdout, highlight=False)  # also while others redirect stdout
        self.live = console.is_interactive
        one_line = Column(no_wrap=True, overflow="ellipsis")
        text = TextColumn("{task.description}", markup=False, table_column=one_line)
        bar = (BarColumn(12), text, TimeElapsedColumn())
        self._progress = Progress(*bar, console=console, transient=True, disable=not self.live)
        self._task = self._progress.add_task("", total=None)

    def __enter__(self) -> Screen:
        # a character that cannot be encoded must not end a training
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        with _UNREAD:
            self._progress.stop()

    def print(self, text: str, style: str = "") -> None:
        """Prints a line above the live one; the terminal wraps it."""
        with _UNREAD:
            self._progress.console.print(Text(text, style), soft_wrap=True)

    def update(self, text: str, done: int = 0, total: int | None = None) -> None:
        """Replaces the live line, if there is one."""
        with _UNREAD:
            self._progress.update(self._task, description=text, completed=done, total=total)
            self._progress.refresh()


_FIGURES = {
    "loss": "loss {:.4f}",
    "grad_norm": "grad norm {:.4g}",
    "lr": "lr {:.1e}",
    "muon_lr": "Muon lr {:.1e}",
    "tokens_per_s": "{:,.0f} tokens/s",
    "optimizer_share": "optimizer {:.0%}",
    "seconds_left": "{} left",
}
"""Format of the figures of the event `step`, in the order of a line."""

LIVE_FIGURES = ("loss", "tokens_per_s", "seconds_left")


def step_line(event: Mapping[str, Any], figures: Iterable[str] = tuple(_FIGURES)) -> str:
    """A log interval: the event `step` of `megatron.REPORTS`."""
    steps = str(event["steps"] or "")
    line = f"step {event['step']:>{len(steps)}}"
    if steps:
        line += f"/{steps}"
    for name in figures:
        value = event.get(name)
        if name == "seconds_left" and value is not None:
            value = timedelta(seconds=round(value))
        if value is not None:
            line += "  " + _FIGURES[name].format(value)
    return line
