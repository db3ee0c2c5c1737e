"""The numbers of parameter groups as a step reads them."""

from __future__ import annotations

import torch

type Number = float | torch.Tensor
"""A number of a group as a step reads it; a tensor is 0-dimensional, fp32, on the device."""


def is_on_device(number: Number) -> bool:
    """True if reading it would wait for a device."""
    return isinstance(number, torch.Tensor) and number.device.type != "cpu"


def acts(decay: Number) -> bool:
    """True if weights decay; any decay on a device counts."""
    return is_on_device(decay) or bool(decay != 0.0)
