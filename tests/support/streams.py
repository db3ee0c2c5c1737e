"""A GPU's streams and driver, and the host's threads, on paper: operations run at once, in the program's order.

Two things are noted of each. What its stream, or its thread, knows of the others by the waits that the program asked
for: every access to memory must come after the accesses of others that it may meet, else a GPU may run them in any
order. And when it would run: streams do one operation after the other, each takes a time drawn at random, and a wait
costs what is left of what it waits for. So a step has a timeline, the same for the same seed on any machine. How fast a
GPU is, it does not tell.
"""

from __future__ import annotations

import contextlib
import heapq
import random
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_muon.offload import store
from megatron_muon.offload.files import MomentumFile

Clock = dict[str, int]

_PRODUCTS = {"aten::bmm", "aten::baddbmm"}
_SHORT = 0.002
"""What takes less time than products and transfers, which take 1 on average."""


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


class Moment:
    """What has happened, as counts of operations by stream or thread, and the time on the timeline."""

    def __init__(self, gpu: Gpu, clock: Clock, time: float) -> None:
        self.gpu = gpu
        self.clock = clock
        self.time = time

    def wait_for(self, other: Moment) -> None:
        self.clock = later(self.clock, other.clock)
        self.time = max(self.time, other.time)


class Event(Moment):
    def synchronize(self) -> None:
        self.gpu.thread.wait_for(self)


class Line(Moment):
    """What does one thing after the other: a stream, or a task of the host."""

    def __init__(self, gpu: Gpu, name: str) -> None:
        super().__init__(gpu, {}, 0.0)
        self.name = name

    def record_event(self) -> Event:
        return Event(self.gpu, dict(self.clock), self.time)


class Stream(Line):
    def wait_event(self, event: Event) -> None:
        self.wait_for(event)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.record_event().synchronize()


class Task:
    """The future of a task."""

    def __init__(self, end: Event, result: Any) -> None:
        self._end = end
        self._result = result

    def result(self) -> Any:
        self._end.synchronize()
        return self._result


class Threads:
    """Takes the place of a ThreadPoolExecutor; a task begins when it is submitted and a thread is free.

    Of other tasks it knows what its submitter knows: it may run in any of the threads.
    """

    def __init__(self, gpu: Gpu, count: int, name: str) -> None:
        self._gpu = gpu
        self._name = name
        self._free_at = [0.0] * count
        self._count = 0

    def submit(self, run: Callable[..., Any], *args: Any) -> Task:
        self._count += 1
        thread = Line(self._gpu, f"{self._name} {self._count}")
        thread.wait_for(self._gpu.thread)
        thread.time = max(thread.time, heapq.heappop(self._free_at))
        with self._gpu.running(thread):
            result = run(*args)
        heapq.heappush(self._free_at, thread.time)
        return Task(thread.record_event(), result)

    def shutdown(self, *, wait: bool, cancel_futures: bool) -> None:
        """Nothing is left to do."""


class Span(NamedTuple):
    """An operation on the timeline: what does it, and the thread that asked for it."""

    line: str
    operation: str
    thread: str
    start: float
    end: float


@dataclass(frozen=True)
class Access:
    start: int
    end: int
    writes: bool
    line: str
    tick: int
    operation: str


class Gpu(TorchDispatchMode):
    """Takes the place of torch.cuda's streams, the store's threads and its disk.

    Attributes:
        products: the stream that a thread begins with.
        thread: the host's thread that runs.
        timeline: all operations, in the order in which the program asked for them.
        early: accesses to memory that was released before them.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, seed: int = 0) -> None:
        super().__init__()
        self.seed = seed
        self.driver = Driver()
        self.thread = self.main = Line(self, "host")
        self.products = self.current = Stream(self, "products")
        self.streams = [self.products]
        self.timeline: list[Span] = []
        self._counts = Counter[str]()
        self.accesses: dict[int, list[Access]] = {}  # by storage
        self._alive: list[torch.UntypedStorage] = []  # so that no address comes twice
        self.early: list[Access] = []
        for name, value in {
            "Stream": self._new_stream,
            "current_stream": lambda device=None: self.current,
            "stream": self._on,
            "cudart": lambda: self.driver,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(store, "ThreadPoolExecutor", lambda count, name, **_: Threads(self, count, name))
        for name, writes in (("read", True), ("write", False)):
            monkeypatch.setattr(MomentumFile, name, self._watched(getattr(MomentumFile, name), f"disk {name}", writes))

    def restart(self, seed: int) -> None:
        """A new timeline, with delays of its own."""
        self.seed = seed
        self.timeline.clear()
        self._counts.clear()

    def hidden(self) -> float:
        """The share of the time of copies, asked for by the store's threads, in which products run."""
        copies = [span for span in self.timeline if span.operation == "aten::copy_" and span.thread != "host"]
        products = [span for span in self.timeline if span.operation in _PRODUCTS]
        both = sum(max(0.0, min(c.end, p.end) - max(c.start, p.start)) for c in copies for p in products)
        return both / sum(copy.end - copy.start for copy in copies)

    def _new_stream(self, device: Any = None) -> Stream:
        self.streams.append(Stream(self, f"stream {len(self.streams)}"))
        return self.streams[-1]

    @contextlib.contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextlib.contextmanager
    def running(self, thread: Line) -> Iterator[None]:
        """A thread of the host runs; it begins with the stream of products."""
        before, self.thread = self.thread, thread
        with self._on(self.products):
            yield
        self.thread = before

    def _watched(self, move: Callable[..., None], operation: str, writes: bool) -> Callable[..., None]:
        def watched(file: MomentumFile, offset: int, buffer: torch.Tensor) -> None:
            self._run(self.thread, operation, [(buffer, writes)])
            move(file, offset, buffer)

        return watched

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
        self.current.wait_for(self.thread)  # which asks for it
        self._run(self.current, func._schema.name, found)
        return result

    def _run(self, line: Line, operation: str, found: Iterable[tuple[torch.Tensor, bool]]) -> None:
        line.clock[line.name] = line.clock.get(line.name, 0) + 1
        start, kind = line.time, f"{line.name} {operation}"
        self._counts[kind] += 1
        mean = 1.0 if operation in _PRODUCTS or self.thread is not self.main else _SHORT
        line.time += mean * random.Random(f"{self.seed} {kind} {self._counts[kind]}").expovariate(1.0)
        self.timeline.append(Span(line.name, operation, self.thread.name, start, line.time))
        for tensor, writes in found:
            self._note(tensor, writes, line, operation)

    def _note(self, tensor: torch.Tensor, writes: bool, line: Line, operation: str) -> None:
        if not tensor.numel():
            return
        start = tensor.data_ptr()
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        end = start + (last + 1) * tensor.element_size()
        self._alive.append(tensor.untyped_storage())
        access = Access(start, end, writes, line.name, line.clock[line.name], operation)
        of_storage = self.accesses.setdefault(tensor.untyped_storage().data_ptr(), [])
        for other in of_storage:
            if other.start < end and start < other.end and (writes or other.writes):
                assert line.clock.get(other.line, 0) >= other.tick, f"{access} does not wait for {other}"
        of_storage.append(access)

    def watch_release(self, tensor: torch.Tensor, of: Stream, then: Callable[[], object]) -> None:
        """When `tensor` returns to the memory of a stream, that stream must wait for all that have accessed it."""
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        storage = tensor.untyped_storage().data_ptr()

        def released() -> None:
            then()
            for other in self.accesses.get(storage, []):
                if other.start < end and start < other.end and of.clock.get(other.line, 0) < other.tick:
                    self.early.append(other)

        weakref.finalize(tensor, released)
