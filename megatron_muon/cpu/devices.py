"""A stand-in for CUDA: `torch.cuda`, as far as megatron-core's training uses it, and devices.

There is one device, index 0, and one stream, on which everything has already happened. The CUDA
random generator *is* the CPU's default generator. Memory figures are those of this process:
"allocated" and "reserved" are both its resident set, "max allocated" is the peak of that. CUDA
graphs, memory snapshots, NVML queries and the profiler's `cudart` fail as on any machine without a
GPU.

Factory functions, `Tensor` methods, `DeviceMesh` and `with torch.device(...)` accept "cuda", a CUDA
`torch.device` or a device index and build on the CPU: megatron-core 0.19 names the device in
hundreds of places. `torch.device` objects and `Tensor.is_cuda` (False) stay.
`torch.load(map_location="cuda")`, `torch.autocast` and CUDA `torch.Generator`s are not mapped, and
fail loudly.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _device as device_context

from megatron_muon.patching import Patches

_KINDS = ("empty", "full", "ones", "rand", "randint", "randn", "zeros")
_LIKE = ("normal", *(f"{kind}_like" for kind in _KINDS))
"""Functions with `device=` that create a tensor, besides those that torch itself lists."""

_NEW_KINDS = ("empty", "empty_strided", "full", "ones", "tensor", "zeros")
_NEW = tuple(f"new_{kind}" for kind in _NEW_KINDS)
"""Methods of tensors with `device=`."""


def install(patches: Patches) -> None:
    """Replace `torch.cuda`, and map CUDA devices to the CPU for tensors, modules and meshes."""
    _answer_for_cuda(patches)
    _map_devices(patches)


class _Event(torch.cpu.Event):
    """A point in time. Work on the CPU is done when the call returns, so waiting is a no-op."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
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
    """Reset the peak; if the kernel does not allow it, the peak since the start stays."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _memory_stats(device: Any = None) -> dict[str, int]:
    """The entries of `torch.cuda.memory_stats` that Megatron logs, in bytes; no count of calls."""
    stats = {"allocation.all.current": 0, "allocation.all.peak": 0}
    for kind in ("allocated_bytes", "reserved_bytes", "active_bytes"):
        stats[f"{kind}.all.current"] = _resident()
        stats[f"{kind}.all.peak"] = _peak_resident()
    return stats


def _seed(seed: int) -> None:
    # Megatron seeds each tensor-parallel rank through here alone: were this to do nothing, all of
    # them would draw the same numbers. torch.manual_seed calls it too, with the seed that the
    # generator has just been given.
    torch.default_generator.manual_seed(int(seed))


def _always(value: Any) -> Any:
    """A function of its own for each name: torch's compiler keeps a table by function."""
    return lambda *args, **kwargs: value


def _answer_for_cuda(patches: Patches) -> None:
    cuda, stream = torch.cuda, _Stream()
    # The compute capability 8.0 is the lowest that megatron-core accepts for grouped GEMM, and one
    # that selects neither FP8 nor kernels written for a later GPU.
    total_memory = psutil.virtual_memory().total
    cpu = SimpleNamespace(
        name="cpu", major=8, minor=0, multi_processor_count=1, total_memory=total_memory
    )
    for name, value in {
        # Megatron imports _lazy_call and _lazy_init by name, so they must be convinced rather than
        # replaced: with this set, the first runs its callback at once and the second returns.
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
    # the first re-exports the second's functions, and Megatron uses both names
    for module in (cuda, cuda.random):
        patches.replace(module, "manual_seed", _seed)
        patches.replace(module, "manual_seed_all", _seed)
        patches.replace(module, "get_rng_state", lambda device="cuda": torch.get_rng_state())
        patches.replace(
            module, "set_rng_state", lambda new_state, device="cuda": torch.set_rng_state(new_state)
        )
    for name in ("range_push", "range_pop", "mark"):
        patches.replace(cuda.nvtx, name, _always(None))
    patches.replace(cuda.nvtx, "range", _always(contextlib.nullcontext()))
    # DataLoader asks this one whether to pin memory, and it would ask torch.cuda.is_available in
    # turn.
    patches.replace(torch.accelerator, "is_available", _always(False))

    # In a CUDA build the compiler asks the driver about the device as soon as it believes that
    # there is one. The setting is read when a compiled function is called, so functions decorated
    # earlier obey it as well. Where the compiler is not loaded there are none, and
    # `megatron.install` lets no other be compiled: loading takes a second.
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:
        patches.replace(dynamo.config, "disable", True)


def _on_cpu(device: Any) -> Any:
    """Map a CUDA device to the CPU; `meta` stays, as models are built there without storage."""
    if isinstance(device, torch.device):
        return torch.device("cpu") if device.type == "cuda" else device
    is_name = isinstance(device, str) and device.split(":")[0] == "cuda"
    # of the current accelerator
    is_index = isinstance(device, int) and not isinstance(device, bool)
    return "cpu" if is_name or is_index else device


def _map_devices(patches: Patches) -> None:
    # This list is cached on first use and its functions are compared by identity: fill it with the
    # originals, or `with torch.device("meta")` would not recognise the functions that it is meant
    # to redirect.
    listed = {function.__name__: function for function in device_context._device_constructors()}
    own = sorted(
        name for name, function in listed.items() if getattr(torch, name, None) is function
    )
    # A TorchFunctionMode would be shorter, but it is suspended inside Tensor.backward, where
    # Megatron-FSDP's hooks allocate their buckets.
    for name in (*own, *_LIKE):
        patches.wrap(torch, name, _mapped)
    for name in _NEW:
        patches.wrap(torch.Tensor, name, _mapped)
    # to(device, ...), to(dtype, ...) or to(other, ...): only the first kind names a device.
    patches.wrap(torch.Tensor, "to", functools.partial(_mapped, has_self=True))
    patches.wrap(torch.Tensor, "type", _tensor_type)
    # Everything lives on the one device there is, so moving there returns the tensor itself, as on
    # a GPU.
    patches.replace(torch.Tensor, "cuda", _itself)
    patches.replace(torch.nn.Module, "cuda", _itself, takes=("device",))
    # Pinning asks the driver, and record_stream wants a real stream.
    patches.replace(torch.Tensor, "pin_memory", _itself)
    patches.replace(torch.Tensor, "record_stream", lambda tensor, stream: None)
    for owner, keyword in ((DeviceMesh, "device_type"), (device_context.DeviceContext, "device")):
        patches.wrap(
            owner,
            "__init__",
            functools.partial(_mapped, has_self=True, keyword=keyword),
            takes=(keyword,),
        )


def _itself(tensor_or_module: Any, *args: Any, **kwargs: Any) -> Any:
    return tensor_or_module


def _mapped(
    function: Callable[..., Any], *, has_self: bool = False, keyword: str = "device"
) -> Callable[..., Any]:
    """`function` with its device on the CPU; methods take it as their first argument, too."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if has_self:
            args = (*args[:1], *map(_on_cpu, args[1:2]), *args[2:])
        if keyword in kwargs:
            kwargs[keyword] = _on_cpu(kwargs[keyword])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False  # pinned memory asks the driver
        return function(*args, **kwargs)

    return call


def _tensor_type(function: Callable[..., Any]) -> Callable[..., Any]:
    """`Tensor.type()` reports CUDA; with an argument it converts, on the CPU.

    megatron-core 0.19.x decides by this string: clip_grads asserts 'torch.cuda.FloatTensor', and
    the optimizers sort parameters by 'torch.cuda.HalfTensor', 'torch.cuda.BFloat16Tensor' and
    'torch.cuda.FloatTensor'.
    """

    def type_(
        self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any
    ) -> Any:
        if dtype is not None:
            if isinstance(dtype, str):
                dtype = dtype.replace("torch.cuda.", "torch.")
            return function(self, dtype, non_blocking, **kwargs)
        name = function(self)
        return name.replace("torch.", "torch.cuda.", 1) if self.device.type == "cpu" else name

    return type_
