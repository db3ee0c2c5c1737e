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

import torch
import torch.distributed as dist

from megatron_muon.core.exchange.steps import Batch, BatchMaker, InFlight, Parcels, PlannedExchange, RowPhases
from megatron_muon.core.layout import Shard
from megatron_muon.core.probe import Probe


@dataclass(frozen=True)
class _Route:
    """What this rank does in one wave.

    Attributes:
        batch: the matrices that this rank orthogonalises.
        owned: how many they are.
        idle: matrices of which it holds elements that a replica sends.
        kept: this rank's own shards of them.
        gathered: shards of them that arrive.
        spread: shards of them whose updates this rank sends to their holders.
        sent: shards that this rank sends to their matrices' owners.
        returned: shards whose updates arrive.
    """

    batch: Batch
    owned: int
    idle: list[int]
    kept: Parcels
    gathered: Parcels
    spread: Parcels
    sent: Parcels
    returned: Parcels


class OwnerExchange(PlannedExchange):
    """Carries out a plan for matrices whose rows lie on several ranks."""

    def _make_routes(self, batches: BatchMaker) -> None:
        self._routes = [self._route(wave, batches) for wave in self.plan.waves]
        self._fillers = [(indices, batches(indices)) for indices in self.plan.fillers(self._rank)]

    def _route(self, wave: Sequence[int], batches: BatchMaker) -> _Route:
        """This rank's part in a wave."""
        rank, owners = self._rank, self.plan.owners
        kept, gathered, spread, sent, returned = (list[tuple[int, int, Shard]]() for _ in range(5))
        idle = []
        for index in wave:
            owner = owners[index]
            for shard in self.layout.matrices[index].shards:
                source = shard.source(owner, self.layout.world_size)
                if owner == rank:
                    (kept if source == rank else gathered).append((source, index, shard))
                    spread += [(holder, index, shard) for holder in shard.holders if holder != rank]
                elif rank in shard.holders:
                    returned.append((owner, index, shard))
                    if source == rank:
                        sent.append((owner, index, shard))
                    else:
                        idle.append(index)
        owned = [index for index in wave if owners[index] == rank]
        parcels = (self._parcels(items, owned) for items in (kept, gathered, spread, sent, returned))
        return _Route(batches(owned), len(owned), idle, *parcels)

    def run(self, rows: RowPhases, probe: Probe) -> None:
        """One step, wave by wave."""
        fillers, beside_a_wave = iter(self._fillers), -(-len(self._fillers) // max(len(self._routes), 1))
        returning: tuple[_Route, InFlight] | None = None
        arriving = self._gather(self._routes[0], rows, probe) if self._routes else None
        for route, following in itertools.zip_longest(self._routes, self._routes[1:]):
            assert arriving is not None
            current = arriving
            arriving = self._gather(following, rows, probe) if following is not None else None
            for filler in itertools.islice(fillers, beside_a_wave):
                self._update_whole(*filler, rows, probe)
            results, finite = self._orthogonalize(route, rows, current, probe)
            leaving = self._send_back(route, results, finite, probe)
            if route.kept.indices:
                rows.finalize(route.kept.indices, route.kept.rectangles(results), finite[route.kept.places])
            if returning is not None:
                self._receive(*returning, rows, probe)
            returning = (route, leaving)
        for filler in fillers:
            self._update_whole(*filler, rows, probe)
        if returning is not None:
            self._receive(*returning, rows, probe)

    def _gather(self, route: _Route, rows: RowPhases, probe: Probe) -> InFlight:
        """Send this rank's rows of a wave to their owners, and expect the rows of the matrices that it owns."""
        with probe.phase("gather"):
            send = self._nothing.new_empty(route.sent.numel)
            if route.sent.indices:
                torch._foreach_copy_(route.sent.pieces(send), rows.prepare(route.sent.indices))
            if route.idle:
                rows.prepare(route.idle)  # a replica sends the rows; here only the momentum counts
            return self._all_to_all(send, route.sent, route.gathered, probe)

    def _orthogonalize(
        self, route: _Route, rows: RowPhases, arriving: InFlight, probe: Probe
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Assemble this rank's matrices of a wave from what arrived and its own rows, and orthogonalise them."""
        with probe.phase("gather_wait"):
            arrived = arriving.wait()
        if not route.owned:
            return [], self._nothing.bool()
        with probe.phase("orthogonalize"):
            matrices = route.batch.allocate(self._nothing)
            if route.kept.indices:
                torch._foreach_copy_(route.kept.rectangles(matrices), rows.prepare(route.kept.indices))
            if route.gathered.indices:
                torch._foreach_copy_(route.gathered.rectangles(matrices), route.gathered.pieces(arrived))
            return route.batch.orthogonalize(probe)

    def _send_back(self, route: _Route, results: list[torch.Tensor], finite: torch.Tensor, probe: Probe) -> InFlight:
        """Send the update rows of other ranks to their holders."""
        with probe.phase("send_back"):
            send = self._nothing.new_empty(route.spread.numel)
            if route.spread.indices:
                torch._foreach_copy_(route.spread.pieces(send), route.spread.rectangles(results))
                route.spread.mark(send, finite[route.spread.places])
            return self._all_to_all(send, route.spread, route.returned, probe)

    def _receive(self, route: _Route, leaving: InFlight, rows: RowPhases, probe: Probe) -> None:
        """Finalize the update rows that came back."""
        with probe.phase("scatter_wait"):
            received = leaving.wait()
            if route.returned.indices:
                finite = route.returned.finite(received)
                rows.finalize(route.returned.indices, route.returned.pieces(received), finite)

    def _all_to_all(self, send: torch.Tensor, sent: Parcels, expected: Parcels, probe: Probe) -> InFlight:
        receive = self._nothing.new_empty(expected.numel)
        probe.received(receive.nbytes)
        work = dist.all_to_all_single(receive, send, expected.counts, sent.counts, group=self.group, async_op=True)
        return InFlight(work, receive, send)
