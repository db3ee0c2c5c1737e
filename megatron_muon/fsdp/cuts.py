"""Who holds which rows of a matrix, in each way in which a model is sharded.

    plain tensors      one process, DDP: every rank holds all rows
    FSDP2, TP, EP      DTensors cut by their placements, on a mesh of one or more dimensions
    Megatron-FSDP      puts parameters end to end in a bucket, pads it, and cuts it into equal pieces of whole rows; the
                       model that wraps them has noted where each part begins
    its next version   does so in a DBuffer, which knows its own range

`box_of` asks this rank's parameter; all ranks' shards come by arithmetic, so that no rank has to
ask the others. `check_alike` compares the two, and a digest of the layout over all ranks. Only the
names of attributes are known here, so none of these frameworks is imported.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import _utils as of_dtensors
from torch.distributed.tensor.placement_types import Partial, Placement

from megatron_muon.core.errors import UserError
from megatron_muon.core.layout import (
    Layout,
    LayoutError,
    Matrix,
    Rectangle,
    Shard,
    as_shards,
    everywhere,
)
from megatron_muon.core.ranks import Alone, group_among, numbers_of_all_ranks
from megatron_muon.fsdp.views import View

_Ranks = np.ndarray[Any, np.dtype[np.int64]]

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""The first element of what a rank holds of a parameter, in each dimension, and how many."""

_KNOWN = (
    "cuts are known of megatron-core 0.19, megatron-fsdp 0.6 and torch 2.11 to 2.13: install one of"
    " these"
)

_ELSEWHERE = -1
"""In place of a layout's digest: this rank does not hold what the layout says."""


def layout_of(
    matrices: Mapping[torch.Tensor, Sequence[Matrix]],
    group: dist.ProcessGroup | Alone,
    *,
    remedy: str,
    views: Mapping[torch.Tensor, View] | None = None,
) -> tuple[Layout, list[Rectangle]]:
    """Who holds which rectangle of the matrices of parameters, and what this rank holds of each. Collective.

    Args:
        matrices: of each parameter as Muon sees them, still without shards. Without a view it is
            one, a stack too, as one below the other. The shape is whole over the ranks of the
            group; where tensor parallelism cuts a parameter further, that of a part.
        group: the ranks of the layout. Those that hold the same rectangle are replicas.
        remedy: ends the message where ranks differ.
        views: how parameters are read that are not matrices themselves.

    Raises:
        UserError: a rank's parameters are others than those of the first, or cut in a way that is
            not known here.
    """

    @functools.cache
    def buffer_cut(buffer: Any) -> BufferCut:
        assert not isinstance(group, Alone)
        return BufferCut(buffer, group)

    @functools.cache  # where shape and placements are the same, so is the cut
    def placed(
        view: View, mesh: DeviceMesh, placements: tuple[Placement, ...]
    ) -> list[tuple[Shard, ...]]:
        found = placed_shards(view, _ranks_of(mesh, group), placements)
        for shards in {id(shards): shards for shards in found}.values():
            Matrix("", view.matrix, shards).check_tiling()
        return found

    def shards_of(name: str, parameter: Any, view: View) -> list[tuple[Shard, ...]]:
        if isinstance(group, Alone) or not isinstance(parameter, DTensor):
            return [everywhere(view.matrix, group.size())] * view.count
        folded = view.shape[0], math.prod(view.shape[1:])  # as Megatron-FSDP's buffers have it
        if (model := getattr(parameter, "_megatron_fsdp_model", None)) is not None:
            return _unfolded(
                view,
                buffer_cut(model.param_and_grad_buffer).shards(parameter, folded),
                group.size(),
            )
        if (members := getattr(parameter, "_mfsdp_parameter_group", None)) is not None:
            place = _place_within(members, parameter)
            return _unfolded(
                view, dbuffer_shards(members.main_weight, place, folded, group), group.size()
            )
        try:
            return placed(view, parameter.device_mesh, tuple(parameter.placements))
        except LayoutError:
            raise UserError(
                f"{name} {view.shape} is sharded as {parameter.placements}, which does not give"
                " each rank one block of it; use Shard, or _StridedShard as fully_shard makes it"
                " beside another dimension of the mesh"
            ) from None

    mine, cut = [], []
    for parameter, several in matrices.items():
        name, view = _parameter_of(several[0].name), (views or {}).get(parameter)
        offsets, sizes = box_of(name, parameter)
        if view is None:
            (rows, cols), inner = several[0].shape, math.prod(sizes[1:-1])
            # A part begins at a multiple of its size, so the remainder is the place within the
            # part.
            mine.append(
                (offsets[0] * inner % rows, sizes[0] * inner, offsets[-1] % cols, sizes[-1])
            )
            view = View(several[0].shape)
        else:
            if view.flat and sizes[1:] != view.shape[1:]:
                raise UserError(
                    f"{name} {view.shape} is sharded along a dimension that flatten= makes columns,"
                    f" of which this rank has {sizes}; shard its first dimension, or leave it out"
                    " of flatten="
                )
            mine += view.rectangles(offsets, sizes)
        cut += [
            replace(one, shards=of)
            for one, of in zip(several, shards_of(name, parameter, view), strict=True)
        ]
    layout = Layout(group.size(), tuple(cut))
    check_alike(layout, mine, group, remedy=remedy)
    return layout, mine


def _parameter_of(matrix: str) -> str:
    """The name of the parameter of which this is the first matrix."""
    return re.sub(r"\[0(,0)*\]$", "", matrix)


def ranks_of(name: str, parameter: torch.Tensor) -> tuple[int, ...]:
    """The ranks of a parameter's mesh, ascending; none for a plain tensor."""
    if not isinstance(parameter, DTensor):
        return ()
    if parameter.device_mesh.get_coordinate() is None:
        raise UserError(
            f"{name} is on {parameter.device_mesh}, which rank {dist.get_rank()} is not in; give"
            " Muon on each rank only parameters whose mesh has that rank"
        )
    return tuple(sorted(parameter.device_mesh.mesh.flatten().tolist()))


def group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The process group of all ranks of a mesh. Collective over them where it has to be made."""
    if mesh.ndim == 1:
        return mesh.get_group()
    ranks = sorted(mesh.mesh.flatten().tolist())
    assert dist.group.WORLD is not None
    return (
        dist.group.WORLD
        if len(ranks) == dist.get_world_size()
        else group_among(ranks, dist.group.WORLD)
    )


def box_of(name: str, parameter: torch.Tensor) -> Box:
    """What this rank holds of a parameter. A UserError where it is sharded in a way that Muon does not take."""
    if not isinstance(parameter, DTensor):
        return (0,) * parameter.ndim, tuple(parameter.shape)
    _check_placements(name, parameter)
    offsets: Sequence[int]
    sizes: Sequence[int] = parameter._local_tensor.shape
    if (model := getattr(parameter, "_megatron_fsdp_model", None)) is not None:
        if getattr(model.ddp_config, "megatron_fsdp_use_decoupled_grad", False):
            raise UserError(
                f"{name}: Megatron-FSDP keeps its gradient apart; leave out use_decoupled_grad=True"
            )
        buffer = model.param_and_grad_buffer
        offsets, sizes = noted_part(buffer, buffer.param_to_name[cast(Any, parameter).orig_param])
        if parameter.ndim > 2 and tuple(sizes[1:]) != tuple(parameter.shape[1:]):
            raise UserError(
                f"{name}: a stack of experts {tuple(parameter.shape)} that tensor parallelism cuts"
                " is not supported with Muon; use --expert-tensor-parallel-size 1, or"
                " --muon-exclude"
            )
    elif (group := getattr(parameter, "_mfsdp_parameter_group", None)) is not None:
        owned = group.main_weight._get_owned_range(_place_within(group, parameter))
        first = (
            0 if owned is None else owned.tensor_relative_offset // math.prod(parameter.shape[1:])
        )
        offsets = (first, *(0 for _ in sizes[1:]))
    else:
        mesh, placements = parameter.device_mesh, parameter.placements
        _, offsets = of_dtensors.compute_local_shape_and_global_offset(
            parameter.shape, mesh, placements
        )
    return tuple(offsets), tuple(sizes)


def noted_part(buffer: Any, name: str) -> tuple[Sequence[int], Sequence[int]]:
    """Offsets and sizes of this rank's part of a Megatron-FSDP parameter, which are noted for checkpoints.

    (update_uneven_dtensor_chunk_metadata, on the tensor from which the optimizer's parameter is
    made)
    """
    tensor = buffer.dist_main_weight[name]
    # no_shard: replicas of the whole
    if not hasattr(tensor._local_tensor, "__create_chunk_list__"):
        return (0,) * tensor.ndim, tuple(tensor.shape)
    noted = tensor._local_tensor.__create_chunk_list__()[0]
    return noted.offsets, noted.sizes


def _place_within(group: Any, parameter: torch.Tensor) -> int:
    return next(place for place, each in enumerate(group.sharded_parameters) if each is parameter)


def _check_placements(name: str, parameter: DTensor) -> None:
    """Refuse, by a UserError, DTensors of unreduced values, and those that lie on another device than their mesh."""
    placements = ", ".join(map(str, parameter.placements))
    device, mesh = parameter.device.type, parameter.device_mesh.device_type
    if any(isinstance(placement, Partial) for placement in parameter.placements):
        raise UserError(
            f"{name} has unreduced values ({placements}); redistribute it to Shard or Replicate"
            " first"
        )
    if device != mesh and mesh != "cpu":
        raise UserError(
            f"{name} lies on {device} and its mesh on {mesh}, as with FSDP's CPUOffloadPolicy,"
            " which Muon does not take; keep them on the device and give Muon offload='cpu'"
        )


def _ranks_of(mesh: DeviceMesh, group: Any) -> _Ranks:
    """The ranks of a mesh, each as its place in the group."""
    return np.searchsorted(dist.get_process_group_ranks(group), mesh.mesh.numpy())


class Places:
    """Who has which piece of every bucket, from `ranks` in the group, `(instances, pieces, parts)`.

    Instances hold the same; parts are those of tensor-parallel ranks, each of which has buckets of
    its own.
    """

    def __init__(self, ranks: _Ranks) -> None:
        by_part = np.sort(ranks, axis=0).transpose(1, 2, 0)
        self.of_part = [[tuple(holders) for holders in parts] for parts in by_part.tolist()]
        self.of_all = [
            tuple(holders) for holders in np.sort(by_part.reshape(len(by_part), -1)).tolist()
        ]


def bucket_shards(
    start: int, piece_size: int, part: tuple[int, int], shape: tuple[int, int], places: Places
) -> tuple[Shard, ...]:
    """The shards of a matrix that lies in a bucket; a cut falls between rows.

    Args:
        start: elements before it in the bucket.
        piece_size: elements of each of the bucket's pieces.
        part: shape of what one tensor-parallel rank has of it; the whole where tensor parallelism
            does not cut it.
        shape: of the whole matrix.
        places: who has which piece.

    Source: megatron-core's `DataParallelBuffer._get_item_slice_in_shard`.
    """
    (rows, cols), shards = part, []
    # from part to part
    down, right = (size * (size != of_all) for size, of_all in zip(part, shape, strict=True))
    for piece in range(start // piece_size, (start + rows * cols - 1) // piece_size + 1):
        first = max(piece * piece_size - start, 0) // cols
        end = min((piece + 1) * piece_size - start, rows * cols) // cols
        if end > first:
            parts = places.of_part[piece] if down or right else [places.of_all[piece]]
            for at, (rank, *replicas) in enumerate(parts):
                shards.append(
                    Shard(rank, first + at * down, end - first, at * right, cols, tuple(replicas))
                )
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
        return bucket_shards(
            item.global_data_index, piece_size, part, shape, self._places[bucket.is_expert_param]
        )

    def _find(self, is_expert: bool) -> Places:
        """Where the ranks of the group are on the mesh of data- and tensor-parallel ranks.

        Instances that share their state cut a bucket over all their ranks, an instance's pieces one
        behind the other (FSDPDistributedIndex.get_logical_hybrid_fsdp_rank).
        """
        index = self._buffer.dist_index
        axes = [
            name
            for name in (index.dp_outer_dim, index.dp_shard_dim, index.tp_dim)
            if name is not None
        ]
        ranks = index.get_submesh(axes, is_expert_parallel=is_expert).mesh.numpy()
        ranks = ranks if index.dp_outer_dim is not None else ranks[None]
        ranks = ranks if index.tp_dim is not None else ranks[..., None]
        if index.hsdp_outer_dp_shard:
            ranks = ranks.swapaxes(0, 1).reshape(1, -1, ranks.shape[2])
        # A group of data-parallel ranks alone has one part.
        ranks = ranks[..., np.isin(ranks, self._ranks).all(axis=(0, 1))]
        return Places(np.searchsorted(self._ranks, ranks))


def dbuffer_shards(
    buffer: Any, place: int, shape: tuple[int, int], group: dist.ProcessGroup
) -> tuple[Shard, ...]:
    """The shards of the matrix at `place` of a DBuffer, on a mesh of all the group's ranks.

    Source: `GlobalLayout.get_local_range`: of several axes of the mesh that cut the buffer, the
    last one cuts first.
    """
    ranks = _ranks_of(buffer.mesh, group)
    # the last ones
    flat = sum(type(placement).__name__ == "Flat" for placement in buffer.placements)
    instances = math.prod(ranks.shape[: ranks.ndim - flat])
    pieces = ranks.reshape(instances, *ranks.shape[ranks.ndim - flat :])
    pieces = pieces.transpose(0, *range(flat, 0, -1)).reshape(instances, -1, 1)
    start, piece_size = buffer.layout.tensor_to_offset[place], buffer.layout.size // pieces.shape[1]
    return bucket_shards(start, piece_size, shape, shape, Places(pieces))


def placed_shards(
    view: View, ranks: _Ranks, placements: Sequence[Placement]
) -> list[tuple[Shard, ...]]:
    """The shards of each matrix of a parameter that DTensor's placements cut on a mesh of `ranks`.

    Each rank is given by its place in the group.
    """
    boxes: list[Box] = [((), ())] * ranks.size
    for place, rank in np.ndenumerate(ranks):
        sizes, offsets = of_dtensors._compute_local_shape_and_global_offset(
            view.shape, ranks.shape, list(place), placements
        )
        boxes[int(rank)] = offsets, sizes
    return _as_matrices(view, boxes)


def _unfolded(view: View, shards: tuple[Shard, ...], ranks: int) -> list[tuple[Shard, ...]]:
    """The shards of each matrix of a parameter whose dimensions but the first are taken together in `shards`."""
    if view.is_itself:
        return [shards]
    inner = view.shape[1:]
    boxes: list[Box] = [((0,) * len(view.shape), (0,) * len(view.shape))] * ranks
    for shard in shards:
        for rank in shard.holders:
            boxes[rank] = (shard.row_start, *(0 for _ in inner)), (shard.rows, *inner)
    return _as_matrices(view, boxes)


def _as_matrices(view: View, boxes: Sequence[Box]) -> list[tuple[Shard, ...]]:
    """The shards of each matrix of a parameter of which rank r holds `boxes[r]`; equal ones are the same object."""
    same: dict[tuple[Shard, ...], tuple[Shard, ...]] = {}
    of_ranks = [view.rectangles(*box) for box in boxes]
    return [
        same.setdefault(shards, shards) for shards in map(as_shards, zip(*of_ranks, strict=True))
    ]


def check_alike(
    layout: Layout, mine: Sequence[Rectangle], group: dist.ProcessGroup | Alone, *, remedy: str
) -> None:
    """Check that this rank holds, in `mine`, what the layout says, and that all ranks have the same. Collective.

    Raises:
        UserError: on every rank where one rank holds something else, or has another layout; the
            message names the first matrix and both sides, and ends with `remedy`.
    """
    misfit = _misfit(layout, mine, group.rank())
    digests = [
        found
        for (found,) in numbers_of_all_ranks([_ELSEWHERE if misfit else layout.digest()], group)
    ]
    if misfit:
        raise UserError(misfit)
    if _ELSEWHERE in digests:
        rank = digests.index(_ELSEWHERE)
        raise UserError(
            f"rank {rank} of the group holds other rows than the layout gives it; see that rank's"
            " message"
        )
    if (
        other := next((rank for rank, found in enumerate(digests) if found != digests[0]), None)
    ) is not None:
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
                f"{matrix.name}: rank {rank} of the group holds {_shown(rectangle)}, where the"
                f" framework's cut as this package knows it gives {_shown(cut)}; {_KNOWN}"
            )
    return ""


def _shown(rectangle: Rectangle) -> str:
    row, rows, col, cols = rectangle
    return (
        f"rows {row} to {row + rows - 1}, columns {col} to {col + cols - 1}"
        if rows and cols
        else "no rows"
    )


def _difference(first: Sequence[Matrix], second: Sequence[Matrix], other: int) -> str:
    if len(first) != len(second):
        return f"rank 0 gives {len(first)} matrices and rank {other} gives {len(second)}"
    one, two = next(pair for pair in zip(first, second, strict=True) if pair[0] != pair[1])
    if (one.name, one.shape) != (two.name, two.shape):
        return (
            f"rank 0 gives {one.name} {one.shape} where rank {other} gives {two.name} {two.shape}"
        )
    return (
        f"{one.name} has other blocks, Newton-Schulz steps or shards on rank {other} than on rank 0"
    )
