"""Stands in for the machine of a profile: a device that fake tensors are on, and what code asks of its driver.

A fake tensor needs no driver, but compute capability, streams and the symmetric kernel do. Kernels of Triton take real
memory; here the product is recorded and its result made.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from emerging_optimizers.orthogonalized_optimizers import muon_utils

from megatron_muon import cpu
from megatron_muon.core import newton_schulz
from megatron_muon.patching import Patches
from megatron_muon.tools.plan.estimate import Hardware
from megatron_muon.tools.rehearse.recorder import Recorder

DEVICE = torch.device("cuda", 0)
"""Where the tensors of a rank are."""


@contextlib.contextmanager
def on(hardware: Hardware, recorder: Recorder) -> Iterator[None]:
    """Fake tensors on the machine's GPU, recorded; its nodes as torchrun tells of them."""
    assert not cpu.installed(), "the CPU stands in for the device that fake tensors are to be on"
    stream = mock.MagicMock()  # on a stream, what is enqueued has happened
    stream.record_event.return_value = stream
    stream.synchronize.side_effect = lambda: recorder.host_waits("synchronize of a stream or an event")

    def kernel(a: torch.Tensor, c: Any, out: torch.Tensor, *, alpha: float = 1.0, beta: float = 0.0) -> None:
        assert a.dtype == out.dtype == torch.bfloat16
        assert all(one is None or one.is_contiguous() for one in (a, c, out))
        recorder.product(len(a) ** 2 * a.shape[1])

    capability = (9, 0) if hardware.symmetric_kernel else (8, 0)  # as `newton_schulz.products_on` tells them apart
    nodes = mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": str(hardware.node_ranks)})
    with Patches() as patches, recorder, nodes:
        for name, value in {
            "get_device_capability": lambda device=None: capability,
            "synchronize": lambda device=None: recorder.host_waits("torch.cuda.synchronize"),
            "Stream": lambda *_, **__: stream,
            "Event": lambda *_, **__: stream,
            "current_stream": lambda device=None: stream,
            "stream": lambda stream: contextlib.nullcontext(),
            "set_device": lambda device: None,
        }.items():
            patches.replace(torch.cuda, name, value)
        patches.replace(newton_schulz, "symmetric_kernel", kernel)
        patches.replace(muon_utils.triton_kernels, "HAS_TRITON_340", True)
        patches.replace(muon_utils.triton_kernels, "tsyrk_ex", lambda a: a)  # which is tuned before the first step
        yield
