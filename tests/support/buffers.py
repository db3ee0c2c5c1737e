"""The smallest buffer of a step, as the error for a smaller one names it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from megatron_muon.core.user_errors import UserError


def smallest_bytes(make: Callable[[int], Any]) -> int:
    """What `make(buffer_bytes)` asks for where it gets next to nothing."""
    with pytest.raises(UserError, match="is too small") as refused:
        make(1)
    found = re.search(r"needs ([0-9.]+); give at least that", str(refused.value))
    assert found
    return round(float(found[1]) * 2**20)
