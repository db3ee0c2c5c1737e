"""The guard that names a Python or megatron-core outside the supported range, before anything heavy is imported."""

from __future__ import annotations

import re
import sys
from importlib import metadata

from megatron_muon.errors import UserError, install

PYTHON = ((3, 12), (3, 14))
MEGATRON_CORE = ((0, 19), (0, 20))
_RANGE = "megatron-core>={}.{},<{}.{}".format(*MEGATRON_CORE[0], *MEGATRON_CORE[1])


def check_versions(python: tuple[int, int] | None = None, megatron_core: str | None = None) -> None:
    """Check that this Python and megatron-core, or those given, are supported; a UserError says what to install."""
    major, minor = python or sys.version_info[:2]
    if not PYTHON[0] <= (major, minor) < PYTHON[1]:
        raise UserError(f"Python {major}.{minor} does not suit {_RANGE}; make the environment with python3.12 or 3.13")
    try:
        megatron_core = megatron_core or metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        raise UserError(f"megatron-core is not installed; {install('megatron')} (or pip install '{_RANGE}')") from None
    numbers = re.match(r"(\d+)\.(\d+)", megatron_core)
    if numbers is None or not MEGATRON_CORE[0] <= (int(numbers[1]), int(numbers[2])) < MEGATRON_CORE[1]:
        raise UserError(f"megatron-core {megatron_core} is not supported; type: pip install '{_RANGE}'")
