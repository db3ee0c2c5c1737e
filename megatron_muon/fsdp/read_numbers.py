"""Reads the numbers of parameter groups.

As in torch's optimizers they may be Python's, numpy's, or tensors of one element, of any dtype and
on any device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any, TypeGuard

import torch

from megatron_muon.errors import UserError
from megatron_muon.ranges import number_of

ON_DEVICE = ("lr", "weight_decay")
"""Numbers that a step can read from a tensor on the device, without waiting for it; others it needs
as floats, as operations of torch do."""


def stays_on_device(
    value: Any,
    name: str,
    device: torch.device,
) -> TypeGuard[torch.Tensor]:
    """True if a step reads the number on the device: one fp32 element, where parameters are."""
    return (
        name in ON_DEVICE
        and isinstance(value, torch.Tensor)
        and value.numel() == 1
        and value.dtype == torch.float32
        and value.device == device
    )


def as_float(name: str, value: Any) -> float:
    """A number of a group as a float.

    Raises:
        UserError: it is not one finite number.
    """
    number = number_of(value)
    is_real = isinstance(number, Real) and not isinstance(number, bool)
    if not is_real or not math.isfinite(number):
        raise UserError(
            f"{name} of a parameter group is {value!r}; give one finite number, or a tensor of one"
            " element"
        )
    return float(number)


def read_group(
    group: Mapping[str, Any], names: Iterable[str], device: torch.device
) -> dict[str, Any]:
    """A parameter group with these numbers as floats, or as 0-dimensional tensors on the device.

    Raises:
        UserError: one of them is not one finite number.
    """
    read = dict(group)
    for name in names:
        value = group.get(name)
        if stays_on_device(value, name, device):
            read[name] = value.detach().view(())
        else:
            read[name] = as_float(name, value)
    return read
