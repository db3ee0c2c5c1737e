"""The owner scheme: rows travel to the one rank that orthogonalises their matrix, and the update's rows travel back.

A step walks the plan's waves. While the matrices of wave k are orthogonalised, the rows of wave k+1 are under way to
their owners and the updates of wave k-1 back to their holders; matrices that lie whole on their owner fill what is
left. Each wave and direction is one all-to-all-v. Which rank sends what is settled at construction: a step has no
collective on Python objects and never waits for the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_muon.core.exchange.steps import FiniteMarks, RowPhases, rectangle_view
from megatron_muon.core.layout import Layout, Shard
from megatron_muon.core.plan import Plan
from megatron_muon.core.probe import SILENT, Probe


class Batch(Protocol):
    """Matrices that are orthogonalised together: filled, run, read."""

    def allocate(self, like: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
        """Room for each whole matrix `(rows, cols)`, of `dtype`, on the device of `like`."""

    def orthogonalize(self, probe: Probe = SILENT) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The scaled update of each matrix, `(rows, cols)`, in its place; which are finite, `(matrices,)` bool."""


class BatchMaker(Protocol):
    """Makes the batch of the matrices with the given indices; called at construction, once for each wave."""

    def __call__(self, indices: Sequence[int]) -> Batch:
        """The batch of these matrices."""


@dataclass(frozen=True)
class _Route:
    """What this rank does in one wave.

    Attributes:
        owned: matrices of the wave that this rank orthogonalises.
        owned_and_held: owned matrices of which this rank holds a shard.
        batch: the owned matrices as a batch.
        sent: matrices of which this rank sends its elements to their owners.
        idle: matrices of which it holds elements that a replica sends.
        gathered: shards of owned matrices that arrive.
        spread: shards of owned matrices whose updates this rank sends to their holders.
        returned: matrices of which update rows arrive.
        held_places: for each of `owned_and_held` its place in `owned`.
        spread_places: for each shard of `spread` its matrix's place in `owned`.
        spread_marks, returned_marks: which updates of `spread` and `returned` are finite.
    """

    owned: tuple[int, ...]
    owned_and_held: tuple[int, ...]
    batch: Batch
    sent: _Parcels
    idle: tuple[int, ...]
    gathered: _Parcels
    spread: _Parcels
    returned: _Parcels
    held_places: torch.Tensor
    spread_places: torch.Tensor
    spread_marks: FiniteMarks
    returned_marks: FiniteMarks


@dataclass(frozen=True)
class _Parcels:
    """What travels between this rank and the others in one direction, ordered by rank and then by matrix.

    Attributes:
        items: `(matrix index, shard)`.
        counts: elements for each rank of the group.
    """

    items: tuple[tuple[int, Shard], ...]
    counts: tuple[int, ...]

    @property
    def indices(self) -> tuple[int, ...]:
        """Matrix indices, in the order of the items."""
        return tuple(index for index, _ in self.items)

    @property
    def numel(self) -> int:
        """Elements in all."""
        return sum(self.counts)

    def marks(self, device: torch.device) -> FiniteMarks:
        """Marks of their updates in a buffer."""
        return FiniteMarks([shard.numel for _, shard in self.items], device)

    def pieces(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """A buffer as the rectangles, one after the other: views."""
        pieces = buffer.split([shard.numel for _, shard in self.items])
        return [piece.view(shard.rows, shard.cols) for (_, shard), piece in zip(self.items, pieces, strict=True)]


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


class OwnerExchange:
    """Carries out a plan.

    Args:
        plan: owners and waves; the same on every rank.
        group: the process group whose rank r holds the shards of rank r in the plan's layout.
        batches: makes batches of matrices.
        wire_dtype: dtype of elements on the wire and of the matrices that are put together from them: torch.float32, or
            torch.bfloat16 where the iteration starts from bf16. A rank's own rows are rounded like those that travel,
            so that the result does not depend on who holds what.
        device: where the rows lie.

    Raises:
        ValueError: the plan is for another number of ranks.
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
        if group.size() != plan.layout.world_size:
            raise ValueError(f"the plan is for {plan.layout.world_size} ranks, the process group has {group.size()}")
        self.plan = plan
        self.group = group
        self.wire_dtype = wire_dtype
        self._rank = group.rank()
        self._nothing = torch.empty(0, dtype=wire_dtype, device=device)
        self._routes = [_route(plan, wave, self._rank, batches, device) for wave in plan.waves]
        self._shards = {
            index: shard
            for index, matrix in enumerate(plan.layout.matrices)
            if (shard := matrix.shard_of(self._rank)) is not None
        }
        self._fillers = [(indices, batches(indices)) for indices in plan.fillers(self._rank)]

    @property
    def layout(self) -> Layout:
        """The layout that the plan was made for."""
        return self.plan.layout

    def replicas(self, index: int) -> int:
        """How many ranks hold the same rows of a matrix as this one."""
        return len(self._shards[index].holders)

    def run(self, rows: RowPhases, probe: Probe) -> None:
        """One step, wave by wave."""
        fillers = iter(self._fillers)
        returning: tuple[_Route, _InFlight] | None = None
        arriving = self._gather(self._routes[0], rows, probe) if self._routes else None
        for route, following in zip(self._routes, [*self._routes[1:], None], strict=False):
            assert arriving is not None
            current = arriving
            arriving = self._gather(following, rows, probe) if following is not None else None
            self._fill_gap(fillers, rows, probe)
            results, finite = self._orthogonalize(route, rows, current, probe)
            leaving = self._send_back(route, results, finite, probe)
            if route.owned_and_held:
                rows.finalize(route.owned_and_held, self._own_rectangles(route, results), finite[route.held_places])
            if returning is not None:
                self._receive(*returning, rows, probe)
            returning = (route, leaving)
        while self._fill_gap(fillers, rows, probe):
            pass
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
            matrices = route.batch.allocate(self._nothing, self.wire_dtype)
            if route.owned_and_held:
                torch._foreach_copy_(self._own_rectangles(route, matrices), rows.prepare(route.owned_and_held))
            if route.gathered.items:
                torch._foreach_copy_(_rectangles(route, matrices, route.gathered), route.gathered.pieces(arrived))
            return route.batch.orthogonalize(probe)

    def _send_back(self, route: _Route, results: list[torch.Tensor], finite: torch.Tensor, probe: Probe) -> _InFlight:
        """Send the update rows of other ranks to their holders."""
        with probe.phase("send_back"):
            send = self._nothing.new_empty(route.spread.numel)
            if route.spread.items:
                torch._foreach_copy_(route.spread.pieces(send), _rectangles(route, results, route.spread))
                route.spread_marks.write(send, finite[route.spread_places])
            return self._all_to_all(send, route.spread, route.returned, probe)

    def _receive(self, route: _Route, leaving: _InFlight, rows: RowPhases, probe: Probe) -> None:
        """Finalize the update rows that came back."""
        with probe.phase("scatter_wait"):
            received = leaving.wait()
            if not route.returned.items:
                return
            finite = route.returned_marks.read(received)
            rows.finalize(route.returned.indices, route.returned.pieces(received), finite)

    def _fill_gap(self, fillers: Iterator[tuple[tuple[int, ...], Batch]], rows: RowPhases, probe: Probe) -> bool:
        """Orthogonalise the next part of the matrices that lie whole on this rank; False where none is left."""
        indices, batch = next(fillers, ((), None))
        if batch is None:
            return False
        with probe.phase("orthogonalize"):
            torch._foreach_copy_(batch.allocate(self._nothing, self.wire_dtype), rows.prepare(indices))
            updates, finite = batch.orthogonalize(probe)
        rows.finalize(indices, updates, finite)
        return True

    def _own_rectangles(self, route: _Route, matrices: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's rows in those of its matrices of a wave of which it holds some: views."""
        places = dict(zip(route.owned, matrices, strict=True))
        return [rectangle_view(places[index], self._shards[index]) for index in route.owned_and_held]

    def _all_to_all(self, send: torch.Tensor, sent: _Parcels, expected: _Parcels, probe: Probe) -> _InFlight:
        receive = self._nothing.new_empty(expected.numel)
        probe.received(receive.nbytes)
        work = dist.all_to_all_single(
            receive, send, list(expected.counts), list(sent.counts), group=self.group, async_op=True
        )
        return _InFlight(work=work, send=send, receive=receive)


def _rectangles(route: _Route, matrices: Sequence[torch.Tensor], parcels: _Parcels) -> list[torch.Tensor]:
    """The rectangles of owned matrices that travel: views."""
    places = dict(zip(route.owned, matrices, strict=True))
    return [rectangle_view(places[index], shard) for index, shard in parcels.items]


def _route(plan: Plan, wave: Sequence[int], rank: int, batches: BatchMaker, device: torch.device) -> _Route:
    """This rank's part in a wave."""
    matrices, owners, world_size = plan.layout.matrices, plan.owners, plan.layout.world_size
    sent, gathered, spread, returned = (_Collector(world_size) for _ in range(4))
    idle = []
    for index in wave:
        owner = owners[index]
        for shard in matrices[index].shards:
            source = shard.source(owner, world_size)
            if owner == rank:
                if source != rank:
                    gathered.add(source, index, shard)
                for holder in shard.holders:
                    if holder != rank:
                        spread.add(holder, index, shard)
            elif rank in shard.holders:
                returned.add(owner, index, shard)
                if source == rank:
                    sent.add(owner, index, shard)
                else:
                    idle.append(index)
    owned = tuple(index for index in wave if owners[index] == rank)
    owned_and_held = tuple(index for index in owned if matrices[index].shard_of(rank) is not None)
    place = {index: number for number, index in enumerate(owned)}
    leaving, arriving = spread.parcels(), returned.parcels()
    return _Route(
        owned=owned,
        owned_and_held=owned_and_held,
        batch=batches(owned),
        sent=sent.parcels(),
        idle=tuple(idle),
        gathered=gathered.parcels(),
        spread=leaving,
        returned=arriving,
        held_places=torch.tensor([place[index] for index in owned_and_held], dtype=torch.int64, device=device),
        spread_places=torch.tensor([place[index] for index in leaving.indices], dtype=torch.int64, device=device),
        spread_marks=leaving.marks(device),
        returned_marks=arriving.marks(device),
    )


class _Collector:
    """Collects what travels to or from each rank, matrix after matrix of a wave; both ends collect in that order."""

    def __init__(self, world_size: int) -> None:
        self._of_rank: list[list[tuple[int, Shard]]] = [[] for _ in range(world_size)]

    def add(self, rank: int, index: int, shard: Shard) -> None:
        """Add a shard of a matrix."""
        self._of_rank[rank].append((index, shard))

    def parcels(self) -> _Parcels:
        """All that was added."""
        return _Parcels(
            items=tuple(itertools.chain.from_iterable(self._of_rank)),
            counts=tuple(sum(shard.numel for _, shard in items) for items in self._of_rank),
        )
