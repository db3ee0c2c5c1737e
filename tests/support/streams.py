"""A GPU's streams and driver, and the host's threads, on paper: operations run at once, in the
program's order.

Of each it is noted what its stream, or its thread, knows of the others by the waits that the
program asked for: every access to memory must come after the accesses of others that it may meet,
else a GPU may run them in any order. How fast a GPU is, it does not tell.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_muon.offload import store
from megatron_muon.offload.disk import MomentumFile

Clock = dict[str, int]


def later(one: Clock, other: Clock) -> Clock:
    names = one.keys() | other.keys()
    return {
        name: max(
            one.get(name, 0),
            other.get(name, 0),
        )
        for name in names
    }


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
    """What has happened, as counts of operations by stream or thread."""

    def __init__(self, gpu: Gpu, clock: Clock) -> None:
        self.gpu = gpu
        self.clock = clock

    def wait_for(self, other: Moment) -> None:
        self.clock = later(self.clock, other.clock)


class Event(Moment):
    def synchronize(self) -> None:
        self.gpu.thread.wait_for(self)


class Line(Moment):
    """What does one thing after the other: a stream, or a task of the host."""

    def __init__(self, gpu: Gpu, name: str) -> None:
        super().__init__(gpu, {})
        self.name = name

    def record_event(self) -> Event:
        return Event(self.gpu, dict(self.clock))


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
    """Takes the place of a ThreadPoolExecutor; a task runs when it is submitted.

    Of other tasks it knows what its submitter knows: it may run in any of the threads.
    """

    def __init__(self, gpu: Gpu, name: str) -> None:
        self._gpu = gpu
        self._name = name
        self._count = 0

    def submit(self, run: Callable[..., Any], *args: Any) -> Task:
        self._count += 1
        thread = Line(self._gpu, f"{self._name} {self._count}")
        thread.wait_for(self._gpu.thread)
        with self._gpu.running(thread):
            result = run(*args)
        return Task(thread.record_event(), result)

    def shutdown(self, *, wait: bool, cancel_futures: bool) -> None:
        """Nothing is left to do."""


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
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.driver = Driver()
        self.thread = Line(self, "host")
        self.products = self.current = Stream(self, "products")
        self.streams = [self.products]
        self.accesses: dict[int, list[Access]] = {}  # by storage
        self._alive: list[torch.UntypedStorage] = []  # so that no address comes twice
        for name, value in {
            "Stream": self._new_stream,
            "current_stream": lambda device=None: self.current,
            "stream": self._on,
            "cudart": lambda: self.driver,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(store, "ThreadPoolExecutor", lambda count, name, _: Threads(self, name))
        for name, writes in (("read", True), ("write", False)):
            monkeypatch.setattr(
                MomentumFile,
                name,
                self._watched(getattr(MomentumFile, name), f"disk {name}", writes),
            )

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

    def _watched(
        self, move: Callable[..., None], operation: str, writes: bool
    ) -> Callable[..., None]:
        def watched(file: MomentumFile, offset: int, buffer: torch.Tensor) -> None:
            self._run(self.thread, operation, [(buffer, writes)])
            move(file, offset, buffer)

        return watched

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(
            value.alias_info and not value.alias_info.is_write for value in func._schema.returns
        ):
            return result  # a view
        found = [
            (tensor, bool(argument.alias_info and argument.alias_info.is_write))
            for argument, value in zip(func._schema.arguments, args, strict=False)
            for tensor in tree_leaves(value)
            if isinstance(tensor, torch.Tensor)
        ]
        if "empty" not in func.name():
            found += [
                (tensor, True) for tensor in tree_leaves(result) if isinstance(tensor, torch.Tensor)
            ]
        self.current.wait_for(self.thread)  # which asks for it
        self._run(self.current, func._schema.name, found)
        return result

    def _run(
        self,
        line: Line,
        operation: str,
        found: Iterable[tuple[torch.Tensor, bool]],
    ) -> None:
        line.clock[line.name] = line.clock.get(line.name, 0) + 1
        for tensor, writes in found:
            self._note(tensor, writes, line, operation)

    def _note(self, tensor: torch.Tensor, writes: bool, line: Line, operation: str) -> None:
        if not tensor.numel():
            return
        start = tensor.data_ptr()
        last = sum(
            (size - 1) * stride
            for size, stride in zip(
                tensor.shape,
                tensor.stride(),
                strict=True,
            )
        )
        end = start + (last + 1) * tensor.element_size()
        self._alive.append(tensor.untyped_storage())
        access = Access(start, end, writes, line.name, line.clock[line.name], operation)
        of_storage = self.accesses.setdefault(tensor.untyped_storage().data_ptr(), [])
        for other in of_storage:
            if other.start < end and start < other.end and (writes or other.writes):
                assert line.clock.get(other.line, 0) >= other.tick, (
                    f"{access} does not wait for {other}"
                )
        of_storage.append(access)
