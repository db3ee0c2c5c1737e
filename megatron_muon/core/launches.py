"""Launches of kernels, as an operation of torch that fake tensors have too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("megatron_muon", "FRAGMENT")
_LIBRARY.define(
    "launch(str kernel, int programs, Tensor(a!)[] tensors, float[] numbers, int[] constants,"
    " int warps, int nbytes) -> ()"
)


@torch.library.impl(_LIBRARY, "launch", "CompositeExplicitAutograd")
def _launched(
    kernel: str,
    programs: int,
    tensors: list[Tensor],
    numbers: list[float],
    constants: list[int],
    warps: int,
    nbytes: int,
) -> None:
    from megatron_muon.core import kernels

    getattr(kernels, kernel)[(programs,)](*tensors, *numbers, *constants, num_warps=warps)


@torch.library.register_fake("megatron_muon::launch", lib=_LIBRARY)
def _launched_on_paper(*_: Any) -> None:
    pass


_launch = torch.ops.megatron_muon.launch.default


def launch(
    kernel: str,
    programs: int,
    tensors: list[Tensor],
    constants: Sequence[int],
    nbytes: int,
    *,
    numbers: Sequence[float] = (),
    warps: int = 8,
) -> None:
    """Launch a kernel of `core.kernels` by its name.

    Its arguments are tensors, then numbers, then constants. `nbytes` is what it reads and writes of
    memory, tables apart, for whoever counts.
    """
    if programs:
        _launch(kernel, programs, tensors, list(numbers), list(constants), warps, nbytes)


def has_kernels(device: torch.device) -> bool:
    """True if kernels take the passes on a device."""
    return device.type == "cuda"
