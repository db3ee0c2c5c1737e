"""What a command shows while trainings run: printed lines and, on a terminal, a live line for each run below them.

In a pipe or a log, on a dumb terminal and with NO_COLOR, only plain lines are printed.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_muon.tools.train import wording

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

STOPPING = "stopping"
"""The stage of a run that was asked to end; it stays to the end."""

_LIVE_EXTRA = 22
"""Columns of a live line beside its text: a bar, the time that has passed."""

_UNREAD = contextlib.suppress(OSError)
"""Whoever read has read enough (`| head`), or the terminal was closed: the run continues, or saves and ends."""


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
        return min(wording.WIDTH, self.progress.console.width) if self.progress is not None else wording.WIDTH

    def __enter__(self) -> Screen:
        if isinstance(sys.stdout, io.TextIOWrapper):  # a character that cannot be shown must not end a training
            sys.stdout.reconfigure(errors="replace")
        if self.live:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
            from rich.table import Column

            one_line = Column(no_wrap=True, overflow="ellipsis")
            text = TextColumn("{task.description}", markup=False, table_column=one_line)
            console = Console(highlight=False, force_terminal=True)
            self.progress = Progress(BarColumn(12), text, TimeElapsedColumn(), console=console, transient=True)
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
        words = wording.step_line(figures, max(width, 0)) if figures and self.stage is None else self.stage or ""
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
