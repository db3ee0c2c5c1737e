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

from megatron_muon.core.copies import Copy

FLAT, TALL = (4, 1024), (64, 64)
"""Rows and columns of a tile, by whether the far end is transposed."""

_MOST_ALIGNED = 16


@dataclass(frozen=True)
class Tiles:
    """Tiles of one shape, for a launch.

    Attributes:
        tiles: the piece of each tile, int32.
        pieces: for each piece nine int64: number of its matrix or slot, near start and row stride,
            far start and stride, rows, columns, elements, first tile.
        slots: the slot of each piece at the far end, int32, where the near end is by matrix.
        tall: columns are rows at the far end.
        aligned: elements of which all starts and strides are multiples.
        numel: of all pieces.
    """

    tiles: Tensor
    pieces: Tensor
    slots: Tensor | None
    tall: bool
    aligned: int
    numel: int


def tiles_of(
    copies: Sequence[Copy],
    numbers: Sequence[int],
    device: torch.device,
    slots: Sequence[int] | None = None,
) -> list[Tiles]:
    """Tiles of copies whose near end is the source; offsets there are from the matrix or lane.

    `numbers` are those of matrices, or slots, by copy; `slots` likewise, if both are needed.
    """
    kinds: dict[bool, list[list[int]]] = {False: [], True: []}
    for place, copy in enumerate(copies):
        (repeats, *steps), (rows, near, far), (cols, one, far_col) = copy.dims
        assert one == 1
        tall = far_col != 1 and cols > 1
        if tall:
            assert far == 1 or rows == 1
            far = far_col
        elif near == far == cols or rows == 1:
            rows, cols = 1, rows * cols
            if steps == [cols, cols]:
                repeats, cols = 1, repeats * cols
        for number in range(repeats):
            source = copy.source + number * steps[0]
            target = copy.target + number * steps[1]
            kinds[tall].append([place, source, near, target, far, rows, cols, rows * cols])
    found = []
    for tall, pieces in kinds.items():
        if pieces:
            found.append(_tiles(np.array(pieces, dtype=np.int64), numbers, slots, tall, device))
    return found


def _tiles(
    pieces: np.ndarray,
    numbers: Sequence[int],
    slots: Sequence[int] | None,
    tall: bool,
    device: torch.device,
) -> Tiles:
    tile_rows, tile_cols = TALL if tall else FLAT
    places = pieces[:, 0].copy()
    pieces[:, 0] = np.asarray(numbers, dtype=np.int64)[places]
    numel = int(pieces[:, 7].sum())
    aligned = _aligned(pieces)
    # runs are as many rows as needed
    is_run = pieces[:, 5] == 1
    if not tall:
        cols = np.where(is_run, tile_cols, pieces[:, 6])
        pieces[:, 5] = np.where(is_run, -(-pieces[:, 6] // tile_cols), pieces[:, 5])
        pieces[:, 2] = np.where(is_run, tile_cols, pieces[:, 2])
        pieces[:, 4] = np.where(is_run, tile_cols, pieces[:, 4])
        pieces[:, 6] = cols
    counts = -(-pieces[:, 5] // tile_rows) * -(-pieces[:, 6] // tile_cols)
    firsts = counts.cumsum() - counts
    table = np.column_stack([pieces, firsts])
    tiles = np.repeat(np.arange(len(pieces), dtype=np.int32), counts)
    of_slots = None
    if slots is not None:
        of_slots = torch.from_numpy(np.asarray(slots, dtype=np.int32)[places]).to(device)
    return Tiles(
        torch.from_numpy(tiles).to(device),
        torch.from_numpy(table).to(device),
        of_slots,
        tall,
        aligned,
        numel,
    )


def _aligned(pieces: np.ndarray) -> int:
    """The largest power of two, up to 16, of which starts and strides are multiples."""
    bits = int(np.bitwise_or.reduce(pieces[:, 1:5], axis=None)) | _MOST_ALIGNED
    return bits & -bits
