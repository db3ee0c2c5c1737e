"""The terminal that a training is watched on: printed lines, and below them live lines where there is a terminal.

`Status` is what is known of one run from what its ranks tell, and the live line that shows it; `Screen` keeps live
lines at the bottom of a terminal. In a pipe, a log, on a dumb terminal and with NO_COLOR lines are all there is,
without control codes.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_muon.runs import wording

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

_SPINNER, _PLAIN_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏", "|/-\\"
_BAR, _LEAST_BAR = 24, 6
_SILENT_S = 10.0
"""Seconds without news after which the live line says for how long; three steps, where these take longer."""


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
        self.heard = self._since = self._told = time.monotonic()

    def enter(self, stage: str | None) -> None:
        """The run does something else than before; None is steps."""
        self.stage, self.heard = stage, time.monotonic()
        self._since = self.heard

    def take(self, told: Mapping[str, Any]) -> None:
        """What a rank told: an event of `megatron.TOLD`."""
        self.heard = time.monotonic()
        if told["event"] == "stage":
            self.enter(told["stage"])
        elif told["event"] in ("tick", "step"):
            self.step = told["step"]
            if self.stage is not None:
                self.enter(None)
        if told["event"] == "step":
            self.steps, self._told = told["steps"], self.heard
            self.figures = {**told, "seconds_left": told.get("seconds_left", self.figures.get("seconds_left"))}

    def fields(self) -> list[wording.Field]:
        """What the live line says now."""
        now = time.monotonic()
        if self.step is None:
            return [wording.Field(f"{self.stage or 'waiting'} {wording.clock(now - self._since)}", self.stage or "")]
        told = dict(self.figures)
        if (left := told.get("seconds_left")) is not None:
            told["seconds_left"] = max(0.0, left - (now - self._told))
        if self.stage is not None:  # no step is taken: how fast the last were is beside the point
            told = {name: told.get(name) for name in ("loss", "seconds_left")}
        fields = wording.live_fields(told, self.step, self.steps)
        if self.stage is not None:
            fields.insert(1, wording.Field(f"{self.stage} {wording.clock(now - self._since)}", self.stage))
        elif now - self.heard > max(_SILENT_S, 3 * (told.get("step_s") or 0.0)):
            silent = f"no step for {wording.clock(now - self.heard)}"
            fields.insert(1, wording.Field(silent, silent))
        return fields

    def line(self, width: int, *, plain: bool = False) -> Text:
        """The live line: a bar, or what stands for one before the first step, and the fields."""
        from rich.text import Text

        fields = self.fields()
        if self.name:
            fields.insert(0, wording.Field(self.name, self.name))
        if self.step is None or not self.steps:
            frames = _PLAIN_SPINNER if plain else _SPINNER
            frame = frames[int(time.monotonic() * 8) % len(frames)]
            return Text.assemble((frame, "cyan"), " ", wording.fit(fields, width - 2), no_wrap=True, overflow="crop")
        shortest = len("  ".join(field.short for field in fields))
        room = _LEAST_BAR + 6 if shortest + _LEAST_BAR + 6 <= width else 0
        return progress_bar(self.step / self.steps, wording.fit(fields, width - room), width, plain=plain)


def progress_bar(done: float, words: str, width: int, *, plain: bool = False) -> Text:
    """A line of a bar and words, or of words alone where there is no room; `plain` for terminals without UTF-8."""
    from rich.text import Text

    space = min(_BAR, width - len(words) - 2)
    if space < _LEAST_BAR:
        return Text(words, no_wrap=True, overflow="crop")
    full = min(space, int(done * space))
    did, rest = ("#" * full, "." * (space - full)) if plain else ("━" * full, "━" * (space - full))
    return Text.assemble((did, "green"), (rest, "bright_black"), "  ", words, no_wrap=True, overflow="crop")


class Screen:
    """Printed lines, and below them, on a terminal, the live lines that `lines` gives for a width; all threads print.

    A context; within it what anything in this process prints stands above the live lines.
    """

    def __init__(self, lines: Callable[[int, bool], Sequence[Text]], *, live: bool | None = None) -> None:
        self.live = is_terminal() if live is None else live
        self._lines = lines
        self._shown: Live | None = None
        self._console: Console | None = None

    @property
    def width(self) -> int:
        """Columns that a line may take."""
        return min(wording.WIDTH, self._console.width) if self._console is not None else wording.WIDTH

    def __enter__(self) -> Screen:
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

    def print(self, text: str = "", style: str = "") -> None:
        """A line above the live ones, whole: a terminal breaks it where it must."""
        if self._console is None:
            print(text, flush=True)
            return
        from rich.text import Text

        self._console.print(Text(text, style), soft_wrap=True)

    def _render(self) -> Any:
        from rich.text import Text

        assert self._console is not None
        width = self._console.width - 1  # a full last column wraps on some terminals
        return Text("\n").join(self._lines(width, self._console.encoding.lower().find("utf") < 0))


@contextlib.contextmanager
def told_that(stage: str) -> Iterator[None]:
    """Shows within the context what goes on: a live line, or one plain line on standard error."""
    status = Status(stage)
    if not is_terminal():
        print(f"{stage} ...", file=sys.stderr, flush=True)
    with Screen(lambda width, plain: [status.line(width, plain=plain)]):
        yield
