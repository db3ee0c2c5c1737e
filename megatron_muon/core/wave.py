"""A wave's route with its buffers: views and copies that exist from construction on.

`exchange` carries a wave out; here is what it works with. The sizes of buffers come from the route, their places from
an arena, and when they are needed from `schedule`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from megatron_muon.core.arena import Arena, Buffer, Copies
from megatron_muon.core.newton_schulz import Work
from megatron_muon.core.route import BROADCAST, HeldShard, Route, from_chunk, parts_of_rows, to_chunk
from megatron_muon.core.schedule import LIFETIMES
from megatron_muon.core.teams import TeamGroup


class Chunk(NamedTuple):
    """Rows of a wave that are prepared together, and whose updates are applied together.

    Attributes:
        number: counted over all waves of the exchange.
        rows: the shards, with their first elements in the chunk.
        numel: elements of all of them.
        prepared: where their prepared rows go, flat, fp32.
        updates: where their updates come, flat, fp32; NaN where one is not finite.
    """

    number: int
    rows: tuple[HeldShard, ...]
    numel: int
    prepared: torch.Tensor
    updates: torch.Tensor


class Agreement(NamedTuple):
    """A team that says which of its matrices are finite: this rank's slots of them, and for each its matrix."""

    team: TeamGroup | None
    number: int  # of its matrices
    slots: torch.Tensor | None  # None where they are all of the wave's, in order
    matrices: torch.Tensor


class Wave:
    """A wave on this rank.

    Args:
        route: what it sends, receives and orthogonalises.
        work_bytes: of the iteration's buffers, by name.
        wire: dtype of what travels and of the stacks.
        chunk_numel: elements of rows that are prepared together, unless one shard has more.
        world_size: ranks of the group.
        rows_apart: prepared rows lie in a buffer that is given to it.

    Attributes:
        chunks: its rows.
        pack: for each chunk, the copies of prepared rows to what is sent and to what stays.
        unpack: copies from there to the stacks.
        stacks: `(count, smaller, length)` each.
        agreements: which slots are finite together.
        whole: for updates that are normalised: index, views of the matrix's blocks, and their slots.
        pack_back: copies of updates from the stacks to what is sent back and to what stays.
        assemble: for each chunk, the copies of what came back.
        by_owner: with broadcasts, the part of each owner of what comes back.
        work: buffers of the iteration.
        buffers, tensors: by name; see `schedule.LIFETIMES`.
    """

    def __init__(
        self,
        route: Route,
        work_bytes: dict[str, int],
        wire: torch.dtype,
        *,
        chunk_numel: int,
        world_size: int,
        rows_apart: bool,
    ) -> None:
        self.route = route
        self._parts = parts_of_rows(route, route.numel if rows_apart else chunk_numel)
        self.work = Work(overwrites=True)
        self.work.place(work_bytes)
        chunk = max((numel for _, numel in self._parts), default=0)
        self.sizes = {
            "prepared": (0 if rows_apart else chunk, torch.float32),
            "send": (route.send.numel, wire),
            "own": (route.padding or route.own.numel, wire),
            "receive": (route.padding * world_size or route.receive.numel, wire),
            "stacks": (route.stacked, wire),
            "work": (self.work.nbytes, torch.uint8),
            "back": (route.back.numel, wire),
            "returned": (route.numel, wire),
            "updates": (chunk, torch.float32),
        }
        self.buffers: dict[str, Buffer] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.agreements: list[Agreement] = []
        self.whole: list[tuple[int, list[torch.Tensor], torch.Tensor]] = []

    def make_buffers(self, when: Sequence[int]) -> list[Buffer]:
        """Its buffers, without places; `when` are the first moments of its stages."""
        for name, (numel, dtype) in self.sizes.items():
            (first, after), (last, until) = LIFETIMES[name]
            self.buffers[name] = Buffer(numel, dtype, when[first] + after, when[last] + until)
        return list(self.buffers.values())

    def make_views(self, arena: Arena, first_chunk: int) -> None:
        """Make every view and copy, once buffers have places; chunks are numbered from `first_chunk` on."""
        route = self.route
        self.tensors = tensors = {name: arena.tensor(buffer) for name, buffer in self.buffers.items()}
        self.work.memory = tensors["work"]
        self.chunks: list[Chunk] = []
        self.pack: list[list[Copies]] = []
        self.assemble: list[Copies] = []
        for number, (rows, numel) in enumerate(self._parts, first_chunk):
            start = rows[0].start
            prepared, updates = tensors["prepared"][:numel], tensors["updates"][:numel]
            moved = tuple(held._replace(start=held.start - start) for held in rows)
            self.chunks.append(Chunk(number, moved, numel, prepared, updates))
            within = range(start, start + numel)
            self.pack.append(
                [
                    Copies(from_chunk(way.copies, within), prepared, tensors[name])
                    for name, way in (("send", route.send), ("own", route.own))
                    if way.numel
                ]
            )
            self.assemble.append(Copies(to_chunk(route.returned.copies, within), tensors["returned"], updates))
        stacks = tensors["stacks"]
        self.unpack = [
            Copies(copies, tensors[name], stacks)
            for name, copies in (("receive", route.receive.copies), ("own", route.own_to_stacks))
            if copies
        ]
        self.pack_back = [
            Copies(copies, stacks, tensors[name])
            for name, copies in (("back", route.back.copies), ("returned", route.own_updates.copies))
            if copies
        ]
        self.stacks = [stacks[of.start : of.start + of.numel].view(of.shape) for of in route.stacks]
        self.by_owner = tensors["returned"].split(route.returned.counts) if route.updates_by == BROADCAST else ()

    def slot_views(self) -> list[torch.Tensor]:
        """What each slot has, `(rows, cols)` as in its matrix: views of the stacks."""
        views = []
        for stack, of in zip(self.stacks, self.route.stacks, strict=True):
            views += [wide.mT if slot.is_tall else wide for wide, slot in zip(stack.unbind(), of.slots, strict=True)]
        return views
