"""The part of `torch.cuda` that megatron-core's training touches, answered for one CPU.

There is one device, index 0, and one stream, on which everything has already happened. The CUDA random
generator *is* the CPU's default generator. Memory figures are those of this process: "allocated" and
"reserved" are both its resident set, Python and libraries included; "max allocated" is the peak of that.
CUDA graphs, memory snapshots, NVML queries (temperature, power, clock) and the profiler's `cudart` are not
provided: asking for them fails as it does on any machine without a GPU.

Needed with megatron-core 0.19.x.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from megatron_muon.patching import Patches

_DEVICE = torch.device("cpu")


class HostEvent:
    """A point in time. Work on the CPU is done when the call returns, so waiting for it is nothing."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._recorded_s = time.perf_counter()

    def record(self, stream: Any = None) -> None:
        """Notes the time."""
        self._recorded_s = time.perf_counter()

    def elapsed_time(self, end_event: "HostEvent") -> float:
        """Milliseconds from this event to `end_event`."""
        return (end_event._recorded_s - self._recorded_s) * 1e3

    def query(self) -> bool:
        """True: what came before has been done."""
        return True

    def wait(self, stream: Any = None) -> None:
        """Returns at once."""

    def synchronize(self) -> None:
        """Returns at once."""


class HostStream:
    """The order in which the calling thread runs things."""

    device = _DEVICE
    cuda_stream = 0
    priority = 0

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None: ...

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """The lowest and the highest priority: there is only one."""
        return 0, 0

    def record_event(self, event: HostEvent | None = None) -> HostEvent:
        """Records `event`, or a new one."""
        event = HostEvent() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        """True: what was enqueued has been done."""
        return True

    def wait_event(self, event: Any) -> None:
        """Returns at once."""

    def wait_stream(self, stream: Any) -> None:
        """Returns at once."""

    def synchronize(self) -> None:
        """Returns at once."""


@dataclass(frozen=True)
class HostProperties:
    """What `torch.cuda.get_device_properties` tells of this machine.

    The compute capability is 8.0: the lowest that megatron-core accepts for grouped GEMM, and one that
    selects neither FP8 nor kernels written for a later GPU.
    """

    name: str = "cpu"
    major: int = 8
    minor: int = 0
    multi_processor_count: int = 1
    total_memory: int = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Resident set of this process in bytes."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes() -> int:
    """Largest resident set of this process so far, or since `reset_peak`, in bytes."""
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resident_bytes()


def reset_peak() -> None:
    """Starts the peak anew; where the kernel does not allow it, the peak since the process began stays."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as clear_refs:
        clear_refs.write("5")


def memory_stats() -> dict[str, int]:
    """The entries of `torch.cuda.memory_stats` that Megatron logs, in bytes.

    Counts of allocations are left at 0: the CPU's allocator keeps none.
    """
    now, peak = resident_bytes(), peak_resident_bytes()
    stats = {"allocation.all.current": 0, "allocation.all.peak": 0}
    for kind in ("allocated_bytes", "reserved_bytes", "active_bytes"):
        stats[f"{kind}.all.current"] = now
        stats[f"{kind}.all.peak"] = peak
    return stats


class _DeviceGuard(contextlib.AbstractContextManager[None]):
    """Stands in for `torch.cuda.device(index)`: there is no other device to change to."""

    def __init__(self, device: Any) -> None: ...

    def __exit__(self, *exception: object) -> None: ...


def _seed(seed: int) -> None:
    # Megatron seeds each tensor-parallel rank through here alone: were this to do nothing, all of them
    # would draw the same numbers. torch.manual_seed calls it too, with the seed that the generator has just
    # been given.
    torch.default_generator.manual_seed(int(seed))


@contextlib.contextmanager
def _range(message: str = "", *args: Any, **kwargs: Any) -> Iterator[None]:
    yield


def install(patches: Patches) -> None:
    """Replaces the functions and classes of `torch.cuda` by those of this module."""
    cuda, stream, properties = torch.cuda, HostStream(), HostProperties()

    def always(value: Any) -> Any:
        return lambda *args, **kwargs: value

    def measured(function: Any) -> Any:
        return lambda *args, **kwargs: function()

    # Megatron imports _lazy_call and _lazy_init by name, so they must be convinced rather than replaced: with
    # this set, the first runs its callback at once and the second returns.
    patches.replace(cuda, "_initialized", True)
    for name, value in {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "set_device": None,
        "synchronize": None,
        "empty_cache": None,
        "ipc_collect": None,
        "current_stream": stream,
        "default_stream": stream,
        "set_stream": None,
        "is_current_stream_capturing": False,
        "get_device_name": properties.name,
        "get_device_capability": (properties.major, properties.minor),
        "get_device_properties": properties,
    }.items():
        patches.replace(cuda, name, always(value))

    patches.replace(cuda, "Event", HostEvent)
    patches.replace(cuda, "Stream", HostStream)
    patches.replace(cuda, "stream", lambda stream: contextlib.nullcontext())
    patches.replace(cuda, "device", _DeviceGuard)

    for name in ("memory_allocated", "memory_reserved", "device_memory_used"):
        patches.replace(cuda, name, measured(resident_bytes))
    for name in ("max_memory_allocated", "max_memory_reserved"):
        patches.replace(cuda, name, measured(peak_resident_bytes))
    patches.replace(cuda, "memory_stats", measured(memory_stats))
    patches.replace(cuda, "reset_peak_memory_stats", measured(reset_peak))
    patches.replace(
        cuda,
        "mem_get_info",
        lambda device=None: (
            os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            properties.total_memory,
        ),
    )

    # torch.cuda re-exports the functions of torch.cuda.random, and Megatron uses both names.
    patches.replace(cuda, "default_generators", (torch.default_generator,))
    for module in (cuda, cuda.random):
        patches.replace(module, "manual_seed", _seed)
        patches.replace(module, "manual_seed_all", _seed)
        patches.replace(module, "get_rng_state", lambda device="cuda": torch.get_rng_state())
        patches.replace(module, "set_rng_state", lambda new_state, device="cuda": torch.set_rng_state(new_state))

    for name in ("range_push", "range_pop", "mark"):
        patches.replace(cuda.nvtx, name, always(None))
    patches.replace(cuda.nvtx, "range", _range)

    # DataLoader asks this one whether to pin memory, and it would ask torch.cuda.is_available in turn.
    patches.replace(torch.accelerator, "is_available", always(False))

    # In a CUDA build the compiler asks the driver about the device as soon as it believes that there is one.
    # The setting is read when a compiled function is called, so functions decorated earlier obey it as
    # well, and no environment variable is needed.
    import torch._dynamo.config as dynamo_config

    patches.setting(dynamo_config, "disable", True)
