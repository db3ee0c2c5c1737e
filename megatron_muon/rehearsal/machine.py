"""Stands in for the machine of a profile: a device that fake tensors are on, and what code asks of its driver.

A fake tensor needs no driver, but compute capability, streams and the symmetric kernel do. Kernels of Triton take real
memory; here the product is recorded and its result made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from emerging_optimizers.orthogonalized_optimizers import muon_utils

from megatron_muon.patching import Patches
from megatron_muon.planning.estimate import Hardware
from megatron_muon.rehearsal.recorder import Recorder

_CAPABILITY = {True: (9, 0), False: (8, 0)}
"""Of a GPU with and without the symmetric kernel, as `core.newton_schulz.products_on` tells them apart."""


def device_of(hardware: Hardware) -> torch.device:
    """Where the tensors of a run on this machine are."""
    return torch.device("cpu") if hardware.processor else torch.device("cuda", 0)


@contextlib.contextmanager
def on(hardware: Hardware, recorder: Recorder) -> Iterator[None]:
    """Fake tensors on the machine's device, recorded."""
    with Patches() as patches, recorder:
        patches.replace(torch.cuda, "get_device_capability", lambda device=None: _CAPABILITY[hardware.symmetric_kernel])
        patches.replace(torch.cuda, "synchronize", lambda device=None: recorder.host_waits("torch.cuda.synchronize"))
        patches.replace(muon_utils.triton_kernels, "HAS_TRITON_340", True)

        def tsyrk_ex(a: torch.Tensor, c: Any = None, alpha: float = 1.0, beta: float = 0.0) -> torch.Tensor:
            assert a.dtype == torch.bfloat16
            assert all(one is None or one.is_contiguous() or one.T.is_contiguous() for one in (a, c))
            rows, cols = a.shape
            result = a.new_empty(rows, rows)
            recorder.product(rows * rows * cols, result)
            return result

        patches.replace(muon_utils.triton_kernels, "tsyrk_ex", tsyrk_ex, takes=("a", "c", "alpha", "beta"))
        yield
