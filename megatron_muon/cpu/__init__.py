"""Lets unmodified megatron-core 0.19.x, with Megatron-FSDP, train on the CPU over gloo.

`install()` answers for `torch.cuda`, sends CUDA tensors to the CPU and runs Megatron-FSDP's
collectives one by one; `uninstall()` takes everything back. A machine that has a GPU is left alone
unless the caller insists.

    megatron_muon.cpu.install()     # before the first tensor or process group is made
    megatron.training.pretrain(...) # with --distributed-backend gloo
"""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_muon.patching import Patches

__all__ = ["install", "installed", "keep_freed_memory", "uninstall"]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_TUNABLES = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"}

_active: Patches | None = None


def install(*, force: bool = False) -> None:
    """Make the CPU stand in for a CUDA device. Installing twice is installing once.

    A RuntimeError, with nothing patched, if CUDA is available and `force` is not set, or if torch
    or megatron-core has changed in an unknown way.
    """
    global _active
    if _active is not None:
        return
    import torch

    if torch.cuda.is_available() and not force:
        raise RuntimeError(
            "CUDA is available here: to train on the CPU all the same, pass --device cpu; to use"
            " the GPU, do not call megatron_muon.cpu.install()"
        )

    from megatron_muon.cpu import devices, megatron
    from megatron_muon.errors import quiet_imports
    from megatron_muon.patching import Patches

    patches = Patches()
    try:
        # The one that imports megatron-core comes first, so that it picks up no patched functions
        # by name.
        with quiet_imports():
            for part in (megatron, devices):
                part.install(patches)
    except BaseException:
        patches.undo()
        raise
    _active = patches


def uninstall() -> None:
    """Restore every attribute that `install` replaced; does nothing where nothing is installed."""
    global _active
    if _active is not None:
        _active.undo()
        _active = None


def installed() -> bool:
    """True while the CPU stands in for a CUDA device."""
    return _active is not None


def keep_freed_memory() -> bool:
    """Let glibc serve blocks below 128 MiB from the heap, and keep up to 256 MiB of it when free.

    By default it gives such memory back, and every page is cleared anew: with four ranks on two
    cores a tenth of a Muon step. False, with nothing changed, without glibc or if the user has set
    it in the environment.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or os.environ.keys() & _TUNABLES:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, 128 * 2**20) and mallopt(_M_TRIM_THRESHOLD, 256 * 2**20))
