"""Where figures and runs come from: machine, versions of the packages that matter, commit. Imports none of them."""

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

from megatron_muon.version import __version__

_ROOT = Path(__file__).resolve().parents[2]

_PACKAGES = ("megatron-core", "torch", "emerging-optimizers", "transformer-engine", "deepspeed", "muon-fsdp2")


def provenance(program: str) -> dict[str, Any]:
    """Where figures come from: `origin`, `command` (`program` with this process's arguments), `time`."""
    command = f"{program} {shlex.join(sys.argv[1:])}"
    return {**origin(), "command": command, "time": datetime.now(UTC).isoformat(timespec="seconds")}


def origin() -> dict[str, Any]:
    """`machine`, `versions`, `commit`, and `dirty`: whether tracked files differ from it.

    The commit is that of the checkout that the package runs from, else of the working folder's, or None.
    """
    machine = {
        "processor": _processor(),
        "cores": cores(),
        "load_average_before": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.machine()}",
    }
    folder = _ROOT if (_ROOT / "pretrain_gpt.py").is_file() else Path.cwd()
    describe = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=10", "--exclude", "*"]
    commit = None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        commit = subprocess.run(describe, capture_output=True, text=True, timeout=10, check=True).stdout.strip() or None
    return {
        "machine": machine,
        "versions": versions(),
        "commit": commit and commit.removesuffix("-dirty"),
        "dirty": commit and commit.endswith("-dirty"),
    }


def versions() -> dict[str, str]:
    """The versions that matter, of what is installed."""
    found = {"python": platform.python_version(), "megatron-muon": __version__}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text("utf-8", "replace"), re.MULTILINE)
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine()
