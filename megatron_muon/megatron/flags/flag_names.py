"""Names of pretrain_gpt.py's flags: kept in a file between commands, and the nearest to what was typed.

megatron.training, which knows them, takes seconds to import. The file is of one version of
megatron-core and one state of this package's own flags; without it nothing is known.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
from collections.abc import Iterable
from pathlib import Path

_CUTOFF = 0.75
"""difflib's ratio from which names are alike; lower ones suggest flags that have nothing to do with what was typed."""


def kept() -> frozenset[str]:
    """The flags that `keep` has kept; empty where it has not, or for other versions."""
    # RuntimeError: a user without a home; ModuleNotFoundError: no megatron-core.
    with contextlib.suppress(OSError, ValueError, RuntimeError, ModuleNotFoundError):
        return frozenset(json.loads(_file().read_text("utf-8")))
    return frozenset()


def keep(flags: Iterable[str]) -> None:
    """Keeps the flags for the next command, where that can be written."""
    from megatron_muon.checkpoint import files

    with contextlib.suppress(OSError, RuntimeError):
        _file().parent.mkdir(parents=True, exist_ok=True)
        with files.written_at_once(_file()) as stream:
            stream.write(json.dumps(sorted(flags)))


def _file() -> Path:
    from importlib import metadata

    from megatron_muon import settings

    own = os.stat(settings.__file__).st_mtime_ns  # where this package's flags stand
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron-muon"
    return folder / f"flags-{metadata.version('megatron-core')}-{own}.json"


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """The end of an error message that names the nearest of `known`; empty where none is near."""
    near = nearest(wrong, known)
    return f"; did you mean {near}?" if near is not None else ""


def nearest(wrong: str, known: Iterable[str]) -> str | None:
    """The one of `known` that is most like `wrong`, whatever dashes, underscores and case; None where none is."""
    names = {plain(name): name for name in reversed(list(known))}
    near = difflib.get_close_matches(plain(wrong), names, n=1, cutoff=_CUTOFF)
    return names[near[0]] if near else None


def plain(name: str) -> str:
    """A name as all of its spellings: lower case, inner dashes."""
    return name.lstrip("-").replace("_", "-").lower()
