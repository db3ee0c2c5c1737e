"""What a sweep shows while it runs: bars on a terminal, a line for each start and end elsewhere."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from typing import Any

from megatron_muon.runs.run_summary import in_words
from megatron_muon.runs.train import Outcome
from megatron_muon.sweep.trials import PROGRESS, RESUMED, Plan

_LINE_EVERY_S = 60.0


@dataclass
class _Running:
    """A run under way: since when, how far, when that was last told, and its bar."""

    began: float
    told: float
    bar: Any = None
    done: int = 0
    asked: int = 0
    loss: str = ""


class Display:
    """Shows progress; `started` and `line` are called from the runs' threads.

    Args:
        total: runs of the sweep.
        done: those that were finished before.
    """

    def __init__(self, total: int, done: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self.console = Console(highlight=False, soft_wrap=True)
        self._lock = threading.Lock()
        self._running: dict[Plan, _Running] = {}
        self._total, self._done = total, done
        self._bars: Progress | None = None
        if self.console.is_terminal:
            said, bar = TextColumn("{task.fields[said]}"), BarColumn(bar_width=24)
            columns = (TextColumn("{task.description}"), bar, MofNCompleteColumn(), said, TimeElapsedColumn())
            self._bars = Progress(*columns, console=self.console)
            self._all = self._bars.add_task("runs", total=total, completed=done, said="")

    def __enter__(self) -> Display:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def started(self, plan: Plan) -> None:
        """A run begins."""
        with self._lock:
            self._running[plan] = running = _Running(time.monotonic(), time.monotonic())
            if self._bars is not None:
                running.bar = self._bars.add_task(plan.task.name, total=None, said="starting")
            else:
                self._print(f"{plan.task.name}: {'goes on' if plan.state == RESUMED else 'started'}")

    def line(self, plan: Plan, line: str) -> None:
        """A line of a run's output."""
        if match := PROGRESS.search(line):
            with self._lock:
                running = self._running[plan]
                running.done, running.asked, running.loss = int(match[1]), int(match[2]), match[3] or ""
                with contextlib.suppress(ValueError):
                    running.loss = f"{float(running.loss):.4f}"

    def ended(self, plan: Plan, outcome: Outcome) -> None:
        """A run has ended."""
        with self._lock:
            self._done += 1
            running = self._running.pop(plan)
            words = in_words(outcome.summary, why=True)
            self._print(
                f"[{self._done}/{self._total}] {plan.task.name}: {words}, {time.monotonic() - running.began:.0f} s"
            )
            if self._bars is not None:
                self._bars.remove_task(running.bar)
                self._bars.update(self._all, completed=self._done)

    def refresh(self) -> None:
        """Shows what is new."""
        with self._lock:
            for plan, running in self._running.items():
                said = f"loss {running.loss}" if running.loss else ""
                if self._bars is not None and running.asked:
                    self._bars.update(running.bar, completed=running.done, total=running.asked, said=said)
                elif self._bars is None and running.done and time.monotonic() - running.told > _LINE_EVERY_S:
                    running.told = time.monotonic()
                    self._print(f"{plan.task.name}: iteration {running.done}/{running.asked}, {said}")

    def _print(self, text: str) -> None:
        from rich.text import Text

        self.console.print(Text(text), soft_wrap=True)
