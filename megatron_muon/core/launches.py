"""Launches of the kernels of `core.kernels`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

import torch
from torch import Tensor


def has_kernels(device: torch.device) -> bool:
    """True if kernels take the passes on a device; MUON_KERNELS=0 has torch operations take them."""
    return device.type == "cuda" and os.environ.get("MUON_KERNELS") != "0"


def launch(
    kernel: str,
    programs: int,
    tensors: Sequence[Tensor],
    constants: Sequence[float],
    nbytes: int,
) -> None:
    """Launch a kernel by its name; its arguments are tensors, then numbers and constants.

    `nbytes` is what it reads and writes of memory, tables apart, for whoever counts.
    """
    from megatron_muon.core import kernels  # Triton is there only where it can run

    if not programs:
        return
    device = tensors[0].device
    # Triton launches on the current device
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        getattr(kernels, kernel)[(programs,)](*tensors, *constants, num_warps=8)
