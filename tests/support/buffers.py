"""Sizes of waves, and the smallest buffer of a step, as the error for a smaller one names it."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_muon.core.buffers import CHUNK, Sizes
from megatron_muon.core.cost import Iteration
from megatron_muon.core.methods.newton_schulz import NewtonSchulz
from megatron_muon.errors import UserError


def smallest_bytes(make: Callable[[int], Any]) -> int:
    """What `make(buffer_bytes)` asks for where it gets next to nothing."""
    with pytest.raises(UserError, match="is too small") as refused:
        make(1)
    found = re.search(r"needs ([0-9.]+); give at least that", str(refused.value))
    assert found
    return round(float(found[1]) * 2**20)


DTYPES = {2: torch.bfloat16, 4: torch.float32}


@functools.cache
def sizes_of(
    element_bytes: int,
    iteration: Iteration | None = None,
    **more: Any,
) -> Sizes:
    """Sizes of waves on the CPU: one object for equal arguments, as plans compare it."""
    method = NewtonSchulz()
    if iteration is not None:
        method = NewtonSchulz(iteration)
        method.iteration = iteration  # with its own products
    return Sizes(method, DTYPES[element_bytes], CHUNK["cpu"], **more)
