"""What one rank sends, receives and orthogonalises in a wave: numbers alone, made before the first step.

A wave's rows on a rank are one flat tensor, in the order in which their updates come back: by owner, this rank's own
last. From there rows go to a buffer that is sent, or to one that stays here (`own`), and from what arrived and what
stayed into the stacks. Updates go the same way back, and arrive in the order of the rows; only where a team owns a
matrix, or a replica sends its rows, does the order differ. Every way is a list of `copies.Copy`.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_muon.core.copies import Copy, Strided
from megatron_muon.core.layout import Layout, Shard
from megatron_muon.core.slices import BlockKind, BlockSlice, Piece, Team, blocks_of

NOWHERE, ALL_TO_ALL, ALL_GATHER, BROADCAST = "nowhere", "all_to_all", "all_gather", "broadcast"
"""How rows, or updates, of a wave travel; rows are not broadcast, updates are not gathered."""

_ALIGNED = 256
"""Elements: each stack begins at an aligned place, as products of a CPU's library may round otherwise."""


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
        return len(self.slots) * self.kind.smaller * self.kind.length

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
        indices: of its matrices, the same on every rank.
        rows: the shards that this rank holds, in the order of the wave's rows.
        stacks: what it orthogonalises.
        send: rows -> what other ranks orthogonalise.
        own: rows -> what this rank has of its own blocks; it is not sent.
        receive: what arrives of other ranks' rows -> stacks.
        own_to_stacks: `own` -> stacks.
        back: stacks -> updates for other ranks.
        returned: updates from other ranks, then this rank's own -> rows. `counts` are of other ranks; with broadcasts
            of all owners, each at the same place on every rank.
        own_updates: stacks -> this rank's own part of `returned`.
        rows_by, updates_by: how they travel.
        padding: with an all-gather of rows, elements of the largest shard.
    """

    number: int | None
    indices: Sequence[int]
    rows: list[HeldShard]
    stacks: list[Stack]
    send: Way
    own: Way
    receive: Way
    own_to_stacks: list[Copy]
    back: Way
    returned: Way
    own_updates: Way
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
    world = layout.world_size
    held = dict(zip(indices, layout.held(rank, indices), strict=True))
    stacks = make_stacks([slot for index in indices for slot in _slots(layout, index, teams[index], rank)], scale)
    send, own, receive, back, returned = _sort_units(
        layout, indices, teams, rank, held, stacks, rows_by=rows_by, updates_by=updates_by
    )
    # An owner broadcasts from the place that its updates have on all ranks.
    order = range(world) if updates_by == BROADCAST else [*range(rank), *range(rank + 1, world), rank]
    rows, starts, start = [], {}, 0
    for index in dict.fromkeys(unit.of for owner in order for unit in returned[owner]):
        rows.append(HeldShard(index, held[index], start))
        starts[index] = start
        start += held[index].numel

    def from_rows(placed: _Placed) -> list[Copy]:
        return [
            Copy((unit.rows, unit.cols), unit.in_rows(starts[unit.of]), Strided(at, (unit.cols, 1)))
            for at, unit in placed
        ]

    own_placed, received, updates = _placed(own), _placed(receive), _placed(returned, order)
    padding = 0
    if rows_by == ALL_GATHER:  # every rank sends one shard of each matrix, padded to the largest
        (index,) = indices
        padding = max(shard.numel for shard in layout.matrices[index].shards)
        received = [(source * padding, unit) for source in range(world) for unit in (*own[source], *receive[source])]
    own_updates = [(at, unit) for at, unit in updates if unit.owner == rank]
    counts = _counts(returned)
    if updates_by != BROADCAST:
        counts[rank] = 0
    return Route(
        number,
        indices,
        rows,
        stacks,
        send=Way(_counts(send), from_rows(_placed(send))),
        own=Way(_counts(own), from_rows(own_placed)),
        receive=Way(_counts(receive), _to_stacks(received)),
        own_to_stacks=[] if rows_by == ALL_GATHER else _to_stacks(own_placed),
        back=Way(_counts(back), _reversed(_to_stacks(_placed(back)))),
        returned=Way(counts, _reversed(from_rows(updates))),
        own_updates=Way([sum(unit.numel for _, unit in own_updates)], _reversed(_to_stacks(own_updates))),
        rows_by=rows_by,
        updates_by=updates_by,
        padding=padding,
    )


class _Unit(NamedTuple):
    """A rectangle between a holder and an owner, which travels in one piece.

    `parts` are what slots of the owner have of it: stack, slot number, and where; `of` is the matrix.
    """

    of: int
    owner: int
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


_Units = list[list[_Unit]]
"""By the rank at the other end."""
_Placed = list[tuple[int, _Unit]]
"""Units with the element of a buffer at which each begins."""


def _slots(layout: Layout, index: int, team: Team | None, rank: int) -> list[BlockSlice]:
    """What `rank` orthogonalises of a matrix."""
    if team is None:
        return blocks_of(index, layout.matrices[index], rank)
    return [slot for slot in team.slots(index, layout.matrices[index]) if slot.rank == rank]


def _sort_units(
    layout: Layout,
    indices: Sequence[int],
    teams: Sequence[Team | None],
    rank: int,
    held: dict[int, Shard],
    stacks: Sequence[Stack],
    *,
    rows_by: str,
    updates_by: str,
) -> tuple[_Units, _Units, _Units, _Units, _Units]:
    """What this rank sends, keeps, receives, sends back, and gets back, itself included."""
    world = layout.world_size
    slots: dict[int, list[tuple[Stack, int, BlockSlice]]] = defaultdict(list)
    for stack in stacks:
        for place, slot in enumerate(stack.slots):
            slots[slot.index].append((stack, place, slot))
    send, own, receive, back, returned = (_by_rank(world) for _ in range(5))
    for index in indices:
        matrix, team = layout.matrices[index], teams[index]
        here = [held[index]] if held[index].numel else []
        for part in [None] if team is None or team.cuts is None else team.slices(index, matrix):
            owner = rank if team is None else team.ranks[0] if part is None else part.rank
            ours = slots[index] if owner == rank else []
            for shard in matrix.shards if owner == rank else here:
                source = shard.rank if rows_by == ALL_GATHER else shard.source(owner, world)
                for unit in _units(index, owner, shard, part, ours):
                    if rank in shard.holders:
                        returned[owner].append(unit)
                    if owner == rank:
                        (own if source == rank else receive)[source].append(unit)
                        if team is not None and updates_by == ALL_TO_ALL:
                            for holder in shard.holders:
                                back[holder].append(unit)
                    elif source == rank and rows_by == ALL_TO_ALL:
                        send[owner].append(unit)
    back[rank] = []
    return send, own, receive, back, returned


def _units(
    index: int, owner: int, shard: Shard, part: BlockSlice | None, slots: Sequence[tuple[Stack, int, BlockSlice]]
) -> list[_Unit]:
    """What travels of a shard for an owner: all of it where one rank owns the matrix, else what its slice has of it."""
    if part is None:
        parts = [(stack, place, piece) for stack, place, slot in slots for piece in slot.pieces(shard)]
        return [_Unit(index, owner, shard, shard.row_start, shard.rows, shard.col_start, shard.cols, parts)]
    where = [(stack, place) for stack, place, slot in slots if slot == part]
    return [
        _Unit(index, owner, shard, *piece[:4], [(stack, place, piece) for stack, place in where])
        for piece in part.pieces(shard)
    ]


def _by_rank(world_size: int) -> _Units:
    return [[] for _ in range(world_size)]


def _counts(units: _Units) -> list[int]:
    return [sum(unit.numel for unit in of_rank) for of_rank in units]


def _placed(units: _Units, order: Iterable[int] | None = None) -> _Placed:
    """Units one after the other, by rank in this order."""
    in_order = list(itertools.chain(*(units if order is None else (units[rank] for rank in order))))
    starts = itertools.accumulate((unit.numel for unit in in_order), initial=0)
    return list(zip(starts, in_order, strict=False))


def _to_stacks(placed: _Placed) -> list[Copy]:
    return [
        Copy(
            (piece.rows, piece.cols),
            Strided(at + (piece.row - unit.row) * unit.cols + piece.col - unit.col, (unit.cols, 1)),
            stack.place(number, piece.slice_row, piece.slice_col),
        )
        for at, unit in placed
        for stack, number, piece in unit.parts
    ]


def _reversed(copies: Sequence[Copy]) -> list[Copy]:
    return [Copy(copy.shape, copy.target, copy.source) for copy in copies]


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
        copy._replace(source=copy.source._replace(offset=copy.source.offset - chunk.start))
        for copy in copies
        if copy.source.offset in chunk
    ]


def to_chunk(copies: Sequence[Copy], chunk: range) -> list[Copy]:
    """Those copies that end in a chunk of the rows, likewise."""
    return _reversed(from_chunk(_reversed(copies), chunk))
