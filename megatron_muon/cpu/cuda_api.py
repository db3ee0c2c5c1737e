"""The part of `torch.cuda` that megatron-core's training touches, answered for one CPU.

There is one device, index 0, and one stream, on which everything has already happened. The CUDA random
generator *is* the CPU's default generator. Memory figures are those of this process: "allocated" and
"reserved" are both its resident set, Python and libraries included; "max allocated" is the peak of that.
CUDA graphs, memory snapshots, NVML queries (temperature, power, clock) and the profiler's `cudart` are not
provided: asking for them fails as it does on any machine without a GPU.

Needed with megatron-core 0.19.x.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from megatron_muon.patching import Patches


class _Event(torch.cpu.Event):
    """A point in time. Work on the CPU is done when the call returns, so waiting for it is nothing."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.record()

    def record(self, stream: Any = None) -> None:
        self._recorded_s = time.perf_counter()

    def elapsed_time(self, end_event: _Event) -> float:
        """Milliseconds from this event to `end_event`."""
        return (end_event._recorded_s - self._recorded_s) * 1e3


class _Stream(torch.cpu.Stream):
    """The order in which the calling thread runs things."""

    device = torch.device("cpu")
    cuda_stream = 0
    priority = 0

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None: ...

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0

    def record_event(self, event: _Event | None = None) -> _Event:  # type: ignore[override]
        event = event or _Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


@dataclass(frozen=True)
class _Properties:
    """What `torch.cuda.get_device_properties` tells of this machine.

    The compute capability is 8.0: the lowest that megatron-core accepts for grouped GEMM, and one that
    selects neither FP8 nor kernels written for a later GPU.
    """

    name: str = "cpu"
    major: int = 8
    minor: int = 0
    multi_processor_count: int = 1
    total_memory: int = psutil.virtual_memory().total


class _DeviceGuard(contextlib.AbstractContextManager[None]):
    """Stands in for `torch.cuda.device(index)`: there is no other device to change to."""

    def __init__(self, device: Any) -> None: ...

    def __exit__(self, *exception: object) -> None: ...


def _resident() -> int:
    """Resident set of this process in bytes."""
    return int(psutil.Process().memory_info().rss)


def _peak_resident() -> int:
    """Largest resident set of this process so far, or since `_reset_peak`, in bytes."""
    with open("/proc/self/status") as status:
        peak = next((line for line in status if line.startswith("VmHWM:")), None)
    return int(peak.split()[1]) * 1024 if peak else _resident()


def _reset_peak() -> None:
    """Starts the peak anew; where the kernel does not allow it, the peak since the process began stays."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as clear_refs:
        clear_refs.write("5")


def _memory_stats() -> dict[str, int]:
    """The entries of `torch.cuda.memory_stats` that Megatron logs, in bytes; the CPU's allocator counts no calls."""
    stats = {"allocation.all.current": 0, "allocation.all.peak": 0}
    for kind in ("allocated_bytes", "reserved_bytes", "active_bytes"):
        stats[f"{kind}.all.current"] = _resident()
        stats[f"{kind}.all.peak"] = _peak_resident()
    return stats


def _seed(seed: int) -> None:
    # Megatron seeds each tensor-parallel rank through here alone: were this to do nothing, all of them
    # would draw the same numbers. torch.manual_seed calls it too, with the seed that the generator has just
    # been given.
    torch.default_generator.manual_seed(int(seed))


@contextlib.contextmanager
def _range(message: str = "", *args: Any, **kwargs: Any) -> Iterator[None]:
    yield


def _always(value: Any) -> Any:
    return lambda *args, **kwargs: value


def _measured(function: Any) -> Any:
    return lambda *args, **kwargs: function()


def install(patches: Patches) -> None:
    """Replaces the functions and classes of `torch.cuda` by those of this module."""
    cuda, stream, properties = torch.cuda, _Stream(), _Properties()
    for name, value in {
        # Megatron imports _lazy_call and _lazy_init by name, so they must be convinced rather than replaced: with
        # this set, the first runs its callback at once and the second returns.
        "_initialized": True,
        "is_available": _always(True),
        "is_initialized": _always(True),
        "device_count": _always(1),
        "current_device": _always(0),
        "set_device": _always(None),
        "synchronize": _always(None),
        "empty_cache": _always(None),
        "ipc_collect": _always(None),
        "current_stream": _always(stream),
        "default_stream": _always(stream),
        "set_stream": _always(None),
        "is_current_stream_capturing": _always(False),
        "get_device_name": _always(properties.name),
        "get_device_capability": _always((properties.major, properties.minor)),
        "get_device_properties": _always(properties),
        "Event": _Event,
        "Stream": _Stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "device": _DeviceGuard,
        "memory_allocated": _measured(_resident),
        "memory_reserved": _measured(_resident),
        "device_memory_used": _measured(_resident),
        "max_memory_allocated": _measured(_peak_resident),
        "max_memory_reserved": _measured(_peak_resident),
        "memory_stats": _measured(_memory_stats),
        "reset_peak_memory_stats": _measured(_reset_peak),
        "mem_get_info": _measured(lambda: (psutil.virtual_memory().free, properties.total_memory)),
        "default_generators": (torch.default_generator,),
    }.items():
        patches.replace(cuda, name, value)

    for module in (cuda, cuda.random):  # the first re-exports the second's functions, and Megatron uses both names
        patches.replace(module, "manual_seed", _seed)
        patches.replace(module, "manual_seed_all", _seed)
        patches.replace(module, "get_rng_state", lambda device="cuda": torch.get_rng_state())
        patches.replace(module, "set_rng_state", lambda new_state, device="cuda": torch.set_rng_state(new_state))

    for name in ("range_push", "range_pop", "mark"):
        patches.replace(cuda.nvtx, name, _always(None))
    patches.replace(cuda.nvtx, "range", _range)

    # DataLoader asks this one whether to pin memory, and it would ask torch.cuda.is_available in turn.
    patches.replace(torch.accelerator, "is_available", _always(False))

    # In a CUDA build the compiler asks the driver about the device as soon as it believes that there is one.
    # The setting is read when a compiled function is called, so functions decorated earlier obey it as
    # well, and no environment variable is needed.
    import torch._dynamo.config as dynamo_config

    patches.setting(dynamo_config, "disable", True)
