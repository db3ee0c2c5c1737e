"""The probe that a step calls at each phase; `megatron_muon.metrics` measures with one.

While a torch profiler runs, each phase is a range of its trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

from megatron_muon.core.slices import BlockSlice

if TYPE_CHECKING:
    from megatron_muon.core.teams import TeamGroup

PHASES = (
    "momentum",
    "gather",
    "gather_wait",
    "orthogonalize",
    "send_back",
    "scatter_wait",
    "apply",
    "other",
)
"""In the order of a step. momentum: `advance`; gather: packing rows and starting the exchange; gather_wait: waiting for
rows (all of its gathering, for the all-gather scheme); orthogonalize: assembly and iteration; send_back: packing the
update's rows; scatter_wait: waiting for them; apply: `descend`; other: what lies between."""

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

    def momentum(
        self, indices: Sequence[int], rows: Sequence[torch.Tensor], replicas: Callable[[int], int]
    ) -> None:
        """This rank's new momentum `(rows, cols)` fp32; `replicas(index)` ranks hold the same rows of a matrix."""

    def updates(
        self, indices: Sequence[int], rows: Sequence[torch.Tensor], replicas: Callable[[int], int]
    ) -> None:
        """As `momentum`, the rows of scaled updates, before the learning rate; NaN where one is skipped."""

    def blocks(self, stack: torch.Tensor, scale: float, team: TeamGroup | None = None) -> None:
        """Orthogonalized blocks, `(count, m, n)` with m <= n, times `scale`; not to be kept.

        With `team`, n are this rank's columns, and each rank of the team is shown its own at the
        same time.
        """

    def orthogonalized(self, slots: Sequence[BlockSlice]) -> None:
        """This rank has orthogonalized these blocks, or its parts of them."""

    def received(self, size: int) -> None:
        """A collective that brings this rank so many bytes from others has been started."""


SILENT = Probe()
