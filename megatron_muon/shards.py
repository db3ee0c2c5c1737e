"""This rank's rows of a parameter, and tensors that are sharded as a parameter is."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor


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
