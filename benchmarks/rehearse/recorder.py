"""Records a rank's products, collectives, waits and memory on fake tensors.

A `Recorder` is torch's fake mode that also inspects each operation with its fake result. Tensors of
the host are real. Memory of the device is counted by storage, until nothing refers to it any more.
The record is plain data.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import traceback
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, override

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

import megatron_muon
from benchmarks.rehearse import traffic
from megatron_muon.core.layout import Ints
from megatron_muon.core.probe import Probe
from megatron_muon.core.slices import BlockSlice

PACKAGE = Path(megatron_muon.__file__).resolve().parent
_aten = torch.ops.aten
_PRODUCTS = {_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm}
PRODUCTS = "products"
_COPIES = {_aten._to_copy.default, _aten.copy_.default}


class Members(NamedTuple):
    """A process group by its global ranks and the number of earlier groups of these."""

    ranks: tuple[int, ...]
    number: int


class Split:
    """Bytes to or from peers; iterates over `(rank in the group, bytes)`, without zeros."""

    def __init__(self, sizes: Ints) -> None:
        (self._peers,) = sizes.nonzero()
        self._sizes = sizes[self._peers]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._peers.tolist(), self._sizes.tolist(), strict=True)


NOTHING = Split(np.zeros(0, dtype=np.int64))


class Call(NamedTuple):
    """A collective that has been started.

    `nbytes` is the size of the reduced tensor, or of this rank's part of a gathered one, the same
    on every rank. An all-to-all has `sent` and `received` instead.
    """

    group: int  # index in the trace's groups
    op: str
    dtype: str
    nbytes: int = 0
    sent: Split = NOTHING
    received: Split = NOTHING

    @property
    def signature(self) -> tuple[str, str, int]:
        """Everything that must be the same on every member."""
        return self.op, self.dtype, self.nbytes


class BlockPart(NamedTuple):
    """A part of a block: its place among `parts`; a block that is not cut is one part."""

    matrix: str
    block: int
    place: int
    parts: int


@dataclass
class StepTrace:
    """One step, and the memory of tensors on the device in it."""

    # collectives, and waits for them by number, as enqueued
    events: list[Call | int] = field(default_factory=list)
    # how often this rank has done each part
    orthogonalized: Counter[BlockPart] = field(default_factory=Counter)
    flops: int = 0  # of all products
    # kernels and bytes of memory by pass: a phase of the probe, "products", or "other"
    launches: Counter[str] = field(default_factory=Counter)
    moved: Counter[str] = field(default_factory=Counter)
    begin_bytes: int = 0
    end_bytes: int = 0
    # beyond weights, gradients and state, by kind of group; and what of it lasts
    taken: dict[str, int] = field(default_factory=dict)
    buffers: dict[str, int] = field(default_factory=dict)

    @property
    def calls(self) -> list[Call]:
        """The collectives."""
        return [event for event in self.events if isinstance(event, Call)]

    @property
    def waits(self) -> list[int]:
        """The numbers of the collectives that are waited for, in the order of the waits."""
        return [event for event in self.events if isinstance(event, int)]

    @property
    def extra_bytes(self) -> int:
        """Peak memory beyond weights, gradients and state: buffers and temporary tensors."""
        return max(self.taken.values(), default=0)


@dataclass
class RankTrace:
    """One rank: its process groups, the digest of its plans, its steps.

    `failure` is the error of a rank that did not finish, `synchronizations` the lines at which the
    host waited for the device in a step.
    """

    rank: int
    groups: list[Members] = field(default_factory=list)
    digest: str = ""
    steps: list[StepTrace] = field(default_factory=list)
    failure: str = ""
    synchronizations: list[str] = field(default_factory=list)

    @property
    def received_bytes(self) -> int:
        """Bytes that the rank receives from others in the all-to-alls of its last step."""
        total = 0
        for call in self.steps[-1].calls:
            own = self.groups[call.group].ranks.index(self.rank)
            total += sum(size for peer, size in call.received if peer != own)
        return total

    def figures(self) -> dict[str, int]:
        """The figures of the last step."""
        last = self.steps[-1]
        return {
            "received_bytes": self.received_bytes,
            "extra_bytes": last.extra_bytes,
            "flops": last.flops,
            "collectives": len(last.calls),
            "launches": sum(last.launches.values()) - last.launches[PRODUCTS],
            "moved_bytes": sum(last.moved.values()) - last.moved[PRODUCTS],
        }


class Recorder(FakeTensorMode):
    """The record of one rank, with the memory of `device`; `now` is dropped between steps."""

    def __init__(self, rank: int, device: torch.device) -> None:
        super().__init__(allow_non_fake_inputs=True)  # copies between host and device
        self.trace = RankTrace(rank)
        self.now = self._dropped = StepTrace()
        self._device = device
        self._live: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._live_bytes = self._peak_bytes = 0
        self._is_within = False  # an operation that fake mode makes of others
        self.phase = "other"

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_of_host(args, kwargs):
            return func(*args, **kwargs)
        is_outer = not self._is_within
        self._is_within = True
        try:
            result: Any = super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._is_within = not is_outer
        if is_outer and self.is_in_step:
            self._count_traffic(func, args, kwargs, result)
        if func.overloadpacket in _PRODUCTS:
            self.now.flops += flop_registry[func.overloadpacket](*args, **kwargs, out_val=result)
        if _makes_memory(func):
            for tensor in (result,) if isinstance(result, FakeTensor) else tree_leaves(result):
                if isinstance(tensor, FakeTensor) and tensor.fake_device == self._device:
                    self._count(tensor)
        if func in _COPIES:
            self._look_for_wait(args, kwargs, result)
        return result

    def _count_traffic(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        count = traffic.launches(func, args, kwargs)
        size = traffic.moved_bytes(func, args, kwargs, result) if count else 0
        self.count(count, size, is_product=func.overloadpacket in _PRODUCTS)

    def count(self, launches: int, size: int, *, is_product: bool = False) -> None:
        """Count kernels of a pass, and bytes that they move."""
        phase = PRODUCTS if is_product else self.phase
        self.now.launches[phase] += launches
        self.now.moved[phase] += size

    def _is_of_host(self, args: Any, kwargs: Any) -> bool:
        if args and isinstance(args[0], FakeTensor):
            return False  # the usual case, without a walk through all arguments
        if torch.device(kwargs.get("device") or "cpu").type != "cpu":
            return False
        return not any(isinstance(one, FakeTensor) for one in tree_leaves((args, kwargs)))

    @property
    def is_in_step(self) -> bool:
        """True during a step."""
        return self.now is not self._dropped

    def host_waits(self, call: str) -> None:
        """Note that the host waits for the device in a call."""
        if self.is_in_step:
            where = location(traceback.extract_stack(sys._getframe(1)))
            self.trace.synchronizations.append(f"{call} at {where}")

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around a step."""
        step = StepTrace(begin_bytes=self._live_bytes)
        self.now = step
        yield
        step.end_bytes = self._live_bytes
        self.now = self._dropped
        self.trace.steps.append(step)

    @contextlib.contextmanager
    def group(self, name: str, kept_bytes: int) -> Iterator[None]:
        """Around a step's work on a group of matrices, with `kept_bytes` of lasting buffers."""
        self._peak_bytes = self._live_bytes
        yield
        self.now.buffers[name] = kept_bytes
        self.now.taken[name] = kept_bytes + max(self._peak_bytes - self.now.begin_bytes, 0)

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._live:
            self._live[key] = weakref.ref(storage, lambda _: self._forget(key)), size
            self._live_bytes += size
            self._peak_bytes = max(self._peak_bytes, self._live_bytes)

    def _forget(self, key: int) -> None:
        self._live_bytes -= self._live.pop(key)[1]

    def _look_for_wait(self, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        """Note blocking copies between device and host, after the first step in both directions."""
        source = args[1] if len(args) > 1 and isinstance(args[1], torch.Tensor) else args[0]
        non_blocking = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
        if non_blocking or source.device.type == result.device.type:
            return
        if source.device.type == "cuda":
            self.host_waits("a copy to host memory")
        elif self.trace.steps:
            self.host_waits("a copy from host memory")


@functools.cache
def _makes_memory(func: Any) -> bool:
    return any(value.alias_info is None for value in func._schema.returns)


class OrthogonalizedParts(Probe):
    """Records which parts of the matrices of these names a step orthogonalizes."""

    def __init__(self, recorder: Recorder, names: Sequence[str]) -> None:
        self._recorder = recorder
        self._names = names

    @override
    @contextlib.contextmanager
    def phase(self, name: str, wave: int | None = None) -> Iterator[None]:
        before, self._recorder.phase = self._recorder.phase, name
        yield
        self._recorder.phase = before

    @override
    def orthogonalized(self, slots: Sequence[BlockSlice]) -> None:
        if self._recorder.is_in_step:
            for slot in slots:
                name = self._names[slot.index]
                part = BlockPart(name, slot.block, slot.ranks.index(slot.rank), len(slot.ranks))
                self._recorder.now.orthogonalized[part] += 1


def location(stack: Sequence[traceback.FrameSummary]) -> str:
    """The innermost line of the package on a stack, else of any file."""
    ours = [frame for frame in stack if Path(frame.filename).is_relative_to(PACKAGE)]
    frame = ours[-1] if ours else stack[-1]
    file = Path(frame.filename)
    if ours:
        file = file.relative_to(PACKAGE.parent)
    return f"{file}:{frame.lineno}"
