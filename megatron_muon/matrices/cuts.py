"""The layout of matrices over ranks, from the part of each parameter that each rank holds.

    plain tensors      one process, DDP: every rank holds all rows
    FSDP2, TP, EP      DTensors on a mesh of one or more dimensions
    Megatron-FSDP      pieces of buckets; the model that wraps them has noted where each begins

A rank reads its own part of each parameter, its `Box`, and all ranks gather these. Parameters that
are sharded alike share one, and boxes without elements are not sent: those of thousands of matrices
on thousands of ranks are megabytes. Only the names of Megatron-FSDP's attributes are known here, so
it is not imported.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import _utils as dtensor_utils

from megatron_muon.core.layout import Layout, LayoutError, Matrix, Rectangle, Shard, Shards
from megatron_muon.errors import UserError
from megatron_muon.matrices.agreement import check_agreement
from megatron_muon.matrices.views import Matrices, View
from megatron_muon.ranks import Alone, numbers_of_all_ranks

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""The first element that a rank holds of a parameter, in each dimension, and how many."""

_END = -1
"""After the numbers that a rank sends, up to the most that one sends."""


def layout_of(
    matrices: Mapping[torch.Tensor, Matrices],
    group: dist.ProcessGroup | Alone,
    *,
    remedy: str,
) -> tuple[Layout, list[Rectangle]]:
    """Who holds which rectangle of each matrix, and this rank's rectangles. Collective.

    Args:
        matrices: of each parameter. The shape is whole over the ranks of the group; if tensor
            parallelism cuts a parameter further, that of a part.
        group: the ranks of the layout. Those that hold the same rectangle are replicas.
        remedy: ends the message where ranks differ.

    Raises:
        UserError: on every rank if parameters differ between ranks, or if the parts that ranks hold
            overlap or leave a gap.
    """
    mine = list[Rectangle]()
    numbers: dict[Any, int] = {}
    cut_of = list[tuple[Matrix, int, int]]()
    for parameter, several in matrices.items():
        view = several.view
        box = box_of(several.name, parameter)
        _check_flat(several, box)
        mine += view.rectangles(*box)
        # Parameters with equal numbers are sharded alike.
        number = numbers.setdefault((view, box, _sharding(parameter)), len(numbers))
        cut_of += [(matrix, number, place) for place, matrix in enumerate(several)]
    described = {}
    for index, (matrix, number, _) in enumerate(cut_of):
        rows = f"{matrix.split}, steps {matrix.steps}, cut {number}"
        described[f"matrix {index}"] = f"{matrix.name} {matrix.shape}, {rows}"
    check_agreement(described, group, remedy)
    boxes = _gather([box for _, box, _ in numbers], group)
    shards = [
        shards_of(view, of_ranks) for (view, _, _), of_ranks in zip(numbers, boxes, strict=True)
    ]
    cut = [replace(matrix, shards=shards[number][place]) for matrix, number, place in cut_of]
    try:
        return Layout(group.size(), tuple(cut)), mine
    except LayoutError as error:
        raise UserError(
            f"{error}, by the parts of parameters that ranks hold; shard it evenly, or use torch"
            " 2.11 to 2.13, megatron-core 0.19 and megatron-fsdp 0.6"
        ) from None


def _check_flat(several: Matrices, box: Box) -> None:
    """Raise a UserError for a flat parameter that is cut in another dimension than the first."""
    view = several.view
    _, sizes = box
    if view.flat and sizes[1:] != view.shape[1:]:
        raise UserError(
            f"{several.name} {view.shape} is sharded along a dimension that flatten= makes columns,"
            f" of which this rank has {sizes}; shard its first dimension, or leave it out of"
            " flatten="
        )


def _sharding(parameter: Any) -> Any:
    """A key of parameters of which each rank holds the same part, if their shapes are equal."""
    if hasattr(parameter, "_megatron_fsdp_model"):
        return parameter
    is_sharded = isinstance(parameter, DTensor)
    return (parameter.device_mesh, parameter.placements) if is_sharded else None


def _gather(
    boxes: Sequence[Box],
    group: dist.ProcessGroup | Alone,
) -> list[dict[int, Box]]:
    """Each box on every rank that holds elements. Collective."""
    mine = list[int]()
    for number, (offsets, sizes) in enumerate(boxes):
        if math.prod(sizes):
            mine += [number, *offsets, *sizes]
    (longest,) = max(numbers_of_all_ranks([len(mine)], group))
    mine += [_END] * (longest - len(mine))
    found: list[dict[int, Box]] = [{} for _ in boxes]
    for rank, sent in enumerate(numbers_of_all_ranks(mine, group)):
        numbers = iter(sent)
        while (number := next(numbers, _END)) != _END:
            dims = len(boxes[number][0])
            offsets = tuple(itertools.islice(numbers, dims))
            sizes = tuple(itertools.islice(numbers, dims))
            found[number][rank] = offsets, sizes
    return found


def shards_of(view: View, boxes: Mapping[int, Box]) -> list[Shards]:
    """The shards of each matrix of a parameter, of which ranks hold these boxes.

    Equal ones are the same object.
    """
    holders: list[dict[Rectangle, list[int]]] = [defaultdict(list) for _ in range(view.count)]
    for rank, box in boxes.items():
        rectangles = view.rectangles(*box)
        for ranks, rectangle in zip(holders, rectangles, strict=True):
            if rectangle[1] and rectangle[3]:
                ranks[rectangle].append(rank)
    same: dict[tuple[Shard, ...], Shards] = {}
    found = []
    for of_matrix in holders:
        shards = []
        for rectangle, (first, *replicas) in of_matrix.items():
            shards.append(Shard(first, *rectangle, tuple(replicas)))
        found.append(same.setdefault(tuple(shards), Shards(shards)))
    return found


def box_of(name: str, parameter: Any) -> Box:
    """This rank's part of a parameter; a UserError if Muon does not support its sharding."""
    if (model := getattr(parameter, "_megatron_fsdp_model", None)) is not None:
        if getattr(model.ddp_config, "megatron_fsdp_use_decoupled_grad", False):
            raise UserError(
                f"{name}: Megatron-FSDP keeps its gradient apart; leave out use_decoupled_grad=True"
            )
        buffer = model.param_and_grad_buffer
        return noted_part(buffer, buffer.param_to_name[parameter.orig_param])
    if not isinstance(parameter, DTensor):
        return (0,) * parameter.ndim, tuple(parameter.shape)
    if any(placement.is_partial() for placement in parameter.placements):
        raise UserError(f"{name} has unreduced values; redistribute it to Shard or Replicate first")
    device = parameter.device.type
    mesh = parameter.device_mesh.device_type
    if device != mesh and mesh != "cpu":
        raise UserError(
            f"{name} is on {device} and its mesh on {mesh}, as with FSDP's CPUOffloadPolicy, which"
            " Muon does not support; use offload='cpu' of Muon instead"
        )
    _, offsets = dtensor_utils.compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return tuple(offsets), tuple(parameter._local_tensor.shape)


def noted_part(buffer: Any, name: str) -> Box:
    """This rank's part of a parameter, as a ParamAndGradBuffer has noted it for checkpoints.

    (update_uneven_dtensor_chunk_metadata, on the tensor from which the optimizer's parameter is
    made)
    """
    tensor = buffer.dist_main_weight[name]
    if not hasattr(tensor._local_tensor, "__create_chunk_list__"):  # no_shard: replicas
        return (0,) * tensor.ndim, tuple(tensor.shape)
    noted = tensor._local_tensor.__create_chunk_list__()[0]
    return tuple(noted.offsets), tuple(noted.sizes)
