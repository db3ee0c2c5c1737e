"""A stand-in for CUDA: `torch.cuda`, as far as megatron-core's training uses it, and devices.

There is one device, index 0, and one stream, on which everything has already happened. The CUDA
random generator *is* the CPU's default generator. Memory figures are those of this process:
"allocated" and "reserved" are both its resident set, "max allocated" is the peak of that. All else,
such as CUDA graphs, timing events and memory snapshots, fails as on any machine without a GPU.

Factory functions, `Tensor` methods, `DeviceMesh` and `with torch.device(...)` accept "cuda", a CUDA
`torch.device` or a device index and build on the CPU: megatron-core 0.19 names the device in
hundreds of places. `torch.device` objects and `Tensor.is_cuda` (False) stay.
`torch.load(map_location="cuda")`, `torch.autocast` and CUDA `torch.Generator`s are not mapped, and
fail loudly.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _device as device_context

from megatron_muon.patching import Patches

_LIKE = ("empty_like", "ones_like", "zeros_like")
"""Functions with `device=` that create a tensor, besides those that torch itself lists."""

_NEW = ("new_empty", "new_full", "new_tensor", "new_zeros")
"""Methods of tensors with `device=`."""


def install(patches: Patches) -> None:
    """Replace `torch.cuda`, and map CUDA devices to the CPU for tensors, modules and meshes."""
    _answer_for_cuda(patches)
    _map_devices(patches)


class _Event(torch.cpu.Event):
    """Work on the CPU is done when the call returns, so waiting is a no-op."""

    def __init__(self, **kwargs: Any) -> None: ...


class _Stream(torch.cpu.Stream):
    """The order in which the calling thread runs things."""

    def __init__(self, device: Any = None, **kwargs: Any) -> None: ...

    def record_event(self, event: _Event | None = None) -> _Event:  # type: ignore[override]
        return event or _Event()

    def synchronize(self) -> None: ...


def _resident(device: Any = None) -> int:
    """Resident set of this process in bytes."""
    return int(psutil.Process().memory_info().rss)


def _memory_stats(device: Any = None) -> dict[str, int]:
    """The entries of `torch.cuda.memory_stats` that Megatron logs, in bytes; no count of calls."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"VmHWM:\s*(\d+)", status)  # the largest resident set so far, in KiB
    current = _resident()
    peak = 1024 * int(found[1]) if found else current
    return {
        "allocation.all.current": 0,
        "allocated_bytes.all.current": current,
        "allocated_bytes.all.peak": peak,
        "reserved_bytes.all.current": current,
        "reserved_bytes.all.peak": peak,
    }


def _always(value: Any) -> Any:
    """A function of its own for each name: torch's compiler keeps a table by function."""
    return lambda *args, **kwargs: value


def _answer_for_cuda(patches: Patches) -> None:
    cuda, stream = torch.cuda, _Stream()
    # The compute capability 8.0 is the lowest that megatron-core accepts for grouped GEMM, and one
    # that selects neither FP8 nor kernels written for a later GPU.
    total_memory = psutil.virtual_memory().total
    cpu = SimpleNamespace(major=8, minor=0, total_memory=total_memory)
    for name, value in {
        # Megatron imports _lazy_call and _lazy_init by name, so they must be convinced rather than
        # replaced: then the first runs its callback at once and the second returns.
        "is_initialized": _always(True),
        "is_available": _always(True),
        "device_count": _always(1),
        "current_device": _always(0),
        "set_device": _always(None),
        "synchronize": _always(None),
        "empty_cache": _always(None),
        "current_stream": _always(stream),
        "stream": _always(contextlib.nullcontext()),
        "get_device_properties": _always(cpu),
        "Event": _Event,
        "Stream": _Stream,
        "device": contextlib.nullcontext,  # there is no other to change to
        "device_memory_used": _resident,
        "memory_stats": _memory_stats,
        # Megatron seeds each tensor-parallel rank through this generator alone: were it another,
        # all of them would draw the same numbers.
        "default_generators": (torch.default_generator,),
    }.items():
        patches.replace(cuda, name, value)
    # Functions of these modules call the others by the names that they imported.
    patches.replace(cuda.memory, "memory_stats", _memory_stats)
    patches.replace(cuda.random, "current_device", _always(0))
    patches.replace(cuda.random, "device_count", _always(1))
    for name in ("range_push", "range_pop"):
        patches.replace(cuda.nvtx, name, _always(None))
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
    own = [name for name, function in listed.items() if getattr(torch, name, None) is function]
    # A TorchFunctionMode would be shorter, but it is suspended inside Tensor.backward, where
    # Megatron-FSDP's hooks allocate their buckets.
    for name in (*sorted(own), *_LIKE):
        patches.around(torch, name)(_mapped)
    for name in _NEW:
        patches.around(torch.Tensor, name)(_mapped)
    # to(device, ...), to(dtype, ...) or to(other, ...): only the first kind names a device.
    patches.around(torch.Tensor, "to")(functools.partial(_mapped, has_self=True))
    patches.around(torch.Tensor, "type")(_tensor_type)
    # Everything lives on the one device there is, so moving there returns the tensor itself, as on
    # a GPU.
    patches.replace(torch.Tensor, "cuda", _itself)
    patches.replace(torch.nn.Module, "cuda", _itself, takes=("device",))
    # Pinning asks the driver, and record_stream wants a real stream.
    patches.replace(torch.Tensor, "pin_memory", _itself)
    patches.replace(torch.Tensor, "record_stream", lambda tensor, stream: None)
    for owner, keyword in ((DeviceMesh, "device_type"), (device_context.DeviceContext, "device")):
        init = functools.partial(_mapped, has_self=True, keyword=keyword)
        patches.around(owner, "__init__", takes=(keyword,))(init)


def _itself(tensor_or_module: Any, *args: Any, **kwargs: Any) -> Any:
    return tensor_or_module


def _mapped(
    function: Any, *args: Any, has_self: bool = False, keyword: str = "device", **kwargs: Any
) -> Any:
    """Call `function` with its device on the CPU; methods take it as their first argument, too."""
    if has_self:
        args = (*args[:1], *map(_on_cpu, args[1:2]), *args[2:])
    if keyword in kwargs:
        kwargs[keyword] = _on_cpu(kwargs[keyword])
    if kwargs.get("pin_memory"):
        kwargs["pin_memory"] = False  # pinned memory asks the driver
    return function(*args, **kwargs)


def _tensor_type(
    function: Any, tensor: Any, dtype: Any = None, non_blocking: bool = False, **kwargs: Any
) -> Any:
    """`Tensor.type()` reports CUDA; with an argument it converts, on the CPU.

    megatron-core 0.19.x decides by this string: clip_grads asserts 'torch.cuda.FloatTensor', and
    the optimizers sort parameters by 'torch.cuda.HalfTensor', 'torch.cuda.BFloat16Tensor' and
    'torch.cuda.FloatTensor'.
    """
    if dtype is not None:
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.")
        return function(tensor, dtype, non_blocking, **kwargs)
    name = function(tensor)
    return name.replace("torch.", "torch.cuda.", 1) if tensor.device.type == "cpu" else name
