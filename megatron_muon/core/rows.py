"""This rank's rows of a parameter, and tensors that are sharded as a parameter is."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor


def local_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The rows of `tensor` that this rank holds, without a copy; of a stack of experts one expert below the other."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return (
        local.view(
            local.shape[:-1].numel(),
            local.shape[-1],
        )
        if local.ndim == 3
        else local
    )


def sharded_like(other: torch.Tensor, elements: torch.Tensor) -> torch.Tensor:
    """`elements`, of the shape of this rank's rows, as a tensor that is sharded as `other` is; in the same memory."""
    elements = with_own_storage(elements)
    if not isinstance(other, DTensor):
        return elements.view(other.shape)
    return DTensor(elements.view(other._local_tensor.shape), other._spec, requires_grad=False)


def with_own_storage(view: torch.Tensor) -> torch.Tensor:
    """A contiguous view as a tensor in the same memory, whose storage begins and ends with its elements.

    `torch.save`, pickle and `copy.deepcopy` take whole storages, and fail for a DTensor over a view
    that begins later than its storage: they know a DTensor, which has no data of its own, by its
    `data_ptr()` of 0.
    """
    storage, start = view.untyped_storage(), view.storage_offset() * view.element_size()
    is_whole = storage.nbytes() == view.nbytes
    if is_whole or storage.device.type == "meta":
        return view
    alone = storage[start : start + view.nbytes]  # the same memory, kept alive
    return view.new_empty(0).set_(alone, 0, view.shape, view.stride())
