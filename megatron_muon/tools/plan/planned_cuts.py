"""Which rows of a matrix each rank will hold, by each framework's cutting rule, without ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.distributed.tensor import _utils as dtensor_utils
from torch.distributed.tensor.placement_types import Placement

from megatron_muon.core.layout import Shard, Shards
from megatron_muon.matrices.cuts import Box, shards_of
from megatron_muon.matrices.views import View

Ranks = np.ndarray[Any, np.dtype[np.int64]]


class PieceHolders:
    """The holders of every piece of a bucket.

    `ranks` in the group are `(instances, pieces, parts)`: instances hold the same; parts are
    tensor-parallel ranks, each of which has buckets of its own.

    Attributes:
        of_part: by piece and part, the ranks that hold it.
        of_all: by piece, the ranks that hold it if tensor parallelism does not cut it.
    """

    def __init__(self, ranks: Ranks) -> None:
        by_part = np.sort(ranks, axis=0).transpose(1, 2, 0)
        by_piece = np.sort(by_part.reshape(len(by_part), -1))
        self.of_part = [list(map(tuple, parts)) for parts in by_part.tolist()]
        self.of_all = list(map(tuple, by_piece.tolist()))


def bucket_shards(
    start: int,
    piece_size: int,
    part: tuple[int, int],
    shape: tuple[int, int],
    held: PieceHolders,
) -> Shards:
    """The shards of a matrix in a bucket; a cut falls between rows.

    Args:
        start: elements before it in the bucket.
        piece_size: elements of each of the bucket's pieces.
        part: shape of a tensor-parallel rank's part; the whole if tensor parallelism does not cut
            it.
        shape: of the whole matrix.

    Source: megatron-core's `DataParallelBuffer._get_item_slice_in_shard`.
    """
    rows, cols = part
    numel = rows * cols
    shards = []
    last_piece = (start + numel - 1) // piece_size
    for piece in range(start // piece_size, last_piece + 1):
        offset = piece * piece_size - start
        first = max(offset, 0) // cols
        end = min(offset + piece_size, numel) // cols
        if end <= first:
            continue
        parts = [held.of_all[piece]] if part == shape else held.of_part[piece]
        for number, holders in enumerate(parts):
            row = first if rows == shape[0] else first + number * rows
            col = 0 if cols == shape[1] else number * cols
            rank, *replicas = holders
            shards.append(Shard(rank, row, end - first, col, cols, tuple(replicas)))
    return Shards(sorted(shards, key=lambda shard: shard.rank))


def placed_shards(view: View, ranks: Ranks, placements: Sequence[Placement]) -> list[Shards]:
    """The shards of each matrix of a parameter that placements cut on a mesh of `ranks`.

    Each rank is given by its number in the group.
    """
    boxes: dict[int, Box] = {}
    for coordinate, rank in np.ndenumerate(ranks):
        sizes, offsets = dtensor_utils._compute_local_shape_and_global_offset(
            view.shape, ranks.shape, list(coordinate), placements
        )
        boxes[int(rank)] = offsets, sizes
    return shards_of(view, dict(sorted(boxes.items())))
