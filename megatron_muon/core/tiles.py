"""Copies as tables for kernels: pieces of matrices, cut into tiles of one size for each program.

A piece has a near end, rows whose elements follow each other, at the address of a matrix or in a
lane, and a far end in a flat tensor; in stacks of tall blocks columns are rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_muon.core import launches
from megatron_muon.core.copies import NOWHERE, Copy

SHAPES = (32, 128), (4, 1024)
"""Rows and columns of tiles; a launch has those of which fewer cover its pieces."""

FIELDS = 10
"""Of a piece: number of its matrix, slot or block, near start and row stride, far start and
stride, rows, columns, first tile, 1 if columns are rows at the far end, 2 if there is no such end,
slot there."""

_MOST_ALIGNED = 16


@dataclass(frozen=True)
class Tiles:
    """Tiles of one shape, for a launch.

    Attributes:
        tiles: the piece of each tile, int32.
        pieces: fields of each piece, int64 `(pieces, FIELDS)`.
        on_host: the same on the host.
        counts: tiles of each piece, on the host.
        shape: rows and columns of a tile.
        aligned: elements of which starts, strides and columns are multiples, where the far end has
            rows; `tall_aligned` those of which starts, strides and rows are, where it has columns.
        numel: of all pieces.
    """

    tiles: Tensor
    pieces: Tensor
    on_host: np.ndarray
    counts: np.ndarray
    shape: tuple[int, int]
    aligned: int
    tall_aligned: int
    numel: int

    def launch(
        self,
        kernel: str,
        tensors: Sequence[Tensor],
        element_bytes: int,
        flags: Sequence[int] = (),
        aligned: int = _MOST_ALIGNED,
    ) -> None:
        """Launch a kernel on tiles, which moves so many bytes for an element."""
        constants = [*map(int, flags), *self.shape, min(aligned, self.aligned), self.tall_aligned]
        given = [self.tiles, self.pieces, *tensors]
        launches.launch(kernel, len(self.tiles), given, constants, self.numel * element_bytes)


def tiles_of(
    copies: Sequence[Copy],
    numbers: Sequence[int],
    device: torch.device,
    slots: Sequence[int] | None = None,
) -> Tiles:
    """Tiles of copies whose near end is the source; offsets there are from the matrix or lane.

    `numbers` are those of matrices, or slots, by copy; `slots` likewise, if both are needed. A copy
    to `NOWHERE` has no far end.
    """
    rows_of = []
    for copy, of, slot in zip(copies, numbers, slots or numbers, strict=True):
        (repeats, *steps), (rows, near, far), (cols, _, far_col) = copy.dims
        is_tall = far_col != 1 and cols > 1
        stride = far_col if is_tall else far
        for number in range(repeats):
            source = copy.source + number * steps[0]
            target = copy.target + number * steps[1]
            kind = 2 if copy.target == NOWHERE else int(is_tall)
            ends = [source, near, max(0, target), stride]
            rows_of.append([of, *ends, rows, cols, 0, kind, slot])
    pieces = np.array(rows_of, dtype=np.int64).reshape(-1, FIELDS)
    pieces = pieces[np.argsort(pieces[:, 0], kind="stable")]
    height, width = pieces[:, 5], pieces[:, 6]
    found = [-(-height // rows) * -(-width // cols) for rows, cols in SHAPES]
    counts, shape = min(zip(found, SHAPES, strict=True), key=lambda each: each[0].sum())
    pieces[:, 7] = counts.cumsum() - counts
    tiles = np.repeat(np.arange(len(pieces), dtype=np.int32), counts)
    return Tiles(
        torch.from_numpy(tiles).to(device),
        torch.from_numpy(pieces).to(device),
        pieces,
        counts,
        shape,
        *_aligned(pieces),
        int((height * width).sum()),
    )


def split_at(copies: Sequence[Copy], length: int, row: int, moved: int) -> list[Copy]:
    """Copies whose targets have rows of a length; those from a row on are moved by so many elements."""
    found = []
    for copy in copies:
        (repeats, *steps), *sides = copy.dims
        # columns may be the target's rows; a piece may be in one of these
        across = [side for side in (1, 0) if sides[side][0] > 1 and sides[side][2] >= length]
        side = across[0] if across else 0
        size, near, far = sides[side]
        for number in range(repeats):
            source, target = copy.source + number * steps[0], copy.target + number * steps[1]
            before = min(max(0, row - target // length), size)
            if before and not across:
                before = size
            for first, count, by in ((0, before, 0), (before, size - before, moved)):
                if count:
                    sides[side] = count, near, far
                    ends = source + first * near, target + first * far + by
                    found.append(Copy(*ends, ((1, 0, 0), *sides)))
    return found


def _aligned(pieces: np.ndarray) -> tuple[int, int]:
    """`Tiles.aligned` and `tall_aligned`."""
    is_tall = pieces[:, 8] == 1
    is_flat = pieces[:, 8] == 0
    flat = _multiple_of(pieces[:, [1, 2, 6]], pieces[is_flat][:, [3, 4]])
    if not is_tall.any():
        return flat, _MOST_ALIGNED
    return flat, _multiple_of(pieces[is_tall][:, [3, 4]], pieces[:, 5])


def _multiple_of(*numbers: np.ndarray) -> int:
    """The largest power of two, up to 16, that divides all of these."""
    flat = np.concatenate([one.ravel() for one in numbers])
    bits = int(np.bitwise_or.reduce(flat)) | _MOST_ALIGNED
    return bits & -bits
