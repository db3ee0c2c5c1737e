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

SHAPES = (32, 128), (4, 1024)
"""Rows and columns of tiles; a launch has those of which fewer cover its pieces."""

FIELDS = 9
"""Of a piece: number of its matrix or slot, near start and row stride, far start and stride, rows,
columns, first tile, 1 if columns are rows at the far end, 2 if there is no such end."""

NOWHERE = -1
"""The target of a copy without a far end."""

_MOST_ALIGNED = 16


@dataclass(frozen=True)
class Tiles:
    """Tiles of one shape, for a launch.

    Attributes:
        tiles: the piece of each tile, int32.
        pieces: fields of each piece, int64 `(pieces, FIELDS)`.
        slots: the slot of each piece at the far end, int64, where the near end is by matrix.
        tiles_on_host, slots_on_host: the same on the host.
        shape: rows and columns of a tile.
        aligned: elements of which starts, strides and columns are multiples, where the far end has
            rows; `tall_aligned` those of which starts, strides and rows are, where it has columns.
        numel: of all pieces.
        runs: matrix, first tile and number of tiles of each matrix, int64, on the host.
    """

    tiles: Tensor
    pieces: Tensor
    slots: Tensor | None
    tiles_on_host: np.ndarray
    slots_on_host: np.ndarray
    shape: tuple[int, int]
    aligned: int
    tall_aligned: int
    numel: int
    runs: np.ndarray


def tiles_of(
    copies: Sequence[Copy],
    numbers: Sequence[int],
    device: torch.device,
    slots: Sequence[int] | None = None,
) -> Tiles | None:
    """Tiles of copies whose near end is the source; offsets there are from the matrix or lane.

    `numbers` are those of matrices, or slots, by copy; `slots` likewise, if both are needed. A copy
    to `NOWHERE` has no far end. None for no copies.
    """
    rows_of = []
    for place, copy in enumerate(copies):
        (repeats, *steps), (rows, near, far), (cols, _, far_col) = copy.dims
        is_tall = far_col != 1 and cols > 1
        stride = far_col if is_tall else far
        for number in range(repeats):
            source = copy.source + number * steps[0]
            target = copy.target + number * steps[1]
            kind = 2 if copy.target == NOWHERE else int(is_tall)
            rows_of.append([place, source, near, max(0, target), stride, rows, cols, 0, kind])
    if not rows_of:
        return None
    pieces = np.array(rows_of, dtype=np.int64)
    places = pieces[:, 0].copy()
    pieces[:, 0] = np.asarray(numbers, dtype=np.int64)[places]
    order = np.argsort(pieces[:, 0], kind="stable")
    pieces, places = pieces[order], places[order]
    counts, shape = min(
        ((_counts(pieces, shape), shape) for shape in SHAPES), key=lambda found: found[0].sum()
    )
    pieces[:, 7] = counts.cumsum() - counts
    tiles = tiled(counts)
    of_slots = np.asarray(slots, dtype=np.int64)[places] if slots else np.zeros(0, dtype=np.int64)
    return Tiles(
        torch.from_numpy(tiles).to(device),
        torch.from_numpy(pieces).to(device),
        torch.from_numpy(of_slots).to(device) if slots else None,
        tiles,
        of_slots,
        shape,
        *_aligned(pieces),
        int((pieces[:, 5] * pieces[:, 6]).sum()),
        _runs(pieces, counts),
    )


def uncovered(copies: Sequence[Copy], rows: int, cols: int) -> list[Copy]:
    """Copies to `NOWHERE` of the elements of a shard `(rows, cols)` that are in no copy from there."""
    boxes = []
    for copy in copies:
        (repeats, step, _), (height, *_), (width, *_) = copy.dims
        for number in range(repeats):
            row, col = divmod(copy.source + number * step, max(1, cols))
            boxes.append((row, row + height, col, col + width))
    row_cuts = sorted({0, rows}.union(*(box[:2] for box in boxes)))
    col_cuts = sorted({0, cols}.union(*(box[2:] for box in boxes)))
    is_free = np.ones((len(row_cuts) - 1, len(col_cuts) - 1), dtype=bool)
    for top, bottom, left, right in boxes:
        down = slice(row_cuts.index(top), row_cuts.index(bottom))
        is_free[down, col_cuts.index(left) : col_cuts.index(right)] = False
    found = []
    for place, number in np.argwhere(is_free).tolist():
        row, col = row_cuts[place], col_cuts[number]
        size = row_cuts[place + 1] - row, col_cuts[number + 1] - col
        dims = ((1, 0, 0), (size[0], cols, 1), (size[1], 1, 1))
        found.append(Copy(row * cols + col, NOWHERE, dims))
    return found


def split_at(copies: Sequence[Copy], length: int, row: int, moved: int) -> list[Copy]:
    """Copies whose targets have rows of a length; those from a row on are moved by so many elements."""
    found = []
    for copy in copies:
        (repeats, *steps), (rows, near, far), (cols, one, far_col) = copy.dims
        for number in range(repeats):
            source, target = copy.source + number * steps[0], copy.target + number * steps[1]
            before = max(0, row - target // length)
            if cols > 1 and far_col >= length:  # columns are the target's rows
                before = min(before, cols)
                parts = [(rows, before), (rows, cols - before)]
                at = source + before, target + before * far_col
            elif rows > 1 and far >= length:
                before = min(before, rows)
                parts = [(before, cols), (rows - before, cols)]
                at = source + before * near, target + before * far
            else:  # all in one row
                parts = [(rows if before else 0, cols), (0 if before else rows, cols)]
                at = source, target
            ends = (source, target), (at[0], at[1] + moved)
            for (height, width), (start, end) in zip(parts, ends, strict=True):
                if height and width:
                    dims = ((1, 0, 0), (height, near, far), (width, one, far_col))
                    found.append(Copy(start, end, dims))
    return found


def tiled(counts: np.ndarray) -> np.ndarray:
    """The number of the piece of each tile, int32, of so many tiles each."""
    return np.repeat(np.arange(len(counts), dtype=np.int32), counts)


def _counts(pieces: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    rows, cols = shape
    found: np.ndarray = -(-pieces[:, 5] // rows) * -(-pieces[:, 6] // cols)
    return found


def _runs(pieces: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Matrix, first tile and tiles of consecutive pieces of a matrix."""
    numbers, firsts = np.unique(pieces[:, 0], return_index=True)
    tiles = np.add.reduceat(counts, firsts)
    return np.column_stack([numbers, pieces[firsts, 7], tiles])


def _aligned(pieces: np.ndarray) -> tuple[int, int]:
    """`Tiles.aligned` and `tall_aligned`."""
    is_tall, is_flat = pieces[:, 8] == 1, pieces[:, 8] == 0
    flat = multiple_of(pieces[:, [1, 2, 6]], pieces[is_flat][:, [3, 4]])
    if not is_tall.any():
        return flat, _MOST_ALIGNED
    return flat, multiple_of(pieces[is_tall][:, [3, 4]], pieces[:, 5])


def multiple_of(*numbers: np.ndarray) -> int:
    """The largest power of two, up to 16, that divides all of these."""
    flat = np.concatenate([one.ravel() for one in numbers])
    bits = int(np.bitwise_or.reduce(flat)) | _MOST_ALIGNED
    return bits & -bits
