"""Sends tensors that ask for a CUDA device to the CPU.

Factory functions, `Tensor` methods, `DeviceMesh` and `with torch.device(...)` accept "cuda", a CUDA `torch.device` or a
device index and build on the CPU: megatron-core 0.19 names the device in hundreds of places. `torch.device` objects and
`Tensor.is_cuda` (False) stay. `torch.load(map_location="cuda")`, `torch.autocast` and CUDA `torch.Generator`s are not
mapped, and fail loudly.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _device as device_context

from megatron_muon.patching import Patches

_LIKE = ("normal", *(f"{kind}_like" for kind in ("empty", "full", "ones", "rand", "randint", "randn", "zeros")))
"""Functions of torch that create a tensor on the device named in `device=`, beside those that torch itself lists."""

_NEW = tuple(f"new_{kind}" for kind in ("empty", "empty_strided", "full", "ones", "tensor", "zeros"))
"""Methods of tensors that do."""


def _on_cpu(device: Any) -> Any:
    """Map whatever names a CUDA device to the CPU; `meta` stays, where models are built before they have storage."""
    if isinstance(device, torch.device):
        return torch.device("cpu") if device.type == "cuda" else device
    is_name = isinstance(device, str) and device.split(":")[0] == "cuda"
    is_index = isinstance(device, int) and not isinstance(device, bool)  # of the current accelerator
    return "cpu" if is_name or is_index else device


def install(patches: Patches) -> None:
    """Map CUDA devices to the CPU wherever a tensor, a module or a mesh is made or moved."""
    # This list is cached on first use and its functions are compared by identity: fill it with the originals, or
    # `with torch.device("meta")` would not recognise the functions that it is meant to redirect.
    listed = {function.__name__: function for function in device_context._device_constructors()}
    own = sorted(name for name, function in listed.items() if getattr(torch, name, None) is function)
    # A TorchFunctionMode would be shorter, but it is suspended inside Tensor.backward, where Megatron-FSDP's hooks
    # allocate their buckets.
    for name in (*own, *_LIKE):
        patches.wrap(torch, name, _mapped)
    for name in _NEW:
        patches.wrap(torch.Tensor, name, _mapped)
    # to(device, ...), to(dtype, ...) or to(other, ...): only the first kind names a device.
    patches.wrap(torch.Tensor, "to", functools.partial(_mapped, has_self=True))
    patches.wrap(torch.Tensor, "type", _tensor_type)
    # Everything lives on the one device there is, so moving there returns the tensor itself, as on a GPU.
    patches.replace(torch.Tensor, "cuda", _itself)
    patches.replace(torch.nn.Module, "cuda", _itself, takes=("device",))
    # Pinning asks the driver, and record_stream wants a real stream.
    patches.replace(torch.Tensor, "pin_memory", _itself)
    patches.replace(torch.Tensor, "record_stream", lambda tensor, stream: None)
    for owner, keyword in ((DeviceMesh, "device_type"), (device_context.DeviceContext, "device")):
        patches.wrap(owner, "__init__", functools.partial(_mapped, has_self=True, keyword=keyword), takes=(keyword,))


def _itself(tensor_or_module: Any, *args: Any, **kwargs: Any) -> Any:
    return tensor_or_module


def _mapped(function: Callable[..., Any], *, has_self: bool = False, keyword: str = "device") -> Callable[..., Any]:
    """`function` with its device on the CPU; methods take it as their first argument, too."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if has_self:
            args = (args[0], *map(_on_cpu, args[1:2]), *args[2:])
        if keyword in kwargs:
            kwargs[keyword] = _on_cpu(kwargs[keyword])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False  # pinned memory asks the driver
        return function(*args, **kwargs)

    return call


def _tensor_type(function: Callable[..., Any]) -> Callable[..., Any]:
    """`Tensor.type()` without arguments speaks of CUDA; with an argument it converts, on the CPU.

    megatron-core 0.19.x decides by this string: clip_grads asserts 'torch.cuda.FloatTensor', and the optimizers sort
    parameters by 'torch.cuda.HalfTensor', 'torch.cuda.BFloat16Tensor' and 'torch.cuda.FloatTensor'.
    """

    def type_(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if dtype is not None:
            if isinstance(dtype, str):
                dtype = dtype.replace("torch.cuda.", "torch.")
            return function(self, dtype, non_blocking, **kwargs)
        name = function(self)
        return name.replace("torch.", "torch.cuda.", 1) if self.device.type == "cpu" else name

    return type_
