"""The part of `torch.cuda` that megatron-core's training touches, answered for one CPU.

There is one device, index 0, and one stream, on which everything has already happened. The CUDA random generator *is*
the CPU's default generator. Memory figures are those of this process: "allocated" and "reserved" are both its resident
set, "max allocated" is the peak of that. CUDA graphs, memory snapshots, NVML queries and the profiler's `cudart` fail
as on any machine without a GPU.
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from types import SimpleNamespace
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


def _resident(device: Any = None) -> int:
    """Resident set of this process in bytes."""
    return int(psutil.Process().memory_info().rss)


def _peak_resident(device: Any = None) -> int:
    """Largest resident set of this process so far, or since `_reset_peak`, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next((line for line in lines if line.startswith("VmHWM:")), None)
    return int(peak.split()[1]) * 1024 if peak else _resident()


def _reset_peak(device: Any = None) -> None:
    """Starts the peak anew; where the kernel does not allow it, the peak since the process began stays."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _memory_stats(device: Any = None) -> dict[str, int]:
    """The entries of `torch.cuda.memory_stats` that Megatron logs, in bytes; the CPU's allocator counts no calls."""
    stats = {"allocation.all.current": 0, "allocation.all.peak": 0}
    for kind in ("allocated_bytes", "reserved_bytes", "active_bytes"):
        stats |= {f"{kind}.all.current": _resident(), f"{kind}.all.peak": _peak_resident()}
    return stats


def _seed(seed: int) -> None:
    # Megatron seeds each tensor-parallel rank through here alone: were this to do nothing, all of them would draw the
    # same numbers. torch.manual_seed calls it too, with the seed that the generator has just been given.
    torch.default_generator.manual_seed(int(seed))


def _always(value: Any) -> Any:
    """A function of its own for each name: torch's compiler keeps a table by function."""
    return lambda *args, **kwargs: value


def install(patches: Patches) -> None:
    """Replace the functions and classes of `torch.cuda` by those of this module."""
    cuda, stream = torch.cuda, _Stream()
    # The compute capability 8.0 is the lowest that megatron-core accepts for grouped GEMM, and one that selects neither
    # FP8 nor kernels written for a later GPU.
    total_memory = psutil.virtual_memory().total
    cpu = SimpleNamespace(name="cpu", major=8, minor=0, multi_processor_count=1, total_memory=total_memory)
    for name, value in {
        # Megatron imports _lazy_call and _lazy_init by name, so they must be convinced rather than replaced: with
        # this set, the first runs its callback at once and the second returns.
        "_initialized": True,
        "is_available": _always(True),
        "is_initialized": _always(True),
        "is_current_stream_capturing": _always(False),
        "device_count": _always(1),
        "current_device": _always(0),
        "set_device": _always(None),
        "synchronize": _always(None),
        "empty_cache": _always(None),
        "ipc_collect": _always(None),
        "set_stream": _always(None),
        "current_stream": _always(stream),
        "default_stream": _always(stream),
        "stream": _always(contextlib.nullcontext()),
        "get_device_name": _always(cpu.name),
        "get_device_capability": _always((cpu.major, cpu.minor)),
        "get_device_properties": _always(cpu),
        "Event": _Event,
        "Stream": _Stream,
        "device": contextlib.nullcontext,  # there is no other to change to
        "memory_allocated": _resident,
        "memory_reserved": _resident,
        "device_memory_used": _resident,
        "max_memory_allocated": _peak_resident,
        "max_memory_reserved": _peak_resident,
        "memory_stats": _memory_stats,
        "reset_peak_memory_stats": _reset_peak,
        "mem_get_info": lambda device=None: (psutil.virtual_memory().free, total_memory),
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
    patches.replace(cuda.nvtx, "range", _always(contextlib.nullcontext()))
    # DataLoader asks this one whether to pin memory, and it would ask torch.cuda.is_available in turn.
    patches.replace(torch.accelerator, "is_available", _always(False))

    # In a CUDA build the compiler asks the driver about the device as soon as it believes that there is one. The
    # setting is read when a compiled function is called, so functions decorated earlier obey it as well. Where the
    # compiler is not loaded there are none, and `megatron.install` lets no other be compiled: loading takes a second.
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:
        patches.replace(dynamo.config, "disable", True)
