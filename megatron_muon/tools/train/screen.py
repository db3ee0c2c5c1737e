"""What a command shows while trainings run: printed lines and, on a terminal, live lines below them.

`Status` holds the state of one run as its ranks report it and renders its live line; `Screen` keeps live lines at the
bottom of a terminal. In a pipe or a log, on a dumb terminal and with NO_COLOR, only plain lines are printed.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_muon.tools.train import wording

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

_SPINNER, _PLAIN_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏", "|/-\\"
_BAR, _LEAST_BAR = 24, 6
_SILENT_S = 10.0
"""After this many seconds without news, or three times the step time if longer, the live line says so."""

STOPPING = "stopping"
"""The stage of a run that was asked to end; it stays to the end."""


def is_terminal() -> bool:
    """Whether live lines and colours can be shown where this process prints."""
    is_dumb = os.environ.get("TERM", "dumb") in ("dumb", "unknown") or os.environ.get("NO_COLOR")
    return sys.stdout.isatty() and not is_dumb


class Status:
    """What is known of a run under way: what it does, its last step, the figures of the last log interval."""

    def __init__(self, stage: str | None = None, *, name: str = "") -> None:
        self.name, self.stage = name, stage
        self.step: int | None = None
        self.steps: int | None = None
        self.figures: dict[str, Any] = {}
        self.heard = self._since = self._figures_at = time.monotonic()

    def enter(self, stage: str | None) -> None:
        """Starts a new stage; None means that steps are being taken."""
        self.stage, self.heard = stage, time.monotonic()
        self._since = self.heard

    def take(self, event: Mapping[str, Any]) -> None:
        """Updates the state from an event of `megatron.TOLD`."""
        self.heard, kind = time.monotonic(), event["event"]
        if kind in ("tick", "step"):
            self.step = event["step"]
        if kind == "step":
            self.steps, self.figures, self._figures_at = event["steps"], dict(event), self.heard
        if self.stage != STOPPING:
            if kind == "stage":
                self.enter(event["stage"])
            elif kind in ("tick", "step") and self.stage is not None:
                self.enter(None)

    def silent_for(self, patience_s: float) -> float | None:
        """Seconds without news, if they are more than `patience_s` and than three steps take; else None."""
        silent = time.monotonic() - self.heard
        return silent if silent > max(patience_s, 3 * (self.figures.get("step_s") or 0.0)) else None

    def fields(self) -> list[wording.Field]:
        """What the live line says now."""
        now, stage = time.monotonic(), self.stage  # which another thread may change
        if self.step is None:
            return [wording.Field(f"{stage or 'waiting'} {wording.clock(now - self._since)}", stage or "")]
        figures = dict(self.figures)
        if (left := figures.get("seconds_left")) is not None:
            figures["seconds_left"] = max(0.0, left - (now - self._figures_at))
        if stage is not None:  # no steps are being taken, so the speed of the last ones is left out
            figures = {name: figures.get(name) for name in ("loss", "seconds_left")}
        fields = wording.live_fields(figures, self.step, self.steps)
        if stage is not None:
            fields.insert(1, wording.Field(f"{stage} {wording.clock(now - self._since)}", stage))
        elif silent := self.silent_for(_SILENT_S):
            fields.insert(1, wording.Field(f"no step for {wording.clock(silent)}"))
        return fields

    def line(self, width: int, *, plain: bool = False) -> Text:
        """The live line: the fields after a bar, or after a spinner until the number of steps is known."""
        from rich.text import Text

        fields = self.fields()
        if self.name:
            fields.insert(0, wording.Field(self.name))
        if self.step is None or not self.steps:
            frames = _PLAIN_SPINNER if plain else _SPINNER
            frame = frames[int(time.monotonic() * 8) % len(frames)]
            return Text.assemble((frame, "cyan"), " ", wording.fit(fields, width - 2), no_wrap=True, overflow="crop")
        shortest = len("  ".join(field.short or field.text for field in fields))
        room = _LEAST_BAR + 6 if shortest + _LEAST_BAR + 6 <= width else 0
        return progress_bar(self.step / self.steps, wording.fit(fields, width - room), width, plain=plain)


def progress_bar(done: float, words: str, width: int, *, plain: bool = False) -> Text:
    """A progress bar and words, or the words alone if there is no room; `plain` for terminals without UTF-8."""
    from rich.text import Text

    space = min(_BAR, width - len(words) - 2)
    if space < _LEAST_BAR:
        return Text(words, no_wrap=True, overflow="crop")
    full = min(space, int(done * space))
    did, rest = ("#" * full, "." * (space - full)) if plain else ("━" * full, "━" * (space - full))
    return Text.assemble((did, "green"), (rest, "bright_black"), "  ", words, no_wrap=True, overflow="crop")


class Screen:
    """Prints lines from any thread and, on a terminal, keeps below them the live lines of `lines(width, plain)`.

    A context; within it what anything in this process prints stands above the live lines.
    """

    def __init__(self, lines: Callable[[int, bool], Sequence[Text]], *, live: bool = True) -> None:
        self.live = live and is_terminal()
        self._lines = lines
        self._shown: Live | None = None
        self._console: Console | None = None

    @property
    def width(self) -> int:
        """Columns that a line may take."""
        return min(wording.WIDTH, self._console.width) if self._console is not None else wording.WIDTH

    def __enter__(self) -> Screen:
        if isinstance(sys.stdout, io.TextIOWrapper):  # a character that cannot be shown must not end a training
            sys.stdout.reconfigure(errors="replace")
        if self.live:
            from rich.console import Console
            from rich.live import Live

            self._console = Console(highlight=False, soft_wrap=True, force_terminal=True)
            self._shown = Live(get_renderable=self._render, console=self._console, refresh_per_second=8, transient=True)
            self._shown.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown is not None:
            self._shown.stop()
            self._shown = None

    def print(self, text: str, style: str = "") -> None:
        """Prints a line above the live ones, unbroken: the terminal wraps it."""
        if self._console is None:
            print(text, flush=True)
            return
        from rich.text import Text

        self._console.print(Text(text, style), soft_wrap=True)

    def _render(self) -> Any:
        from rich.text import Text

        assert self._console is not None
        width = self._console.width - 1  # a full last column wraps on some terminals
        return Text("\n").join(self._lines(width, "utf" not in self._console.encoding.lower()))


@contextlib.contextmanager
def told_that(stage: str) -> Iterator[None]:
    """Shows `stage` while the context runs: a live line, or one plain line on standard error."""
    status = Status(stage)
    if not is_terminal():
        print(f"{stage} ...", file=sys.stderr, flush=True)
    with Screen(lambda width, plain: [status.line(width, plain=plain)]):
        yield
