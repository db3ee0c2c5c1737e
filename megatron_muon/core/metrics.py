"""What a run logs of Muon's steps: sizes of update and momentum, how orthogonal updates are, where time and bytes go.

Measured in one step out of many, by a probe that the optimizers call in it; a GPU then waits for each phase. The
figures are means or sums over all ranks, the same on every rank.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, override

import torch
import torch.distributed as dist

from megatron_muon.core.collectives import TeamGroup
from megatron_muon.core.probe import SILENT, PhaseTimer, synchronize
from megatron_muon.core.ranks import Alone

_OF_PHASES = {
    "momentum_ms": ("momentum",),
    "gather_ms": ("gather", "gather_wait"),
    "newton_schulz_ms": ("orthogonalize",),
    "scatter_ms": ("send_back", "scatter_wait"),
    "apply_ms": ("apply",),
}
_BLOCKS = 4
"""Blocks of a step whose orthogonality is measured on each rank, and in each team."""


@dataclass(frozen=True)
class StepMetrics:
    """One measured step: its number, from 1, skipped steps not counted, and values by name.

    `update_rms` (root mean square of the scaled updates' elements, before the learning rate), `momentum_norm` (of all
    matrices together), `orthogonality_error` (||X X^T - I|| over the root of X's rows, the mean over some blocks; high
    while momentum is of low rank, in a run's first steps), milliseconds of the phases and of the whole step
    (`step_ms`), `exchanged_mb` that a rank receives, and `skipped_steps` so far.
    """

    step: int
    values: dict[str, float]


class Sampler:
    """Measures the Muons of a step, which call their `probe`, every `interval` steps; with 0 never."""

    def __init__(self, muons: Sequence[Any], *, interval: int, group: Any = None) -> None:
        self._muons = muons
        self._group = group  # of the ranks that have them; None is all
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
        probe = _StepProbe(device)
        for muon in self._muons:
            muon.probe = probe
        synchronize(device)
        start = time.perf_counter()
        try:
            yield
            synchronize(device)
        finally:
            for muon in self._muons:
                muon.probe = SILENT
        values = probe.reduced(time.perf_counter() - start, self._group)
        self.latest = StepMetrics(self.steps, values | {"skipped_steps": float(self.skipped_steps)})


class _StepProbe(PhaseTimer):
    """Times the phases of a step, and adds up what this rank computes in it, on the device until it is reduced."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._zero = torch.zeros((), dtype=torch.float64, device=device)
        self._update, self._momentum, self._error, self._measured = (self._zero.clone() for _ in range(4))
        self._elements = 0
        self._blocks = Counter[tuple[int, ...]]()  # by team: its ranks count those alike

    @override
    def momentum(self, indices: Sequence[int], rows: Sequence[torch.Tensor], replicas: Callable[[int], int]) -> None:
        by_count = defaultdict(list)
        for index, values in zip(indices, rows, strict=True):
            by_count[replicas(index)].append(values)
        for count, alike in by_count.items():
            self._momentum += _squares(alike).to(self._zero.device) / count

    @override
    def updates(self, rows: Sequence[torch.Tensor]) -> None:
        if rows:
            self._update += _squares([row.nan_to_num() for row in rows]).to(self._zero.device)
            self._elements += sum(update.numel() for update in rows)

    @override
    def block(self, block: torch.Tensor, scale: float, team: TeamGroup | None = None) -> None:
        ranks = () if team is None else team.ranks
        if self._blocks[ranks] < _BLOCKS:
            block = block.float() / scale
            gram = block @ block.mT if team is None else team.total(block @ block.mT)
            gram.diagonal().sub_(1.0)
            error = (torch.linalg.vector_norm(gram) / math.sqrt(len(block))).to(self._zero.device)
            share = 1.0 / max(len(ranks), 1)
            self._error += torch.where(error.isfinite(), share * error, 0.0)  # one without a gradient is not
            self._measured += share * error.isfinite()
            self._blocks[ranks] += 1

    def reduced(self, elapsed: float, group: Any = None) -> dict[str, float]:
        """The metrics of all ranks for a step that took `elapsed` seconds. Collective."""
        seconds = [sum(self.seconds[phase] for phase in phases) for phases in _OF_PHASES.values()]
        numbers = [self._elements, *seconds, elapsed, self.bytes_received, 1]
        sums = [self._update, self._momentum, self._error, self._measured]
        mine = torch.stack([*sums, *(self._zero + number for number in numbers)])
        if dist.is_initialized() and not isinstance(group, Alone):
            dist.all_reduce(mine, group=group)
        update, momentum, error, blocks, elements, *rest, ranks = mine.tolist()
        *phases, elapsed, received = (value / ranks for value in rest)
        values = {"update_rms": math.sqrt(update / max(elements, 1.0)), "momentum_norm": math.sqrt(momentum)}
        if blocks:
            values["orthogonality_error"] = error / blocks
        values |= {name: 1e3 * mean for name, mean in zip(_OF_PHASES, phases, strict=True)}
        return {**values, "step_ms": 1e3 * elapsed, "exchanged_mb": received / 1e6}


def _squares(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    norms = torch._foreach_norm([tensor.float() for tensor in tensors])
    return torch.stack(list(norms)).double().square().sum()
