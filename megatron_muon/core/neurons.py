"""NorMuon's tables of a wave for its kernels: strips of neurons, and pieces to normalize."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_muon.core import launches
from megatron_muon.core.copies import Copy
from megatron_muon.core.rules.second_moments import NorMuon
from megatron_muon.core.slices import BlockSlice
from megatron_muon.core.tiles import tiles_of
from megatron_muon.core.wave import Wave

_STRIP, _DEPTH = 64, 32
"""Neurons of a program, and elements of each that it takes at a time."""


class Neurons:
    """NorMuon's tables of a wave, whose matrices this rank owns alone.

    Args:
        firsts: first element of each slot.
    """

    def __init__(
        self,
        wave: Wave,
        firsts: Sequence[int],
        rule: NorMuon,
    ) -> None:
        self._firsts = firsts
        self._moments = rule.moments_of_neurons
        self._strips: list[list[int]] = []
        self._parts: list[list[int]] = []
        self._blocks: list[Copy] = []
        self._of_lanes: list[int] = []
        device = wave.lane.device
        by_matrix: dict[int, list[tuple[int, BlockSlice]]] = {}
        for number, each in enumerate(wave.route.slots):
            by_matrix.setdefault(each.index, []).append((number, each))
        scales = []
        for index, blocks in by_matrix.items():
            blocks.sort(key=lambda found: found[1].block)
            first, lane = len(self._strips), len(self._of_lanes)
            of_blocks = self._add(rule.starts[index], blocks)
            of_matrix = [first, len(self._strips) - first, lane, len(self._of_lanes) - lane]
            for strip in self._strips[first:]:
                strip += of_matrix
            scales += [rule.held.scales[index][rows[0], 0] for rows in of_blocks]
        self._tiles = tiles_of(self._blocks, range(len(self._blocks)), device)
        tables = self._strips, self._parts, self._of_lanes
        self._on_device = [torch.tensor(one, dtype=torch.int64, device=device) for one in tables]
        self._weights = torch.stack(scales).to(device, torch.float32)
        self._sums = torch.zeros(len(self._strips), 2, dtype=torch.float32, device=device)
        self._counters = torch.zeros(len(self._strips), dtype=torch.int32, device=device)

    def _add(self, start: int, blocks: Sequence[tuple[int, BlockSlice]]) -> list[list[int]]:
        """Add a matrix, whose moments begin at `start`; the rows of its blocks."""
        matrix = blocks[0][1].matrix
        rows, cols = matrix.shape
        lines = matrix.split.views(torch.arange(rows).view(-1, 1))
        of_blocks = [lines[each.block].reshape(-1).tolist() for _, each in blocks]
        lane, part = len(self._of_lanes), len(self._parts)
        by_rows = rows >= cols
        for (slot, each), numbers in zip(blocks, of_blocks, strict=True):
            height = len(numbers)
            begin = self._firsts[slot]
            # a stack's rows are columns of a tall block
            across, along = (1, height) if each.is_tall else (cols, 1)
            if not by_rows:
                across, along = along, across
            self._parts.append([begin, across, along, cols if by_rows else height])
            stack_rows, stack_cols = (cols, height) if each.is_tall else (height, cols)
            # the far end are neurons
            down, right = (0, 1) if by_rows == each.is_tall else (1, 0)
            first = len(self._of_lanes) if by_rows else lane
            dims = (1, 0, 0), (stack_rows, stack_cols, down), (stack_cols, 1, right)
            self._blocks.append(Copy(begin, first, dims))
            if by_rows:
                self._cut(each.index, slot, [start + one for one in numbers], [part, 1], cols)
                part += 1
        if not by_rows:
            moments = list(range(start, start + cols))
            self._cut(blocks[0][1].index, blocks[0][0], moments, [part, len(blocks)], rows)
        return of_blocks

    def _cut(
        self, index: int, slot: int, moments: list[int], parts: list[int], elements: int
    ) -> None:
        """Add strips of neurons with these moments; each has so many elements, over these parts."""
        lane = len(self._of_lanes)
        self._of_lanes += moments
        for begin in range(0, len(moments), _STRIP):
            count = min(_STRIP, len(moments) - begin)
            self._strips.append([index, slot, lane + begin, count, *parts, begin, elements])

    def advance(
        self,
        updates: Tensor,
        factors: Tensor,
        groups: Sequence[Tensor],
    ) -> None:
        """Advance moments, and find factors of the updates.

        Args:
            updates: memory of stacks.
            factors: of slots, NaN where an update is skipped.
            groups: the group of each matrix, and the numbers of groups.
        """
        strips, parts, lanes = self._on_device
        tensors = [strips, parts, lanes, updates, factors]
        tensors += [*self._moments, self._sums, self._counters]
        launches.launch(
            "neurons",
            len(strips),
            [*tensors, *groups],
            [_STRIP, _DEPTH],
            self._tiles.numel * updates.itemsize,
        )

    def normalize(self, stacks: Tensor) -> None:
        """Multiply updates in stacks by factors of neurons, and by those of their blocks."""
        tensors = [self._weights, stacks, self._on_device[2], self._moments[2]]
        self._tiles.launch("normalize", tensors, 2 * stacks.itemsize)
