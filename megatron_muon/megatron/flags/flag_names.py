"""Names of pretrain_gpt.py's flags: cached in a file between commands, and the nearest to a typo.

megatron.training, which defines them, takes seconds to import. The cache is valid for one version
of megatron-core and one state of this package's own flags.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
from collections.abc import Iterable
from pathlib import Path

_CUTOFF = 0.75
"""difflib's ratio above which names are alike; lower ones suggest unrelated flags."""


def kept() -> frozenset[str]:
    """The cached flags; empty without a cache for these versions."""
    # RuntimeError: a user without a home; ModuleNotFoundError: no megatron-core.
    with contextlib.suppress(OSError, ValueError, RuntimeError, ModuleNotFoundError):
        text = _file().read_text("utf-8")
        return frozenset(json.loads(text))
    return frozenset()


def keep(flags: Iterable[str]) -> None:
    """Cache the flags for the next command, where the file can be written."""
    from megatron_muon.checkpoint import folders

    with contextlib.suppress(OSError, RuntimeError):
        file = _file()
        file.parent.mkdir(parents=True, exist_ok=True)
        with folders.written_at_once(file) as stream:
            json.dump(sorted(flags), stream)


def _file() -> Path:
    from importlib import metadata

    from megatron_muon import settings

    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    version = metadata.version("megatron-core")
    own_flags = os.stat(settings.__file__).st_mtime_ns
    return Path(folder, "megatron-muon", f"flags-{version}-{own_flags}.json")


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """The end of an error message, with the nearest of `known`; empty if none is near."""
    near = nearest(wrong, known)
    return f"; did you mean {near}?" if near is not None else ""


def nearest(wrong: str, known: Iterable[str]) -> str | None:
    """The most similar of `known`, ignoring dashes, underscores and case; None if none is near."""
    names = {_plain(name): name for name in known}
    near = difflib.get_close_matches(_plain(wrong), names, n=1, cutoff=_CUTOFF)
    return names[near[0]] if near else None


def _plain(name: str) -> str:
    """A name in one spelling: lower case, inner dashes."""
    return name.lstrip("-").replace("_", "-").lower()
