"""What a command shows while trainings run: printed lines and, on a terminal, a live line for each run below them.

In a pipe or a log, on a dumb terminal and with NO_COLOR, only plain lines are printed.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_muon.tools.train import wording

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

STOPPING = "stopping"
"""The stage of a run that was asked to end; it stays to the end."""


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

            self.progress = Progress(
                BarColumn(bar_width=12),
                TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
                TimeElapsedColumn(),
                console=Console(highlight=False, force_terminal=True),
                transient=True,
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
        self.step: int | None = None
        self.heard = time.monotonic()
        self._screen, self._name, self._figures = screen, name, dict[str, Any]()
        self._task: TaskID | None = None
        self._show()

    def enter(self, stage: str | None) -> None:
        """Starts a new stage; None means that steps are being taken."""
        self.stage, self.heard = stage, time.monotonic()
        self._show()

    def take(self, event: Mapping[str, Any]) -> None:
        """Updates the state from an event of `megatron.TOLD`."""
        kind = event["event"]
        if kind == "step":
            self._figures = dict(event)
        if kind in ("tick", "step"):
            self.step = event["step"]
        is_news = self.stage != STOPPING and kind in ("stage", "tick", "step")
        self.enter(event.get("stage") if is_news else self.stage)

    def silent_for(self, patience_s: float) -> float | None:
        """Seconds without news, if they are more than `patience_s` and than three steps take; else None."""
        silent = time.monotonic() - self.heard
        return silent if silent > max(patience_s, 3 * (self._figures.get("step_s") or 0.0)) else None

    def _show(self) -> None:
        if (progress := self._screen.progress) is None:
            return
        steps = self._figures.get("steps")
        done = "" if self.step is None else wording.steps_of({"step": self.step, "steps": steps})
        words = self.stage if self.stage is not None else wording.live_line(self._figures)
        description = "  ".join(filter(None, (self._name, done, words)))
        with _UNREAD:
            if self._task is None:
                self._task = progress.add_task(description, total=None)
            progress.update(self._task, description=description, completed=self.step or 0, total=steps)

    def end(self) -> None:
        """Takes the live line away."""
        if self._screen.progress is not None and self._task is not None:
            with _UNREAD:
                self._screen.progress.remove_task(self._task)
