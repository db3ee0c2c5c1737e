"""Stands in for the machine of a profile: a device that fake tensors are on, and what code asks of its driver.

A fake tensor needs no driver, but compute capability, streams and the symmetric kernel do. Kernels of Triton take real
memory; here the product is recorded and its result made.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from emerging_optimizers.orthogonalized_optimizers import muon_utils
from torch._subclasses.fake_tensor import FakeTensor

from megatron_muon import cpu
from megatron_muon.core import newton_schulz
from megatron_muon.patching import Patches
from megatron_muon.tools.plan.estimate import Hardware
from megatron_muon.tools.rehearse.recorder import Recorder

_CAPABILITY = {True: (9, 0), False: (8, 0)}
"""Of a GPU with and without the symmetric kernel, as `core.newton_schulz.products_on` tells them apart."""


class _Stream:
    """A stream, and an event: what is enqueued has happened."""

    waits: Callable[[str], None]
    """Told of a host that waits."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self) -> _Stream:
        return self

    def record(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None:
        self.waits("synchronize of a stream or an event")


class _Driver:
    """Locks host memory, which costs a real machine time and this one nothing."""

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        return 0


def _streams(recorder: Recorder) -> dict[str, Any]:
    """What offloading momentum asks of torch.cuda."""

    class Stream(_Stream):
        waits = recorder.host_waits

    return {
        "Stream": Stream,
        "Event": Stream,
        "current_stream": lambda device=None: Stream(),
        "stream": lambda stream: contextlib.nullcontext(),
        "set_device": lambda device: None,
        "cudart": _Driver,
    }


def _at_once(recorder: Recorder) -> Callable[..., Future[Any]]:
    """Does what threads that move momentum would do: these may wait."""

    def submit(executor: Any, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with recorder.beside_host():
            future.set_result(fn(*args, **kwargs))
        return future

    return submit


DEVICE = torch.device("cuda", 0)
"""Where the tensors of a rank are."""
_NODE = "LOCAL_WORLD_SIZE"


@contextlib.contextmanager
def on(hardware: Hardware, recorder: Recorder) -> Iterator[None]:
    """Fake tensors on the machine's GPU, recorded; its nodes as torchrun tells of them."""
    assert not cpu.installed(), "the CPU stands in for the device that fake tensors are to be on"
    with Patches() as patches, recorder:
        patches.replace(torch.cuda, "get_device_capability", lambda device=None: _CAPABILITY[hardware.symmetric_kernel])
        patches.replace(torch.cuda, "synchronize", lambda device=None: recorder.host_waits("torch.cuda.synchronize"))
        patches.replace(muon_utils.triton_kernels, "HAS_TRITON_340", True)
        for name, value in _streams(recorder).items():
            patches.replace(torch.cuda, name, value)
        patches.replace(ThreadPoolExecutor, "submit", _at_once(recorder), takes=("fn",))  # the mode is of one thread
        patches.replace(FakeTensor, "data_ptr", lambda tensor: 0)  # of memory that begins at a page

        def kernel(a: torch.Tensor, c: Any, out: torch.Tensor, *, alpha: float = 1.0, beta: float = 0.0) -> None:
            assert a.dtype == out.dtype == torch.bfloat16
            assert all(one is None or one.is_contiguous() for one in (a, c, out))
            recorder.kernel(len(a) ** 2 * a.shape[1], out)

        patches.replace(newton_schulz, "symmetric_kernel", kernel)
        patches.replace(muon_utils.triton_kernels, "tsyrk_ex", lambda a: a)  # which is tuned before the first step
        before = os.environ.get(_NODE)
        os.environ[_NODE] = str(hardware.node_ranks)
        try:
            yield
        finally:
            os.environ.pop(_NODE)
            if before is not None:
                os.environ[_NODE] = before
