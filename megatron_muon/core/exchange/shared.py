"""The work of replicated matrices, shared: each matrix has one owner, and its update is broadcast to the other ranks.

Under `no_shard` every rank holds all rows and the same gradients, so no rows travel and momentum is computed by each
rank for itself. A step walks the plan's waves: each owner orthogonalises its matrices of a wave, then owner after owner
broadcasts them as one parcel. Broadcasts stay under way while the next wave is worked on, as many as fit the buffer.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_muon.core.exchange.steps import Batch, BatchMaker, InFlight, Parcel, Parcels, PlannedExchange, RowPhases
from megatron_muon.core.probe import Probe


class _Share(NamedTuple):
    """The matrices that one owner orthogonalises in a wave and broadcasts; `batch` is there on their owner alone."""

    owner: int
    parcels: Parcels
    batch: Batch | None


class SharedExchange(PlannedExchange):
    """Carries out a plan for matrices that every rank holds whole.

    The owner applies the update that it sends, rounded as it travels, so that the replicas stay the same to the last
    bit.
    """

    def _make_routes(self, batches: BatchMaker) -> None:
        """The plan's waves, and after them what it has lie whole on its owner: here that is broadcast like all else."""
        plan, ranks = self.plan, range(self.layout.world_size)
        fillers = itertools.zip_longest(*map(plan.fillers, ranks), fillvalue=())
        waves = [*plan.waves, *(tuple(itertools.chain(*parts)) for parts in fillers)]
        self._waves = [[self._share(owner, wave, batches) for owner in self._owners(wave)] for wave in waves]
        # A wave that is worked on takes three times that; see `core.memory`.
        self._most_under_way = plan.wave_bytes // self._nothing.itemsize

    def _owners(self, wave: tuple[int, ...]) -> list[int]:
        return sorted({self.plan.owners[index] for index in wave})

    def _share(self, owner: int, wave: tuple[int, ...], batches: BatchMaker) -> _Share:
        indices = [index for index in wave if self.plan.owners[index] == owner]
        parcels = []
        for room, index in enumerate(indices):
            (shard,) = self.layout.matrices[index].shards
            ((portion, (piece,)),) = ((portion, portion.pieces(shard)) for portion in self.plan.portions(index))
            parcels.append(Parcel(portion.rank, index, piece, shard, room))
        batch = batches(indices) if owner == self._rank else None
        return _Share(owner, self._parcels(parcels), batch)

    def run(self, rows: RowPhases, probe: Probe) -> None:
        """One step, wave by wave."""
        under_way: deque[tuple[Parcels, InFlight]] = deque()
        for wave in self._waves:
            own = [self._orthogonalize(parcels, batch, rows, probe) for _, parcels, batch in wave if batch is not None]
            for owner, parcels, batch in wave:
                if batch is None:
                    rows.prepare(parcels.indices)  # the owner orthogonalises them; here only the momentum counts
                filled = sum(flying.numel for flying, _ in under_way)
                while under_way and filled + parcels.numel > self._most_under_way:
                    filled -= under_way[0][0].numel
                    self._receive(*under_way.popleft(), rows, probe)
                updates = self._nothing.new_empty(parcels.numel) if batch is None else own.pop()
                under_way.append((parcels, self._broadcast(owner, updates, probe)))
        while under_way:
            self._receive(*under_way.popleft(), rows, probe)

    def _orthogonalize(self, parcels: Parcels, batch: Batch, rows: RowPhases, probe: Probe) -> torch.Tensor:
        """The updates of this rank's matrices of a wave, one after the other in one buffer."""
        with probe.phase("orthogonalize"):
            torch._foreach_copy_(batch.allocate(self._nothing), rows.prepare(parcels.indices))
            updates = self._nothing.new_empty(parcels.numel)
            results, finite = batch.orthogonalize(probe)
            torch._foreach_copy_(parcels.in_buffer(updates), results)
            parcels.mark(updates, finite)
        return updates

    def _broadcast(self, owner: int, updates: torch.Tensor, probe: Probe) -> InFlight:
        """Send the owner's updates to every other rank, or expect them."""
        if self.group.size() == 1:
            return InFlight(received=updates)
        if owner != self._rank:
            probe.received(updates.nbytes)
        work = dist.broadcast(updates, group=self.group, group_src=owner, async_op=True)
        return InFlight(received=updates, work=work)

    def _receive(self, parcels: Parcels, flight: InFlight, rows: RowPhases, probe: Probe) -> None:
        """Finalize updates once they are there; the owner takes what it sent."""
        with probe.phase("scatter_wait"):
            updates = flight.wait()
            finite = parcels.finite(updates)
            rows.finalize(parcels.indices, parcels.in_buffer(updates), finite)
