"""Lets unmodified megatron-core 0.19.x, with Megatron-FSDP, train on the CPU over gloo.

`install()` answers for `torch.cuda`, sends CUDA tensors to the CPU and runs Megatron-FSDP's collectives one
by one. Nothing happens on import, everything can be taken back with `uninstall()`, and a machine that has a
GPU is left alone unless the caller insists. It makes nothing fast: it serves tests, first steps and
rehearsals at small size.

    megatron_muon.cpu.install()     # before the first tensor or process group is made
    megatron.training.pretrain(...) # with --distributed-backend gloo
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_muon.patching import Patches

__all__ = ["install", "installed", "uninstall"]

_active: Patches | None = None


def install(*, force: bool = False) -> None:
    """Make the CPU stand in for a CUDA device. Installing twice is installing once.

    Raises RuntimeError, with nothing patched, where CUDA is available and `force` is not set, or torch or megatron-core
    has changed in a way that this package does not know.
    """
    global _active
    if _active is not None:
        return
    import torch

    if torch.cuda.is_available() and not force:
        count = torch.cuda.device_count()
        raise RuntimeError(
            f"the CPU backend was asked for, but CUDA is available here ({count} device{'s'[: count != 1]}). "
            "To train on the CPU all the same, pass --device cpu; to use the GPU, do not call "
            "megatron_muon.cpu.install()."
        )

    from megatron_muon.cpu import collectives, cuda_api, devices, megatron
    from megatron_muon.patching import Patches

    patches = Patches()
    try:
        # The two that import megatron-core come first: it must not pick up patched functions by name while it
        # is imported, or uninstalling could not take them back.
        for part in (collectives, megatron, cuda_api, devices):
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
    """Whether the CPU stands in for a CUDA device at the moment."""
    return _active is not None
