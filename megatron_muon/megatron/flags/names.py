"""Names of pretrain_gpt.py's flags, kept in a file between commands: megatron.training takes seconds to import.

The file is of one version of megatron-core and one state of this package's own flags; without it nothing is known.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from megatron_muon import settings
from megatron_muon.checkpoint import files


def kept() -> frozenset[str]:
    """The flags that `keep` has kept; empty where it has not, or for other versions."""
    with contextlib.suppress(OSError, ValueError, metadata.PackageNotFoundError):
        return frozenset(json.loads(_file().read_text("utf-8")))
    return frozenset()


def keep(flags: Iterable[str]) -> None:
    """Keeps the flags for the next command, where that can be written."""
    with contextlib.suppress(OSError):
        _file().parent.mkdir(parents=True, exist_ok=True)
        with files.written_at_once(_file()) as stream:
            stream.write(json.dumps(sorted(flags)))


def _file() -> Path:
    own = os.stat(settings.__file__).st_mtime_ns  # where this package's flags stand
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron-muon"
    return folder / f"flags-{metadata.version('megatron-core')}-{own}.json"
