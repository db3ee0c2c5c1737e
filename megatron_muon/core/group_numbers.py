"""The numbers of parameter groups as a step reads them.

As in torch's optimizers they may be Python's, numpy's, or tensors of one element, of any dtype and
on any device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any, TypeGuard

import torch

from megatron_muon.core.numbers import number_of
from megatron_muon.core.user_errors import UserError

ON_DEVICE = ("lr", "weight_decay")
"""Numbers that a step can read from a tensor on the device, without waiting for it; others it needs as Python has them,
as operations of torch do."""


def stays_on_device(value: Any, name: str, device: torch.device) -> TypeGuard[torch.Tensor]:
    """Whether a step reads the number of this name where it is: one element, fp32, on the device of the parameters."""
    return (
        name in ON_DEVICE
        and isinstance(value, torch.Tensor)
        and value.numel() == 1
        and value.dtype == torch.float32
        and value.device == device
    )


def as_float(name: str, value: Any) -> float:
    """A number of a group as Python's; a UserError, which calls it `name`, for what is not one finite number."""
    number = number_of(value)
    if isinstance(number, bool) or not isinstance(number, Real) or not math.isfinite(number):
        raise UserError(f"{name} is {value!r}; give one finite number, or a tensor of one element")
    return float(number)


def read_group(
    group: Mapping[str, Any], names: Iterable[str], device: torch.device
) -> dict[str, Any]:
    """A parameter group with the numbers of these names as floats, or as 0-dimensional tensors on the device.

    A UserError for what is not one finite number.
    """
    read = dict(group)
    for name in names:
        value = group[name]
        if stays_on_device(value, name, device):
            read[name] = value.detach().view(())
        else:
            read[name] = as_float(f"{name} of a parameter group", value)
    return read
