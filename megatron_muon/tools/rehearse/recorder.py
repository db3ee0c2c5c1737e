"""Records what a rank does on fake tensors: products, collectives, waits, and the memory that is live meanwhile.

A `Recorder` is torch's fake mode that also looks at each operation with its fake result. Tensors of
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

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from megatron_muon.core.layout import Ints
from megatron_muon.core.probe import Probe
from megatron_muon.core.slices import BlockSlice

PACKAGE = Path(__file__).resolve().parents[2]
_aten = torch.ops.aten
_PRODUCTS = {_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm}
_COPIES = {_aten._to_copy.default, _aten.copy_.default}


class Members(NamedTuple):
    """A process group, the same on each of its ranks: their global ranks, and how many such groups came before it."""

    ranks: tuple[int, ...]
    number: int


class Split(NamedTuple):
    """Bytes for peers, or from them: the peers' ranks in the group, ascending, and the bytes of each, never zero."""

    peers: Ints
    sizes: Ints


class Call(NamedTuple):
    """A collective that has been started.

    `nbytes` is the size of the tensor that is reduced, or of this rank's part of what is gathered,
    the same on every rank. An all-to-all has `sent` and `received` instead.
    """

    group: int  # index in the trace's groups
    op: str
    dtype: str
    nbytes: int = 0
    sent: Split | None = None
    received: Split | None = None

    @property
    def signature(self) -> tuple[str, str, int]:
        """What must be the same on every member."""
        return self.op, self.dtype, self.nbytes


type Part = tuple[str, int, int, int]
"""A matrix, its block, and which of how many parts of that; a block that is not cut is one part."""


@dataclass
class StepTrace:
    """One step, and the memory of tensors on the device in it."""

    # collectives, and waits for them by number, as enqueued
    events: list[Call | int] = field(default_factory=list)
    # how often this rank has done which part
    orthogonalized: Counter[Part] = field(default_factory=Counter)
    flops: int = 0  # of all products
    operations: int = 0  # of torch that are not views
    begin_bytes: int = 0
    end_bytes: int = 0
    # beyond weights, gradients and state, by kind of group
    taken: dict[str, int] = field(default_factory=dict)

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
        """The most memory beyond weights, gradients and state: buffers, and what is made within the step."""
        return max(self.taken.values(), default=0)


@dataclass
class RankTrace:
    """One rank: its process groups, the digest of its plans, its steps.

    `failure` says in a line why it did not finish, `synchronizations` where the host waited for the
    device in a step.
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
        all_to_alls = [
            (call.received, self.groups[call.group])
            for call in self.steps[-1].calls
            if call.received
        ]
        return sum(
            int(got.sizes[got.peers != of.ranks.index(self.rank)].sum()) for got, of in all_to_alls
        )


class Recorder(FakeTensorMode):
    """The record of one rank; memory of `device` counts. `now` is the step under way; between steps it is dropped."""

    def __init__(self, rank: int, device: torch.device) -> None:
        super().__init__(allow_non_fake_inputs=True)  # copies between host and device
        self.trace = RankTrace(rank)
        self.now = self._dropped = StepTrace()
        self._device = device
        self._live: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._live_bytes = self._peak_bytes = 0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_of_host(args, kwargs):
            return func(*args, **kwargs)
        result: Any = super().__torch_dispatch__(func, types, args, kwargs)
        if func.namespace == "aten":
            self.now.operations += not func.is_view
        if func.overloadpacket in _PRODUCTS:
            self.now.flops += flop_registry[func.overloadpacket](*args, **kwargs, out_val=result)
        if _makes_memory(func):
            for tensor in (result,) if isinstance(result, FakeTensor) else tree_leaves(result):
                if isinstance(tensor, FakeTensor) and tensor.fake_device == self._device:
                    self._count(tensor)
        if func in _COPIES:
            self._look_for_wait(args, kwargs, result)
        return result

    def _is_of_host(self, args: Any, kwargs: Any) -> bool:
        if (args and isinstance(args[0], FakeTensor)) or torch.device(
            kwargs.get("device") or "cpu"
        ).type != "cpu":
            return False
        return not any(isinstance(one, FakeTensor) for one in tree_leaves((args, kwargs)))

    @property
    def is_in_step(self) -> bool:
        """Whether a step is under way."""
        return self.now is not self._dropped

    def host_waits(self, what: str) -> None:
        """Note that the host waits for the device."""
        if self.is_in_step:
            where = place(traceback.extract_stack(sys._getframe(1)))
            self.trace.synchronizations.append(f"{what} at {where}")

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around a step."""
        self.now = step = StepTrace(begin_bytes=self._live_bytes)
        yield
        step.end_bytes, self.now = self._live_bytes, self._dropped
        self.trace.steps.append(step)

    @contextlib.contextmanager
    def group(self, name: str, kept_bytes: int) -> Iterator[None]:
        """Around what a step does with a group of matrices, in so many bytes of buffers that are kept between steps."""
        self._peak_bytes = self._live_bytes
        yield
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
        """A blocking copy between device and host makes the host wait; what the first step brings to the device may."""
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


class Orthogonalized(Probe):
    """Records which parts of the matrices of these names a step orthogonalises."""

    def __init__(self, recorder: Recorder, names: Sequence[str]) -> None:
        self._recorder, self._names = recorder, names

    @override
    def orthogonalized(self, slots: Sequence[BlockSlice]) -> None:
        if self._recorder.is_in_step:
            parts = (
                (self._names[slot.index], slot.block or 0, slot.place, len(slot.ranks))
                for slot in slots
            )
            self._recorder.now.orthogonalized.update(parts)


def place(stack: Sequence[traceback.FrameSummary]) -> str:
    """The innermost line of this package on a stack, but for those that record."""
    here = str(Path(__file__).parent)
    ours = [
        frame
        for frame in stack
        if frame.filename.startswith(str(PACKAGE)) and here not in frame.filename
    ]
    frame = ours[-1] if ours else stack[-1]
    file = Path(frame.filename)
    return f"{file.relative_to(PACKAGE.parent) if file.is_relative_to(PACKAGE) else file}:{frame.lineno}"
