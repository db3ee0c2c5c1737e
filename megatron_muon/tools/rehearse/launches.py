"""How many kernels CUDA launches for an operation on fake tensors.

Most operations are one. A view is none, and a `_foreach_` call is one for each of the lists that CUDA's fast path makes
of it, or one for each tensor where it falls to the slow path. Source: ATen's ForeachUtils.h, ForeachBinaryOpList.cu and
MultiTensorApply.cuh of torch 2.13. What a library's own call launches inside (cuBLAS, NCCL) is not known here.
"""

from __future__ import annotations

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
        lists = [arg for arg in args if isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], torch.Tensor)]
        return _of_lists(lists) if _are_fast(lists, may_cast=name == "_foreach_copy_") else len(lists[0])
    return 2 if name in _TWO and kwargs.get("out") is not None and kwargs["out"] is not args[0] else 1


def _of_lists(lists: Sequence[Sequence[torch.Tensor]]) -> int:
    count, tensors, chunks = 0, 0, 0
    for tensor in lists[0]:
        tensors += 1
        for _ in range(-(-tensor.numel() // _CHUNK)):
            chunks += 1
            if chunks == _CHUNKS:
                count, tensors, chunks = count + 1, 1, 0
        if tensors == _TENSORS[len(lists)]:
            count, tensors, chunks = count + 1, 0, 0
    return count + (chunks > 0)


def _are_fast(lists: Sequence[Sequence[torch.Tensor]], *, may_cast: bool) -> bool:
    """Whether the fast path takes them: a dtype in each list, sizes and strides alike, dense without overlap."""
    dtypes = [{tensor.dtype for tensor in tensors} for tensors in lists]
    if any(len(found) > 1 for found in dtypes) or (not may_cast and any(found != dtypes[0] for found in dtypes)):
        return False
    for first, *others in zip(*lists, strict=True):
        extent = 1 + sum((size - 1) * stride for size, stride in zip(first.shape, first.stride(), strict=True))
        if extent != max(first.numel(), 1):
            return False
        if any(other.shape != first.shape or other.stride() != first.stride() for other in others):
            return False
    return True
