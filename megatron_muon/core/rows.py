"""This rank's rows of a parameter, and tensors that are sharded as a parameter is."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor


def local_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The rows of `tensor` that this rank holds, without a copy; of a stack of experts one expert below the other."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.view(local.shape[:-1].numel(), local.shape[-1]) if local.ndim == 3 else local


def sharded_like(other: torch.Tensor, elements: torch.Tensor) -> torch.Tensor:
    """`elements`, of the shape of this rank's rows, as a tensor that is sharded as `other` is, wherever they lie."""
    if not isinstance(other, DTensor):
        return elements.view(other.shape)
    return DTensor(elements.view(other._local_tensor.shape), other._spec, requires_grad=False)
