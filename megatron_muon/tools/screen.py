"""What commands show while they or their trainings run: lines, live lines below them on a terminal, and their wording.

In a pipe or a log, on a dumb terminal and with NO_COLOR, only plain lines are printed.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

WIDTH = 100
"""Columns that a printed line may take; commands and errors, which are copied, may take more."""

STOPPING = "stopping"
"""The stage of a run that was asked to end; it stays to the end."""

_LIVE_EXTRA = 22
"""Columns of a live line beside its text: a bar, the time that has passed."""

_LINE_EVERY_S = 10.0

_UNREAD = contextlib.suppress(OSError)
"""Whoever read has read enough (`| head`), or the terminal was closed: the run continues, or saves and ends."""

_FIGURES: dict[str, Callable[[Any], str]] = {
    "loss": lambda loss: f"loss {_loss(loss)}",
    "grad_norm": lambda norm: f"grad norm {norm:.2f}" if norm < 1000 else f"grad norm {norm:.2e}",
    "lr": lambda rate: f"lr {rate:.1e}",
    "muon_lr": lambda rate: f"Muon's lr {rate:.1e}",
    "skipped": lambda steps: f"{steps} skipped",
    "tokens_per_s": lambda speed: (
        f"{speed:,.0f} tokens/s" if speed < 999_500 else f"{speed / 1e6:,.2f} M tokens/s"
    ),
    "mfu": lambda mfu: f"MFU {mfu:.0%}",
    "optimizer_share": lambda share: f"optimizer {share:.0%}",
    "peak_bytes": lambda peak: f"{peak / 1e9:,.1f} GB",
    "seconds_left": lambda left: f"{clock(left)} left",
}
"""How the figures of the event `step` are written, in the order of a line."""

_SPARE = ("peak_bytes", "lr", "muon_lr", "grad_norm", "optimizer_share", "mfu", "tokens_per_s")
"""Figures that a line leaves out where it is too narrow, the first of these first."""


def is_terminal() -> bool:
    """Whether live lines and colours can be shown where this process prints."""
    is_dumb = os.environ.get("TERM", "dumb") in ("dumb", "unknown") or os.environ.get("NO_COLOR")
    return sys.stdout.isatty() and not is_dumb


class Screen:
    """A context that prints lines from any thread and, on a terminal, keeps live lines below them (`progress`)."""

    def __init__(self, *, live: bool = True) -> None:
        self.live = live and is_terminal()
        self.progress: Progress | None = None

    @property
    def width(self) -> int:
        """Columns that a line may take."""
        return min(WIDTH, self.progress.console.width) if self.progress is not None else WIDTH

    def __enter__(self) -> Screen:
        # a character that cannot be shown must not end a training
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")
        if self.live:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
            from rich.table import Column

            one_line = Column(no_wrap=True, overflow="ellipsis")
            text = TextColumn("{task.description}", markup=False, table_column=one_line)
            console = Console(highlight=False, force_terminal=True)
            self.progress = Progress(
                BarColumn(12), text, TimeElapsedColumn(), console=console, transient=True
            )
            self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.progress is not None:
            with _UNREAD:
                self.progress.stop()

    def print(self, text: str, style: str = "") -> None:
        """Prints a line above the live ones, unbroken: the terminal wraps it."""
        with _UNREAD:
            if self.progress is None:
                print(text, flush=True)
                return
            from rich.text import Text

            self.progress.console.print(Text(text, style), soft_wrap=True)


class Status:
    """A run under way as its ranks report it: its stage, or its last step; and its live line, where there is one."""

    def __init__(self, screen: Screen, stage: str = "waiting", *, name: str = "") -> None:
        self.stage: str | None = stage
        self.figures: Mapping[str, Any] = {}
        self._screen, self._name = screen, name
        self._task: TaskID | None = None
        self._show()

    def enter(self, stage: str | None) -> None:
        """Starts a new stage; None means that steps are being taken."""
        self.stage = stage
        self._show()

    def take(self, event: Mapping[str, Any]) -> None:
        """Updates the state from an event of `megatron.TOLD`."""
        if event["event"] == "step":
            self.figures = event
        if event["event"] in ("stage", "step"):
            self.enter(STOPPING if self.stage == STOPPING else event.get("stage"))

    def _show(self) -> None:
        if (progress := self._screen.progress) is None:
            return
        figures, width = self.figures, self._screen.width - _LIVE_EXTRA - len(self._name)
        words = (
            step_line(figures, max(width, 0))
            if figures and self.stage is None
            else self.stage or ""
        )
        description = "  ".join(filter(None, (self._name, words)))
        step, steps = figures.get("step", 0), figures.get("steps")
        with _UNREAD:
            if self._task is None:
                self._task = progress.add_task(description, total=None)
            progress.update(self._task, description=description, completed=step, total=steps)

    def end(self) -> None:
        """Takes the live line away."""
        if self._screen.progress is not None and self._task is not None:
            with _UNREAD:
                self._screen.progress.remove_task(self._task)


@contextlib.contextmanager
def progress(doing: str, unit: str) -> Iterator[Callable[[float, float], None]]:
    """Shows on standard error how much is done, of how much: a bar on a terminal, else a line every few seconds."""
    from rich.console import Console
    from rich.progress import Progress

    console, printed = Console(stderr=True, highlight=False), time.monotonic()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(doing, total=None)
        if bar.disable:
            console.print(f"{doing} ...")

        def show(done: float, total: float) -> None:
            nonlocal printed
            bar.update(task, completed=done, total=total)
            if bar.disable and time.monotonic() - printed >= _LINE_EVERY_S:
                printed = time.monotonic()
                console.print(f"{doing}: {done:,.0f} of {total:,.0f} {unit}")

        yield show


def step_line(event: Mapping[str, Any], width: int = WIDTH) -> str:
    """A log interval: the event `step` of `megatron.TOLD`."""
    step, steps = event["step"], event.get("steps")
    shown = {"step": f"step {step:>{len(str(steps))}}/{steps}" if steps else f"step {step}"}
    shown |= {
        name: write(event[name]) for name, write in _FIGURES.items() if event.get(name) is not None
    }
    for spare in _SPARE:
        if len("  ".join(shown.values())) > width:
            shown.pop(spare, None)
    return "  ".join(shown.values())[:width]


def validation_line(event: Mapping[str, Any]) -> str:
    """An evaluation: the event `validation`."""
    loss = event["loss"]
    perplexity = f"  perplexity {math.exp(loss):,.2f}" if loss < 20 else ""
    return f"{event['what']} {_loss(loss)}{perplexity}  at step {event['step']:,}"


def _loss(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "not a number"


def wrapped(text: str, *, indent: int = 2, width: int = WIDTH) -> str:
    """A note in lines; words, paths and flags stay whole."""
    return textwrap.fill(
        text, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[int] = ()
) -> str:
    """A table in Markdown; `numbers` are the columns set to the right."""
    rule = ["---:" if column in numbers else "---" for column in range(len(head))]
    return "\n".join(
        f"| {' | '.join(cell.replace('|', r'\|') for cell in cells)} |"
        for cells in (head, rule, *rows)
    )


def printable(text: str) -> str:
    """The text with control characters, and bytes that are no text, as Python writes them."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def clock(seconds: float) -> str:
    """Minutes and seconds, 2:41, with hours and days where there are any."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours:02}:{minutes:02} h"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
