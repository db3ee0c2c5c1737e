"""The owner scheme: rows travel to the one rank that orthogonalises their matrix, and the update's rows travel back.

A step walks the plan's waves. While the matrices of wave k are orthogonalised, the rows of wave k+1 are under way to
their owners and the updates of wave k-1 back to their holders; matrices that lie whole on their owner fill what is
left. Each wave and direction is one all-to-all-v. Which rank sends what is settled at construction: a step has no
collective on Python objects and never waits for the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist

from megatron_muon.core.exchange.steps import Batch, BatchMaker, Exchange, FiniteMarks, RowPhases, rectangle_view
from megatron_muon.core.layout import Shard
from megatron_muon.core.plan import Plan
from megatron_muon.core.probe import Probe

_Collected = list[tuple[int, int, Shard]]
"""`(other rank, matrix index, shard)`."""


@dataclass(frozen=True)
class _Parcels:
    """Rectangles of a wave's matrices that travel in one direction, or stay, ordered by rank and then by matrix.

    Attributes:
        items: `(matrix index, shard)`.
        counts: elements for each rank of the group, or from it.
        places: where this rank owns the matrices, the place of each one among the owned.
        places_on_device: the same.
        marks: which of the updates are finite.
    """

    items: tuple[tuple[int, Shard], ...]
    counts: tuple[int, ...]
    places: tuple[int, ...]
    places_on_device: torch.Tensor
    marks: FiniteMarks

    @property
    def indices(self) -> tuple[int, ...]:
        """Matrix indices, in the order of the items."""
        return tuple(index for index, _ in self.items)

    @property
    def numel(self) -> int:
        """Elements in all."""
        return sum(self.counts)

    def pieces(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """A buffer as the rectangles, one after the other: views."""
        pieces = buffer.split([shard.numel for _, shard in self.items])
        return [piece.view(shard.rows, shard.cols) for (_, shard), piece in zip(self.items, pieces, strict=True)]

    def rectangles(self, owned: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The rectangles of owned matrices: views."""
        return [rectangle_view(owned[place], shard) for (_, shard), place in zip(self.items, self.places, strict=True)]


@dataclass(frozen=True)
class _Route:
    """What this rank does in one wave.

    Attributes:
        owned: matrices that this rank orthogonalises.
        batch: these as a batch.
        kept: this rank's own shards of them.
        gathered: shards of them that arrive.
        spread: shards of them whose updates this rank sends to their holders.
        sent: shards that this rank sends to their matrices' owners.
        idle: matrices of which it holds elements that a replica sends.
        returned: shards whose updates arrive.
    """

    owned: tuple[int, ...]
    batch: Batch
    kept: _Parcels
    gathered: _Parcels
    spread: _Parcels
    sent: _Parcels
    idle: tuple[int, ...]
    returned: _Parcels


@dataclass
class _InFlight:
    """A collective under way with the buffers that it reads and writes; they live until it has been waited for."""

    work: Any
    send: torch.Tensor
    receive: torch.Tensor

    def wait(self) -> torch.Tensor:
        """The received elements, in the order of the parcels that were expected."""
        self.work.wait()
        return self.receive


class OwnerExchange(Exchange):
    """Carries out a plan.

    Args:
        plan: owners and waves; the same on every rank.
        group: the process group whose rank r holds the shards of rank r in the plan's layout.
        batches: makes batches of matrices.
        wire_dtype: as for `Exchange`. A rank's own rows are rounded like those that travel, so that the result does not
            depend on who holds what.
        device: where the rows lie.
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
        self._routes = [_route(plan, wave, self._rank, batches, device) for wave in plan.waves]
        self._fillers = [(indices, batches(indices)) for indices in plan.fillers(self._rank)]

    def run(self, rows: RowPhases, probe: Probe) -> None:
        """One step, wave by wave."""
        fillers = iter(self._fillers)
        returning: tuple[_Route, _InFlight] | None = None
        arriving = self._gather(self._routes[0], rows, probe) if self._routes else None
        for route, following in itertools.zip_longest(self._routes, self._routes[1:]):
            assert arriving is not None
            current = arriving
            arriving = self._gather(following, rows, probe) if following is not None else None
            for filler in itertools.islice(fillers, 1):
                self._update_whole(*filler, rows, probe)
            results, finite = self._orthogonalize(route, rows, current, probe)
            leaving = self._send_back(route, results, finite, probe)
            if route.kept.items:
                rows.finalize(route.kept.indices, route.kept.rectangles(results), finite[route.kept.places_on_device])
            if returning is not None:
                self._receive(*returning, rows, probe)
            returning = (route, leaving)
        for filler in fillers:
            self._update_whole(*filler, rows, probe)
        if returning is not None:
            self._receive(*returning, rows, probe)

    def _gather(self, route: _Route, rows: RowPhases, probe: Probe) -> _InFlight:
        """Send this rank's rows of a wave to their owners, and expect the rows of the matrices that it owns."""
        with probe.phase("gather"):
            send = self._nothing.new_empty(route.sent.numel)
            if route.sent.items:
                torch._foreach_copy_(route.sent.pieces(send), rows.prepare(route.sent.indices))
            if route.idle:
                rows.prepare(route.idle)  # a replica sends the rows; here only the momentum counts
            return self._all_to_all(send, route.sent, route.gathered, probe)

    def _orthogonalize(
        self, route: _Route, rows: RowPhases, arriving: _InFlight, probe: Probe
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Assemble this rank's matrices of a wave from what arrived and its own rows, and orthogonalise them."""
        with probe.phase("gather_wait"):
            arrived = arriving.wait()
        if not route.owned:
            return [], self._nothing.bool()
        with probe.phase("orthogonalize"):
            matrices = route.batch.allocate(self._nothing)
            if route.kept.items:
                torch._foreach_copy_(route.kept.rectangles(matrices), rows.prepare(route.kept.indices))
            if route.gathered.items:
                torch._foreach_copy_(route.gathered.rectangles(matrices), route.gathered.pieces(arrived))
            return route.batch.orthogonalize(probe)

    def _send_back(self, route: _Route, results: list[torch.Tensor], finite: torch.Tensor, probe: Probe) -> _InFlight:
        """Send the update rows of other ranks to their holders."""
        with probe.phase("send_back"):
            send = self._nothing.new_empty(route.spread.numel)
            if route.spread.items:
                torch._foreach_copy_(route.spread.pieces(send), route.spread.rectangles(results))
                route.spread.marks.write(send, finite[route.spread.places_on_device])
            return self._all_to_all(send, route.spread, route.returned, probe)

    def _receive(self, route: _Route, leaving: _InFlight, rows: RowPhases, probe: Probe) -> None:
        """Finalize the update rows that came back."""
        with probe.phase("scatter_wait"):
            received = leaving.wait()
            if not route.returned.items:
                return
            finite = route.returned.marks.read(received)
            rows.finalize(route.returned.indices, route.returned.pieces(received), finite)

    def _all_to_all(self, send: torch.Tensor, sent: _Parcels, expected: _Parcels, probe: Probe) -> _InFlight:
        receive = self._nothing.new_empty(expected.numel)
        probe.received(receive.nbytes)
        work = dist.all_to_all_single(
            receive, send, list(expected.counts), list(sent.counts), group=self.group, async_op=True
        )
        return _InFlight(work=work, send=send, receive=receive)


def _route(plan: Plan, wave: Sequence[int], rank: int, batches: BatchMaker, device: torch.device) -> _Route:
    """This rank's part in a wave."""
    world_size = plan.layout.world_size
    owned = tuple(index for index in wave if plan.owners[index] == rank)
    place = {index: number for number, index in enumerate(owned)}
    kept, gathered, spread, sent, returned = (_Collected() for _ in range(5))
    idle = []
    for index in wave:
        owner = plan.owners[index]
        for shard in plan.layout.matrices[index].shards:
            source = shard.source(owner, world_size)
            if owner == rank:
                (kept if source == rank else gathered).append((source, index, shard))
                spread += [(holder, index, shard) for holder in shard.holders if holder != rank]
            elif rank in shard.holders:
                returned.append((owner, index, shard))
                if source == rank:
                    sent.append((owner, index, shard))
                else:
                    idle.append(index)

    def parcels(items: _Collected) -> _Parcels:
        items.sort(key=itemgetter(0))  # matrices keep the order of the wave: both ends have the same
        counts = [0] * world_size
        for other, _, shard in items:
            counts[other] += shard.numel
        places = tuple(place[index] for _, index, _ in items if index in place)
        return _Parcels(
            items=tuple((index, shard) for _, index, shard in items),
            counts=tuple(counts),
            places=places,
            places_on_device=torch.tensor(places, dtype=torch.int64, device=device),
            marks=FiniteMarks([shard.numel for _, _, shard in items], device),
        )

    return _Route(
        owned=owned,
        batch=batches(owned),
        kept=parcels(kept),
        gathered=parcels(gathered),
        spread=parcels(spread),
        sent=parcels(sent),
        idle=tuple(idle),
        returned=parcels(returned),
    )
