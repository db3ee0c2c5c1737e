"""What a run logs of Muon's steps: sizes of update and momentum, how orthogonal updates are, where time and bytes go.

Measured in one step out of many, by wrapping the optimizers' methods for that step, so that the others pay nothing. On
a GPU the measured step waits for each phase. The figures are means or sums over all ranks, the same on every rank.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon

from megatron_muon.core.exchange import LocalExchange, SharedExchange
from megatron_muon.core.optimizer import MOMENTUM, ShardedMuon, local_rows
from megatron_muon.megatron.phases import ByteCounter, Timers, attach, synchronize
from megatron_muon.patching import Patches

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
    """Measures steps of Muons.

    Args:
        optimizers: those of a step, of any kind.
        interval: measure every so many steps; 0 never.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], *, interval: int) -> None:
        self._muons = [one for one in optimizers if isinstance(one, (ShardedMuon, TensorParallelMuon))]
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
        patches, timers, sums = Patches(), Timers(device), _Sums(device)
        attachments: list[Patches] = []
        for muon in self._muons:
            if isinstance(muon, ShardedMuon):
                _watch_sharded(muon, sums, patches)
                attachments.append(attach(muon, timers))
            else:
                _watch_replicated(muon, sums, patches, timers)
        synchronize(device)
        start = time.perf_counter()
        counter = ByteCounter()
        try:
            with counter:
                yield
            synchronize(device)
        finally:
            for attached in reversed(attachments):
                attached.undo()
            patches.undo()
        elapsed = time.perf_counter() - start
        for muon in self._muons:
            if isinstance(muon, TensorParallelMuon):
                sums.add_momentum([local_rows(state[MOMENTUM]) for state in muon.state.values()], _replicas(muon))
        phases = [sum(timers.seconds[phase] for phase in group) for group in _OF_PHASES.values()]
        self.latest = StepMetrics(self.steps, sums.reduced(phases, elapsed, counter.received) | {
            "skipped_steps": float(self.skipped_steps)})  # fmt: skip


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

    def add_block(self, block: torch.Tensor) -> None:
        """An orthogonalised block `(m, n)`, m <= n, unscaled."""
        if self.blocks < _BLOCKS:
            gram = block.float() @ block.float().mT
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


def _watch_sharded(muon: ShardedMuon, sums: _Sums, patches: Patches) -> None:
    """Have `sums` see the momentum, the updates and some orthogonalised blocks of a step."""
    exchange = muon.exchange
    layout = exchange.layout  # type: ignore[attr-defined]
    whole = isinstance(exchange, (SharedExchange, LocalExchange))
    rank = 0 if whole else exchange.group.rank()  # type: ignore[attr-defined]
    lent: list[torch.Tensor] = []

    def replicas(index: int) -> int:
        if whole:
            return int(layout.world_size)
        shard = layout.matrices[index].shard_of(rank)
        return 1 if shard is None else len(shard.holders)

    def around_lend(lend: Callable[..., Any]) -> Callable[..., Any]:
        def remember(indices: Sequence[int]) -> Any:
            lent[:] = lend(indices)
            return list(lent)

        return remember

    def around_take_back(take_back: Callable[..., Any]) -> Callable[..., Any]:
        def add(indices: Sequence[int]) -> None:
            by_count: dict[int, list[torch.Tensor]] = {}
            for index, rows in zip(indices, lent, strict=True):
                by_count.setdefault(replicas(index), []).append(rows)
            for count, alike in by_count.items():
                sums.add_momentum(alike, count)
            lent.clear()
            take_back(indices)

        return add

    def around_subtract(subtract: Callable[..., Any]) -> Callable[..., Any]:
        def add(weights: Any, updates: list[torch.Tensor], *, rate: float) -> None:
            sums.add_updates(updates)
            subtract(weights, updates, rate=rate)

        return add

    patches.wrap(muon._momentum, "lend", around_lend)
    patches.wrap(muon._momentum, "take_back", around_take_back)
    patches.wrap(muon, "_subtract", around_subtract)
    if muon.orthogonalizer is not None:
        patches.replace(muon.orthogonalizer, "watch", sums.add_block)


def _watch_replicated(muon: TensorParallelMuon, sums: _Sums, patches: Patches, timers: Timers) -> None:
    """Have `sums` see the updates of a step of plain Muon."""
    orthogonalize = timers.timed("orthogonalize", muon.orthogonalize)

    def around(_: Callable[..., Any]) -> Callable[..., Any]:
        def add(p: torch.Tensor, grad: torch.Tensor, **kwargs: Any) -> Any:
            update = orthogonalize(p, grad, **kwargs)
            sums.add_updates([local_rows(update)])
            return update

        return add

    patches.wrap(muon, "orthogonalize", around)


def _replicas(muon: TensorParallelMuon) -> float:
    """How many ranks hold plain Muon's matrices alike."""
    parameters = [p for group in muon.param_groups for p in group["params"]]
    experts = any(getattr(p, "expert_tp", False) for p in parameters)
    group: dist.ProcessGroup = muon.pg_collection.expt_dp if experts else muon.pg_collection.dp_cp
    return float(group.size())
