"""Who holds which rows of a matrix that lies in a bucket of Megatron-FSDP.

Megatron-FSDP puts parameters end to end in a bucket, pads it, and cuts it into equal pieces of
whole rows. The model that wraps them has noted where each part begins. Only the names of attributes
are known here, so it is not imported.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron_muon.core.layout import Shard, everywhere
from megatron_muon.core.user_errors import SettingError, UserError

Ranks = np.ndarray[Any, np.dtype[np.int64]]

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""The first element that a rank holds of a parameter, in each dimension, and how many."""


def ranks_in(mesh: Any, group: Any) -> Ranks:
    """The ranks of a mesh as numbers in a group of all of them."""
    ranks: Ranks = mesh.mesh.numpy()
    return np.searchsorted(dist.get_process_group_ranks(group), ranks)


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
) -> tuple[Shard, ...]:
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
    return tuple(sorted(shards, key=lambda shard: shard.rank))


class BufferCut:
    """The shards of parameters in one Megatron-FSDP model's ParamAndGradBuffer."""

    def __init__(self, buffer: Any, group: dist.ProcessGroup) -> None:
        self._buffer = buffer
        self._group = group
        self._holders: dict[bool, PieceHolders] = {}

    def shards(self, parameter: Any, shape: tuple[int, int]) -> tuple[Shard, ...]:
        """The shards of an optimizer's parameter, a matrix of this shape over the group."""
        if self._buffer.ddp_config.data_parallel_sharding_strategy == "no_shard":
            return everywhere(shape, self._group.size())
        original = parameter.orig_param
        number = self._buffer.param_to_param_group[original]
        bucket = self._buffer.parameter_groups[number]
        data = bucket.main_weight_buffer or bucket.model_weight_buffer
        is_expert = bucket.is_expert_param
        if is_expert not in self._holders:
            self._holders[is_expert] = self._find_holders(is_expert)
        item = data.item_index_map[data.param_idx[original]]
        part = math.prod(item.shape[:-1]), item.shape[-1]
        piece_size = data.bucket_index.size // data.dp_world_size
        holders = self._holders[is_expert]
        return bucket_shards(item.global_data_index, piece_size, part, shape, holders)

    def _find_holders(self, is_expert: bool) -> PieceHolders:
        """The group's ranks on the mesh of data- and tensor-parallel ranks.

        Instances that share their state cut a bucket over all their ranks, an instance's pieces one
        after the other (FSDPDistributedIndex.get_logical_hybrid_fsdp_rank).
        """
        index = self._buffer.dist_index
        axes = [index.dp_outer_dim, index.dp_shard_dim, index.tp_dim]
        axes = [axis for axis in axes if axis is not None]
        ranks = index.get_submesh(axes, is_expert_parallel=is_expert).mesh.numpy()
        if index.dp_outer_dim is None:
            ranks = ranks[None]
        if index.tp_dim is None:
            ranks = ranks[..., None]
        if index.hsdp_outer_dp_shard:
            ranks = ranks.swapaxes(0, 1).reshape(1, -1, ranks.shape[2])
        members = dist.get_process_group_ranks(self._group)
        # A group of data-parallel ranks alone has one part.
        is_member = np.isin(ranks, members)
        ranks = ranks[..., is_member.all(axis=(0, 1))]
        return PieceHolders(np.searchsorted(members, ranks))


def noted_part(buffer: Any, name: str) -> tuple[Sequence[int], Sequence[int]]:
    """Offsets and sizes of this rank's part of a parameter, which are noted for checkpoints.

    (update_uneven_dtensor_chunk_metadata, on the tensor from which the optimizer's parameter is
    made)
    """
    tensor = buffer.dist_main_weight[name]
    if not hasattr(tensor._local_tensor, "__create_chunk_list__"):  # no_shard: replicas
        return (0,) * tensor.ndim, tuple(tensor.shape)
    noted = tensor._local_tensor.__create_chunk_list__()[0]
    return noted.offsets, noted.sizes


def buffer_box(name: str, parameter: Any) -> Box:
    """This rank's part of a parameter in a ParamAndGradBuffer."""
    model = parameter._megatron_fsdp_model
    if getattr(model.ddp_config, "megatron_fsdp_use_decoupled_grad", False):
        raise UserError(
            f"{name}: Megatron-FSDP keeps its gradient apart; leave out use_decoupled_grad=True"
        )
    buffer = model.param_and_grad_buffer
    offsets, sizes = noted_part(buffer, buffer.param_to_name[parameter.orig_param])
    if parameter.ndim > 2 and tuple(sizes[1:]) != tuple(parameter.shape[1:]):
        raise SettingError(
            "expert_tensor_parallel_size",
            math.prod(parameter.shape[1:]) // math.prod(sizes[1:]),
            f"cuts the stack of experts {name} {tuple(parameter.shape)}, which is not supported"
            " with Muon",
            "use 1, or name the stack in {muon_exclude}",
        )
    return tuple(offsets), tuple(sizes)
