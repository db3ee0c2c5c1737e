"""The step of matrix optimizers on sharded matrices: a pipeline of three stages, on one page.

Each rank holds some rows of every matrix (ZeRO), with their gradients, momentum and weights. Each
matrix has an owner, or a team of them. A step walks waves, each as many matrices as fit its buffers:

    send_rows       momentum advances; its rows go to the owners
    orthogonalize   owners fill stacks of whole blocks, apply the method, and send updates back
    apply           weights descend along the rows of their updates

While blocks of one wave are orthogonalized, rows of the next and updates of the one before travel.
Matrices local to their owner form batches: their rows go to the stacks, and updates to the weights,
while the updates of a wave travel. Gradient reduction, clipping and installing weights are the
caller's part.
"""

from __future__ import annotations

from typing import Any, Protocol

from megatron_muon.core.build import Waves
from megatron_muon.core.passes import Passes
from megatron_muon.core.probe import SILENT, Probe
from megatron_muon.core.wave import Wave


class Stages(Protocol):
    """The stages of a wave: an engine's, or a model of their time."""

    def send_rows(self, k: int) -> None:
        """Prepare the rows of wave `k` and start to send them."""

    def orthogonalize(self, k: int) -> None:
        """Wait for rows, orthogonalize, and start to send updates."""

    def apply(self, k: int) -> None:
        """Wait for updates and apply them."""


def run(waves: int, stages: Stages) -> None:
    """Take so many waves through their stages, three at a time."""
    for k in range(waves + 2):
        if k < waves:
            stages.send_rows(k)
        if 0 < k <= waves:
            stages.orthogonalize(k - 1)
        if k >= 2:
            stages.apply(k - 2)


class Engine:
    """The stages of a step on this rank.

    Args:
        waves: in the order of the step, with what carries them.
        passes: what ranks do to rows.

    Attributes:
        probe: measures a step.
    """

    def __init__(
        self,
        waves: Waves,
        passes: Passes,
    ) -> None:
        self.waves = waves.all
        self.transport = waves.transport
        self.method = waves.method
        self.memory = waves.memory
        self.passes = passes
        self.probe: Probe = SILENT
        self._under_way: dict[int, tuple[str, Any]] = {}
        self.memory.release()

    def step(self) -> None:
        """Everything that the device does in a step. Collective, as the transport is."""
        self._under_way.clear()  # left by a failed step
        self.memory.acquire()
        self.passes.begin(self.probe)
        with self.method.arithmetic():
            run(len(self.waves), self)
        for k, (what, _) in self._under_way.items():
            raise RuntimeError(f"wave {k}: {what} were not waited for")
        self.passes.end()
        self.memory.release()

    def send_rows(self, k: int) -> None:
        """Advance momentum of wave `k`, and start to send its rows."""
        wave = self.waves[k]
        with self.probe.phase("gather", k):
            self.passes.advance(wave)
            if k in self._under_way:
                raise RuntimeError(f"wave {k}: {self._under_way[k][0]} were not waited for")
            self._under_way[k] = "rows", self.transport.send_rows(wave.rows, self.probe)

    def orthogonalize(self, k: int) -> None:
        """Orthogonalize the blocks of wave `k`, and start to send their updates."""
        wave = self.waves[k]
        with self.probe.phase("gather_wait", k):
            self._wait(k, "rows")
        with self.probe.phase("orthogonalize", k):
            self.passes.fill(wave)
            self._apply_method(wave)
        with self.probe.phase("send_back", k):
            self.passes.drain(wave)
            self._under_way[k] = "updates", self.transport.send_updates(wave.updates, self.probe)
        for batch in wave.batches:
            self.passes.advance(batch)
            with self.probe.phase("orthogonalize", k):
                self._apply_method(batch)
            self.passes.descend(batch)

    def _apply_method(self, wave: Wave) -> None:
        """Put updates in the place of the blocks of a wave or batch."""
        if not (wave.stacks or wave.agreement.shared):
            return
        factors = self.passes.measure(wave)
        one = len(wave.stacks) == 1
        of_stacks = [factors] if one else factors.split(wave.counts)
        spare = None
        for number in wave.order:
            stack = wave.stacks[number]
            if self.method.takes_levelled:
                self.passes.scale(wave, stack, of_stacks[number])
            updates = self.method.run(
                stack.blocks,
                stack.kind,
                of_stacks[number],
                wave.work_with(spare),
                state=stack.state,
                team=stack.team,
                probe=self.probe,
            )
            spare = self.passes.take(wave, number, stack.blocks if updates is None else updates)
        self.passes.finish(wave, factors)
        self.probe.orthogonalized(wave.route.slots)

    def apply(self, k: int) -> None:
        """Apply the updates of wave `k` to the weights."""
        wave = self.waves[k]
        with self.probe.phase("scatter_wait", k):
            self._wait(k, "updates")
            self.passes.descend(wave)

    def _wait(self, k: int, what: str) -> None:
        """Wait for rows or updates of wave `k`; a RuntimeError if a stage was left out."""
        found, work = self._under_way.get(k, ("nothing", None))
        if found != what:
            raise RuntimeError(f"wave {k}: no {what} are under way")
        del self._under_way[k]
        work.wait()
