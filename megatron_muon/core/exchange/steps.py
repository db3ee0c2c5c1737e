"""The contract between an optimizer and its exchange, and what exchanges have in common.

The exchange sets the pace, because it knows the waves: it asks the optimizer to `prepare` the rows of a wave, and hands
the update's rows to `finalize` as they come. Memory is bounded by the exchange's buffer.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_muon.core.layout import Layout, Shard
from megatron_muon.core.plan import Plan
from megatron_muon.core.probe import Probe


class RowPhases(Protocol):
    """The elementwise phases of a step on this rank's rows; `ShardedMuon` has them."""

    def prepare(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """Momentum and look-ahead of the matrices with these indices, all of which this rank holds rows of.

        Returns:
            This rank's rectangle `(rows, cols)` fp32 of what is orthogonalised of each; not to be changed. It is read
            by what is enqueued before the next call.
        """

    def finalize(self, indices: Sequence[int], updates: Sequence[torch.Tensor], finite: torch.Tensor) -> None:
        """Subtract updates from the weights.

        Args:
            indices: the matrices.
            updates: this rank's rectangle `(rows, cols)`, of any floating dtype, of the scaled update of each.
            finite: which updates are finite, `(matrices,)` bool on their device. The others are zero, and their
                matrices keep their weights.
        """


class Batch(Protocol):
    """Matrices that are orthogonalised together: filled, run, read."""

    def allocate(self, like: torch.Tensor) -> list[torch.Tensor]:
        """Room for each whole matrix `(rows, cols)`, of the dtype and on the device of `like`."""

    def orthogonalize(self, probe: Probe) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The scaled update of each matrix, `(rows, cols)`, in its place; which are finite, `(matrices,)` bool."""


BatchMaker = Callable[[Sequence[int]], Batch]
"""Makes the batch of the matrices with the given indices; called at construction, once for each wave."""


class Exchange(ABC):
    """Makes matrices whole, has them orthogonalised, and brings the update's rows back.

    Args:
        layout: who holds which rectangle of each matrix; the same on every rank.
        group: the process group whose rank r holds the shards of rank r in `layout`.
        device: where the rows lie.
        wire_dtype: dtype of elements on the wire and of the matrices that are put together from them: torch.float32, or
            torch.bfloat16 where the iteration starts from bf16.

    Raises:
        ValueError: the layout is for another number of ranks.
    """

    def __init__(
        self,
        layout: Layout,
        group: dist.ProcessGroup,
        *,
        device: torch.device,
        wire_dtype: torch.dtype = torch.float32,
    ) -> None:
        if group.size() != layout.world_size:
            raise ValueError(f"the layout is for {layout.world_size} ranks, the process group has {group.size()}")
        self.layout = layout
        self.group = group
        self._rank = group.rank()
        self._nothing = torch.empty(0, dtype=wire_dtype, device=device)

    def replicas(self, index: int) -> int:
        """How many ranks hold the same rows of a matrix as this one."""
        shard = self.layout.matrices[index].shard_of(self._rank)
        return 1 if shard is None else len(shard.holders)

    @abstractmethod
    def run(self, rows: RowPhases, probe: Probe) -> None:
        """One step of all matrices.

        Collective over the exchange's group, but for `LocalExchange`. Each matrix of which this rank holds rows is
        prepared once and finalized once after that; the optimizer checks it.

        Raises:
            RuntimeError: a collective failed.
        """

    def _update_whole(self, indices: Sequence[int], batch: Batch, rows: RowPhases, probe: Probe) -> None:
        """Prepare, orthogonalise and finalize matrices that this rank holds whole."""
        with probe.phase("orthogonalize"):
            torch._foreach_copy_(batch.allocate(self._nothing), rows.prepare(indices))
            updates, finite = batch.orthogonalize(probe)
        rows.finalize(indices, updates, finite)


class PlannedExchange(Exchange):
    """An exchange in which each matrix has one owner, which orthogonalises it, and travels in a wave.

    `plan` is the same on every rank; the other arguments are those of `Exchange`. What a rank has itself is rounded
    like what travels, so that a result does not depend on who holds what.
    """

    def __init__(
        self,
        plan: Plan,
        group: dist.ProcessGroup,
        batches: BatchMaker,
        *,
        wire_dtype: torch.dtype = torch.float32,
        device: torch.device,
    ) -> None:
        super().__init__(plan.layout, group, device=device, wire_dtype=wire_dtype)
        self.plan = plan
        self._make_routes(batches)

    @abstractmethod
    def _make_routes(self, batches: BatchMaker) -> None:
        """Settle, before the first step, what this rank does in each wave."""

    def _parcels(self, items: Sequence[tuple[int, int, Shard]], owned: Sequence[int]) -> Parcels:
        return Parcels(items, owned, self.layout.world_size, self._nothing.device)


class Parcels:
    """Rectangles of a wave's matrices, one after the other in a buffer that travels, or that stay where they are.

    A buffer of updates says itself which of them are not finite: the first element of such an update is NaN, the others
    are zero. So nothing waits for the device, and no second message is needed.

    Args:
        items: `(other rank, matrix index, shard)`; they are ordered by rank, and within a rank as given.
        owned: matrices that this rank owns, in the order of its results.
        world_size: ranks of the group.
        device: where buffers lie.

    Attributes:
        indices: of the matrices.
        counts: elements for each rank of the group, or from it.
        numel: elements in all.
        places: where this rank owns the matrices, the place of each one among the owned, on the device.
    """

    def __init__(
        self, items: Sequence[tuple[int, int, Shard]], owned: Sequence[int], world_size: int, device: torch.device
    ) -> None:
        items = sorted(items, key=itemgetter(0))
        self.indices = [index for _, index, _ in items]
        self.counts = [0] * world_size
        for other, _, shard in items:
            self.counts[other] += shard.numel
        self.numel = sum(self.counts)
        self._shards = [shard for _, _, shard in items]
        self._sizes = [shard.numel for shard in self._shards]
        place = {index: number for number, index in enumerate(owned)}
        self._places = [place[index] for index in self.indices if index in place]
        self.places = torch.tensor(self._places, dtype=torch.int64, device=device)
        starts = [0, *itertools.accumulate(self._sizes)][: len(items)]
        self._first = torch.tensor(starts, dtype=torch.int64, device=device)

    def pieces(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """A buffer as the rectangles, one after the other: views."""
        pieces = buffer.split(self._sizes)
        return [piece.view(shard.rows, shard.cols) for shard, piece in zip(self._shards, pieces, strict=True)]

    def rectangles(self, owned: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The rectangles of owned matrices: views."""
        return [rectangle_view(owned[place], shard) for shard, place in zip(self._shards, self._places, strict=True)]

    def mark(self, buffer: torch.Tensor, finite: torch.Tensor) -> None:
        """Mark the updates that are not `finite`, `(updates,)` bool."""
        buffer[self._first] = torch.where(finite, buffer[self._first], torch.nan)

    def finite(self, buffer: torch.Tensor) -> torch.Tensor:
        """Which updates are finite, `(updates,)` bool; takes the marks away."""
        first = buffer[self._first]
        finite = first.isfinite()
        buffer[self._first] = torch.where(finite, first, 0.0)
        return finite


@dataclass
class InFlight:
    """A collective under way with the buffers that it reads and writes; they live until it has been waited for."""

    work: Any
    received: torch.Tensor
    sent: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        """The received elements, in the order of the parcels that were expected."""
        if self.work is not None:
            self.work.wait()
        return self.received


def rectangle_view(matrix: torch.Tensor, shard: Shard) -> torch.Tensor:
    """The rectangle of `matrix` that `shard` describes, a view."""
    return matrix.narrow(0, shard.row_start, shard.rows).narrow(1, shard.col_start, shard.cols)
