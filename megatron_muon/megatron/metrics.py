"""What a run logs of Muon's steps: sizes of update and momentum, how orthogonal updates are, where time and bytes go.

Measured in one step out of many, by a probe that the optimizers call in that step, so that the others pay nothing. On a
GPU the measured step waits for each phase. The figures are means or sums over all ranks, the same on every rank.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_muon.core.optimizer import MOMENTUM, ShardedMuon, local_rows
from megatron_muon.core.probe import SILENT, PhaseTimer, Probe, synchronize
from megatron_muon.megatron.replicated_muon import ReplicatedMuon

_OF_PHASES = {
    "momentum_ms": ("momentum",),
    "gather_ms": ("gather", "gather_wait"),
    "newton_schulz_ms": ("orthogonalize",),
    "scatter_ms": ("send_back", "scatter_wait"),
    "apply_ms": ("apply",),
}
_BLOCKS = 4
"""Blocks of a step whose orthogonality is measured on each rank."""


@dataclass(frozen=True)
class StepMetrics:
    """One measured step.

    Attributes:
        step: its number, from 1, skipped steps not counted.
        values: by name: `update_rms` (root mean square of the scaled updates' elements, before the learning rate),
            `momentum_norm` (of all matrices together), `orthogonality_error` (||X X^T - I|| over the root of X's rows,
            the mean over some blocks; high while momentum is of low rank, in a run's first steps), milliseconds of the
            phases and of the whole step (`step_ms`), `exchanged_mb` that a rank receives, and `skipped_steps` so far.
    """

    step: int
    values: dict[str, float]


class Sampler:
    """Measures the Muons among the optimizers of a step, every `interval` steps; with 0 never."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], *, interval: int) -> None:
        self._muons = [one for one in optimizers if isinstance(one, (ShardedMuon, ReplicatedMuon))]
        self.interval = interval
        self.steps = 0
        self.skipped_steps = 0
        self.latest: StepMetrics | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around the step of all optimizers. Collective where the step is measured, which ranks agree on."""
        self.steps += 1
        if not self._muons or self.interval <= 0 or self.steps % self.interval:
            yield
            return
        device = self._muons[0].param_groups[0]["params"][0].device
        timer, sums = PhaseTimer(device), _Sums(device)
        for muon in self._muons:
            replicas = muon.exchange.replicas if isinstance(muon, ShardedMuon) else None
            muon.probe = _StepProbe(timer, sums, replicas)
        synchronize(device)
        start = time.perf_counter()
        try:
            yield
            synchronize(device)
        finally:
            for muon in self._muons:
                muon.probe = SILENT
        elapsed = time.perf_counter() - start
        for muon in self._muons:
            if isinstance(muon, ReplicatedMuon):
                sums.add_momentum([local_rows(state[MOMENTUM]) for state in muon.state.values()], muon.replicas)
        phases = [sum(timer.seconds[phase] for phase in group) for group in _OF_PHASES.values()]
        values = sums.reduced(phases, elapsed, timer.bytes_received)
        self.latest = StepMetrics(self.steps, values | {"skipped_steps": float(self.skipped_steps)})


class _StepProbe(Probe):
    """Times the phases of a step, and adds up what one Muon computes in it; `timer` and `sums` are common to all.

    `replicas` says how many ranks hold this rank's rows of a matrix, by its index; None where `momentum` is not called.
    """

    def __init__(self, timer: PhaseTimer, sums: _Sums, replicas: Callable[[int], int] | None) -> None:
        self._timer = timer
        self._sums = sums
        self._replicas = replicas

    def phase(self, name: str) -> AbstractContextManager[None]:
        return self._timer.phase(name)

    def received(self, size: int) -> None:
        self._timer.received(size)

    def momentum(self, indices: Sequence[int], rows: Sequence[torch.Tensor]) -> None:
        assert self._replicas is not None
        by_count = defaultdict(list)
        for index, values in zip(indices, rows, strict=True):
            by_count[self._replicas(index)].append(values)
        for count, alike in by_count.items():
            self._sums.add_momentum(alike, count)

    def updates(self, rows: Sequence[torch.Tensor]) -> None:
        self._sums.add_updates(rows)

    def block(self, block: torch.Tensor, scale: float) -> None:
        self._sums.add_block(block, scale)


class _Sums:
    """Sums on this rank, on the device until they are reduced."""

    def __init__(self, device: torch.device) -> None:
        self._zero = torch.zeros((), dtype=torch.float64, device=device)
        self.update, self.momentum, self.error = (self._zero.clone() for _ in range(3))
        self.elements = 0
        self.blocks = 0

    def add_updates(self, updates: Sequence[torch.Tensor]) -> None:
        """Scaled updates, rows of this rank."""
        if updates:
            self.update += _squares(updates).to(self.update.device)
            self.elements += sum(update.numel() for update in updates)

    def add_momentum(self, momentum: Sequence[torch.Tensor], replicas: float) -> None:
        """Momentum, rows of this rank, which so many ranks hold alike."""
        if momentum:
            self.momentum += _squares(momentum).to(self.momentum.device) / replicas

    def add_block(self, block: torch.Tensor, scale: float) -> None:
        """An orthogonalised block `(m, n)`, m <= n, times `scale`."""
        if self.blocks < _BLOCKS:
            block = block.float() / scale
            gram = block @ block.mT
            gram.diagonal().sub_(1.0)
            self.error += (torch.linalg.vector_norm(gram) / math.sqrt(len(block))).to(self.error.device)
            self.blocks += 1

    def reduced(self, phases: Sequence[float], elapsed: float, received: int) -> dict[str, float]:
        """The metrics of all ranks. Collective."""
        numbers = [self.elements, self.blocks, *phases, elapsed, received, 1]
        mine = torch.stack([self.update, self.momentum, self.error, *(self._zero + number for number in numbers)])
        dist.all_reduce(mine)
        update, momentum, error, elements, blocks, *rest, ranks = mine.tolist()
        *phases, elapsed, received = (value / ranks for value in rest)
        values = {"update_rms": math.sqrt(update / max(elements, 1.0)), "momentum_norm": math.sqrt(momentum)}
        if blocks:
            values["orthogonality_error"] = error / blocks
        values |= {name: 1e3 * seconds for name, seconds in zip(_OF_PHASES, phases, strict=True)}
        return {**values, "step_ms": 1e3 * elapsed, "exchanged_mb": received / 1e6}


def _squares(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    norms = torch._foreach_norm([tensor.float() for tensor in tensors])
    return torch.stack(list(norms)).double().square().sum()
