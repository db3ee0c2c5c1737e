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
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Partial, Placement

from megatron_muon.core.errors import UserError
from megatron_muon.core.layout import Layout, Matrix, Rectangle, RowSplit, Shard, everywhere, whole
from megatron_muon.core.ranks import Alone, new_group_of
from megatron_muon.fsdp.cuts import BufferCut, check_alike, dbuffer_shards, dtensor_shards


def rectangle_of(name: str, parameter: torch.Tensor) -> Rectangle:
    """What this rank holds of a matrix.

    Raises:
        UserError: it is sharded in a way that Muon does not take.
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
    return offsets[0], sizes[0], offsets[1], sizes[1]


def noted_part(buffer: Any, name: str) -> tuple[Sequence[int], Sequence[int]]:
    """Where this rank's part of a Megatron-FSDP parameter begins, and its sizes.

    It is noted on the tensor from which the optimizer's parameter is made (update_uneven_dtensor_chunk_metadata), for
    checkpoints.
    """
    tensor = buffer.dist_main_weight[name]
    if not hasattr(tensor._local_tensor, "__create_chunk_list__"):  # no_shard: replicas of the whole
        return (0,) * tensor.ndim, tuple(tensor.shape)
    noted = tensor._local_tensor.__create_chunk_list__()[0]
    return noted.offsets, noted.sizes


def _place_within(group: Any, parameter: torch.Tensor) -> int:
    return next(place for place, each in enumerate(group.sharded_parameters) if each is parameter)


def check_placements(name: str, parameter: DTensor) -> None:
    """Refuse DTensors that are not whole rows, or rectangles of a two-dimensional mesh.

    Raises:
        UserError: names the parameter, its placements and the remedy.
    """
    cut = [getattr(placement, "dim", None) for placement in parameter.placements]
    if any(isinstance(placement, Partial) for placement in parameter.placements):
        raise UserError(f"{name} has unreduced values ({_shown(parameter.placements)}); Muon takes reduced parameters")
    if 1 in cut and 0 not in cut:
        raise UserError(
            f"{name} is sharded by columns ({_shown(parameter.placements)}); Muon takes rows: use Shard(0), "
            "fully_shard's default, or columns by tensor parallelism beside fully_shard on a mesh of two dimensions"
        )
    if parameter.device.type != parameter.device_mesh.device_type and parameter.device_mesh.device_type != "cpu":
        raise UserError(
            f"{name} lies on {parameter.device.type} and its mesh on {parameter.device_mesh.device_type}, as with "
            "FSDP's CPUOffloadPolicy, which Muon does not take; keep them on the device and give Muon "
            "offload='cpu'"
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
    """The mesh of all these parameters; None where they are plain tensors.

    Raises:
        UserError: they are on different meshes, or some are plain tensors.
    """

    def mesh(parameter: torch.Tensor) -> DeviceMesh | None:
        return parameter.device_mesh if isinstance(parameter, DTensor) else None

    first = mesh(parameters[0])
    for parameter in parameters:
        if mesh(parameter) != first:
            raise UserError(
                f"{names[parameter]} is on {_shown_mesh(mesh(parameter))} and {names[parameters[0]]} on "
                f"{_shown_mesh(first)}; one Muon takes matrices of one mesh: make one for each"
            )
    return first


def _shown_mesh(mesh: DeviceMesh | None) -> str:
    return "no mesh (a plain tensor)" if mesh is None else str(mesh)


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
    names: Mapping[torch.Tensor, str],
    parameters: Sequence[torch.Tensor],
    splits: Mapping[torch.Tensor, RowSplit],
    group: dist.ProcessGroup | Alone,
    steps: Mapping[str, int],
) -> Layout:
    """Who holds which rectangle of the matrices. Collective.

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

    mine, matrices = [rectangle_of(names[p], p) for p in parameters], []
    for p in parameters:
        shape = p.shape[0], p.shape[1]
        split = splits.get(p, whole(shape[0]))
        matrices.append(Matrix(names[p], shape, shards_of(p, shape), split, steps.get(names[p], 0)))
    layout = Layout(group.size(), tuple(matrices))
    remedy = (
        "give all ranks the same parameters in the same order, with the same matrices=, exclude=, split= and "
        "ns_steps_for="
    )
    check_alike(layout, mine, group, remedy=remedy)
    return layout
