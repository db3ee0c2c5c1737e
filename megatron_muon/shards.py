"""This rank's rows of a parameter, and tensors that are sharded as a parameter is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate


def local_part(tensor: Any) -> Tensor:
    """This rank's part of a tensor, in the shape that it has there, without a copy."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def sharded_like(other: Tensor, elements: Tensor) -> Tensor:
    """A tensor in the memory of `elements`, this rank's rows, that is sharded as `other` is."""
    elements = with_own_storage(elements)
    if not isinstance(other, DTensor):
        return elements.view(other.shape)
    return DTensor(
        elements.view(other._local_tensor.shape),
        other._spec,
        requires_grad=False,
    )


def with_own_storage(view: Tensor) -> Tensor:
    """A contiguous view as a tensor in the same memory, in a storage of its elements alone.

    `torch.save`, pickle and `copy.deepcopy` take whole storages, and fail for a DTensor over a view
    that begins later than its storage: they know a DTensor, which has no data of its own, by its
    `data_ptr()` of 0.
    """
    storage, start = view.untyped_storage(), view.storage_offset() * view.element_size()
    is_whole = storage.nbytes() == view.nbytes
    if is_whole or storage.device.type == "meta":
        return view
    alone = storage[start : start + view.nbytes]  # the same memory, kept alive
    return view.new_empty(0).set_(
        alone,
        0,
        view.shape,
        view.stride(),
    )


def neuron_moment(
    parameter: Tensor,
    averaged: int,
    *,
    over_tp: bool,
) -> Tensor:
    """Zeros of the shape of `parameter` with 1 for a dimension, fp32, a DTensor as it is.

    Ranks that shard the averaged dimension hold the same numbers. So do tensor-parallel ranks with
    `over_tp`; without it their parts are matrices of their own.
    """
    local = local_part(parameter)
    shape = list(parameter.shape)
    local_shape = list(local.shape)
    shape[averaged] = local_shape[averaged] = 1
    zeros = local.new_zeros(local_shape, dtype=torch.float32)
    if not isinstance(parameter, DTensor):
        return zeros
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or ()
    placements = list(parameter.placements)
    for axis, placement in enumerate(placements):
        if getattr(placement, "dim", None) == averaged:  # of a Shard or _StridedShard
            if over_tp or "tp" not in names[axis]:
                placements[axis] = Replicate()
            else:
                shape[averaged] *= mesh.size(axis)
    return DTensor.from_local(
        zeros,
        mesh,
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(shape, device="meta").stride(),
    )
