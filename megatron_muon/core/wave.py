"""A wave on this rank: its route with buffers, views and copies, made at construction, which `exchange` carries out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from megatron_muon.core.arena import Arena, Buffer, Copies
from megatron_muon.core.collectives import TeamGroup
from megatron_muon.core.newton_schulz import Work
from megatron_muon.core.plan import LIFETIMES
from megatron_muon.core.route import (
    BROADCAST,
    HeldShard,
    Route,
    from_chunk,
    parts_of_rows,
    to_chunk,
)


class Chunk:
    """Rows of a wave that are prepared together, and whose updates are applied together.

    Attributes:
        number: over all waves of the exchange.
        rows: this rank's shards, with their first elements in the chunk; `indices` are their
            matrices.
        starts: these first elements, and the end, `numel`.
        prepared, updates: where prepared rows go and updates come, flat, fp32; NaN where an update
        is not finite. prepared_rows, updated_rows: views of both, `(rows, cols)` each.
        firsts, index: first elements and matrices on the device, int64.
    """

    def __init__(
        self,
        number: int,
        rows: Sequence[HeldShard],
        numel: int,
        prepared: torch.Tensor,
        updates: torch.Tensor,
    ) -> None:
        self.number, self.rows, self.numel, self.prepared, self.updates = (
            number,
            rows,
            numel,
            prepared,
            updates,
        )
        self.indices = [held.of for held in rows]
        self.starts = [*(held.start for held in rows), numel]
        self.prepared_rows, self.updated_rows = self.views(prepared), self.views(updates)
        self.firsts, self.index = (
            torch.tensor(numbers, dtype=torch.int64, device=prepared.device)
            for numbers in (self.starts[:-1], self.indices)
        )

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The rows of each matrix `(rows, cols)` in a flat tensor of the chunk's elements."""
        return [
            flat[held.start : held.start + held.shard.numel].view(
                held.shard.rows,
                held.shard.cols,
            )
            for held in self.rows
        ]


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
        when: the first moment of each of its stages.
        rows_apart: prepared rows lie in a buffer that is given to it.

    Attributes:
        buffers, tensors: by name; see `plan.LIFETIMES`.
        chunks: its rows.
        pack: for each chunk, the copies of prepared rows to what is sent and to what stays.
        unpack: copies from there to the stacks, which are `(count, smaller, length)` each.
        pack_back: copies of updates from the stacks to what is sent back and to what stays.
        assemble: for each chunk, the copies of what came back.
        by_owner: with broadcasts, the owners and their parts of what comes back.
        agreements: which slots are finite together.
        whole: for updates that are normalised: index, views of the matrix's blocks, and their
            slots.
    """

    def __init__(
        self,
        route: Route,
        work_bytes: dict[str, int],
        wire: torch.dtype,
        when: Sequence[int],
        *,
        chunk_numel: int,
        rows_apart: bool,
    ) -> None:
        self.route = route
        self._parts = parts_of_rows(route, route.numel if rows_apart else chunk_numel)
        self.work = Work(work_bytes)
        chunk = max((numel for _, numel in self._parts), default=0)
        sizes = {
            "prepared": (0 if rows_apart else chunk, torch.float32),
            "send": (route.send.numel, wire),
            "own": (route.own.numel, wire),
            "receive": (route.receive.numel, wire),
            "stacks": (route.stacked, wire),
            "work": (self.work.nbytes, torch.uint8),
            "back": (route.back.numel, wire),
            "returned": (route.numel, wire),
            "updates": (chunk, torch.float32),
        }
        self.buffers: dict[str, Buffer] = {}
        for name, (numel, dtype) in sizes.items():
            (first, after), (last, until) = LIFETIMES[name]
            self.buffers[name] = Buffer(numel, dtype, when[first] + after, when[last] + until)
        self.agreements: list[Agreement] = []
        self.whole: list[tuple[int, list[torch.Tensor], torch.Tensor]] = []

    def make_views(self, arena: Arena, first_chunk: int) -> None:
        """Make this wave's tensors, views and copies in an allocated arena.

        `first_chunk` is the number of its first chunk in the whole step.
        """
        route = self.route
        self.tensors = tensors = {
            name: arena.tensor(buffer) for name, buffer in self.buffers.items()
        }
        self.work.memory = tensors["work"]
        self.chunks: list[Chunk] = []
        self.pack: list[list[Copies]] = []
        self.assemble: list[Copies] = []
        for number, (rows, numel) in enumerate(self._parts, first_chunk):
            start = rows[0].start
            prepared, updates = tensors["prepared"][:numel], tensors["updates"][:numel]
            moved = [held._replace(start=held.start - start) for held in rows]
            self.chunks.append(Chunk(number, moved, numel, prepared, updates))
            within = range(start, start + numel)
            ways = (("send", route.send.copies), ("own", route.own.copies))
            self.pack.append(
                [
                    Copies(from_chunk(copies, within), prepared, tensors[name])
                    for name, copies in ways
                ]
            )
            self.assemble.append(
                Copies(to_chunk(route.returned.copies, within), tensors["returned"], updates)
            )
        stacks = tensors["stacks"]
        arrived = (("receive", route.receive.copies), ("own", route.own_to_stacks))
        leaving = (("back", route.back.copies), ("returned", route.own_updates))
        self.unpack = [Copies(copies, tensors[name], stacks) for name, copies in arrived]
        self.pack_back = [Copies(copies, stacks, tensors[name]) for name, copies in leaving]
        self.stacks: list[torch.Tensor] = []
        for of in route.stacks:
            end = of.start + of.numel
            self.stacks.append(stacks[of.start : end].view(of.shape))
        parts = (
            tensors["returned"].split(route.returned.counts)
            if route.updates_by == BROADCAST
            else ()
        )
        self.by_owner = [(owner, part) for owner, part in enumerate(parts) if part.numel()]
