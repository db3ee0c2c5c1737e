"""What a sweep shows while it runs: bars on a terminal, a line for each start and end elsewhere."""

from __future__ import annotations

import contextlib
import time

from megatron_muon.runs.run_summary import in_words
from megatron_muon.runs.train import Outcome
from megatron_muon.sweep.trials import PROGRESS, RESUMED, Plan

_LINE_EVERY_S = 60.0


class Display:
    """Shows progress of `total` runs, of which `done` are finished; a run's thread calls `started` and `line`."""

    def __init__(self, total: int, done: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TimeElapsedColumn

        self.console = Console(highlight=False, soft_wrap=True)
        said, bar = "{task.fields[said]}", BarColumn(bar_width=24)
        columns = ("{task.description}", bar, MofNCompleteColumn(), said, TimeElapsedColumn())
        self._bars = Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self._all = self._bars.add_task("runs", total=total, completed=done, said="")
        self._bar: dict[Plan, TaskID] = {}
        self._began: dict[Plan, float] = {}
        self._told: dict[Plan, float] = {}

    def __enter__(self) -> Display:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def started(self, plan: Plan) -> None:
        """A run begins."""
        self._began[plan] = self._told[plan] = time.monotonic()
        self._bar[plan] = self._bars.add_task(plan.task.name, total=None, said="starting")
        if self._bars.disable:
            self._print(f"{plan.task.name}: {'goes on' if plan.state == RESUMED else 'started'}")

    def line(self, plan: Plan, line: str) -> None:
        """A line of a run's output."""
        if (match := PROGRESS.search(line)) is None:
            return
        done, asked, loss = match.groups(default="")
        with contextlib.suppress(ValueError):
            loss = f"{float(loss):.4f}"
        said = f"loss {loss}" if loss else ""
        self._bars.update(self._bar[plan], completed=int(done), total=int(asked), said=said)
        if self._bars.disable and time.monotonic() - self._told[plan] >= _LINE_EVERY_S:
            self._told[plan] = time.monotonic()
            self._print(f"{plan.task.name}: iteration {done}/{asked}, {said}")

    def ended(self, plan: Plan, outcome: Outcome) -> None:
        """A run has ended."""
        self._bars.remove_task(self._bar[plan])
        self._bars.advance(self._all)
        every = self._bars.tasks[0]
        seconds = time.monotonic() - self._began[plan]
        words = in_words(outcome.summary, why=True)
        self._print(f"[{every.completed:.0f}/{every.total:.0f}] {plan.task.name}: {words}, {seconds:.0f} s")

    def _print(self, text: str) -> None:
        from rich.text import Text

        self.console.print(Text(text), soft_wrap=True)
