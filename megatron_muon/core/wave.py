"""A wave on this rank: its route as views of the step's buffers, and copies, made once."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_muon.core.buffers import (
    ROW_BYTES,
    Buffers,
    Contents,
    Sizes,
    StepMemory,
    WaveBytes,
    aligned,
)
from megatron_muon.core.copies import Copies, Copy, copies_between
from megatron_muon.core.methods.method import BlockState, Method, Work
from megatron_muon.core.route import HeldShard, Route, chunks_of_rows
from megatron_muon.core.slices import BlockKind
from megatron_muon.core.teams import Agreement, TeamGroup
from megatron_muon.core.whole import WholeUpdate


def route_bytes(route: Route, sizes: Sizes) -> WaveBytes:
    """Bytes of the buffers of a wave, or a batch, on this rank."""
    shards = [held.shard.numel for held in route.rows]
    by_matrix = Counter[int]()
    for slot in route.slots:
        by_matrix[slot.index] += slot.numel
    contents = Contents(
        max(sum(shards), route.rows_numel),
        max(shards, default=0),
        tuple(
            (
                stack.kind,
                len(stack.slots),
            )
            for stack in route.stacks
        ),
        max(by_matrix.values(), default=0),
        None if route.is_batch else route.owned_numel,
    )
    return sizes.of(contents)


@dataclass(frozen=True)
class Space:
    """The memory of a step, and the table by which waves take it."""

    memory: StepMemory
    buffers: Buffers
    sizes: Sizes


class Chunk:
    """Rows of a wave that are prepared together, and whose updates are applied together.

    Attributes:
        rows: this rank's shards, with first elements in the chunk; `indices` are their matrices.
        prepared, updates: flat tensors for prepared rows and for updates, fp32, NaN where an
            update is not finite, the same memory unless rows are prepared apart; `prepared_rows`
            and `updated_rows` are views `(rows, cols)`.
        spare: another flat tensor, for rules that ask for one.
        momentum: of all rows, flat, if it lies so.
        firsts, index: first elements and matrices on the device, int64.
        first_elements: of updates, fp32.
        pack, unpack: copies of prepared rows to the lane, and of updates from there.
    """

    firsts: Tensor
    index: Tensor
    first_elements: Tensor
    pack: Copies
    unpack: Copies

    def __init__(
        self,
        rows: Sequence[HeldShard],
        prepared: Tensor,
        updates: Tensor,
        spare: Tensor | None = None,
    ) -> None:
        self.rows = rows
        self.indices = [held.of for held in rows]
        self.prepared = prepared
        self.updates = updates
        self.spare = spare
        self.momentum: Tensor | None = None
        self.prepared_rows = self.views(prepared)
        self.updated_rows = self.views(updates)
        self._cuts: dict[range, Chunk] = {}

    def views(self, flat: Tensor) -> list[Tensor]:
        """The rows of each matrix `(rows, cols)` in a flat tensor of the chunk's elements."""
        found = []
        for held in self.rows:
            part = flat[held.start : held.end]
            found.append(part.view(held.shard.rows, held.shard.cols))
        return found

    def cut(self, places: range) -> Chunk:
        """Some of its rows, as a chunk that is made once; itself for all of them."""
        if len(places) == len(self.rows):
            return self
        if places not in self._cuts:
            rows = self.rows[places.start : places.stop]
            start, end = rows[0].start, rows[-1].end
            spare = None if self.spare is None else self.spare[start:end]
            self._cuts[places] = Chunk(
                [held.moved(-start) for held in rows],
                self.prepared[start:end],
                self.updates[start:end],
                spare,
            )
        return self._cuts[places]


class Message(NamedTuple):
    """Rows or updates of a wave on the wire, and elements from and to each rank."""

    received: Tensor
    sent: Tensor
    received_counts: list[int]
    sent_counts: list[int]


class WaveStack(NamedTuple):
    """Blocks `(count, smaller, length)` of one kind that this rank orthogonalizes together.

    `state` is the method's, by slot name.
    """

    blocks: Tensor
    kind: BlockKind
    team: TeamGroup | None
    state: BlockState


class Wave:
    """A wave, or a batch of matrices that do not travel, with its views.

    Attributes:
        lane: flat tensor of both regions.
        stack_memory: flat tensor of the stacks.
        chunks: its rows.
        batches: of a wave.
        stacks: blocks to orthogonalize.
        order: of stacks, large ones first, so that the memory of one has room for updates of the next.
        keeps_dtype: updates have the dtype of stacks.
        whole: whole updates, for rules that change them.
        fill, drain: copies between lane and stacks.
        work: buffers of the method.
        rows, updates: on the wire.
        agreement: finds the factors of slots.
    """

    def __init__(
        self,
        number: int,
        route: Route,
        space: Space,
        agreement: Agreement,
    ) -> None:
        self.number = number
        self.route = route
        self.agreement = agreement
        self.batches: list[Wave] = []
        self.whole: list[WholeUpdate] = []
        self.stack_memory = flat = self._take_memory(space)
        owned = self.lane[route.owned_start :]
        out, back = route.out, route.back
        # the last of the rows stay here
        self.rows = Message(
            owned[: sum(out.owned)],
            self.lane[: sum(out.rows[:-1])],
            out.owned,
            out.rows[:-1],
        )
        self.updates = Message(
            self.lane[: sum(back.rows[:-1])],
            owned[: sum(back.owned)],
            back.rows[:-1],
            back.owned,
        )
        self.fill = copies_between(out.far, self.lane, flat)
        self.drain = copies_between(back.far, self.lane, flat).reversed
        self.stacks = self._make_stacks(flat, space.sizes.method)
        self.counts = [len(stack.blocks) for stack in self.stacks]
        self.chunks = self._make_chunks(space, flat if route.is_batch else self.lane)
        # teams iterate in one order on all of their ranks
        self.order = list(range(len(self.stacks)))
        if not any(stack.team for stack in self.stacks):
            self.order.sort(key=lambda number: -self.stacks[number].blocks.numel())
        self.keeps_dtype = space.sizes.method.dtype == space.sizes.dtype
        self._works: dict[int, Work] = {}
        self._result = space.sizes.method.leaves_updates_in

    def work_with(self, spare: Tensor | None) -> Work:
        """Buffers of the method, with memory in which it leaves updates; None for its own."""
        if spare is None:
            return self.work
        if id(spare) not in self._works:
            self._works[id(spare)] = self.work.with_buffer(self._result, spare)
        return self._works[id(spare)]

    def _take_memory(self, space: Space) -> Tensor:
        """Make the lane and the method's buffers; the flat tensor of the stacks."""
        memory, sizes = space.memory, space.sizes
        route = self.route
        used = route_bytes(route, sizes)
        start = space.buffers.scratch_start
        ahead = space.buffers.lane_start(self.number)
        if route.is_batch:
            ahead = start
            start += used.chunk
        behind = memory.views(start + used.stacks, used.behind)
        self.work = Work(memory.views(ahead, used.ahead) | behind)
        numel = route.owned_start + route.owned_numel
        self.lane = memory.view(ahead, numel, sizes.dtype)
        return memory.view(
            start,
            used.stacks // sizes.dtype.itemsize,
            sizes.dtype,
        )

    def _make_stacks(self, flat: Tensor, method: Method) -> list[WaveStack]:
        """Stacks in parts that the method takes together."""
        stacks = []
        for stack in self.route.stacks:
            blocks = flat[stack.start : stack.start + stack.numel].view(stack.shape)
            team = self.agreement.teams[stack.kind.ranks] if stack.kind.ranks else None
            count = min(method.together(stack.kind), len(blocks))
            for number, part in enumerate(blocks.split(count)):
                self.work.keep(part)
                slots = stack.slots[number * count : number * count + len(part)]
                state = method.zero_state(stack.kind, slots)
                stacks.append(WaveStack(part, stack.kind, team, state))
        return stacks

    def _make_chunks(self, space: Space, target: Tensor) -> list[Chunk]:
        """Chunks whose rows are packed into a target."""
        route, buffers = self.route, space.buffers
        on_device = functools.partial(
            torch.tensor,
            dtype=torch.int64,
            device=target.device,
        )
        chunks = []
        for part in chunks_of_rows(route.rows, space.sizes.most_numel):
            start, end = part[0].start, part[-1].end
            numel = end - start
            updates = buffers.scratch_start
            prepared = buffers.apart_start(self.number) if buffers.apart else updates
            places = [prepared, updates]
            if space.sizes.spare:
                places.append(updates + aligned(ROW_BYTES * numel))
            chunk = Chunk(
                [held.moved(-start) for held in part],
                *(
                    space.memory.view(
                        place,
                        numel,
                        torch.float32,
                    )
                    for place in places
                ),
            )
            chunk.firsts = on_device([held.start for held in chunk.rows])
            chunk.index = on_device(chunk.indices)
            near = _within(route.out.near, start, end)
            chunk.pack = copies_between(near, chunk.prepared, target)
            near = _within(route.back.near, start, end)
            chunk.unpack = copies_between(near, chunk.updates, target).reversed
            chunks.append(chunk)
        return chunks


def _within(
    copies: Sequence[Copy],
    start: int,
    end: int,
) -> list[Copy]:
    """Copies that begin in a chunk of the rows, with offsets in the chunk."""
    return [copy.moved(-start, 0) for copy in copies if start <= copy.source < end]
