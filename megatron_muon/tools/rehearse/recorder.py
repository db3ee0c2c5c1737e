"""Records what a rank enqueues on fake tensors: products, collectives, waits, and the memory that is live meanwhile.

A `Recorder` is torch's fake mode that also looks at each operation with its fake result. Tensors of the host are real.
Memory of the device is counted by storage, from the operation that makes it until nothing refers to it any more.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import traceback
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, override

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from megatron_muon.core.probe import Probe
from megatron_muon.core.slices import BlockSlice
from megatron_muon.tools.rehearse.trace import Call, Members, Part, Products, StepTrace, Wait

PACKAGE = Path(__file__).resolve().parents[2]
_OTHER = "other"
_aten = torch.ops.aten
_PRODUCTS = {_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm}
_COPIES = {_aten._to_copy.default, _aten.copy_.default}

_TENSORS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
"""Tensors of each list that one launch takes, by how many lists it has."""
_CHUNK, _CHUNKS = 65_536, 320
"""Elements of a block of threads, and blocks of a launch."""

_NONE = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "resize_", "record_stream", "set_"}
_TWO = {"baddbmm", "addmm"}
"""With an output that is not their base they copy first."""

HOST_WAITS = (DataDependentOutputException, DynamicOutputShapeException)
"""Raised by the fake mode where the host asks for a value: there is none."""


class Recorder(FakeTensorMode):
    """The record of one rank; memory and products of `device` count."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(allow_non_fake_inputs=True)  # copies between host and device
        self.groups: list[Members] = []
        self.steps: list[StepTrace] = []
        self.synchronizations: list[str] = []
        self._device = device
        self._live: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._live_bytes = 0
        self._step: StepTrace | None = None
        self._calls = 0
        self._phase = self._matrices = _OTHER
        self.is_beside_host = False  # in what another thread would do: that it waits holds up no host

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_of_host(args, kwargs):
            return func(*args, **kwargs)
        step, self._step = self._step, None if func.is_view else self._step  # what it makes of a view is no other view
        result: Any = super().__torch_dispatch__(func, types, args, kwargs)
        self._step = step
        if self._step is not None:
            self._enqueued(kernels=launches(func, args, kwargs), views=int(func.is_view))
        if func.overloadpacket in _PRODUCTS:
            self._enqueued(flop_registry[func.overloadpacket](*args, **kwargs, out_val=result), result)
        if _makes_memory(func):
            for tensor in (result,) if isinstance(result, FakeTensor) else tree_leaves(result):
                if isinstance(tensor, FakeTensor) and tensor.fake_device == self._device:
                    self._count(tensor)
        if func in _COPIES:
            self._look_for_wait(args, kwargs, result)
        return result

    def _is_of_host(self, args: Any, kwargs: Any) -> bool:
        if (args and isinstance(args[0], FakeTensor)) or torch.device(kwargs.get("device") or "cpu").type != "cpu":
            return False
        return not any(isinstance(one, FakeTensor) for one in tree_leaves((args, kwargs)))

    def kernel(self, flops: int, result: torch.Tensor) -> None:
        """A product of so many operations has been launched that torch knows nothing of."""
        self._enqueued(flops, result, kernels=1)

    def _enqueued(
        self, flops: int = 0, result: torch.Tensor | None = None, *, kernels: int = 0, views: int = 0, made: int = 0
    ) -> None:
        """The host has enqueued, or made, so much; with `result` a product of so many operations."""
        if self._step is None or not (flops or kernels or views or made):
            return
        events, half = self._step.events, result is not None and result.dtype.itemsize < 4
        last = events[-1] if events else None
        mixed = isinstance(last, Products) and last.flops and result is not None and last.half != half
        if not isinstance(last, Products) or last.phase != self._phase or mixed:
            last = Products(self._phase, 0, half)
            events.append(last)
        last.flops += flops
        last.half = half if result is not None else last.half
        last.kernels += kernels
        last.views += views
        last.allocations += made

    def call(self, group: int, op: str, dtype: torch.dtype, nbytes: int = 0, **details: Any) -> int | None:
        """A collective has been started; its number in the step."""
        if self._step is None:
            return None
        name = str(dtype).removeprefix("torch.")
        self._step.events.append(Call(group, op, name, nbytes, **{"root": -1, **details}, phase=self._phase))
        self._calls += 1
        return self._calls - 1

    def wait(self, call: int | None) -> None:
        """The products that come next wait for a collective."""
        if self._step is not None and call is not None:
            self._step.events.append(Wait(call, self._phase))

    def host_waits(self, what: str) -> None:
        """The host waits for the device."""
        if self._step is not None and not self.is_beside_host:
            self.synchronizations.append(f"{what} at {place(traceback.extract_stack(sys._getframe(1)))}")

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around a step."""
        self._step = step = StepTrace(begin_bytes=self._live_bytes, peak_bytes=self._live_bytes)
        self._calls = 0
        yield
        step.end_bytes, self._step = self._live_bytes, None
        self.steps.append(step)

    @contextlib.contextmanager
    def group(self, name: str, kept_bytes: int) -> Iterator[None]:
        """Around what a step does with a group of matrices, in so many bytes of buffers that are kept between steps."""
        self._matrices = name
        if self._step is not None:
            self._step.kept[name] = kept_bytes
            self._step.peaks.setdefault(name, self._live_bytes)
        yield
        self._matrices = _OTHER

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Around a phase; of phases within each other the innermost counts."""
        outer, self._phase = self._phase, name
        yield
        self._phase = outer

    def orthogonalized(self, part: Part) -> None:
        """A part of a matrix has been orthogonalised."""
        if self._step is not None:
            self._step.orthogonalized[part] += 1

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._live:
            return
        self._live[key] = weakref.ref(storage, lambda _: self._forget(key)), size
        self._live_bytes += size
        self._enqueued(made=1)
        if (step := self._step) is None:
            return
        if self._live_bytes > step.peak_bytes:
            step.peak_bytes, step.peak_phase = self._live_bytes, self._phase
        step.peaks[self._matrices] = max(self._live_bytes, step.peaks.get(self._matrices, -1))

    def _forget(self, key: int) -> None:
        self._live_bytes -= self._live.pop(key)[1]

    def _look_for_wait(self, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        """A blocking copy between device and host makes the host wait; what the first step brings to the device may."""
        source = args[1] if len(args) > 1 and isinstance(args[1], torch.Tensor) else args[0]
        non_blocking = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
        if non_blocking or source.device.type == result.device.type:
            return
        if source.device.type == "cuda":
            self.host_waits("a copy to host memory")
        elif self.steps:
            self.host_waits("a copy from host memory")


@functools.cache
def _makes_memory(func: Any) -> bool:
    return any(value.alias_info is None for value in func._schema.returns)


class Phases(Probe):
    """Tells a recorder the phases of a step, and which parts of the matrices of these names it orthogonalises."""

    def __init__(self, recorder: Recorder, names: Sequence[str]) -> None:
        self._recorder, self._names = recorder, names

    @override
    def orthogonalized(self, slots: Sequence[BlockSlice]) -> None:
        for slot in slots:
            self._recorder.orthogonalized(Part(self._names[slot.index], slot.block or 0, slot.place, len(slot.ranks)))

    @override
    def phase(self, name: str, wave: int | None = None) -> AbstractContextManager[None]:
        return self._recorder.phase(name)


def launches(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """Kernels that CUDA launches for an operation, `func` as a dispatch mode sees it.

    A view is none, a `_foreach_` call one for each list that CUDA's fast path makes of it, or one a tensor on the slow
    path. Source: ATen's ForeachUtils.h, ForeachBinaryOpList.cu and MultiTensorApply.cuh of torch 2.13. Launches inside
    cuBLAS and NCCL are not known.
    """
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


def place(stack: Sequence[traceback.FrameSummary]) -> str:
    """The innermost line of this package on a stack, but for those that record."""
    here = str(Path(__file__).parent)
    ours = [frame for frame in stack if frame.filename.startswith(str(PACKAGE)) and here not in frame.filename]
    frame = ours[-1] if ours else stack[-1]
    file = Path(frame.filename)
    return f"{file.relative_to(PACKAGE.parent) if file.is_relative_to(PACKAGE) else file}:{frame.lineno}"
