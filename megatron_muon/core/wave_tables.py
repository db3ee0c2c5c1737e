"""Tables of a wave for the kernels of its passes, made once."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_muon.core import launches
from megatron_muon.core.copies import Copy
from megatron_muon.core.neurons import Neurons
from megatron_muon.core.rules.hyperball import Hyperball
from megatron_muon.core.rules.second_moments import NorMuon
from megatron_muon.core.slices import BlockSlice
from megatron_muon.core.tiles import (
    Tiles,
    split_at,
    tiles_of,
)
from megatron_muon.core.wave import Wave

INT8 = 2
"""`kernels.INT8`."""

_SCALE_COLS = 128
_TERMS = 1024
"""Tiles whose sums a program adds at a time."""


def keeps_scales(wave: Wave) -> bool:
    """True if no piece of rows, sent or not, has a part of the columns of a scale."""
    route = wave.route
    starts = [held.start for held in route.rows]
    for copy in [*route.out.near, *route.unsent]:
        held = route.rows[bisect.bisect_right(starts, copy.source) - 1]
        cols = held.shard.cols
        first = (copy.source - held.start) % max(1, cols)
        last = first + copy.dims[-1][0]
        if first % _SCALE_COLS or (last % _SCALE_COLS and last != cols):
            return False
    return True


class Tables:
    """A wave's tables.

    Args:
        places: of matrices among those that this rank holds.
        norms, sphere: rules, if they are of the step.

    Attributes:
        advance, descend: tiles between this rank's matrices and the lane, or a batch's stacks.
        fill, drain: tiles between lane and stacks.
        slots, siblings, counters: tables with which kernels level slots.
        largest: of each slot, bits of an fp32 magnitude as int32.
        factors: of each slot, `(slots, 1, 1)` fp32.
        parts: tiles of `descend` of a batch, or of `drain`, for each stack by itself; none with
            NorMuon, which needs whole matrices.
        left: tiles and memory of updates that wait for `drain`.
        spare: memory for updates of the next stack.
        neurons: tables of NorMuon.
    """

    def __init__(
        self,
        wave: Wave,
        places: Mapping[int, int],
        *,
        norms: NorMuon | None = None,
        sphere: Hyperball | None = None,
    ) -> None:
        route = wave.route
        device = wave.lane.device
        slots = _slots(wave)
        firsts = [start for start, _ in slots]
        self._places = places
        self._starts = [held.start for held in route.rows]
        self._of = [held.of for held in route.rows]

        def of_slots(copies: Sequence[Copy]) -> list[int]:
            return [bisect.bisect_right(firsts, copy.target) - 1 for copy in copies]

        near, far = route.out.near, route.out.far
        self._of_batch = of_slots(near) if route.is_batch else None
        self.advance = tiles_of(*self._by_matrix([*near, *route.unsent]), device, self._of_batch)
        self.descend = tiles_of(*self._by_matrix(route.back.near), device)
        self._make_parts(wave, norms is None)
        self.fill = tiles_of(far, of_slots(far), device)
        back = route.back.far
        self.drain = tiles_of(back, [0] * len(back), device)
        self._make_levels(route.slots, slots, device)
        self.neurons = None
        if norms is not None and wave.whole:
            self.neurons = Neurons(wave, firsts, norms)
        if sphere is not None:
            self._make_partial(sphere)

    def _by_matrix(self, copies: Sequence[Copy]) -> tuple[list[Copy], list[int]]:
        """Copies with offsets in their matrix's shard, and the matrices."""
        moved, places = [], []
        for copy in copies:
            row = bisect.bisect_right(self._starts, copy.source) - 1
            moved.append(copy.moved(-self._starts[row], 0))
            places.append(self._places[self._of[row]])
        return moved, places

    def _make_parts(self, wave: Wave, is_apart: bool) -> None:
        """Tiles of `descend` of a batch, or of `drain`, for each stack of the wave by itself."""
        route, device = wave.route, wave.lane.device
        self.parts: list[Tiles] = []
        self.left: list[tuple[Tiles, Tensor]] = []
        self._copies: list[list[Copy]] = []
        self._split: dict[int, Tiles] = {}
        self.spare: Tensor | None = None
        numels = [wave.stacks[number].blocks.numel() for number in wave.order]
        self._keeps_dtype = wave.keeps_dtype
        self._rotates = numels == sorted(numels, reverse=True)
        lane = _place(wave.lane).start
        ends = []
        for copy in route.back.far:
            last = sum((size - 1) * step for size, step, _ in copy.dims)
            ends.append((copy.source, copy.source + last + 1))
        drained = np.array(ends, dtype=np.int64).reshape(-1, 2)
        self._drained = lane + wave.lane.itemsize * drained
        if not is_apart:
            return
        copies = route.back.near if route.is_batch else route.back.far
        start = wave.stack_memory.storage_offset()
        for stack in wave.stacks:
            first = stack.blocks.storage_offset() - start
            end = first + stack.blocks.numel()
            chosen = [copy.moved(0, -first) for copy in copies if first <= copy.target < end]
            self._copies.append(chosen)
            if route.is_batch:
                self.parts.append(tiles_of(*self._by_matrix(chosen), device))
            else:
                self.parts.append(tiles_of(chosen, [0] * len(chosen), device))

    def rows_that_stay(self, updates: Tensor, *, is_last: bool) -> int:
        """Rows of updates that neither `drain` nor a later stack's method overwrites, from the first.

        Updates `(count, m, n)` have count m rows. Before the last stack all of them stay, or none.
        """
        count, m, length = map(int, updates.shape)
        place = _place(updates)
        starts, ends = self._drained.T
        reached = starts[(place.start < ends) & (starts < place.stop)]
        free = max(0, int(reached.min()) - place.start) if len(reached) else updates.nbytes
        rows = free // (length * updates.itemsize)
        if is_last or (rows == count * m and self._rotates):
            return rows if self._keeps_dtype else 0
        return 0

    def reset(self) -> None:
        """Forget a step that an error has ended."""
        self.left.clear()
        self.spare = None
        self.largest.zero_()
        self.counters.zero_()

    def leave(self, number: int, updates: Tensor, blocks: Tensor, rows: int) -> None:
        """Have `drain` read so many rows of a stack's updates where they are, and others in blocks."""
        if rows * updates.shape[2] < updates.numel():
            tail = slice(rows * updates.shape[2], None)
            blocks.view(-1)[tail].copy_(updates.view(-1)[tail])
        if number not in self._split:
            moved = int(blocks.storage_offset()) - int(updates.storage_offset())
            copies = split_at(self._copies[number], updates.shape[2], rows, moved)
            device = updates.device
            self._split[number] = tiles_of(copies, [0] * len(copies), device)
        self.left.append((self._split[number], updates))

    def _make_levels(
        self,
        slices: Sequence[BlockSlice],
        slots: Sequence[tuple[int, int]],
        device: torch.device,
    ) -> None:
        """Tables of the slots of each matrix, whose last tile levels them."""
        entering = self.fill if self._of_batch is None else self.advance
        tiles = np.zeros(len(slots), dtype=np.int64)
        np.add.at(tiles, entering.on_host[:, 9], entering.counts)
        by_matrix: dict[int, list[int]] = {}
        for number, each in enumerate(slices):
            by_matrix.setdefault(each.index, []).append(number)
        table: list[list[int]] = [[] for _ in slots]
        siblings: list[int] = []
        for alike in by_matrix.values():
            of_matrix = int(tiles[alike].sum())
            for slot in alike:
                table[slot] = [*slots[slot], len(siblings), len(alike), of_matrix, alike[0]]
            siblings += alike
        make = functools.partial(torch.tensor, dtype=torch.int64, device=device)
        self.slots = make(table).view(-1, 6)
        self.siblings = make(siblings)
        self._heads = make([alike[0] for alike in by_matrix.values()])
        self.counters = torch.zeros(len(slots), dtype=torch.int32, device=device)
        self.largest = torch.zeros(len(slots), dtype=torch.int32, device=device)
        self.factors = torch.ones(len(slots), 1, 1, dtype=torch.float32, device=device)

    @property
    def levels(self) -> list[Tensor]:
        """What a kernel needs to level slots."""
        return [self.slots, self.siblings, self.largest, self.counters, self.factors]

    def level(self, stacks: Tensor, *, multiplies: bool) -> None:
        """Level the slots, whose magnitudes ranks have agreed on."""
        tensors = [self._heads, self.slots, self.siblings, self.largest, stacks, self.factors]
        launches.launch("level", len(self._heads), tensors, [multiplies], 8 * len(self.slots))

    def _make_partial(self, sphere: Hyperball) -> None:
        device = self.slots.device
        held = np.array(list(self._places), dtype=np.int64)
        counted = np.array([sphere.held.counts(index) for index in self._places], dtype=bool)
        self._partial: dict[int, tuple[Tensor, Tensor]] = {}
        is_cut = self._of_batch is not None and self.parts
        for tiles in self.parts if is_cut else [self.descend]:
            places, firsts = np.unique(tiles.on_host[:, 0], return_index=True)
            counts = np.add.reduceat(tiles.counts, firsts)
            runs = np.column_stack([held[places], tiles.on_host[firsts, 7], counts])
            self._partial[id(tiles)] = (
                torch.from_numpy(runs[counted[places]]).to(device),
                torch.zeros(len(tiles.tiles), 3, dtype=torch.float32, device=device),
            )

    def partial(self, tiles: Tiles) -> Tensor:
        """Sums of tiles, `(tiles, 3)` fp32."""
        return self._partial[id(tiles)][1]

    def add_up(self, tiles: Tiles, sums: Tensor) -> None:
        """Add the sums of tiles to those of matrices, `(3, matrices)` fp32."""
        runs, partial = self._partial[id(tiles)]
        constants = [sums.shape[1], _TERMS]
        launches.launch("total", len(runs), [runs, partial, sums], constants, partial.nbytes)


def _place(view: Tensor) -> range:
    """Bytes of the step's memory that a contiguous view of it has."""
    start = view.storage_offset() * view.itemsize
    return range(start, start + view.nbytes)


def _slots(wave: Wave) -> list[tuple[int, int]]:
    """First element and elements of each slot."""
    found = []
    for stack in wave.route.stacks:
        size = stack.kind.smaller * stack.kind.length
        found += [(stack.start + number * size, size) for number in range(len(stack.slots))]
    return found
