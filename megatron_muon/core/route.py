"""What one rank sends, receives and orthogonalises in a wave: numbers alone, made before the first step.

A wave's rows on a rank are one flat tensor, in the order in which their updates come back: by owner, this rank's own
last. From there rows go to a buffer that is sent, or to one that stays here (`own`), and from what arrived and what
stayed into the stacks. Updates go the same way back, and arrive in the order of the rows; only where a team owns a
matrix, or a replica sends its rows, does the order differ. Every way is a list of `copies.Copy`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_muon.core.copies import Copy, Strided
from megatron_muon.core.layout import Layout, Shard
from megatron_muon.core.slices import BlockKind, BlockSlice, Piece, Team, blocks_of

NOWHERE, ALL_TO_ALL, ALL_GATHER, BROADCAST = "nowhere", "all_to_all", "all_gather", "broadcast"
"""How rows, or updates, of a wave travel; rows are not broadcast, updates are not gathered."""


class HeldShard(NamedTuple):
    """A shard of matrix `of` that this rank holds, and its first element in the wave's rows."""

    of: int
    shard: Shard
    start: int


class Stack(NamedTuple):
    """Blocks of one kind, `(count, smaller, length)`, tall ones transposed, from element `start` of the stacks on."""

    kind: BlockKind
    start: int
    slots: tuple[BlockSlice, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the stack."""
        return len(self.slots), self.kind.smaller, self.kind.length

    @property
    def numel(self) -> int:
        """Elements of the stack."""
        count, rows, cols = self.shape
        return count * rows * cols

    def place(self, number: int, row: int = 0, col: int = 0) -> Strided:
        """An element of slot `number` in the stacks, and the strides of its rows and columns."""
        slot, (_, rows, length) = self.slots[number], self.shape
        strides = (1, length) if slot.is_tall else (length, 1)
        return Strided(self.start + number * rows * length + row * strides[0] + col * strides[1], strides)


@dataclass
class Way:
    """A buffer that travels: elements for each rank of the group, one after the other."""

    counts: list[int]
    copies: list[Copy] = field(default_factory=list)

    @property
    def numel(self) -> int:
        """Elements for all ranks."""
        return sum(self.counts)


@dataclass
class Route:
    """This rank's part in a wave.

    Attributes:
        number: of the wave, from 0, for traces; None where nothing travels.
        rows: the shards that this rank holds, in the order of the wave's rows.
        stacks: what it orthogonalises.
        send: rows -> what other ranks orthogonalise.
        own: rows -> what this rank has of its own blocks; it is not sent.
        receive: what arrives of other ranks' rows -> stacks.
        own_to_stacks: `own` -> stacks.
        back: stacks -> updates for other ranks.
        returned: updates from other ranks, then this rank's own -> rows; `counts` are of other ranks.
        own_updates: stacks -> this rank's own updates, behind those of other ranks.
        owners: with broadcasts, the owners of the wave and how many elements each has, in the order of `returned`.
        rows_by, updates_by: how they travel.
        padding: with an all-gather of rows, elements of the largest shard.
    """

    number: int | None
    rows: list[HeldShard]
    stacks: list[Stack]
    send: Way
    own: Way
    receive: Way
    own_to_stacks: list[Copy]
    back: Way
    returned: Way
    own_updates: Way
    owners: list[tuple[int, int]]
    rows_by: str
    updates_by: str
    padding: int = 0

    @property
    def numel(self) -> int:
        """Elements of the rows."""
        return sum(held.shard.numel for held in self.rows)

    @property
    def stacked(self) -> int:
        """Elements of the stacks, and of the gaps between them."""
        return self.stacks[-1].start + self.stacks[-1].numel if self.stacks else 0

    @property
    def slots(self) -> list[BlockSlice]:
        """What this rank orthogonalises, in the order of the stacks."""
        return [slot for stack in self.stacks for slot in stack.slots]


class _Unit(NamedTuple):
    """A rectangle between a holder and an owner, which travels in one piece.

    `parts` are what slots of the owner have of it: stack, slot number, and where; `of` is the matrix.
    """

    of: int
    shard: Shard
    row: int
    rows: int
    col: int
    cols: int
    parts: list[tuple[Stack, int, Piece]]

    @property
    def numel(self) -> int:
        return self.rows * self.cols

    def in_rows(self, start: int) -> Strided:
        """In the rows of its shard, which begin at `start`."""
        row, col = self.row - self.shard.row_start, self.col - self.shard.col_start
        return Strided(start + row * self.shard.cols + col, (self.shard.cols, 1))

    def in_stacks(self, start: int) -> list[tuple[tuple[int, int], Strided, Strided]]:
        """For each part its shape, where it is in a buffer in which the unit begins at `start`, and in the stacks."""
        return [
            (
                (piece.rows, piece.cols),
                Strided(start + (piece.row - self.row) * self.cols + piece.col - self.col, (self.cols, 1)),
                stack.place(number, piece.slice_row, piece.slice_col),
            )
            for stack, number, piece in self.parts
        ]


_ALIGNED = 256
"""Elements: each stack begins at an aligned place, as products of a CPU's library may round otherwise."""


def make_stacks(slots: Sequence[BlockSlice], scale: Callable[[tuple[int, int]], float]) -> list[Stack]:
    """Stacks of equal blocks; `scale` is of the update of a block of this shape."""
    by_kind: dict[BlockKind, list[BlockSlice]] = defaultdict(list)
    for slot in slots:
        by_kind[slot.kind(scale(slot.of))].append(slot)
    stacks, start = [], 0
    for kind in sorted(by_kind, key=lambda kind: kind[:5]):
        stacks.append(Stack(kind, start, tuple(by_kind[kind])))
        start += -(-stacks[-1].numel // _ALIGNED) * _ALIGNED
    return stacks


def make_route(
    layout: Layout,
    indices: Sequence[int],
    teams: Sequence[Team | None],
    rank: int,
    scale: Callable[[tuple[int, int]], float],
    *,
    number: int | None,
    rows_by: str = ALL_TO_ALL,
    updates_by: str = ALL_TO_ALL,
) -> Route:
    """This rank's part in a wave of the matrices with these indices.

    Args:
        layout: who holds what.
        indices: of the wave's matrices.
        teams: the owners of each matrix of the layout; None where every rank orthogonalises it for itself.
        rank: in the group.
        scale: of the update of a block of this shape.
        number: of the wave.
        rows_by: how rows travel.
        updates_by: how updates travel.
    """
    world, matrices = layout.world_size, layout.matrices
    held = dict(zip(indices, layout.held(rank, indices), strict=True))
    owned = [
        slot
        for index in indices
        if (team := teams[index]) is None or rank in team.ranks
        for slot in (
            blocks_of(index, matrices[index], rank)
            if team is None or team.cuts is None
            else [block_slice for block_slice in team.slices(index, matrices[index]) if block_slice.rank == rank]
        )
    ]
    stacks = make_stacks(owned, scale)
    slots: dict[int, list[tuple[Stack, int, BlockSlice]]] = defaultdict(list)
    for stack in stacks:
        for place, slot in enumerate(stack.slots):
            slots[slot.index].append((stack, place, slot))
    units: dict[str, dict[int, list[_Unit]]] = {
        name: defaultdict(list) for name in ("send", "own", "receive", "back", "returned", "own_updates")
    }
    for index in indices:
        matrix, team = matrices[index], teams[index]
        here = [held[index]] if held[index].numel else []
        slices = [None] if team is None or team.cuts is None else team.slices(index, matrix)
        for block_slice in slices:
            owner = rank if team is None else team.ranks[0] if block_slice is None else block_slice.rank
            for shard in matrix.shards if owner == rank else here:
                for unit in _units(index, shard, block_slice, slots[index] if owner == rank else []):
                    source = shard.rank if rows_by == ALL_GATHER else shard.source(owner, world)
                    if owner == rank:
                        units["own" if source == rank else "receive"][source].append(unit)
                        for holder in shard.holders if team is not None else ():
                            if holder != rank and updates_by == ALL_TO_ALL:
                                units["back"][holder].append(unit)
                        if rank in shard.holders:
                            units["own_updates"][rank].append(unit)
                    else:
                        units["returned"][owner].append(unit)
                        if source == rank and rows_by == ALL_TO_ALL:
                            units["send"][owner].append(unit)
    by_owner = [units["returned"][owner] for owner in range(world)]
    order = [unit.of for of_owner in by_owner for unit in of_owner] + [unit.of for unit in units["own_updates"][rank]]
    if updates_by == BROADCAST:  # an owner broadcasts from the place that its updates have on all ranks
        by_owner[rank] = units["own_updates"][rank]
        order = [unit.of for of_owner in by_owner for unit in of_owner]
    rows, starts, start = [], {}, 0
    for index in dict.fromkeys(order):
        rows.append(HeldShard(index, held[index], start))
        starts[index] = start
        start += held[index].numel

    def way(name: str, ranks: Sequence[int] = range(world)) -> tuple[Way, list[tuple[int, _Unit]]]:
        found = Way([0] * world)
        placed, at = [], 0
        for other in ranks:
            for unit in units[name][other]:
                placed.append((at, unit))
                at += unit.numel
                found.counts[other] += unit.numel
        return found, placed

    def from_rows(found: Way, placed: Sequence[tuple[int, _Unit]]) -> Way:
        found.copies = [
            Copy((unit.rows, unit.cols), unit.in_rows(starts[unit.of]), Strided(at, (unit.cols, 1)))
            for at, unit in placed
        ]
        return found

    def to_stacks(placed: Sequence[tuple[int, _Unit]]) -> list[Copy]:
        return [Copy(shape, there, in_stacks) for at, unit in placed for shape, there, in_stacks in unit.in_stacks(at)]

    def from_stacks(placed: Sequence[tuple[int, _Unit]]) -> list[Copy]:
        return [Copy(shape, in_stacks, there) for at, unit in placed for shape, there, in_stacks in unit.in_stacks(at)]

    send, own = from_rows(*way("send")), from_rows(*way("own"))
    _, own_placed = way("own")
    receive, received = way("receive")
    padding = 0
    if rows_by == ALL_GATHER:  # every rank sends one shard of each matrix, padded to the largest
        assert len(indices) == 1
        padding = max(shard.numel for shard in matrices[indices[0]].shards)
        own_placed, received = [], [
            (source * padding, unit) for name in ("own", "receive") for source in range(world)
            for unit in units[name][source]
        ]  # fmt: skip
    receive.copies = to_stacks(received)
    back, leaving = way("back")
    back.copies = from_stacks(leaving)
    own_updates, own_updates_placed = way("own_updates")
    returned, coming = way("returned")
    owners: list[tuple[int, int]] = []
    if updates_by == BROADCAST:
        at, coming, own_updates_placed = 0, [], []
        for owner, of_owner in enumerate(by_owner):
            if of_owner:
                owners.append((owner, sum(unit.numel for unit in of_owner)))
            for unit in of_owner:
                (own_updates_placed if owner == rank else coming).append((at, unit))
                at += unit.numel
        coming += own_updates_placed
    else:
        own_updates_placed = [(returned.numel + at, unit) for at, unit in own_updates_placed]
        coming += own_updates_placed
    own_updates.copies = from_stacks(own_updates_placed)
    returned.copies = [
        Copy((unit.rows, unit.cols), Strided(at, (unit.cols, 1)), unit.in_rows(starts[unit.of])) for at, unit in coming
    ]
    return Route(
        number,
        rows,
        stacks,
        send,
        own,
        receive,
        to_stacks(own_placed),
        back,
        returned,
        own_updates,
        owners,
        rows_by,
        updates_by,
        padding,
    )


def _units(
    index: int, shard: Shard, block_slice: BlockSlice | None, slots: Sequence[tuple[Stack, int, BlockSlice]]
) -> list[_Unit]:
    """What travels of a shard for an owner: all of it where one rank owns the matrix, else what a slice has of it."""
    if block_slice is None:
        parts = [(stack, place, piece) for stack, place, slot in slots for piece in slot.pieces(shard)]
        return [_Unit(index, shard, shard.row_start, shard.rows, shard.col_start, shard.cols, parts)]
    where = [(stack, place) for stack, place, slot in slots if slot == block_slice]
    return [
        _Unit(
            index, shard, piece.row, piece.rows, piece.col, piece.cols,
            [(stack, place, piece) for stack, place in where],
        )
        for piece in block_slice.pieces(shard)
    ]  # fmt: skip


def parts_of_rows(route: Route, most: int) -> list[tuple[list[HeldShard], int]]:
    """The rows of a wave in parts of at most so many elements, or of one shard, and how many elements each has."""
    found: list[tuple[list[HeldShard], int]] = []
    for held in route.rows:
        if found and found[-1][1] + held.shard.numel <= most:
            found[-1] = [*found[-1][0], held], found[-1][1] + held.shard.numel
        else:
            found.append(([held], held.shard.numel))
    return found


def from_chunk(copies: Sequence[Copy], chunk: range) -> list[Copy]:
    """Those copies that begin in a chunk of the rows, with offsets in the chunk."""
    return [
        Copy(copy.shape, Strided(copy.source.offset - chunk.start, copy.source.strides), copy.target)
        for copy in copies
        if copy.source.offset in chunk
    ]


def to_chunk(copies: Sequence[Copy], chunk: range) -> list[Copy]:
    """Those copies that end in a chunk of the rows, likewise."""
    return [
        Copy(copy.shape, copy.source, Strided(copy.target.offset - chunk.start, copy.target.strides))
        for copy in copies
        if copy.target.offset in chunk
    ]
