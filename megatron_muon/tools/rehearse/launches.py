"""How many kernels CUDA launches for an operation on fake tensors.

Most operations are one. A view is none, and a `_foreach_` call is one for each of the lists that CUDA's fast path makes
of it, or one for each tensor where it falls to the slow path. Source: ATen's ForeachUtils.h, ForeachBinaryOpList.cu and
MultiTensorApply.cuh of torch 2.13. What a library's own call launches inside (cuBLAS, NCCL) is not known here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

_TENSORS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
"""Tensors of each list that one launch takes, by how many lists it has."""
_CHUNK, _CHUNKS = 65_536, 320
"""Elements of a block of threads, and blocks of a launch."""

_NONE = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "resize_", "record_stream", "set_"}
_TWO = {"baddbmm", "addmm"}
"""With an output that is not their base they copy first."""


def launches(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """Kernels of one operation, `func` as a dispatch mode sees it."""
    name = func.overloadpacket.__name__
    if func.is_view or name in _NONE or func.namespace == "prim":
        return 0
    if name.startswith("_foreach_"):
        return _of_lists([arg for arg in args if _is_list(arg)], may_cast=name == "_foreach_copy_")
    if name in _TWO and (out := kwargs.get("out")) is not None and out is not args[0]:
        return 2
    return 1


def _is_list(arg: Any) -> bool:
    return isinstance(arg, (list, tuple)) and bool(arg) and isinstance(arg[0], torch.Tensor)


def _of_lists(lists: Sequence[Sequence[torch.Tensor]], *, may_cast: bool) -> int:
    first, *others = lists
    if not _are_fast(first, others, may_cast=may_cast):
        return len(first)
    count, tensors, chunks = 0, 0, 0
    for tensor in first:
        tensors += 1
        for _ in range(math.ceil(tensor.numel() / _CHUNK)):
            chunks += 1
            if chunks == _CHUNKS:
                count, chunks = count + 1, 0
                tensors = 1 if tensors else 0
        if tensors == _TENSORS[len(lists)]:
            count, tensors, chunks = count + 1, 0, 0
    return count + (chunks > 0)


def _are_fast(first: Sequence[torch.Tensor], others: Sequence[Sequence[torch.Tensor]], *, may_cast: bool) -> bool:
    """Whether the fast path takes them: a dtype in each list, sizes and strides alike, dense without overlap."""
    for tensors in (first, *others):
        if any(tensor.dtype != tensors[0].dtype for tensor in tensors):
            return False
    if not may_cast and any(tensors[0].dtype != first[0].dtype for tensors in others):
        return False
    return all(map(_is_dense, first)) and all(
        tensor.shape == other.shape and tensor.stride() == other.stride()
        for tensors in others
        for tensor, other in zip(first, tensors, strict=True)
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill what lies between the first and the last."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in pairs) == max(tensor.numel(), 1)
