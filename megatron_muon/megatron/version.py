"""The guard that names a megatron-core outside the supported range, before anything heavy is imported."""

from __future__ import annotations

from importlib import metadata

from megatron_muon.errors import UserError, install

MEGATRON_CORE = "0.19"


def check_versions(megatron_core: str | None = None) -> None:
    """Check that the installed megatron-core, or the one given, is supported; a UserError says what to install."""
    try:
        megatron_core = megatron_core or metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        raise UserError(f"megatron-core is not installed; {install('megatron')}") from None
    if not (megatron_core + ".").startswith((f"{MEGATRON_CORE}.", f"{MEGATRON_CORE}a", f"{MEGATRON_CORE}rc")):
        # For Python 3.11 pip installs 0.16.
        remedy = f"with Python 3.12 or 3.13 type: pip install 'megatron-core=={MEGATRON_CORE}.*'"
        raise UserError(f"megatron-core {megatron_core} is not supported; {remedy}")
