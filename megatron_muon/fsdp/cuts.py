"""Who holds which rows of a matrix, in each way in which a model is sharded.

    plain tensors      one process, DDP: every rank holds all rows
    FSDP2, TP, EP      DTensors cut by their placements, on a mesh of one or more dimensions
    Megatron-FSDP      pieces of buckets (`buckets`)

`box_of` reads this rank's part from its parameter; all ranks' shards come by arithmetic, so that no
rank has to ask the others. `check_alike` compares the two, and a digest of the layout over all
ranks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import _utils as dtensor_utils
from torch.distributed.tensor.placement_types import Placement

from megatron_muon.core.layout import (
    Layout,
    Matrix,
    Rectangle,
    Shard,
    as_shards,
    everywhere,
)
from megatron_muon.core.ranks import Alone, group_among, numbers_of_all_ranks, of_all_ranks
from megatron_muon.core.user_errors import UserError
from megatron_muon.fsdp.buckets import (
    Box,
    BufferCut,
    Ranks,
    buffer_box,
    ranks_in,
)
from megatron_muon.fsdp.views import View

_SUPPORTED = (
    "cuts are known of megatron-core 0.19, megatron-fsdp 0.6 and torch 2.11 to 2.13: install one of"
    " these"
)

_MISFIT = -1
"""In place of a layout's digest: this rank holds something else than the layout says."""


def layout_of(
    matrices: Mapping[torch.Tensor, Sequence[Matrix]],
    group: dist.ProcessGroup | Alone,
    *,
    remedy: str,
    views: Mapping[torch.Tensor, View] | None = None,
) -> tuple[Layout, list[Rectangle]]:
    """Who holds which rectangle of each matrix, and this rank's rectangles. Collective.

    Args:
        matrices: of each parameter, still without shards. Without a view a parameter is one matrix,
            a stack too, as one below the other. The shape is whole over the ranks of the group; if
            tensor parallelism cuts a parameter further, that of a part.
        group: the ranks of the layout. Those that hold the same rectangle are replicas.
        remedy: ends the message where ranks differ.
        views: how parameters are read that are not matrices themselves.

    Raises:
        UserError: a rank's parameters differ from those of the first, or are cut in a way that is
            not known here.
    """
    cutter = _Cutter(group)
    mine = list[Rectangle]()
    cut = list[Matrix]()
    for parameter, several in matrices.items():
        # the name of the parameter, from that of its first matrix
        name = re.sub(r"\[0(,0)*\]$", "", several[0].name)
        offsets, sizes = box_of(name, parameter)
        if views is None:
            view = View(several[0].shape)
            mine.append(_one_below_the_other(several[0].shape, offsets, sizes))
        else:
            view = views[parameter]
            if view.flat and sizes[1:] != view.shape[1:]:
                raise UserError(
                    f"{name} {view.shape} is sharded along a dimension that flatten= makes columns,"
                    f" of which this rank has {sizes}; shard its first dimension, or leave it out"
                    " of flatten="
                )
            mine += view.rectangles(offsets, sizes)
        shards = cutter.shards(name, parameter, view)
        for matrix, holders in zip(several, shards, strict=True):
            cut.append(replace(matrix, shards=holders))
    layout = Layout(group.size(), tuple(cut))
    check_alike(layout, mine, group, remedy=remedy)
    return layout, mine


def _one_below_the_other(
    shape: tuple[int, int],
    offsets: Sequence[int],
    sizes: Sequence[int],
) -> Rectangle:
    """This rank's rectangle of a parameter, or of a stack whose matrices follow one another.

    A tensor-parallel part begins at a multiple of its size, so the remainder is the place within
    the part.
    """
    rows, cols = shape
    inner = math.prod(sizes[1:-1])
    return offsets[0] * inner % rows, sizes[0] * inner, offsets[-1] % cols, sizes[-1]


class _Cutter:
    """The shards of parameters over the ranks of a group."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._buffers: dict[Any, BufferCut] = {}
        # equal shapes and placements have equal shards
        self._placed: dict[Any, list[tuple[Shard, ...]]] = {}

    def shards(self, name: str, parameter: Any, view: View) -> list[tuple[Shard, ...]]:
        """The shards of each matrix of a parameter."""
        ranks = self._group.size()
        if isinstance(self._group, Alone) or not isinstance(parameter, DTensor):
            return [everywhere(view.matrix, ranks)] * view.count
        if (model := getattr(parameter, "_megatron_fsdp_model", None)) is not None:
            buffer = model.param_and_grad_buffer
            if buffer not in self._buffers:
                self._buffers[buffer] = BufferCut(buffer, self._group)
            folded = view.shape[0], math.prod(view.shape[1:])  # as the buffer has it
            shards = self._buffers[buffer].shards(parameter, folded)
            return _unfolded(view, shards, ranks)
        mesh = parameter.device_mesh
        key = view, mesh, tuple(parameter.placements)
        if key not in self._placed:
            found = placed_shards(view, ranks_in(mesh, self._group), parameter.placements)
            different = {id(shards): shards for shards in found}
            for shards in different.values():
                Matrix(name, view.matrix, shards).check_tiling()
            self._placed[key] = found
        return self._placed[key]


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
    """The process group of all ranks of a mesh. Collective over them if it has to be made."""
    if mesh.ndim == 1:
        return mesh.get_group()
    ranks = sorted(mesh.mesh.flatten().tolist())
    assert dist.group.WORLD is not None
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    return group_among(ranks, dist.group.WORLD)


def box_of(name: str, parameter: torch.Tensor) -> Box:
    """This rank's part of a parameter; a UserError if Muon does not support its sharding."""
    if not isinstance(parameter, DTensor):
        return (0,) * parameter.ndim, tuple(parameter.shape)
    _check_device(name, parameter)
    if getattr(parameter, "_megatron_fsdp_model", None) is not None:
        return buffer_box(name, parameter)
    _, offsets = dtensor_utils.compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return tuple(offsets), tuple(parameter._local_tensor.shape)


def _check_device(name: str, parameter: DTensor) -> None:
    """Raise a UserError for unreduced values, and for a DTensor on another device than its mesh."""
    if any(placement.is_partial() for placement in parameter.placements):
        raise UserError(f"{name} has unreduced values; redistribute it to Shard or Replicate first")
    device = parameter.device.type
    mesh = parameter.device_mesh.device_type
    if device != mesh and mesh != "cpu":
        raise UserError(
            f"{name} is on {device} and its mesh on {mesh}, as with FSDP's CPUOffloadPolicy, which"
            " Muon does not support; use offload='cpu' of Muon instead"
        )


def placed_shards(
    view: View, ranks: Ranks, placements: Sequence[Placement]
) -> list[tuple[Shard, ...]]:
    """The shards of each matrix of a parameter that placements cut on a mesh of `ranks`.

    Each rank is given by its number in the group.
    """
    boxes: list[Box] = [((), ())] * ranks.size
    for coordinate, rank in np.ndenumerate(ranks):
        sizes, offsets = dtensor_utils._compute_local_shape_and_global_offset(
            view.shape, ranks.shape, list(coordinate), placements
        )
        boxes[int(rank)] = offsets, sizes
    return _as_matrices(view, boxes)


def _unfolded(
    view: View,
    shards: tuple[Shard, ...],
    ranks: int,
) -> list[tuple[Shard, ...]]:
    """The shards of each matrix of a parameter that `shards` have folded to two dimensions."""
    if view.is_itself:
        return [shards]
    none = (0,) * len(view.shape)
    boxes: list[Box] = [(none, none)] * ranks
    for shard in shards:
        offsets = (shard.row_start, *none[1:])
        sizes = (shard.rows, *view.shape[1:])
        for rank in shard.holders:
            boxes[rank] = offsets, sizes
    return _as_matrices(view, boxes)


def _as_matrices(view: View, boxes: Sequence[Box]) -> list[tuple[Shard, ...]]:
    """The shards of each matrix of a parameter of which rank r holds `boxes[r]`.

    Equal ones are the same object.
    """
    same: dict[tuple[Shard, ...], tuple[Shard, ...]] = {}
    by_rank = [view.rectangles(*box) for box in boxes]
    found = []
    for rectangles in zip(*by_rank, strict=True):
        shards = as_shards(rectangles)
        found.append(same.setdefault(shards, shards))
    return found


def check_alike(
    layout: Layout,
    mine: Sequence[Rectangle],
    group: dist.ProcessGroup | Alone,
    *,
    remedy: str,
) -> None:
    """Check that this rank holds `mine` by the layout, and that all ranks agree. Collective.

    Raises:
        UserError: on every rank if one rank holds something else, or has another layout; the
            message names the first matrix and both sides, and ends with `remedy`.
    """
    misfit = _misfit(layout, mine, group.rank())
    digest = _MISFIT if misfit else layout.digest()
    digests = [number for (number,) in numbers_of_all_ranks([digest], group)]
    if misfit:
        raise UserError(misfit)
    if _MISFIT in digests:
        raise UserError(
            f"rank {digests.index(_MISFIT)} of the group holds other rows than the layout gives it;"
            " see that rank's message"
        )
    for rank, other in enumerate(digests):
        if other != digests[0]:
            everyone = of_all_ranks(layout.matrices, group)
            raise UserError(f"{_difference(everyone[0], everyone[rank], rank)}; {remedy}")


def _misfit(layout: Layout, mine: Sequence[Rectangle], rank: int) -> str:
    """A message for the first matrix that this rank does not hold by the layout, if any."""
    for matrix, shard, rectangle in zip(layout.matrices, layout.held(rank), mine, strict=True):
        cut = shard.row_start, shard.rows, shard.col_start, shard.cols
        if cut != rectangle and (shard.numel or rectangle[1] * rectangle[3]):
            return (
                f"{matrix.name}: rank {rank} of the group holds {rectangle} (first row, rows, first"
                f" column, columns), not {cut} as the framework's cut gives; {_SUPPORTED}"
            )
    return ""


def _difference(first: Sequence[Matrix], second: Sequence[Matrix], other: int) -> str:
    """The first matrix that differs between rank 0 and another rank."""
    if len(first) != len(second):
        return f"rank 0 gives {len(first)} matrices and rank {other} gives {len(second)}"
    pairs = zip(first, second, strict=True)
    one, two = next(pair for pair in pairs if pair[0] != pair[1])
    if one.name != two.name or one.shape != two.shape:
        there = f"rank {other} gives {two.name} {two.shape}"
        return f"rank 0 gives {one.name} {one.shape} where {there}"
    return (
        f"{one.name} has other blocks, Newton-Schulz steps or shards on rank {other} than on rank 0"
    )
