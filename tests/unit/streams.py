"""A GPU's streams and driver on paper: operations run at once, and it is noted what each stream knows of the others.

Every access of an operation to memory must come after the accesses of other streams that it may meet, by waits that
the program enqueued: else a GPU may run them in any order. Time is a vector, one count for each stream.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Clock = dict[str, int]


def later(one: Clock, other: Clock) -> Clock:
    return {name: max(one.get(name, 0), other.get(name, 0)) for name in one.keys() | other.keys()}


@dataclass
class Driver:
    """Page-locked memory: bytes by address."""

    registered: dict[int, int] = field(default_factory=dict)
    limit: int = 1 << 40

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        assert address not in self.registered
        if size > self.limit:
            return 2
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.registered[address]
        return 0


class Event:
    def __init__(self, gpu: Gpu, clock: Clock) -> None:
        self.gpu = gpu
        self.clock = clock

    def synchronize(self) -> None:
        with self.gpu.guard:
            self.gpu.host = later(self.gpu.host, self.clock)


class Stream:
    def __init__(self, gpu: Gpu, name: str) -> None:
        self.gpu = gpu
        self.name = name
        self.clock: Clock = {}

    def wait_event(self, event: Event) -> None:
        with self.gpu.guard:
            self.clock = later(self.clock, event.clock)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self) -> Event:
        with self.gpu.guard:
            return Event(self.gpu, dict(self.clock))

    def synchronize(self) -> None:
        self.record_event().synchronize()


@dataclass(frozen=True)
class Access:
    start: int
    end: int
    writes: bool
    stream: str
    tick: int
    operation: str


class Gpu(TorchDispatchMode):
    """Takes the place of torch.cuda's streams; `products` is the one that a thread begins with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.guard = threading.RLock()
        self.host: Clock = {}
        self.driver = Driver()
        self.products = Stream(self, "products")
        self.streams = [self.products]
        self.accesses: dict[int, list[Access]] = {}  # by storage
        self._alive: list[torch.UntypedStorage] = []  # so that no address comes twice
        self.early: list[Access] = []  # memory that was released before these
        self._of_thread = threading.local()
        for name, value in {
            "Stream": self._new_stream,
            "current_stream": lambda device=None: self.current,
            "stream": self._on,
            "set_device": lambda device: None,
            "cudart": lambda: self.driver,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    @property
    def current(self) -> Stream:
        return getattr(self._of_thread, "stream", self.products)

    def _new_stream(self, device: Any = None) -> Stream:
        self.streams.append(Stream(self, f"stream {len(self.streams)}"))
        return self.streams[-1]

    @contextlib.contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        before = self.current
        self._of_thread.stream = stream
        watched = threading.current_thread() is threading.main_thread()  # where the test has done so
        with contextlib.nullcontext() if watched else self:
            yield
        self._of_thread.stream = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(value.alias_info and not value.alias_info.is_write for value in func._schema.returns):
            return result  # a view
        found = [
            (tensor, bool(argument.alias_info and argument.alias_info.is_write))
            for argument, value in zip(func._schema.arguments, args, strict=False)
            for tensor in tree_leaves(value)
            if isinstance(tensor, torch.Tensor)
        ]
        if "empty" not in func.name():
            found += [(tensor, True) for tensor in tree_leaves(result) if isinstance(tensor, torch.Tensor)]
        with self.guard:
            stream = self.current
            if stream is not self.products:  # its thread waits for no copy by itself, others may by chance
                stream.clock = later(stream.clock, self.host)
            stream.clock[stream.name] = stream.clock.get(stream.name, 0) + 1
            for tensor, writes in found:
                self._note(tensor, writes, stream, func.name())
        return result

    def _note(self, tensor: torch.Tensor, writes: bool, stream: Stream, operation: str) -> None:
        if not tensor.numel():
            return
        start = tensor.data_ptr()
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        end = start + (last + 1) * tensor.element_size()
        self._alive.append(tensor.untyped_storage())
        access = Access(start, end, writes, stream.name, stream.clock[stream.name], operation)
        of_storage = self.accesses.setdefault(tensor.untyped_storage().data_ptr(), [])
        for other in of_storage:
            if other.start < end and start < other.end and (writes or other.writes):
                assert stream.clock.get(other.stream, 0) >= other.tick, f"{access} does not wait for {other}"
        of_storage.append(access)

    def watch_release(self, tensor: torch.Tensor, of: Stream, then: Callable[[], object]) -> None:
        """When `tensor` returns to the memory of a stream, that stream must wait for all that have accessed it."""
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        storage = tensor.untyped_storage().data_ptr()

        def released() -> None:
            then()
            for other in self.accesses.get(storage, []):
                if other.start < end and start < other.end and of.clock.get(other.stream, 0) < other.tick:
                    self.early.append(other)

        weakref.finalize(tensor, released)
