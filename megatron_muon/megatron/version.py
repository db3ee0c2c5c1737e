"""The guard that names a Python or megatron-core outside the supported range, before anything heavy is imported."""

from __future__ import annotations

import re
import sys
from importlib import metadata

from megatron_muon.errors import UserError

PYTHON = ((3, 12), (3, 14))
MEGATRON_CORE = ((0, 19), (0, 20))


def check_versions(python: tuple[int, int] | None = None, megatron_core: str | None = None) -> None:
    """Check that this Python and megatron-core, or those given, are supported.

    Raises:
        UserError: names what was found, the supported range and what to install.
    """
    python = sys.version_info[:2] if python is None else python
    if python >= PYTHON[1]:
        raise UserError(
            f"Python {python[0]}.{python[1]} is too new: megatron-core {_range()} has no wheel for it; make the "
            "virtual environment with python3.12 or python3.13"
        )
    if python < PYTHON[0]:
        raise UserError(
            f"Python {python[0]}.{python[1]} is too old: megatron-core {_range()} needs Python "
            f"{PYTHON[0][0]}.{PYTHON[0][1]} or newer; make the virtual environment with python3.12"
        )
    if megatron_core is None:
        try:
            megatron_core = metadata.version("megatron-core")
        except metadata.PackageNotFoundError:
            raise UserError(f"megatron-core is not installed; type: pip install 'megatron-core{_range()}'") from None
    numbers = re.match(r"(\d+)\.(\d+)", megatron_core)
    found = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    if not MEGATRON_CORE[0] <= found < MEGATRON_CORE[1]:
        raise UserError(f"megatron-core {megatron_core} is not supported; type: pip install 'megatron-core{_range()}'")


def _range() -> str:
    lowest, beyond = (".".join(map(str, version)) for version in MEGATRON_CORE)
    return f">={lowest},<{beyond}"
