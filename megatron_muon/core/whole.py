"""Whole updates on their owner, in fp32, for rules that change them (NorMuon)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megatron_muon.core.buffers import WHOLE
from megatron_muon.core.layout import Matrix
from megatron_muon.core.methods.method import Work
from megatron_muon.core.slices import BlockSlice


class WholeUpdate:
    """The update of a matrix that this rank orthogonalizes alone.

    Args:
        blocks: views of its slots, as the matrix has them.
        slot: place of one of them in the wave.
        work: memory for a copy, unused if the update is one block of fp32, and for a rule.
    """

    def __init__(
        self,
        index: int,
        matrix: Matrix,
        blocks: Sequence[Tensor],
        slot: int,
        work: Work,
    ) -> None:
        self.index = index
        self.slot = slot
        self._copies: list[tuple[Tensor, Tensor]] = []
        # by columns if the update is one block that lies so
        by_columns = len(blocks) == 1 and not blocks[0].is_contiguous()
        shape = matrix.shape[::-1] if by_columns else matrix.shape
        flats = []
        for number in (0, 1):
            memory = work.take(f"{WHOLE}{number}", shape, torch.float32)
            flats.append(memory.mT if by_columns else memory)
        self.rows, self.squares = flats
        if len(blocks) == 1 and blocks[0].dtype == torch.float32:
            self.rows = blocks[0]
            return
        parts = matrix.split.views(self.rows)
        for part, block in zip(parts, blocks, strict=True):
            self._copies.append((part, block.view(part.shape)))

    def read(self) -> Tensor:
        """The update `(rows, cols)` fp32."""
        for part, block in self._copies:
            part.copy_(block)
        return self.rows

    def write(self) -> None:
        """Put the changed update in the place of its blocks."""
        for part, block in self._copies:
            block.copy_(part)


def whole_updates(
    slots: Sequence[BlockSlice],
    stacks: Iterable[Tensor],
    matrices: Sequence[Matrix],
    work: Work,
) -> list[WholeUpdate]:
    """Whole updates of the matrices of a wave's slots, which lie in stacks."""
    views = [block for stack in stacks for block in stack]
    blocks = defaultdict(list)
    places = {}
    for place in sorted(range(len(slots)), key=lambda place: slots[place].block):
        slot = slots[place]
        view = views[place]
        blocks[slot.index].append(view.mT if slot.is_tall else view)
        places[slot.index] = place
    return [
        WholeUpdate(index, matrices[index], blocks[index], place, work)
        for index, place in places.items()
    ]
