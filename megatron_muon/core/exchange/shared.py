"""The work of replicated matrices, shared: each matrix has one owner, and its update is broadcast to the other ranks.

Under `no_shard` every rank holds all rows and the same gradients, so no rows travel and momentum is computed by each
rank for itself. A step walks the plan's waves: each owner orthogonalises its matrices of a wave, then owner after owner
broadcasts them as one parcel. Broadcasts stay under way while the next wave is worked on, as many as fit the buffer.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_muon.core.exchange.steps import Batch, BatchMaker, Exchange, FiniteMarks, RowPhases
from megatron_muon.core.plan import Plan
from megatron_muon.core.probe import Probe


@dataclass(frozen=True)
class _Parcel:
    """The updates that one owner broadcasts in a wave.

    Attributes:
        owner: its rank in the group.
        indices: the matrices, one after the other.
        numel: elements in all.
        batch: the matrices as a batch, on their owner.
        marks: which updates are finite.
    """

    owner: int
    indices: tuple[int, ...]
    numel: int
    batch: Batch | None
    marks: FiniteMarks


@dataclass
class _InFlight:
    """A broadcast under way with the buffer that it reads or writes, which lives until it has been waited for."""

    parcel: _Parcel
    work: Any
    updates: torch.Tensor


class SharedExchange(Exchange):
    """Carries out a plan for matrices that every rank holds whole.

    Args:
        plan: owners and waves; the same on every rank.
        group: the process group whose ranks hold the same matrices.
        batches: makes batches of matrices.
        wire_dtype: dtype of updates on the wire and of what the iteration starts from. The owner applies the update
            that it sends, rounded as it travels, so that the replicas stay the same to the last bit.
        device: where the matrices lie.
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
        self._waves = [_parcels(plan, wave, self._rank, batches, device) for wave in _waves(plan)]
        # A wave that is worked on fills a third of the buffer; the rest is for what is under way.
        self._most_under_way = 2 * plan.wave_bytes // wire_dtype.itemsize

    def run(self, rows: RowPhases, probe: Probe) -> None:
        """One step, wave by wave."""
        under_way: deque[_InFlight] = deque()
        for wave in self._waves:
            own = [self._orthogonalize(parcel, rows, probe) for parcel in wave if parcel.owner == self._rank]
            for parcel in wave:
                if parcel.owner != self._rank:
                    rows.prepare(parcel.indices)  # the owner orthogonalises them; here only the momentum counts
                filled = sum(flight.parcel.numel for flight in under_way)
                while under_way and filled + parcel.numel > self._most_under_way:
                    filled -= under_way[0].parcel.numel
                    self._receive(under_way.popleft(), rows, probe)
                updates = own.pop() if parcel.owner == self._rank else self._nothing.new_empty(parcel.numel)
                under_way.append(self._broadcast(parcel, updates, probe))
        while under_way:
            self._receive(under_way.popleft(), rows, probe)

    def _orthogonalize(self, parcel: _Parcel, rows: RowPhases, probe: Probe) -> torch.Tensor:
        """The updates of this rank's matrices of a wave, one after the other in one buffer."""
        assert parcel.batch is not None
        with probe.phase("orthogonalize"):
            torch._foreach_copy_(parcel.batch.allocate(self._nothing), rows.prepare(parcel.indices))
            updates = self._nothing.new_empty(parcel.numel)
            results, finite = parcel.batch.orthogonalize(probe)
            torch._foreach_copy_(self._pieces(parcel, updates), results)
            parcel.marks.write(updates, finite)
        return updates

    def _broadcast(self, parcel: _Parcel, updates: torch.Tensor, probe: Probe) -> _InFlight:
        """Send the owner's updates to every other rank, or expect them."""
        if self.group.size() == 1:
            return _InFlight(parcel, None, updates)
        if parcel.owner != self._rank:
            probe.received(updates.nbytes)
        work = dist.broadcast(updates, group=self.group, group_src=parcel.owner, async_op=True)
        return _InFlight(parcel, work, updates)

    def _receive(self, flight: _InFlight, rows: RowPhases, probe: Probe) -> None:
        """Finalize the updates of a parcel once they are there; the owner takes what it sent."""
        with probe.phase("scatter_wait"):
            if flight.work is not None:
                flight.work.wait()
            finite = flight.parcel.marks.read(flight.updates)
            rows.finalize(flight.parcel.indices, self._pieces(flight.parcel, flight.updates), finite)

    def _pieces(self, parcel: _Parcel, buffer: torch.Tensor) -> list[torch.Tensor]:
        """A buffer as the matrices of a parcel, one after the other: views."""
        matrices = [self.layout.matrices[index] for index in parcel.indices]
        pieces = buffer.split([matrix.numel for matrix in matrices])
        return [piece.view(matrix.shape) for matrix, piece in zip(matrices, pieces, strict=True)]


def _waves(plan: Plan) -> list[tuple[int, ...]]:
    """The plan's waves, and after them what it has lie whole on its owner: here that is broadcast like all else."""
    fillers = itertools.zip_longest(*(plan.fillers(rank) for rank in range(plan.layout.world_size)), fillvalue=())
    return [*plan.waves, *(tuple(itertools.chain(*parts)) for parts in fillers)]


def _parcels(
    plan: Plan, wave: Sequence[int], rank: int, batches: BatchMaker, device: torch.device
) -> tuple[_Parcel, ...]:
    """A wave as the parcels of its owners, in the order of their ranks."""
    owned: dict[int, list[int]] = {}
    for index in wave:
        owned.setdefault(plan.owners[index], []).append(index)
    return tuple(
        _Parcel(
            owner=owner,
            indices=tuple(indices),
            numel=sum(plan.layout.matrices[index].numel for index in indices),
            batch=batches(indices) if owner == rank else None,
            marks=FiniteMarks([plan.layout.matrices[index].numel for index in indices], device),
        )
        for owner, indices in sorted(owned.items())
    )
