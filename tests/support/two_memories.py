"""A GPU's memory beside the host's, on the CPU: what asks for CUDA gets memory that no operation
may mix with other.

The CPU stands in for a GPU in tests, so host and device memory are one there, and code that mixes
them works. Within `two_memories` every tensor has a place, kept with its storage: cuda:0 where the
program asked for that device, or computed from what lies there; else cpu. `Tensor.device` is that
place, `to`, `cpu` and `cuda` copy between places, and these are errors, as on a GPU:

    an operation on both, other than a copy, an index or a number without dimensions
    a collective on host memory: NCCL has none
    a view of a DTensor whose local tensor lies elsewhere than where the DTensor was made
    `numpy()` of a tensor on the device

DDP makes its buckets without Python: memory of which nobody has said the place may be written to
and reduced.

All else is real: values, gloo, Megatron, and the store's path for GPUs, with streams that have
always run. Threads are not watched; those of the store copy and do nothing else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.distributed import _functional_collectives as funcol
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _device as device_context
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_muon import cpu
from megatron_muon.core import launches
from megatron_muon.cpu import devices
from tests.support.streams import Driver

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
_COPIES = {"aten::copy_", "aten::_to_copy", "aten::_foreach_copy_", "aten::index"}
_real_device = torch.Tensor.device.__get__


class PlaceError(AssertionError):
    """An operation that a GPU would refuse."""


@contextlib.contextmanager
def two_memories() -> Iterator[None]:
    """Keep the places of this process's tensors apart."""
    cpu.install()  # what is replaced here maps devices to the CPU
    constructors = {function.__name__ for function in device_context._device_constructors()}
    driver = Driver()
    generator = torch.Generator
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            *(
                (torch, name, _made)
                for name in constructors | {"from_numpy", *devices._LIKE}
                if hasattr(torch, name)
            ),
            *((torch.Tensor, name, _made) for name in devices._NEW),
            *(
                (torch.Tensor, name, around)
                for name, around in {"to": _to, "type": _type, "numpy": _numpy}.items()
            ),
        ):
            original = getattr(torch._C.TensorBase if name in ("to", "type") else owner, name)
            stack.enter_context(mock.patch.object(owner, name, value(original)))
        for owner, name, value in (
            (torch.Tensor, "device", property(place)),
            (torch.Tensor, "cpu", lambda self, **_: self.to(CPU)),
            (torch.Tensor, "cuda", lambda self, *_, **__: self.to(GPU)),
            (
                torch.nn.Module,
                "cuda",
                lambda self, device=None: self._apply(lambda tensor: tensor.to(GPU)),
            ),
            (torch, "Generator", lambda device=CPU: generator()),
            (torch.cuda, "cudart", lambda: driver),
            (DeviceMesh, "__init__", DeviceMesh.__init__.__wrapped__),
            (c10d, "_get_object_coll_device", lambda group=None: "cuda"),
            (launches, "has_kernels", lambda device: False),  # Triton would look for a driver
            # else a tensor that waits, on torch's own cuda:0
            (funcol, "_maybe_wrap_tensor", funcol.wait_tensor),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(_Apart())
        yield


def place(tensor: torch.Tensor) -> torch.device:
    """The device of a tensor: a DTensor's is that of its local tensor when it was first seen, as it
    is made there.
    """
    real: torch.device = _real_device(tensor)
    if real.type != "cpu":
        return real
    storage = tensor.untyped_storage()
    if isinstance(tensor, DTensor) and not hasattr(storage, "place"):
        storage.place = place(tensor._local_tensor)
    return getattr(storage, "place", CPU)


def _put[T: torch.Tensor](tensor: T, where: torch.device) -> T:
    """Say where new memory is."""
    for each in (tensor, tensor._local_tensor) if isinstance(tensor, DTensor) else (tensor,):
        each.untyped_storage().place = where
    return tensor


class _Apart(TorchDispatchMode):
    """Refuses what mixes places, and gives results the place of what they are computed from."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs = kwargs or {}
        found = _tensors(args, kwargs)
        if any(issubclass(kind, DTensor) for kind in types):
            is_view = any(
                value.alias_info and not value.alias_info.is_write for value in func._schema.returns
            )
            for tensor in (each for each in found if isinstance(each, DTensor)):
                if place(tensor) != (local := place(tensor._local_tensor)) and is_view:
                    raise PlaceError(
                        f"{func}: a DTensor made on {place(tensor)} has its local tensor on {local}"
                    )
            return NotImplemented  # the operations on local tensors come here by themselves
        found = [each for each in found if _real_device(each).type == "cpu"]
        storages = [each.untyped_storage() for each in found]
        known = [getattr(storage, "place", None) for storage in storages]
        written = {id(each) for each in _tensors(kwargs["out"])} if "out" in kwargs else ()
        places = {
            where or CPU
            for each, where in zip(found, known, strict=True)
            if where == GPU or (each.dim() and (where or id(each) not in written))
        }
        is_collective = (
            func.namespace in ("c10d", "_c10d_functional") and func.name() != "c10d::barrier"
        )
        mixes = len(places) > 1 and func.name().split(".")[0] not in _COPIES
        if mixes or (is_collective and CPU in known):
            shown = ", ".join(f"{tuple(each.shape)} on {place(each)}" for each in found)
            raise PlaceError(f"{func} of {shown}")
        result = func(*args, **kwargs)
        if any(known):
            given = {storage._cdata for storage in storages}
            for made in _tensors(result):
                if _real_device(made).type == "cpu" and made.untyped_storage()._cdata not in given:
                    _put(made, GPU if GPU in places else CPU)
        return result


def _tensors(*values: Any) -> list[torch.Tensor]:
    """The tensors in lists, tuples and dicts; torch's own function for that takes most of an
    operation's time.
    """
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple, dict)):
            found += _tensors(*(value.values() if isinstance(value, dict) else value))
    return found


def _named(device: Any) -> torch.device | None:
    """The device that a program names as torch.device, as text, or as the index of a GPU."""
    if isinstance(device, int) and not isinstance(device, bool):
        return GPU
    if not isinstance(device, (str, torch.device)):
        return None
    device = torch.device(device)
    return GPU if device.type == "cuda" else device


def _made(make: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes a tensor, on the device that is named or, without one, that of its
    first argument.
    """

    def make_there(*args: Any, **kwargs: Any) -> Any:
        like = [each for each in args[:1] if isinstance(each, torch.Tensor)]
        where = _named(kwargs.get("device")) or (place(like[0]) if like else CPU)
        made = make(*args, **kwargs)
        if _real_device(made).type != "cpu":
            return made
        is_shared = any(
            made.untyped_storage()._cdata == each.untyped_storage()._cdata for each in like
        )
        return _put(made.clone() if is_shared and place(made) != where else made, where)

    return make_there


def _to(move: Callable[..., Any]) -> Callable[..., Any]:
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        other = kwargs.pop("device", kwargs.pop("other", None))
        if args and not isinstance(args[0], torch.dtype):
            other, *args = args
        kwargs |= dict(zip(("dtype", "non_blocking", "copy"), args, strict=False))
        if isinstance(other, torch.Tensor):
            other, kwargs["dtype"] = place(other), other.dtype
        where = _named(other) or place(self)
        kwargs["dtype"] = kwargs.get("dtype") or self.dtype
        if where == place(self):
            return move(self, **kwargs)
        return (
            move(self, where, **kwargs)
            if where.type == "meta"
            else _put(move(self, **kwargs | {"copy": True}), where)
        )

    return to


def _type(name_of: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron asserts types such as torch.cuda.FloatTensor."""

    def type_(self: torch.Tensor, dtype: Any = None) -> Any:
        name = name_of(self) if dtype is None else ""
        return (
            (name.replace("torch.", "torch.cuda.") if place(self) == GPU else name)
            if name
            else self.to(dtype)
        )

    return type_


def _numpy(convert: Callable[..., Any]) -> Callable[..., Any]:
    def numpy(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if place(self) != CPU:
            raise PlaceError(f"numpy() of {tuple(self.shape)} on {place(self)}")
        return convert(self, *args, **kwargs)

    return numpy
