"""What a sweep shows while it runs: bars on a terminal, a line for each start and end elsewhere."""

from __future__ import annotations

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
    """A run under way."""

    began: float
    done: int = 0
    asked: int = 0
    loss: str = ""
    told: float = 0.0


class Display:
    """Shows progress; `started`, `line` and `ended` are called from the runs' threads.

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
        self._bars: Any = None
        if self.console.is_terminal:
            self._bars = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[said]}"),
                TimeElapsedColumn(),
                console=self.console,
            )
            self._all = self._bars.add_task("runs", total=total, completed=done, said="")
            self._bar_of: dict[Plan, Any] = {}

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
            now = time.monotonic()
            self._running[plan] = _Running(now, told=now)
            if self._bars is not None:
                self._bar_of[plan] = self._bars.add_task(plan.task.name, total=None, said="starting")
            else:
                self._print(f"{plan.task.name}: {'goes on' if plan.state == RESUMED else 'started'}")

    def line(self, plan: Plan, line: str) -> None:
        """A line of a run's output."""
        if match := PROGRESS.search(line):
            with self._lock:
                running = self._running[plan]
                running.done, running.asked, running.loss = int(match[1]), int(match[2]), _short(match[3])

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
                self._bars.remove_task(self._bar_of.pop(plan))
                self._bars.update(self._all, completed=self._done)

    def refresh(self) -> None:
        """Shows what is new."""
        with self._lock:
            for plan, running in self._running.items():
                said = f"loss {running.loss}" if running.loss else ""
                if self._bars is not None:
                    if running.asked:
                        bar = self._bar_of[plan]
                        self._bars.update(bar, completed=running.done, total=running.asked, said=said)
                elif running.done and time.monotonic() - running.told > _LINE_EVERY_S:
                    running.told = time.monotonic()
                    self._print(f"{plan.task.name}: iteration {running.done}/{running.asked}, {said}")

    def _print(self, text: str) -> None:
        from rich.text import Text

        (self._bars.console if self._bars is not None else self.console).print(Text(text), soft_wrap=True)


def _short(loss: str | None) -> str:
    try:
        return f"{float(loss or ''):.4f}"
    except ValueError:
        return loss or ""
