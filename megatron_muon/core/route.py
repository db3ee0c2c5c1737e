"""The part of one rank in a wave, as numbers: what it sends, receives and orthogonalizes.

A wave's rows on a rank are one flat tensor, in the order in which their updates come back: by
owner, this rank's own last. They are packed into the wave's lane (`buffers`), sent from there, and
fill the stacks of their owner; updates are drained from the stacks into a lane and unpacked to rows.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from megatron_muon.core.copies import NOWHERE, Copy
from megatron_muon.core.layout import Layout, Matrix, Shard
from megatron_muon.core.slices import BlockKind, BlockSlice, Piece, Team

_ALIGNED = 256
"""Elements: stacks and regions begin at multiples, as products of a CPU's library may round otherwise."""


def aligned_elements(numel: int) -> int:
    """Elements up to the next aligned position."""
    return -(-numel // _ALIGNED) * _ALIGNED


class HeldShard(NamedTuple):
    """A shard of matrix `of` that this rank holds, and its first element among the rows."""

    of: int
    shard: Shard
    start: int

    @property
    def end(self) -> int:
        """The element after its last."""
        return self.start + self.shard.numel

    def moved(self, elements: int) -> HeldShard:
        """The same shard so many elements later."""
        return self._replace(start=self.start + elements)


class Stack(NamedTuple):
    """Blocks of one kind, `(count, smaller, length)`, tall ones transposed, from element `start`."""

    kind: BlockKind
    start: int
    slots: tuple[BlockSlice, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the stack."""
        return len(self.slots), self.kind.smaller, self.kind.length

    @property
    def numel(self) -> int:
        """Elements of the stack."""
        return math.prod(self.shape)

    def copy(
        self,
        number: int,
        piece: Piece,
        source: int,
        strides: tuple[int, int],
    ) -> Copy:
        """Copy a piece to slot `number`, from an element of a buffer.

        `strides` are those of its repeats and rows there.
        """
        _, smaller, length = self.shape
        row, col = length, 1
        if self.slots[number].is_tall:
            row, col = 1, length
        first = self.start + number * smaller * length
        dims = (
            (piece.repeats, strides[0], piece.rows * row),
            (piece.rows, strides[1], row),
            (piece.cols, 1, col),
        )
        return Copy(source, first + piece.slice_row * row + piece.slice_col * col, dims)


def make_stacks(
    slots: Sequence[BlockSlice], kind_of: Callable[[BlockSlice], BlockKind]
) -> list[Stack]:
    """Stacks of blocks of one kind, as `Method.kind`."""
    by_kind: dict[BlockKind, list[BlockSlice]] = defaultdict(list)
    for slot in slots:
        by_kind[kind_of(slot)].append(slot)
    stacks: list[Stack] = []
    start = 0
    for kind in sorted(by_kind, key=lambda kind: (kind[:5], kind.is_tall)):
        stacks.append(Stack(kind, start, tuple(by_kind[kind])))
        start += aligned_elements(stacks[-1].numel)
    return stacks


class Leg(NamedTuple):
    """The way of a wave's rows to their owners, or of updates back.

    Attributes:
        rows, owned: elements for each rank in the lane's regions; the last of `rows` stay here.
        near: copies from rows to the lane; of updates they are made backwards.
        far: copies from the lane to the stacks, likewise.
    """

    rows: list[int]
    owned: list[int]
    near: list[Copy]
    far: list[Copy]


@dataclass(frozen=True)
class Route:
    """A rank's part in a wave.

    Attributes:
        indices: matrices of the wave, the same on every rank; of a batch, those of this rank.
        rows: shards that this rank holds.
        stacks: blocks that this rank orthogonalizes.
        out, back: the ways of rows and updates. In a batch `near` leads from rows to stacks.
        unsent: copies of this rank's rows that another holder sends, to `NOWHERE`.
        is_batch: its matrices are whole on this rank, their owner.
    """

    indices: Sequence[int]
    rows: list[HeldShard]
    stacks: list[Stack]
    out: Leg
    back: Leg
    unsent: Sequence[Copy] = ()
    is_batch: bool = False

    @property
    def rows_numel(self) -> int:
        """Elements of the lane's region of rows."""
        return max(sum(self.out.rows), sum(self.back.rows))

    @property
    def owned_numel(self) -> int:
        """Elements of the lane's region for owned matrices."""
        return max(sum(self.out.owned), sum(self.back.owned))

    @property
    def owned_start(self) -> int:
        """First element of the owned region in the lane."""
        return aligned_elements(self.rows_numel)

    @property
    def slots(self) -> list[BlockSlice]:
        """Blocks of this rank, in the order of the stacks."""
        return [slot for stack in self.stacks for slot in stack.slots]


class Unit(NamedTuple):
    """A rectangle of matrix `of` that travels in one piece.

    Attributes:
        numel: its elements, which travel without gaps.
        near: copy from the shard to the unit.
        far: copies from the unit to this rank's stacks, if it is the owner.
    """

    of: int
    owner: int
    source: int
    shard: Shard
    numel: int
    near: Copy
    far: list[Copy]


Placed = list[tuple[int, Unit]]
"""Units with the element of a buffer at which each begins."""


class Units:
    """Units between a rank and the owners of a wave's matrices, itself included.

    Args:
        teams: owners of each matrix of the layout.
        kind_of: as `Method.kind`.
    """

    def __init__(
        self,
        layout: Layout,
        indices: Sequence[int],
        teams: Sequence[Team],
        rank: int,
        kind_of: Callable[[BlockSlice], BlockKind],
    ) -> None:
        self.ranks = layout.world_size
        self.rank = rank
        self.indices = indices
        self._starts: dict[int, int] = {}
        mine = []
        for index in indices:
            slices = teams[index].slices(index, layout.matrices[index])
            mine += [slot for slot in slices if slot.rank == rank]
        self.stacks = make_stacks(mine, kind_of)
        self._slots: dict[int, list[tuple[Stack, int]]] = defaultdict(list)
        for stack in self.stacks:
            for number, slot in enumerate(stack.slots):
                self._slots[slot.index].append((stack, number))
        self.held = {index: layout.matrices[index].held_by(rank) for index in indices}
        self.all: list[Unit] = []
        for index in indices:
            self.all += self._of(
                layout.matrices[index],
                index,
                teams[index],
            )
        self.owned = [unit for unit in self.all if unit.owner == rank]
        self.kept = [unit for unit in self.all if rank in unit.shard.holders]

    def _of(
        self,
        matrix: Matrix,
        index: int,
        team: Team,
    ) -> Iterator[Unit]:
        """A matrix's shards, or what a slice of a team has of them."""
        here = [self.held[index]] if self.held[index].numel else []
        for part in [None] if team.cuts is None else team.slices(index, matrix):
            owner = team.ranks[0] if part is None else part.rank
            for shard in matrix.shards if owner == self.rank else here:
                source = shard.source(owner, self.ranks)
                for piece in [Piece(*shard.rectangle, 0, 0)] if part is None else part.runs(shard):
                    numel = piece.repeats * piece.rows * piece.cols
                    near = _from_shard(shard, piece)
                    unit = Unit(index, owner, source, shard, numel, near, [])
                    if owner == self.rank:
                        unit.far.extend(self._to_stacks(unit, part, piece))
                    yield unit

    def _to_stacks(
        self,
        unit: Unit,
        part: BlockSlice | None,
        piece: Piece,
    ) -> Iterator[Copy]:
        """Copies from a unit to this rank's stacks."""
        cols = piece.cols
        for stack, number in self._slots[unit.of]:
            slot = stack.slots[number]
            if part == slot:
                yield stack.copy(number, piece, 0, (piece.rows * cols, cols))
            elif part is None:
                for run in slot.runs(unit.shard):
                    first = (run.row - piece.row) * cols + run.col - piece.col
                    yield stack.copy(number, run, first, (run.stride * cols, cols))

    def order_rows(self, updates: Placed) -> list[HeldShard]:
        """Put the rows in the order in which their updates come back."""
        rows = []
        start = 0
        for index in dict.fromkeys(unit.of for _, unit in updates):
            self._starts[index] = start
            rows.append(HeldShard(index, self.held[index], start))
            start += self.held[index].numel
        return rows

    def unsent(self, is_sent: Callable[[Unit], bool]) -> list[Copy]:
        """Copies to nowhere of the rows that this rank does not send: of whole shards if it can.

        Units may have a part of the columns of a scale.
        """
        sent = {unit.of for unit in self.kept if is_sent(unit)}
        others = [unit for unit in self.kept if unit.of in sent and not is_sent(unit)]
        copies = self.from_rows([(NOWHERE, unit) for unit in others])
        for index in dict.fromkeys(unit.of for unit in self.kept if unit.of not in sent):
            shard = self.held[index]
            whole = _from_shard(shard, Piece(*shard.rectangle, 0, 0))
            copies.append(whole.moved(self._starts[index], NOWHERE))
        return copies

    def from_rows(self, placed: Placed) -> list[Copy]:
        """Copies of units from the rows to where they are placed."""
        return [
            unit.near.moved(
                self._starts[unit.of],
                at,
            )
            for at, unit in placed
        ]


def _from_shard(shard: Shard, piece: Piece) -> Copy:
    """Copy a piece from a shard."""
    row, col = piece.row - shard.row_start, piece.col - shard.col_start
    dims = (
        (
            piece.repeats,
            piece.stride * shard.cols,
            piece.rows * piece.cols,
        ),
        (piece.rows, shard.cols, piece.cols),
        (piece.cols, 1, 1),
    )
    return Copy(row * shard.cols + col, 0, dims)


def laid_out(
    ranks: int, units: Sequence[tuple[int, Unit]], start: int = 0
) -> tuple[list[int], Placed]:
    """Elements for each rank, and units one after the other by rank from element `start` on.

    Each unit is given with its rank.
    """
    counts = [0] * ranks
    placed = []
    for rank, unit in sorted(units, key=itemgetter(0)):
        placed.append((start, unit))
        start += unit.numel
        counts[rank] += unit.numel
    return counts, placed


def to_stacks(placed: Placed) -> list[Copy]:
    """Copies of units from where they are placed to the stacks."""
    return [copy.moved(at, 0) for at, unit in placed for copy in unit.far]


def chunks_of_rows(
    rows: Sequence[HeldShard],
    most: int,
) -> list[list[HeldShard]]:
    """Rows of a wave in parts of at most so many elements, or of one shard."""
    chunks: list[list[HeldShard]] = []
    end = 0
    for held in rows:
        if not chunks or held.end > end:
            chunks.append([])
            end = held.start + most
        chunks[-1].append(held)
    return chunks
