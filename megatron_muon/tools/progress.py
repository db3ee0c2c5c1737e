"""How far a command's own work is, on standard error; `train.screen` shows trainings."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

_LINE_EVERY_S = 10.0


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
