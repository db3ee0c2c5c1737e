"""The owner scheme: rows travel to the one rank that orthogonalises their matrix, and the update's rows travel back.

A step walks the plan's waves. While the matrices of wave k are orthogonalised, the rows of wave k+1 are under way to
their owners and the updates of wave k-1 back to their holders; matrices that lie whole on their owner fill what is
left. Each wave and direction is one all-to-all-v. Which rank sends what is settled at construction: a step has no
collective on Python objects and never waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_muon.exchange.steps import Advance, Apply
from megatron_muon.sharding import Layout, Shard
from megatron_muon.sharding.plan import Plan


class Batch(Protocol):
    """Matrices that are orthogonalised together: filled, run, read."""

    def allocate(self, like: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
        """Room for each whole matrix `(rows, cols)`, of `dtype`, on the device of `like`."""

    def orthogonalize(self) -> list[torch.Tensor]:
        """The scaled update of each matrix, `(rows, cols)`, in its place."""


class BatchMaker(Protocol):
    """Makes the batch of the matrices with the given indices; called at construction, once for each wave."""

    def __call__(self, indices: Sequence[int]) -> Batch:
        """The batch of these matrices."""


@dataclass(frozen=True)
class _Route:
    """What this rank does in one wave.

    Attributes:
        owned: matrices of the wave that this rank orthogonalises.
        own: those of them of which it also holds rows.
        batch: those matrices as a batch.
        to_owners: matrices whose rows this rank sends, by owner.
        sent: elements sent to each rank when gathering, received from it when returning.
        from_holders: `(position in owned, shard)` of the rows that arrive, by holder.
        received: elements received from each rank when gathering, sent to it when returning.
    """

    owned: tuple[int, ...]
    own: tuple[int, ...]
    batch: Batch
    to_owners: tuple[int, ...]
    sent: tuple[int, ...]
    from_holders: tuple[tuple[int, Shard], ...]
    received: tuple[int, ...]


@dataclass
class _InFlight:
    """A collective under way with the buffers that it reads and writes; they live until it has been waited for."""

    work: Any
    send: torch.Tensor
    receive: torch.Tensor

    def wait(self) -> torch.Tensor:
        """What arrived."""
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
        self._routes = [_route(plan, wave, self._rank, batches) for wave in plan.waves]
        self._shards = {
            index: shard
            for index, matrix in enumerate(plan.layout.matrices)
            if (shard := matrix.shard_of(self._rank)) is not None
        }
        self._fillers = [(part, batches(part)) for part in plan.fillers(self._rank)]

    @property
    def layout(self) -> Layout:
        """The layout that the plan was made for."""
        return self.plan.layout

    def run(self, advance: Advance, apply: Apply) -> None:
        """One step, wave by wave."""
        fillers = iter(self._fillers)
        returning: tuple[_Route, _InFlight] | None = None
        arriving = self._gather(self._routes[0], advance) if self._routes else None
        for k, route in enumerate(self._routes):
            assert arriving is not None
            current = arriving
            arriving = self._gather(self._routes[k + 1], advance) if k + 1 < len(self._routes) else None
            self._fill_gap(fillers, advance, apply)
            results = self._orthogonalize(route, advance, current.wait())
            leaving = self._send_back(route, results)
            self._keep(route, results, apply)
            if returning is not None:
                self._receive(*returning, apply)
            returning = (route, leaving)
        while self._fill_gap(fillers, advance, apply):
            pass
        if returning is not None:
            self._receive(*returning, apply)

    def _gather(self, route: _Route, advance: Advance) -> _InFlight:
        """Send this rank's rows of a wave to their owners, and expect the rows of the matrices that it owns."""
        send = self._nothing.new_empty(sum(route.sent))
        if route.to_owners:
            torch._foreach_copy_(self._pieces(send, route.to_owners), advance(route.to_owners))
        receive = self._nothing.new_empty(sum(route.received))
        return self._all_to_all(send, receive, list(route.sent), list(route.received))

    def _orthogonalize(self, route: _Route, advance: Advance, arrived: torch.Tensor) -> list[torch.Tensor]:
        """Assemble this rank's matrices of a wave from what arrived and its own rows, and orthogonalise them."""
        if not route.owned:
            return []
        matrices = route.batch.allocate(self._nothing, self.wire_dtype)
        if route.own:
            torch._foreach_copy_(self._own_parts(route, matrices), advance(route.own))
        if route.from_holders:
            targets = [_part(matrices[position], shard) for position, shard in route.from_holders]
            torch._foreach_copy_(targets, _split(arrived, [shard for _, shard in route.from_holders]))
        return route.batch.orthogonalize()

    def _send_back(self, route: _Route, results: list[torch.Tensor]) -> _InFlight:
        """Send the update rows of other ranks to their holders."""
        send = self._nothing.new_empty(sum(route.received))
        if route.from_holders:
            torch._foreach_copy_(
                _split(send, [shard for _, shard in route.from_holders]),
                [_part(results[position], shard) for position, shard in route.from_holders],
            )
        receive = self._nothing.new_empty(sum(route.sent))
        return self._all_to_all(send, receive, list(route.received), list(route.sent))

    def _keep(self, route: _Route, results: list[torch.Tensor], apply: Apply) -> None:
        """Apply this rank's own rows of the updates that it computed."""
        if route.own:
            apply(route.own, self._own_parts(route, results))

    def _receive(self, route: _Route, leaving: _InFlight, apply: Apply) -> None:
        """Apply the update rows that came back."""
        received = leaving.wait()
        if route.to_owners:
            apply(route.to_owners, self._pieces(received, route.to_owners))

    def _fill_gap(self, fillers: Iterator[tuple[tuple[int, ...], Batch]], advance: Advance, apply: Apply) -> bool:
        """Orthogonalise the next part of the matrices that lie whole on this rank; False where none is left."""
        indices, batch = next(fillers, ((), None))
        if batch is None:
            return False
        torch._foreach_copy_(batch.allocate(self._nothing, self.wire_dtype), advance(indices))
        apply(indices, batch.orthogonalize())
        return True

    def _pieces(self, buffer: torch.Tensor, indices: Sequence[int]) -> list[torch.Tensor]:
        """A buffer as this rank's rows of these matrices, one after the other: views."""
        return _split(buffer, [self._shards[index] for index in indices])

    def _own_parts(self, route: _Route, matrices: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's rows in those of its matrices of a wave of which it holds some: views."""
        places = dict(zip(route.owned, matrices, strict=True))
        return [_part(places[index], self._shards[index]) for index in route.own]

    def _all_to_all(self, send: torch.Tensor, receive: torch.Tensor, sent: list[int], received: list[int]) -> _InFlight:
        work = dist.all_to_all_single(receive, send, received, sent, group=self.group, async_op=True)
        return _InFlight(work=work, send=send, receive=receive)


def _split(buffer: torch.Tensor, shards: Sequence[Shard]) -> list[torch.Tensor]:
    """A buffer as rectangles of these shapes, one after the other: views."""
    pieces = buffer.split([shard.numel for shard in shards])
    return [piece.view(shard.rows, shard.cols) for shard, piece in zip(shards, pieces, strict=True)]


def _part(matrix: torch.Tensor, shard: Shard) -> torch.Tensor:
    """The rectangle of `matrix` that `shard` describes, a view."""
    return matrix.narrow(0, shard.row_start, shard.rows).narrow(1, shard.col_start, shard.cols)


def _route(plan: Plan, wave: Sequence[int], rank: int, batches: BatchMaker) -> _Route:
    """This rank's part in a wave: sends ordered by owner, receives by holder, both then by matrix."""
    matrices, owners = plan.layout.matrices, plan.owners
    owned = tuple(index for index in wave if owners[index] == rank)
    position = {index: place for place, index in enumerate(owned)}
    sent, received = [0] * plan.layout.world_size, [0] * plan.layout.world_size
    to_owners: list[tuple[int, int]] = []
    from_holders: list[tuple[int, int, Shard]] = []
    for index in wave:
        for shard in matrices[index].shards:
            if shard.rank == rank != owners[index]:
                to_owners.append((owners[index], index))
                sent[owners[index]] += shard.numel
            if owners[index] == rank != shard.rank:
                from_holders.append((shard.rank, index, shard))
                received[shard.rank] += shard.numel
    order = {index: place for place, index in enumerate(wave)}
    to_owners.sort(key=lambda item: (item[0], order[item[1]]))
    from_holders.sort(key=lambda item: (item[0], order[item[1]]))
    return _Route(
        owned=owned,
        own=tuple(index for index in owned if matrices[index].shard_of(rank) is not None),
        batch=batches(owned),
        to_owners=tuple(index for _, index in to_owners),
        sent=tuple(sent),
        from_holders=tuple((position[index], shard) for _, index, shard in from_holders),
        received=tuple(received),
    )
