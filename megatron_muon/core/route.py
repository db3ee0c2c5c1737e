"""What one rank sends, receives and orthogonalises in a wave: numbers alone, made before the first step.

A wave's rows on a rank are one flat tensor, in the order in which their updates come back: by
owner, this rank's own last. From there they go to a buffer that is sent, or to one that stays here
(`own`), and then into the stacks; updates go the same way back. Every way is a list of
`arena.Copy`.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

from megatron_muon.core.arena import Copy, Strided
from megatron_muon.core.layout import Layout, Shard
from megatron_muon.core.slices import BlockKind, BlockSlice, Piece, Team

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
        return Strided(
            self.start + number * rows * length + row * strides[0] + col * strides[1], strides
        )


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
    """This rank's part in a wave."""

    number: int | None  # from 0, for traces; None where nothing travels
    indices: Sequence[int]  # of its matrices, the same on every rank
    rows: list[HeldShard]  # that this rank holds, in the order of the wave's rows
    stacks: list[Stack]  # what it orthogonalises
    send: Way  # rows -> what other ranks orthogonalise
    own: Way  # rows -> what this rank has of its own blocks
    receive: Way  # what arrives of other ranks' rows -> stacks
    own_to_stacks: list[Copy]
    back: Way  # stacks -> updates for other ranks
    # updates, this rank's own last -> rows; counts of others; with broadcasts of all, in rank order
    returned: Way
    own_updates: list[Copy]  # stacks -> this rank's own part of `returned`
    rows_by: str
    updates_by: str

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


def make_stacks(
    slots: Sequence[BlockSlice], scale: Callable[[tuple[int, int]], float]
) -> list[Stack]:
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
    teams: Sequence[Team],
    rank: int,
    scale: Callable[[tuple[int, int]], float],
    *,
    number: int | None = None,
    rows_by: str = NOWHERE,
    updates_by: str = NOWHERE,
) -> Route:
    """This rank's part in wave `number`, of the matrices with these indices; `scale` is of a shape's update.

    `teams` are the owners of each matrix of the layout, this rank where every rank orthogonalises
    it for itself.
    """
    world = layout.world_size
    held = dict(zip(indices, layout.held(rank, indices), strict=True))
    slots = itertools.chain(
        *(teams[index].slots(index, layout.matrices[index]) for index in indices)
    )
    stacks = make_stacks([slot for slot in slots if slot.rank == rank], scale)
    units = list(
        _units(layout, indices, teams, rank, held, stacks, is_gather=rows_by == ALL_GATHER)
    )
    ours = [unit for unit in units if unit.owner == rank]
    send_counts, sent = _laid_out(
        world, [(unit.owner, unit) for unit in units if unit.source == rank != unit.owner]
    )
    own_counts, own = _laid_out(world, [(rank, unit) for unit in ours if unit.source == rank])
    receive_counts, arrived = _laid_out(
        world, [(unit.source, unit) for unit in ours if unit.source != rank]
    )
    holders = [(holder, unit) for unit in ours for holder in unit.shard.holders if holder != rank]
    back_counts, back = _laid_out(world, holders if updates_by == ALL_TO_ALL else [])
    # Own updates come last; but an owner broadcasts from the place that its updates have on all
    # ranks.
    last = rank if updates_by == BROADCAST else world
    held_units = [unit for unit in units if rank in unit.shard.holders]
    by_owner = [(last if unit.owner == rank else unit.owner, unit) for unit in held_units]
    returned_counts, updates = _laid_out(world + 1, by_owner)
    if rows_by == ALL_GATHER:  # every rank sends one shard of each matrix, padded to the largest
        padded = max(shard.numel for index in indices for shard in layout.matrices[index].shards)
        own_counts, receive_counts = [padded], [padded] * world
        arrived = [(unit.source * padded, unit) for unit in ours]
    order = list(dict.fromkeys(unit.of for _, unit in updates))
    starts = dict(
        zip(
            order,
            itertools.accumulate((held[index].numel for index in order), initial=0),
            strict=False,
        )
    )

    def from_rows(placed: _Placed) -> list[Copy]:
        copies = []
        for at, (index, _, _, shard, row, rows, col, cols, _) in placed:
            first = starts[index] + (row - shard.row_start) * shard.cols + col - shard.col_start
            copies.append(
                Copy(
                    (rows, cols),
                    Strided(first, (shard.cols, 1)),
                    Strided(at, (cols, 1)),
                )
            )
        return copies

    return Route(
        number,
        indices,
        [HeldShard(index, held[index], start) for index, start in starts.items()],
        stacks,
        send=Way(send_counts, from_rows(sent)),
        own=Way(own_counts, from_rows(own)),
        receive=Way(receive_counts, _to_stacks(arrived)),
        own_to_stacks=[] if rows_by == ALL_GATHER else _to_stacks(own),
        back=Way(back_counts, _reversed(_to_stacks(back))),
        returned=Way(returned_counts[:world], _reversed(from_rows(updates))),
        own_updates=_reversed(
            _to_stacks([(at, unit) for at, unit in updates if unit.owner == rank])
        ),
        rows_by=rows_by,
        updates_by=updates_by,
    )


class _Unit(NamedTuple):
    """A rectangle of matrix `of` that travels in one piece; `parts`: stack, slot number, place in the slot."""

    of: int
    owner: int
    source: int
    shard: Shard
    row: int
    rows: int
    col: int
    cols: int
    parts: list[tuple[Stack, int, Piece]]


_Placed = list[tuple[int, _Unit]]
"""Units with the element of a buffer at which each begins."""


def _units(
    layout: Layout,
    indices: Sequence[int],
    teams: Sequence[Team],
    rank: int,
    held: dict[int, Shard],
    stacks: Sequence[Stack],
    *,
    is_gather: bool,
) -> Iterator[_Unit]:
    """What travels between this rank and owners, itself included: a shard, or what a slice of a team has of it."""
    slots: dict[int, list[tuple[Stack, int, BlockSlice]]] = defaultdict(list)
    for stack in stacks:
        for place, slot in enumerate(stack.slots):
            slots[slot.index].append((stack, place, slot))
    for index in indices:
        matrix, team = layout.matrices[index], teams[index]
        here = [held[index]] if held[index].numel else []
        for part in [None] if team.cuts is None else team.slices(index, matrix):
            owner = team.ranks[0] if part is None else part.rank
            ours = (
                [found for found in slots[index] if part in (None, found[2])]
                if owner == rank
                else []
            )
            for shard in matrix.shards if owner == rank else here:
                source = shard.rank if is_gather else shard.source(owner, layout.world_size)
                whole = Piece(shard.row_start, shard.rows, shard.col_start, shard.cols, 0, 0)
                for piece in [whole] if part is None else part.pieces(shard):
                    of_slots = [
                        (found, found[2].runs(shard) if part is None else [piece]) for found in ours
                    ]
                    parts = [
                        (stack, place, each)
                        for (stack, place, _), pieces in of_slots
                        for each in pieces
                    ]
                    yield _Unit(index, owner, source, shard, *piece[:4], parts)


def _laid_out(ranks: int, units: Sequence[tuple[int, _Unit]]) -> tuple[list[int], _Placed]:
    """A buffer's elements for each rank, and its units, each given with its rank, one after the other by rank."""
    counts, placed, at = [0] * ranks, [], 0
    for rank, unit in sorted(units, key=itemgetter(0)):
        placed.append((at, unit))
        at += unit.rows * unit.cols
        counts[rank] += unit.rows * unit.cols
    return counts, placed


def _to_stacks(placed: _Placed) -> list[Copy]:
    copies = []
    for at, unit in placed:
        for stack, number, piece in unit.parts:
            source = at + (piece.row - unit.row) * unit.cols + piece.col - unit.col
            target, (row, col) = stack.place(number, piece.slice_row, piece.slice_col)
            copies.append(
                Copy(
                    (piece.repeats, piece.rows, piece.cols),
                    Strided(source, (piece.stride * unit.cols, unit.cols, 1)),
                    Strided(target, (piece.rows * row, row, col)),
                )
            )
    return copies


def _reversed(copies: Sequence[Copy]) -> list[Copy]:
    return [Copy(copy.shape, copy.target, copy.source) for copy in copies]


def parts_of_rows(route: Route, most: int) -> list[tuple[list[HeldShard], int]]:
    """The rows of a wave in parts of at most so many elements, or of one shard, and how many elements each has."""
    found: list[tuple[list[HeldShard], int]] = []
    for held in route.rows:
        if found and found[-1][1] + held.shard.numel <= most:
            part, numel = found[-1]
            found[-1] = [*part, held], numel + held.shard.numel
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
