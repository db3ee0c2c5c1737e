"""The contract between an optimizer and its exchange, and what exchanges have in common.

The exchange sets the pace, because it knows the waves: it asks the optimizer to `prepare` the rows of a wave, and hands
the update's rows to `finalize` as they come. Memory is bounded by the exchange's buffer.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_muon.core.layout import Layout, Shard
from megatron_muon.core.plan import Plan
from megatron_muon.core.portions import Piece, Portion
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
        """Room for each whole matrix `(rows, cols)`, then each portion, of the dtype and on the device of `like`."""

    def orthogonalize(self, probe: Probe) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The scaled update of each matrix, `(rows, cols)`, in its place; which are finite, `(matrices,)` bool."""


class BatchMaker(Protocol):
    """Makes a batch; called at construction, once for each wave."""

    def __call__(self, indices: Sequence[int], portions: Sequence[Portion] = ()) -> Batch:
        """The batch of the whole matrices with these indices, and then of portions of others."""


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
    """An exchange in which each matrix has an owner, or a team, which orthogonalises it, and travels in a wave.

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

    def _parcels(self, parcels: Sequence[Parcel]) -> Parcels:
        return Parcels(parcels, self.layout.world_size, self._nothing.device)


@dataclass(frozen=True)
class Parcel:
    """A rectangle of a matrix between a rank that holds it and one that orthogonalises it.

    Attributes:
        other: the rank at the other end.
        index: of the matrix.
        piece: the rectangle.
        shard: what the holder has of the matrix.
        room: where this rank orthogonalises it, the place of the matrix or portion in its batch.
    """

    other: int
    index: int
    piece: Piece
    shard: Shard
    room: int = -1

    def in_shard(self, shard: torch.Tensor) -> torch.Tensor:
        """The rectangle in what the holder has of the matrix: a view."""
        piece = self.piece
        return _part(shard, piece.row - self.shard.row_start, piece.rows, piece.col - self.shard.col_start, piece.cols)

    def in_room(self, room: torch.Tensor) -> torch.Tensor:
        """The rectangle in what its owner has of the matrix: a view."""
        return _part(room, self.piece.room_row, self.piece.rows, self.piece.room_col, self.piece.cols)


def _part(whole: torch.Tensor, row: int, rows: int, col: int, cols: int) -> torch.Tensor:
    """A rectangle of a matrix; each view of the thousands in a step costs the host time, so none is made in vain."""
    if rows != len(whole):
        whole = whole.narrow(0, row, rows)
    return whole if cols == whole.shape[1] else whole.narrow(1, col, cols)


class Parcels:
    """Rectangles of a wave's matrices, one after the other in a buffer that travels, or that stay where they are.

    A buffer of updates says itself which of them are not finite: the first element of such an update is NaN, the others
    are zero. So nothing waits for the device, and no second message is needed.

    Args:
        parcels: they are ordered by the other rank, and within a rank as given.
        world_size: ranks of the group.
        device: where buffers lie.

    Attributes:
        parcels: in their order.
        indices: of their matrices.
        counts: elements for each rank of the group, or from it.
        numel: elements in all.
        rooms: the rooms that they come from, on the device.
    """

    def __init__(self, parcels: Sequence[Parcel], world_size: int, device: torch.device) -> None:
        self.parcels = sorted(parcels, key=lambda parcel: parcel.other)
        self.indices = [parcel.index for parcel in self.parcels]
        self.counts = [0] * world_size
        for parcel in self.parcels:
            self.counts[parcel.other] += parcel.piece.numel
        self.numel = sum(self.counts)
        self._sizes = [parcel.piece.numel for parcel in self.parcels]
        self.rooms = torch.tensor([parcel.room for parcel in self.parcels], dtype=torch.int64, device=device)
        starts = [0, *itertools.accumulate(self._sizes)][: len(self.parcels)]
        self._first = torch.tensor(starts, dtype=torch.int64, device=device)

    def in_buffer(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The rectangles `(rows, cols)` in a buffer: views."""
        pieces = buffer.split(self._sizes)
        shapes = ((parcel.piece.rows, parcel.piece.cols) for parcel in self.parcels)
        return [piece.view(shape) for shape, piece in zip(shapes, pieces, strict=True)]

    def in_rooms(self, rooms: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The rectangles in what this rank orthogonalises: views."""
        return [parcel.in_room(rooms[parcel.room]) for parcel in self.parcels]

    def in_shards(self, shards: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
        """The rectangles in what this rank holds of the matrices, by index: views."""
        return [parcel.in_shard(shards[parcel.index]) for parcel in self.parcels]

    def mark(self, buffer: torch.Tensor, finite: torch.Tensor) -> None:
        """Mark the updates that are not `finite`, `(rooms,)` bool."""
        first = buffer[self._first]
        buffer[self._first] = torch.where(finite[self.rooms], first, torch.nan)

    def finite(self, buffer: torch.Tensor) -> torch.Tensor:
        """Which updates are finite, `(parcels,)` bool; takes the marks away."""
        first = buffer[self._first]
        finite = first.isfinite()
        buffer[self._first] = torch.where(finite, first, 0.0)
        return finite


@dataclass
class InFlight:
    """A collective under way with the buffers that it reads and writes; they live until it has been waited for.

    Nothing else refers to the buffers: each can go as soon as it has served. What a rank has for itself, `kept`, waits
    with them.
    """

    sent: torch.Tensor | None = None
    received: torch.Tensor | None = None
    work: Any = None
    kept: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        """The received elements, in the order of the parcels that were expected."""
        if self.work is not None:
            self.work.wait()
        self.work = self.sent = None
        assert self.received is not None
        return self.received


@dataclass(frozen=True)
class _Messages:
    """The messages of an all-to-all by pairs."""

    works: Sequence[Any]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def all_to_all(
    flight: InFlight, received: Sequence[int], sent: Sequence[int], group: dist.ProcessGroup, *, by_pairs: bool
) -> None:
    """Begin to send what `flight` has to send, and to receive what other ranks have for this one. Collective.

    An all-to-all of torch.distributed takes a message to every rank of the group, also an empty one: NCCL (from 2.14
    on, as torch calls it) then connects all pairs and keeps buffers for them, gloo waits for each.

    Args:
        flight: has `sent`; gets `received` and `work`.
        received: elements from each rank of the group.
        sent: elements for each.
        group: the ranks.
        by_pairs: have only ranks that have bytes for each other exchange messages.
    """
    assert flight.sent is not None
    flight.received = flight.sent.new_empty(sum(received))
    what = flight.received, flight.sent, received, sent, group
    flight.work = exchange_pairs(*what) if by_pairs else dist.all_to_all_single(*what, async_op=True)


def exchange_pairs(
    received: torch.Tensor,
    sent: torch.Tensor,
    received_counts: Sequence[int],
    sent_counts: Sequence[int],
    group: dist.ProcessGroup,
) -> Any:
    """An asynchronous all-to-all without empty messages; in NCCL, the group has had another collective before it."""
    arriving, leaving = received.split(list(received_counts)), sent.split(list(sent_counts))
    rank = group.rank()
    arriving[rank].copy_(leaving[rank])
    messages = [
        dist.P2POp(start, part, group=group, group_peer=peer)
        for start, parts in ((dist.irecv, arriving), (dist.isend, leaving))
        for peer, part in enumerate(parts)
        if peer != rank and part.numel()
    ]
    return _Messages(dist.batch_isend_irecv(messages) if messages else [])


def rectangle_view(matrix: torch.Tensor, shard: Shard) -> torch.Tensor:
    """The rectangle of `matrix` that `shard` describes, a view."""
    return _part(matrix, shard.row_start, shard.rows, shard.col_start, shard.cols)
