"""Provenance of figures and runs: machine, package versions, commit. Imports none of them."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.version import Version

from megatron_muon.errors import UserError, install
from megatron_muon.version import __version__

VERSIONS = ("0.19.0", "0.19.1", "0.19.2", "0.20.0")
"""The versions of megatron-core that were tried."""

ANY_VERSION = "MEGATRON_MUON_ANY_VERSION"
"""Environment variable: 1 accepts other versions."""

_ADVISED = "0.19.2"
_ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = "megatron-core torch triton emerging-optimizers transformer-engine deepspeed muon-fsdp2"


def check_versions(megatron_core: str | None = None) -> str:
    """A warning about a megatron-core, the installed one by default, that was not tried, or "".

    Raises:
        UserError: it was not tried, and `ANY_VERSION` does not accept it.
    """
    try:
        megatron_core = megatron_core or metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        raise UserError(f"megatron-core is not installed; {install('megatron')}") from None
    if Version(megatron_core).public in VERSIONS:
        return ""
    untried = f"megatron-core {megatron_core} was not tried with this package"
    if os.environ.get(ANY_VERSION) == "1":
        return f"warning: {untried}; those that were: {', '.join(VERSIONS)}"
    raise UserError(
        # for Python 3.11 pip installs 0.16
        f"{untried}; with Python 3.12 or 3.13 type: pip install megatron-core=={_ADVISED}, or try"
        f" it at your own risk with {ANY_VERSION}=1"
    )


def check_imported(version: str, place: str) -> None:
    """Raise a UserError if the imported megatron-core is not the installed one."""
    installed = metadata.version("megatron-core")
    if Version(version).public != Version(installed).public:
        raise UserError(
            f"{place} is megatron-core {version}, but {installed} is installed; uninstall one, or"
            " take the other's folder out of PYTHONPATH"
        )


def provenance(program: str) -> dict[str, Any]:
    """`origin`, `command` (`program` with the arguments of this process) and `time`."""
    command = f"{program} {shlex.join(sys.argv[1:])}"
    return {**origin(), "command": command, "time": datetime.now(UTC).isoformat(timespec="seconds")}


def origin() -> dict[str, Any]:
    """`machine`, `versions`, `commit` of the checkout or the working folder, and `dirty`."""
    machine = {
        "processor": _processor(),
        "cores": cores(),
        "load_average_before": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.machine()}",
    }
    commit = _commit()
    return {
        "machine": machine,
        "versions": versions(),
        "commit": commit and commit.removesuffix("-dirty"),
        "dirty": commit and commit.endswith("-dirty"),
    }


def _commit() -> str | None:
    folder = _ROOT if (_ROOT / "pretrain_gpt.py").is_file() else Path.cwd()
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty"]
    command += ["--abbrev=10", "--exclude", "*"]  # no tags
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return found.stdout.strip() or None
    return None


def versions() -> dict[str, str]:
    """The versions that matter, of what is installed."""
    found = {"python": platform.python_version(), "megatron-muon": __version__}
    for package in _PACKAGES.split():
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def cores() -> int:
    """Processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _processor() -> str:
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text("utf-8", "replace")
        found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine()
