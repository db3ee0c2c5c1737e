"""Measures a step: sizes of updates, orthogonality, where time and bytes go.

A run measures one step out of many, in which a GPU waits for each phase. The figures are means or
sums over all ranks, the same on every rank.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, override

import torch
import torch.distributed as dist

from megatron_muon.core.probe import SILENT, Probe
from megatron_muon.ranks import Alone

if TYPE_CHECKING:
    from megatron_muon.core.teams import TeamGroup


class PhaseTimer(Probe):
    """Adds up seconds by phase, and bytes from other ranks.

    On CUDA it waits for each phase, so phases do not overlap.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds: Counter[str] = Counter()
        self.bytes_received = 0
        self._device = device
        self._within = [0.0]

    @override
    @contextmanager
    def phase(self, name: str, wave: int | None = None) -> Iterator[None]:
        self._within.append(0.0)
        start = time.perf_counter()
        with super().phase(name, wave):
            yield
            synchronize(self._device)
        elapsed = time.perf_counter() - start
        self.seconds[name] += elapsed - self._within.pop()  # type: ignore[assignment]  # a Counter of floats
        self._within[-1] += elapsed

    @override
    def received(self, size: int) -> None:
        self.bytes_received += size


def synchronize(device: torch.device) -> None:
    """Wait for a GPU's queue; on a CPU there is nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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

    `update_rms` (root mean square of the scaled updates' elements, before the learning rate),
    `momentum_norm` (of all matrices together), `orthogonality_error` (||X X^T - I|| over the root
    of X's rows, the mean over some blocks; high while momentum is of low rank, in a run's first
    steps), milliseconds of the phases and of the whole step (`step_ms`), `exchanged_mb` that a rank
    receives, and `skipped_steps` so far.
    """

    step: int
    values: dict[str, float]


@dataclass
class Sampler:
    """Measures the Muons of a step, which call their `probe`, every `interval` steps; with 0 never.

    A Muon with an attribute `copies` has the same matrices on so many ranks; they count once.
    """

    muons: Sequence[Any]
    interval: int
    group: Any = None  # of the ranks that have them; None is all
    steps: int = 0
    skipped_steps: int = 0
    latest: StepMetrics | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Wrap the step of all optimizers. Collective in measured steps, the same on all ranks."""
        self.steps += 1
        if not self.muons or self.interval <= 0 or self.steps % self.interval:
            yield
            return
        device = self.muons[0].device
        probes = dict[int, _StepProbe]()
        for muon in self.muons:
            copies = getattr(muon, "copies", 1)
            muon.probe = probes.setdefault(copies, _StepProbe(device, copies))
        synchronize(device)
        start = time.perf_counter()
        try:
            yield
            synchronize(device)
        finally:
            for muon in self.muons:
                muon.probe = SILENT
        values = _reduced(list(probes.values()), time.perf_counter() - start, self.group)
        self.latest = StepMetrics(self.steps, values | {"skipped_steps": float(self.skipped_steps)})


_SUMS = ("update", "momentum", "elements", "error", "blocks")
"""Squares of updates and of momentum, elements of updates, errors and number of measured blocks."""


class _StepProbe(PhaseTimer):
    """Times the phases of a step and adds up this rank's sums, on the device until reduced."""

    def __init__(self, device: torch.device, copies: int) -> None:
        super().__init__(device)
        self._copies = copies
        self.sums = {name: torch.zeros((), dtype=torch.float64, device=device) for name in _SUMS}
        self._blocks = Counter[tuple[int, ...]]()  # by team: its ranks count those alike

    def _add(self, name: str, value: torch.Tensor) -> None:
        self.sums[name] += value.to(self._device)

    def _add_squares(
        self, name: str, rows: Sequence[torch.Tensor], shares: Sequence[float]
    ) -> None:
        if rows:
            # squares of 1e20, 1e-30
            norms = torch._foreach_norm([row.float() for row in rows], dtype=torch.float64)
            squares = torch.stack(list(norms)).square()
            self._add(name, squares @ squares.new_tensor(shares))

    @override
    def momentum(
        self, indices: Sequence[int], rows: Sequence[torch.Tensor], replicas: Callable[[int], int]
    ) -> None:
        shares = [1.0 / (self._copies * replicas(index)) for index in indices]
        self._add_squares("momentum", rows, shares)

    @override
    def updates(
        self, indices: Sequence[int], rows: Sequence[torch.Tensor], replicas: Callable[[int], int]
    ) -> None:
        shares = [1.0 / (self._copies * replicas(index)) for index in indices]
        self._add_squares("update", [row.nan_to_num() for row in rows], shares)
        numels = [row.numel() for row in rows]
        self.sums["elements"] += math.sumprod(shares, numels)

    @override
    def blocks(self, stack: torch.Tensor, scale: float, team: TeamGroup | None = None) -> None:
        ranks = () if team is None else team.ranks
        if self._blocks[ranks] < _BLOCKS:
            block = stack[0].float() / scale
            gram = block @ block.mT
            if team is not None:
                team.total(gram, gram)
            gram.diagonal().sub_(1.0)
            error = torch.linalg.vector_norm(gram) / math.sqrt(len(block))
            share = 1.0 / max(len(ranks), 1)
            # one without a gradient is not
            self._add("error", torch.where(error.isfinite(), share * error, 0.0))
            self._add("blocks", share * error.isfinite())
            self._blocks[ranks] += 1

    def figures(self) -> torch.Tensor:
        """This rank's terms of the sums over all ranks, fp64."""
        seconds = [sum(self.seconds[phase] for phase in phases) for phases in _OF_PHASES.values()]
        sums = torch.stack(list(self.sums.values()))
        return torch.cat([sums, sums.new_tensor([*seconds, self.bytes_received])])


def _reduced(probes: Sequence[_StepProbe], elapsed: float, group: Any) -> dict[str, float]:
    """The metrics of all ranks for a step that took `elapsed` seconds. Collective."""
    mine = torch.stack([probe.figures() for probe in probes]).sum(0)
    mine = torch.cat([mine, mine.new_tensor([elapsed, 1])])
    if dist.is_initialized() and not isinstance(group, Alone):
        dist.all_reduce(mine, group=group)
    update, momentum, elements, error, blocks, *rest, ranks = mine.tolist()
    *phases, received, elapsed = (value / ranks for value in rest)
    values = {
        "update_rms": math.sqrt(update / max(elements, 1.0)),
        "momentum_norm": math.sqrt(momentum),
    }
    if blocks:
        values["orthogonality_error"] = error / blocks
    values |= {name: 1e3 * mean for name, mean in zip(_OF_PHASES, phases, strict=True)}
    return {**values, "step_ms": 1e3 * elapsed, "exchanged_mb": received / 1e6}
