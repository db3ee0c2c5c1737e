"""The owner scheme: rows travel to the one rank that orthogonalises their matrix, and the update's rows travel back.

A step walks the plan's waves. While the matrices of wave k are orthogonalised, the rows of wave k+1 are under way to
their owners and the updates of wave k-1 back to their holders; matrices that lie whole on their owner fill what is
left. Each wave and direction is one all-to-all-v. Which rank sends what is settled at construction: a step has no
collective on Python objects and never waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_muon.sharding import Layout, Shard
from megatron_muon.sharding.plan import Plan


class Batch(Protocol):
    """Matrices that are orthogonalised together: filled, run, read."""

    def allocate(self, like: torch.Tensor) -> list[torch.Tensor]:
        """Room for each whole matrix `(rows, cols)`, fp32, on the device of `like`; a view of the batch's memory."""

    def orthogonalize(self) -> list[torch.Tensor]:
        """The scaled update of each matrix, `(rows, cols)`."""


class BatchMaker(Protocol):
    """Makes the batch of the matrices with the given indices; called at construction, once for each wave."""

    def __call__(self, indices: Sequence[int]) -> Batch:
        """The batch of these matrices."""


@dataclass(frozen=True)
class _Route:
    """What this rank does in one wave.

    Attributes:
        owned: matrices of the wave that this rank orthogonalises.
        batch: those matrices as a batch.
        to_owners: matrices whose rows this rank sends, by owner.
        sent: elements sent to each rank when gathering, received from it when returning.
        from_holders: `(position in owned, shard)` of the rows that arrive, by holder.
        received: elements received from each rank when gathering, sent to it when returning.
    """

    owned: tuple[int, ...]
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
        wire_dtype: dtype of elements on the wire: torch.float32, or torch.bfloat16 where the iteration starts from
            bf16.

    Raises:
        ValueError: the plan is for another number of ranks.
    """

    def __init__(
        self, plan: Plan, group: dist.ProcessGroup, batches: BatchMaker, wire_dtype: torch.dtype = torch.float32
    ) -> None:
        if group.size() != plan.layout.world_size:
            raise ValueError(f"the plan is for {plan.layout.world_size} ranks, the process group has {group.size()}")
        self.plan = plan
        self.group = group
        self.wire_dtype = wire_dtype
        self._rank = group.rank()
        self._routes = [_route(plan, wave, self._rank, batches) for wave in plan.waves]
        self._own_shard = {
            index: shard
            for index, matrix in enumerate(plan.layout.matrices)
            if (shard := matrix.shard_of(self._rank)) is not None
        }
        self._fillers = [(part, batches(part)) for part in plan.fillers(self._rank)]

    @property
    def layout(self) -> Layout:
        """The layout that the plan was made for."""
        return self.plan.layout

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's rows of every matrix's update.

        Args:
            inputs: one tensor for each matrix, this rank's rows `(rows, cols)` fp32, `(0, cols)` where it holds none;
                not modified.

        Returns:
            As `inputs`, fp32 or the wire's dtype; views of buffers that the caller may keep until the next call.
        """
        updates = list(inputs)
        fillers = iter(self._fillers)
        returning: tuple[_Route, _InFlight] | None = None
        arriving = self._gather(self._routes[0], inputs) if self._routes else None
        for k, route in enumerate(self._routes):
            assert arriving is not None
            current = arriving
            arriving = self._gather(self._routes[k + 1], inputs) if k + 1 < len(self._routes) else None
            self._fill_gap(fillers, inputs, updates)
            results = self._orthogonalize(route, inputs, current.wait())
            leaving = self._send_back(route, results, updates, inputs)
            if returning is not None:
                self._receive(*returning, updates)
            returning = (route, leaving)
        while self._fill_gap(fillers, inputs, updates):
            pass
        if returning is not None:
            self._receive(*returning, updates)
        return updates

    def _gather(self, route: _Route, inputs: Sequence[torch.Tensor]) -> _InFlight:
        """Send this rank's rows of a wave to their owners, and expect the rows of the matrices that it owns."""
        send = inputs[0].new_empty(sum(route.sent), dtype=self.wire_dtype)
        pieces = send.split([inputs[index].numel() for index in route.to_owners])
        if pieces:
            torch._foreach_copy_(list(pieces), [inputs[index].reshape(-1) for index in route.to_owners])
        receive = inputs[0].new_empty(sum(route.received), dtype=self.wire_dtype)
        return self._all_to_all(send, receive, list(route.sent), list(route.received))

    def _orthogonalize(
        self, route: _Route, inputs: Sequence[torch.Tensor], arrived: torch.Tensor
    ) -> list[torch.Tensor]:
        """Assemble this rank's matrices of a wave from what arrived and its own rows, and orthogonalise them."""
        if not route.owned:
            return []
        matrices = route.batch.allocate(inputs[0])
        targets, sources = [], []
        for index, matrix in zip(route.owned, matrices, strict=True):
            if (shard := self._own_shard.get(index)) is not None:
                targets.append(_part(matrix, shard))
                sources.append(inputs[index].to(self.wire_dtype))
        pieces = arrived.split([shard.numel for _, shard in route.from_holders])
        for (position, shard), piece in zip(route.from_holders, pieces, strict=True):
            targets.append(_part(matrices[position], shard))
            sources.append(piece.view(shard.rows, shard.cols))
        torch._foreach_copy_(targets, sources)
        return route.batch.orthogonalize()

    def _send_back(
        self,
        route: _Route,
        results: list[torch.Tensor],
        updates: list[torch.Tensor],
        inputs: Sequence[torch.Tensor],
    ) -> _InFlight:
        """Keep this rank's rows of the updates it computed, and send the others to their holders."""
        for index, result in zip(route.owned, results, strict=True):
            if (shard := self._own_shard.get(index)) is not None:
                updates[index] = self._kept(_part(result, shard))
        send = inputs[0].new_empty(sum(route.received), dtype=self.wire_dtype)
        pieces = send.split([shard.numel for _, shard in route.from_holders])
        if pieces:
            torch._foreach_copy_(
                [piece.view(s.rows, s.cols) for (_, s), piece in zip(route.from_holders, pieces, strict=True)],
                [_part(results[position], shard) for position, shard in route.from_holders],
            )
        receive = inputs[0].new_empty(sum(route.sent), dtype=self.wire_dtype)
        return self._all_to_all(send, receive, list(route.received), list(route.sent))

    def _receive(self, route: _Route, leaving: _InFlight, updates: list[torch.Tensor]) -> None:
        """Take the update rows that came back."""
        shapes = [self._own_shard[index] for index in route.to_owners]
        pieces = leaving.wait().split([shard.numel for shard in shapes])
        for index, shard, piece in zip(route.to_owners, shapes, pieces, strict=True):
            updates[index] = piece.view(shard.rows, shard.cols)

    def _fill_gap(self, fillers: Any, inputs: Sequence[torch.Tensor], updates: list[torch.Tensor]) -> bool:
        """Orthogonalise the next part of the matrices that lie whole on this rank; False where none is left."""
        indices, batch = next(fillers, ((), None))
        if batch is None:
            return False
        torch._foreach_copy_(batch.allocate(inputs[0]), [inputs[index].to(self.wire_dtype) for index in indices])
        for index, update in zip(indices, batch.orthogonalize(), strict=True):
            updates[index] = self._kept(update)
        return True

    def _kept(self, update: torch.Tensor) -> torch.Tensor:
        """A rank's own update rows, rounded as those that travel: the result does not depend on who holds what.

        A copy where it is part of a matrix, so that the rest of the matrix and its stack can be freed.
        """
        return update.to(self.wire_dtype, copy=True)

    def _all_to_all(self, send: torch.Tensor, receive: torch.Tensor, sent: list[int], received: list[int]) -> _InFlight:
        work = dist.all_to_all_single(receive, send, received, sent, group=self.group, async_op=True)
        return _InFlight(work=work, send=send, receive=receive)


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
        batch=batches(owned),
        to_owners=tuple(index for _, index in to_owners),
        sent=tuple(sent),
        from_holders=tuple((position[index], shard) for _, index, shard in from_holders),
        received=tuple(received),
    )
