"""What a step tells whoever measures it: where its time goes, what it receives, what it computes.

A step calls its probe at each phase. While a torch profiler runs, each phase is a range of its trace.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, override

import torch

from megatron_muon.core.slices import BlockSlice

if TYPE_CHECKING:
    from megatron_muon.core.collectives import TeamGroup

PHASES = ("momentum", "gather", "gather_wait", "orthogonalize", "send_back", "scatter_wait", "apply", "other")
"""In the order of a step. momentum: `prepare`; gather: packing rows and starting the exchange; gather_wait: waiting for
rows (all of its gathering, for the all-gather scheme); orthogonalize: assembly and iteration; send_back: packing the
update's rows; scatter_wait: waiting for them; apply: `apply`; other: what lies between."""

_NOTHING = nullcontext()
_is_profiled = torch._C._autograd._profiler_enabled


def span(name: str) -> AbstractContextManager[None]:
    """A range of that name in the trace of a running torch profiler; without one, a fiftieth of a range's cost."""
    return torch.profiler.record_function(name) if _is_profiled() else _NOTHING


class Probe:
    """Listens to a step; this one to nothing."""

    def phase(self, name: str, wave: int | None = None) -> AbstractContextManager[None]:
        """Around one of `PHASES`, of a wave where there are waves; a phase within another counts for itself alone."""
        if not _is_profiled():
            return _NOTHING
        return span(f"muon/{name}" if wave is None else f"muon/{name} wave {wave}")

    def momentum(self, indices: Sequence[int], rows: Sequence[torch.Tensor], replicas: Callable[[int], int]) -> None:
        """This rank's new momentum `(rows, cols)` fp32; `replicas(index)` ranks hold the same rows of a matrix."""

    def updates(self, rows: Sequence[torch.Tensor]) -> None:
        """This rank's rows `(rows, cols)` of scaled updates, before the learning rate; NaN where one is skipped."""

    def block(self, block: torch.Tensor, scale: float, team: TeamGroup | None = None) -> None:
        """The first orthogonalised block of a stack, `(m, n)` with m <= n, times `scale`; not to be kept.

        With `team`, n are this rank's columns of it, and each rank of the team is shown its own at the same time.
        """

    def orthogonalized(self, slots: Sequence[BlockSlice]) -> None:
        """This rank has orthogonalised these blocks, or its parts of them."""

    def received(self, size: int) -> None:
        """A collective that brings this rank so many bytes from others has been started."""


SILENT = Probe()


class PhaseTimer(Probe):
    """Adds up seconds by phase, and bytes from other ranks. On CUDA it waits for each phase: none overlap."""

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
