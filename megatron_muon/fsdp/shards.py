"""Who holds which rows of a matrix: one small adapter for each way in which a model is sharded.

    plain tensors      one process, DDP: every rank holds all rows
    FSDP2, TP          DTensors whose placements say the rectangle, on a mesh of one or more dimensions
    Megatron-FSDP      DTensors cut unevenly; the model that wraps them has noted where each part begins
    its next version   DTensors that are views of a DBuffer, which knows its own range

Each tells the rectangle of this rank, and `cuts` what the others have. Only the names of attributes are known here, so
none of these frameworks is imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Partial, Placement

from megatron_muon.core.errors import UserError
from megatron_muon.core.layout import Layout, Matrix, Rectangle, Shard, everywhere
from megatron_muon.core.ranks import Alone, new_group_of
from megatron_muon.fsdp.cuts import BufferCut, check_alike, dbuffer_shards, dtensor_shards


def rectangle_of(name: str, parameter: torch.Tensor) -> Rectangle:
    """What this rank holds of a matrix, or of a stack of matrices, one below the other.

    A UserError where it is sharded in a way that Muon does not take.
    """
    if not isinstance(parameter, DTensor):
        return 0, parameter.shape[0], 0, parameter.shape[1]
    check_placements(name, parameter)
    offsets: Sequence[int]
    if (model := getattr(parameter, "_megatron_fsdp_model", None)) is not None:
        if getattr(model.ddp_config, "megatron_fsdp_use_decoupled_grad", False):
            raise UserError(f"{name}: Megatron-FSDP keeps its gradient apart; leave out use_decoupled_grad=True")
        buffer = model.param_and_grad_buffer
        offsets, sizes = noted_part(buffer, buffer.param_to_name[cast(Any, parameter).orig_param])
    elif (group := getattr(parameter, "_mfsdp_parameter_group", None)) is not None:
        sizes = tuple(parameter._local_tensor.shape)
        owned = group.main_weight._get_owned_range(_place_within(group, parameter))
        offsets = (0 if owned is None else owned.tensor_relative_offset // parameter.shape[1], 0)
    else:
        sizes = tuple(parameter._local_tensor.shape)
        _, offsets = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    if parameter.ndim == 3:
        if tuple(sizes[1:]) != tuple(parameter.shape[1:]):
            raise UserError(
                f"{name}: a stack of experts {tuple(parameter.shape)} that tensor parallelism cuts is not "
                "supported with Muon; use --expert-tensor-parallel-size 1, or --muon-exclude"
            )
        return offsets[0] * sizes[1], sizes[0] * sizes[1], 0, sizes[2]
    return offsets[0], sizes[0], offsets[1], sizes[1]


def noted_part(buffer: Any, name: str) -> tuple[Sequence[int], Sequence[int]]:
    """Offsets and sizes of this rank's part of a Megatron-FSDP parameter, which are noted for checkpoints.

    (update_uneven_dtensor_chunk_metadata, on the tensor from which the optimizer's parameter is made)
    """
    tensor = buffer.dist_main_weight[name]
    if not hasattr(tensor._local_tensor, "__create_chunk_list__"):  # no_shard: replicas of the whole
        return (0,) * tensor.ndim, tuple(tensor.shape)
    noted = tensor._local_tensor.__create_chunk_list__()[0]
    return noted.offsets, noted.sizes


def _place_within(group: Any, parameter: torch.Tensor) -> int:
    return next(place for place, each in enumerate(group.sharded_parameters) if each is parameter)


def check_placements(name: str, parameter: DTensor) -> None:
    """Refuse DTensors that are not whole rows, or rectangles of a two-dimensional mesh, by a UserError."""
    cut = [getattr(placement, "dim", None) for placement in parameter.placements]
    placements, device, mesh = _shown(parameter.placements), parameter.device.type, parameter.device_mesh.device_type
    if any(isinstance(placement, Partial) for placement in parameter.placements):
        raise UserError(f"{name} has unreduced values ({placements}); Muon takes reduced parameters")
    if 1 in cut and 0 not in cut:
        raise UserError(
            f"{name} is sharded by columns ({placements}); Muon takes rows: use Shard(0), fully_shard's default, or "
            "columns by tensor parallelism beside fully_shard on a mesh of two dimensions"
        )
    if device != mesh and mesh != "cpu":
        raise UserError(
            f"{name} lies on {device} and its mesh on {mesh}, as with FSDP's CPUOffloadPolicy, which Muon does not "
            "take; keep them on the device and give Muon offload='cpu'"
        )


def _shown(placements: Sequence[Placement]) -> str:
    return ", ".join(map(str, placements))


def placement_of(parameter: torch.Tensor) -> tuple[Any, ...]:
    """Where a parameter lies and what it holds: this rank's shape, dtype, device and placements."""
    if isinstance(parameter, DTensor):
        return parameter._local_tensor.shape, parameter.dtype, parameter.device, parameter._spec.placements
    return parameter.shape, parameter.dtype, parameter.device, ()


def shown_placement(placement: tuple[Any, ...]) -> str:
    """For a message."""
    shape, dtype, device, placements = placement
    return f"{tuple(shape)} in {dtype} on {device}" + (f" as {_shown(placements)}" if placements else "")


def mesh_of(names: Mapping[torch.Tensor, str], parameters: Sequence[torch.Tensor]) -> DeviceMesh | None:
    """The mesh of all these parameters; None for plain tensors. A UserError where they are on different ones."""
    first, *others = ((p, p.device_mesh if isinstance(p, DTensor) else None) for p in parameters)
    for parameter, mesh in others:
        if mesh != first[1]:
            one, other = (each or "no mesh (a plain tensor)" for each in (mesh, first[1]))
            raise UserError(
                f"{names[parameter]} is on {one} and {names[first[0]]} on {other}; one Muon takes matrices of "
                "one mesh: make one for each"
            )
    return first[1]


def group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The process group of all ranks of a mesh. Collective over all ranks of the run where it has to be made."""
    if mesh.ndim == 1:
        return mesh.get_group()
    ranks = sorted(mesh.mesh.flatten().tolist())
    if len(ranks) == dist.get_world_size():
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    group = new_group_of(ranks[0])
    assert dist.get_process_group_ranks(group) == ranks, "meshes of two ranks overlap"
    return group


def layout_of(
    matrices: Mapping[torch.Tensor, Matrix],
    group: dist.ProcessGroup | Alone,
    *,
    remedy: str,
) -> tuple[Layout, list[Rectangle]]:
    """Who holds which rectangle of parameters, and what this rank holds of each. Collective.

        Args: matrices: each parameter as Muon sees it, still without shards. The shape is whole over the ranks of the
        group; where tensor parallelism cuts a parameter further, that of a part. group: the ranks of the layout. Those
        that hold the same rectangle are replicas. remedy: ends the message where ranks differ.

    Raises:
        UserError: a rank's parameters are others than those of the first, or cut in a way that is not known here.
    """
    buffers: dict[int, BufferCut] = {}
    alike: dict[Any, tuple[Shard, ...]] = {}  # of DTensors, which are cut alike where shape and placements are the same

    def shards_of(parameter: Any, shape: tuple[int, int]) -> tuple[Shard, ...]:
        if isinstance(group, Alone) or not isinstance(parameter, DTensor):
            return everywhere(shape, group.size())
        if (model := getattr(parameter, "_megatron_fsdp_model", None)) is not None:
            if id(buffer := model.param_and_grad_buffer) not in buffers:
                buffers[id(buffer)] = BufferCut(buffer, group)
            return buffers[id(buffer)].shards(parameter, shape)
        if (members := getattr(parameter, "_mfsdp_parameter_group", None)) is not None:
            return dbuffer_shards(members.main_weight, _place_within(members, parameter), shape, group)
        if (cut := (shape, tuple(parameter.placements))) not in alike:
            alike[cut] = dtensor_shards(shape, parameter.device_mesh, parameter.placements, group)
        return alike[cut]

    mine, cut = [], []
    for parameter, matrix in matrices.items():
        row, rows, col, cols = rectangle_of(matrix.name, parameter)
        # A part begins at a multiple of its size, so the remainder is the place within the part.
        mine.append((row % matrix.shape[0], rows, col % matrix.shape[1], cols))
        cut.append(replace(matrix, shards=shards_of(parameter, matrix.shape)))
    layout = Layout(group.size(), tuple(cut))
    check_alike(layout, mine, group, remedy=remedy)
    return layout, mine
