"""How every framework cuts a matrix: all ranks' shards by arithmetic, so that no rank has to ask the others.

    Megatron-FSDP      puts parameters end to end in a bucket, pads it, and cuts it into equal pieces of whole rows
    its next version   does so in a DBuffer
    FSDP2, TP          cut by DTensor's placements, on a mesh of one or more dimensions

`check_alike` compares the layout with what this rank holds, and a digest of it over all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement

from megatron_muon.core.errors import UserError
from megatron_muon.core.layout import Layout, Matrix, Rectangle, Shard, as_shards, everywhere
from megatron_muon.core.ranks import Alone, numbers_of_all_ranks

_Ranks = np.ndarray[Any, np.dtype[np.int64]]

_KNOWN = "cuts are known of megatron-core 0.19, megatron-fsdp 0.6 and torch 2.11 to 2.13: install one of these"

_ELSEWHERE = -1
"""In place of a layout's digest: this rank does not hold what the layout says."""


class Places:
    """Who has which piece of every bucket, from `ranks` in the group, `(instances, pieces, parts)`.

    Instances hold the same; parts are those of tensor-parallel ranks, each of which has buckets of its own.
    """

    def __init__(self, ranks: _Ranks) -> None:
        by_part = np.sort(ranks, axis=0).transpose(1, 2, 0)
        self.of_part = [[tuple(holders) for holders in parts] for parts in by_part.tolist()]
        self.of_all = [tuple(holders) for holders in np.sort(by_part.reshape(len(by_part), -1)).tolist()]


def bucket_shards(
    start: int, piece_size: int, part: tuple[int, int], shape: tuple[int, int], places: Places
) -> tuple[Shard, ...]:
    """The shards of a matrix that lies in a bucket; a cut falls between rows.

    Args:
        start: elements before it in the bucket.
        piece_size: elements of each of the bucket's pieces.
        part: shape of what one tensor-parallel rank has of it; the whole where tensor parallelism does not cut it.
        shape: of the whole matrix.
        places: who has which piece.

    Source: megatron-core's `DataParallelBuffer._get_item_slice_in_shard`.
    """
    (rows, cols), shards = part, []
    down, right = (size * (size != of_all) for size, of_all in zip(part, shape, strict=True))  # from part to part
    for piece in range(start // piece_size, (start + rows * cols - 1) // piece_size + 1):
        first = max(piece * piece_size - start, 0) // cols
        end = min((piece + 1) * piece_size - start, rows * cols) // cols
        if end > first:
            parts = places.of_part[piece] if down or right else [places.of_all[piece]]
            for at, (rank, *replicas) in enumerate(parts):
                shards.append(Shard(rank, first + at * down, end - first, at * right, cols, tuple(replicas)))
    return tuple(sorted(shards, key=lambda shard: shard.rank))


class BufferCut:
    """The shards of parameters that lie in one Megatron-FSDP model's ParamAndGradBuffer, over the ranks of a group."""

    def __init__(self, buffer: Any, group: dist.ProcessGroup) -> None:
        self._buffer = buffer
        self._ranks = dist.get_process_group_ranks(group)
        self._places: dict[bool, Places] = {}

    def shards(self, parameter: Any, shape: tuple[int, int]) -> tuple[Shard, ...]:
        """The shards of an optimizer's parameter, which is a matrix of this shape over the ranks of the group."""
        if self._buffer.ddp_config.data_parallel_sharding_strategy == "no_shard":
            return everywhere(shape, len(self._ranks))
        original = parameter.orig_param
        bucket = self._buffer.parameter_groups[self._buffer.param_to_param_group[original]]
        data = bucket.main_weight_buffer or bucket.model_weight_buffer
        if bucket.is_expert_param not in self._places:
            self._places[bucket.is_expert_param] = self._find(bucket.is_expert_param)
        item = data.item_index_map[data.param_idx[original]]
        part = math.prod(item.shape[:-1]), item.shape[-1]
        piece_size = data.bucket_index.size // data.dp_world_size
        return bucket_shards(item.global_data_index, piece_size, part, shape, self._places[bucket.is_expert_param])

    def _find(self, is_expert: bool) -> Places:
        """Where the ranks of the group are on the mesh of data- and tensor-parallel ranks.

        Instances that share their state cut a bucket over all their ranks, an instance's pieces one behind the other
        (FSDPDistributedIndex.get_logical_hybrid_fsdp_rank).
        """
        index = self._buffer.dist_index
        axes = [name for name in (index.dp_outer_dim, index.dp_shard_dim, index.tp_dim) if name is not None]
        ranks = index.get_submesh(axes, is_expert_parallel=is_expert).mesh.numpy()
        ranks = ranks if index.dp_outer_dim is not None else ranks[None]
        ranks = ranks if index.tp_dim is not None else ranks[..., None]
        if index.hsdp_outer_dp_shard:
            ranks = ranks.swapaxes(0, 1).reshape(1, -1, ranks.shape[2])
        # A group of data-parallel ranks alone has one part.
        ranks = ranks[..., np.isin(ranks, self._ranks).all(axis=(0, 1))]
        return Places(np.searchsorted(self._ranks, ranks))


def dbuffer_shards(buffer: Any, place: int, shape: tuple[int, int], group: dist.ProcessGroup) -> tuple[Shard, ...]:
    """The shards of the matrix at `place` of a DBuffer, on a mesh of all the group's ranks.

    Source: `GlobalLayout.get_local_range`: of several axes of the mesh that cut the buffer, the last one cuts first.
    """
    ranks = np.searchsorted(dist.get_process_group_ranks(group), buffer.mesh.mesh.numpy())
    flat = sum(type(placement).__name__ == "Flat" for placement in buffer.placements)  # the last ones
    instances = math.prod(ranks.shape[: ranks.ndim - flat])
    pieces = ranks.reshape(instances, *ranks.shape[ranks.ndim - flat :])
    pieces = pieces.transpose(0, *range(flat, 0, -1)).reshape(instances, -1, 1)
    start, piece_size = buffer.layout.tensor_to_offset[place], buffer.layout.size // pieces.shape[1]
    return bucket_shards(start, piece_size, shape, shape, Places(pieces))


def dtensor_shards(
    shape: tuple[int, int], mesh: DeviceMesh, placements: Sequence[Placement], group: dist.ProcessGroup
) -> tuple[Shard, ...]:
    """The shards of a matrix that DTensor's placements cut on a mesh of all the group's ranks."""
    ranks = np.searchsorted(dist.get_process_group_ranks(group), mesh.mesh.numpy())
    return placed_shards(shape, ranks, placements)


def placed_shards(shape: tuple[int, int], ranks: _Ranks, placements: Sequence[Placement]) -> tuple[Shard, ...]:
    """The shards of a matrix that DTensor's placements cut on a mesh of `ranks`, each its place in the group."""
    rectangles = [(0, 0, 0, 0)] * ranks.size
    for place, rank in np.ndenumerate(ranks):
        sizes, offsets = _compute_local_shape_and_global_offset(shape, ranks.shape, list(place), placements)
        rectangles[int(rank)] = (offsets[0], sizes[0], offsets[1], sizes[1])
    return as_shards(rectangles)


def check_alike(layout: Layout, mine: Sequence[Rectangle], group: dist.ProcessGroup | Alone, *, remedy: str) -> None:
    """Check that this rank holds, in `mine`, what the layout says, and that all ranks have the same. Collective.

    Raises:
        UserError: on every rank where one rank holds something else, or has another layout; the message names the first
            matrix and both sides, and ends with `remedy`.
    """
    misfit = _misfit(layout, mine, group.rank())
    digests = [found for (found,) in numbers_of_all_ranks([_ELSEWHERE if misfit else layout.digest()], group)]
    if misfit:
        raise UserError(misfit)
    if _ELSEWHERE in digests:
        rank = digests.index(_ELSEWHERE)
        raise UserError(f"rank {rank} of the group holds other rows than the layout gives it; see that rank's message")
    if (other := next((rank for rank, found in enumerate(digests) if found != digests[0]), None)) is not None:
        assert not isinstance(group, Alone)
        first: list[Any] = [layout.matrices]  # Python objects, only to say what is wrong
        dist.broadcast_object_list(first, group=group, group_src=0)
        second: list[Any] = [layout.matrices]
        dist.broadcast_object_list(second, group=group, group_src=other)
        raise UserError(f"{_difference(first[0], second[0], other)}; {remedy}")


def _misfit(layout: Layout, mine: Sequence[Rectangle], rank: int) -> str:
    """The first matrix of which this rank holds something else than the layout says; empty where there is none."""
    for matrix, shard, rectangle in zip(layout.matrices, layout.held(rank), mine, strict=True):
        cut = shard.row_start, shard.rows, shard.col_start, shard.cols
        if cut != rectangle and (shard.numel or rectangle[1] * rectangle[3]):
            return (
                f"{matrix.name}: rank {rank} of the group holds {_shown(rectangle)}, where the framework's cut as this "
                f"package knows it gives {_shown(cut)}; {_KNOWN}"
            )
    return ""


def _shown(rectangle: Rectangle) -> str:
    row, rows, col, cols = rectangle
    return f"rows {row} to {row + rows - 1}, columns {col} to {col + cols - 1}" if rows and cols else "no rows"


def _difference(first: Sequence[Matrix], second: Sequence[Matrix], other: int) -> str:
    if len(first) != len(second):
        return f"rank 0 gives {len(first)} matrices and rank {other} gives {len(second)}"
    one, two = next(pair for pair in zip(first, second, strict=True) if pair[0] != pair[1])
    if (one.name, one.shape) != (two.name, two.shape):
        return f"rank 0 gives {one.name} {one.shape} where rank {other} gives {two.name} {two.shape}"
    return f"{one.name} has other blocks, Newton-Schulz steps or shards on rank {other} than on rank 0"
