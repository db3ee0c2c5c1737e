"""What CUDA does for an operation of torch: kernels that it launches, bytes that it moves.

Lists are cut as torch's `multi_tensor_apply` cuts them, if its fast path takes them: 110, 64, 48
tensors of one, two or three lists, 320 chunks of 65,536 elements. A base that is not the result of
a product is copied there first. Launches within cuBLAS and NCCL are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

_TENSORS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
_CHUNK, _CHUNKS = 65_536, 320
_SILENT = {"set_", "resize_", "record_stream"}
_OVERWRITES = {"copy_", "zero_", "fill_", "_foreach_copy_", "_foreach_zero_"}
_WITH_BASE = {"baddbmm", "addmm"}


def launches(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """Kernels that CUDA launches for an operation."""
    name = func.overloadpacket.__name__
    if func.is_view or "empty" in name or name in _SILENT or func.namespace == "prim":
        return 0
    if name.startswith("_foreach_"):
        lists = [arg for arg in args if isinstance(arg, (list, tuple)) and _is_list(arg)]
        return _of_lists(lists) if _are_fast(lists, name) else len(lists[0])
    if name in _WITH_BASE and kwargs.get("out") is not None:
        return 1 + (kwargs["out"] is not args[0])
    return 1


def moved_bytes(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes that an operation reads and writes, each of its tensors once."""
    total = 0
    overwrites = func.overloadpacket.__name__ in _OVERWRITES
    for described, value in _arguments(func, args, kwargs):
        for tensor in _tensors(value):
            is_written = described.alias_info is not None and described.alias_info.is_write
            is_read = not (is_written and (described.kwarg_only or overwrites))
            total += tensor.nbytes * (is_written + is_read)
    if all(one.alias_info is None for one in func._schema.returns):
        total += sum(tensor.nbytes for tensor in _tensors(result))
    return total


def _arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    described = func._schema.arguments
    yield from zip(described, args, strict=False)
    for one in described[len(args) :]:
        if one.name in kwargs:
            yield one, kwargs[one.name]


def _tensors(value: Any) -> Sequence[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [one for one in value if isinstance(one, Tensor)]
    return []


def _is_list(values: Sequence[Any]) -> bool:
    return bool(values) and isinstance(values[0], Tensor)


def _of_lists(lists: Sequence[Sequence[Tensor]]) -> int:
    count = tensors = chunks = 0
    for tensor in lists[0]:
        tensors += 1
        for _ in range(-(-tensor.numel() // _CHUNK)):
            chunks += 1
            if chunks == _CHUNKS:
                count, tensors, chunks = count + 1, 1, 0
        if tensors == _TENSORS[len(lists)]:
            count, tensors, chunks = count + 1, 0, 0
    return count + (chunks > 0)


def _are_fast(lists: Sequence[Sequence[Tensor]], name: str) -> bool:
    dtypes = [{tensor.dtype for tensor in tensors} for tensors in lists]
    differ = any(found != dtypes[0] for found in dtypes)
    if any(len(found) > 1 for found in dtypes) or (differ and name != "_foreach_copy_"):
        return False
    for first, *others in zip(*lists, strict=True):
        if not _is_dense(first):
            return False
        if any(one.shape != first.shape or one.stride() != first.stride() for one in others):
            return False
    return True


def _is_dense(tensor: Tensor) -> bool:
    if not tensor.numel():
        return True
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return 1 + last == tensor.numel()
