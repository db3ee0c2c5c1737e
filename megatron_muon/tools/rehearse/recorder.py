"""Records what a rank enqueues on fake tensors: products, collectives, waits, and the memory that is live meanwhile.

A `Recorder` is torch's fake mode that also looks at each operation with its fake result. Tensors on the device are
fake, those of the host are what they are. Memory of the device is counted by storage, from the operation that makes it
until nothing refers to it any more. Operations that make the host wait for the device are noted with the line that
asked for them.
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
from typing import Any, NamedTuple, override

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from megatron_muon.core.probe import Probe
from megatron_muon.core.slices import BlockSlice
from megatron_muon.tools.rehearse.launches import launches
from megatron_muon.tools.rehearse.trace import Call, Members, Part, Products, StepTrace, Wait

PACKAGE = Path(__file__).resolve().parents[2]
_HERE = str(Path(__file__).parent)
_OTHER = "other"

_aten = torch.ops.aten
_PRODUCTS = {_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm}
_COPIES = {_aten._to_copy.default, _aten.copy_.default}
_ON_ONE_DEVICE = {_aten.new_empty.default, _aten.empty_like.default, _aten.zeros_like.default}

HOST_WAITS = (DataDependentOutputException, DynamicOutputShapeException)
"""What the fake mode raises where the host asks for a value: there is none."""


class _Kind(NamedTuple):
    """What a recorder does with an operation."""

    is_product: bool
    makes_memory: bool
    is_copy: bool
    is_quick: bool
    """Its shapes follow from torch's meta kernels alone: views, operations on lists, and such."""


@functools.cache
def _kind(func: Any) -> _Kind:
    makes_memory = any(value.alias_info is None for value in func._schema.returns)
    is_quick = func.is_view or func in _ON_ONE_DEVICE or func.overloadpacket.__name__.startswith("_foreach_")
    return _Kind(func.overloadpacket in _PRODUCTS, makes_memory, func in _COPIES, is_quick)


class Recorder(FakeTensorMode):
    """The record of one rank.

    Args:
        device: whose memory and products count.
    """

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
        self._phases = [_OTHER]
        self._matrices = _OTHER
        self._is_beside = False

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = _kind(func)
        if kind.is_quick and "device" not in kwargs and self._are_here(args):
            result = self._run_quickly(func, args, kwargs)
        elif self._is_of_host(args, kwargs):
            return func(*args, **kwargs)
        else:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        if self._step is not None:
            self._enqueued(kernels=launches(func, args, kwargs), views=int(func.is_view))
        if kind.is_product:
            self._enqueued(flop_registry[func.overloadpacket](*args, **kwargs, out_val=result), result)
        if kind.makes_memory:
            for tensor in (result,) if isinstance(result, FakeTensor) else tree_leaves(result):
                if isinstance(tensor, FakeTensor) and tensor.fake_device == self._device:
                    self._count(tensor)
        if kind.is_copy:
            self._look_for_wait(args, kwargs, result)
        return result

    def _are_here(self, args: Sequence[Any]) -> bool:
        first = args[0] if args else None
        tensors = first if isinstance(first, (list, tuple)) else (first,)
        return all(isinstance(one, FakeTensor) and one.fake_device == self._device for one in tensors)

    def _is_of_host(self, args: Any, kwargs: Any) -> bool:
        if (args and isinstance(args[0], FakeTensor)) or torch.device(kwargs.get("device") or "cpu").type != "cpu":
            return False
        return not any(isinstance(one, FakeTensor) for one in tree_leaves((args, kwargs)))

    def _run_quickly(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What the fake mode does, without its cache and cases: on a view it spends half a millisecond."""
        with in_kernel_invocation_manager(self):
            result = func(*args, **kwargs)
        if isinstance(result, (list, tuple)):
            return [self._fake(one) for one in result]
        return self._fake(result)

    def _fake(self, made: Any) -> Any:
        return made if made is None or isinstance(made, FakeTensor) else FakeTensor(self, made, self._device)

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
        if (
            isinstance(last, Products)
            and last.phase == self._phases[-1]
            and (not last.flops or result is None or last.half == half)
        ):
            half = last.half if result is None else half
            events[-1] = Products(
                last.phase,
                last.flops + flops,
                half,
                last.kernels + kernels,
                last.views + views,
                last.allocations + made,
            )
        else:
            events.append(Products(self._phases[-1], flops, half, kernels, views, made))

    def call(self, group: int, op: str, dtype: torch.dtype, nbytes: int = 0, **details: Any) -> int | None:
        """A collective has been started; its number in the step."""
        if self._step is None:
            return None
        name = str(dtype).removeprefix("torch.")
        self._step.events.append(Call(group, op, name, nbytes, **{"root": -1, **details}, phase=self._phases[-1]))
        self._calls += 1
        return self._calls - 1

    def wait(self, call: int | None) -> None:
        """The products that come next wait for a collective."""
        if self._step is not None and call is not None:
            self._step.events.append(Wait(call, self._phases[-1]))

    def host_waits(self, what: str) -> None:
        """The host waits for the device."""
        if self._step is not None and not self._is_beside:
            self.synchronizations.append(f"{what} at {place(traceback.extract_stack(sys._getframe(1)))}")

    def orthogonalized(self, part: Part) -> None:
        """A part of a matrix has been orthogonalised."""
        if self._step is not None:
            self._step.orthogonalized[part] += 1

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around a step."""
        self._step = step = StepTrace(begin_bytes=self._live_bytes, peak_bytes=self._live_bytes)
        self._calls = 0
        try:
            yield
        finally:
            step.end_bytes = self._live_bytes
            self.steps.append(step)
            self._step = None

    @contextlib.contextmanager
    def beside_host(self) -> Iterator[None]:
        """Around what another thread would do: that it waits holds up no host."""
        self._is_beside = True
        try:
            yield
        finally:
            self._is_beside = False

    def probe(self, names: Sequence[str]) -> Probe:
        """Tells this recorder of the phases of a step, and which parts of the matrices of these names it does."""
        return _Phases(self, names)

    @contextlib.contextmanager
    def group(self, name: str, kept_bytes: int) -> Iterator[None]:
        """Around what a step does with a group of matrices, in so many bytes of buffers that are kept between steps."""
        self._matrices = name
        if self._step is not None:
            self._step.kept[name] = kept_bytes
            self._step.peaks.setdefault(name, self._live_bytes)
        try:
            yield
        finally:
            self._matrices = _OTHER

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Around a phase; of phases within each other the innermost counts."""
        self._phases.append(name)
        try:
            yield
        finally:
            self._phases.pop()

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        size = storage.nbytes()
        self._live[key] = weakref.ref(storage, lambda _: self._forget(key)), size
        self._live_bytes += size
        self._enqueued(made=1)
        if self._step is not None and self._live_bytes > self._step.peak_bytes:
            self._step.peak_bytes, self._step.peak_phase = self._live_bytes, self._phases[-1]
        if self._step is not None and self._live_bytes > self._step.peaks.get(self._matrices, -1):
            self._step.peaks[self._matrices] = self._live_bytes

    def _forget(self, key: int) -> None:
        self._live_bytes -= self._live.pop(key)[1]

    def _look_for_wait(self, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        """A copy between device and host makes the host wait, unless it says otherwise.

        What is brought to the device once, in the first step, is no loss.
        """
        source = args[1] if len(args) > 1 and isinstance(args[1], torch.Tensor) else args[0]
        non_blocking = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
        if non_blocking or source.device.type == result.device.type:
            return
        if source.device.type == "cuda":
            self.host_waits("a copy to host memory")
        elif self.steps:
            self.host_waits("a copy from host memory")


class _Phases(Probe):
    """Tells a recorder of the phases of a step."""

    def __init__(self, recorder: Recorder, names: Sequence[str]) -> None:
        self._recorder = recorder
        self._names = names

    @override
    def orthogonalized(self, slots: Sequence[BlockSlice]) -> None:
        for slot in slots:
            part = Part(self._names[slot.index], slot.block or 0, slot.place, len(slot.ranks))
            self._recorder.orthogonalized(part)

    @override
    def phase(self, name: str, wave: int | None = None) -> AbstractContextManager[None]:
        return self._recorder.phase(name)


def place(stack: Sequence[traceback.FrameSummary]) -> str:
    """The innermost line of this package on a stack, but for those that record."""
    ours = [frame for frame in stack if frame.filename.startswith(str(PACKAGE))]
    frame = next((frame for frame in reversed(ours) if not frame.filename.startswith(_HERE)), stack[-1])
    file = Path(frame.filename)
    return f"{file.relative_to(PACKAGE.parent) if file.is_relative_to(PACKAGE) else file}:{frame.lineno}"
