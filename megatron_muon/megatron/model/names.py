"""Patterns for parameter names, as `--muon-exclude` takes them. Imports neither torch nor Megatron."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from megatron_muon.errors import UserError


def matching(patterns: Sequence[str], names: Iterable[str], *, others: Iterable[str] = ()) -> list[str]:
    """The names in which at least one of the patterns is found, in their order.

    A pattern is shell-style (`*`, `?`, `[...]`) and case-sensitive, and may be found anywhere in a name: `router`
    finds every router, `layers.0.*fc1` the first projections of layer 0.

    Raises:
        UserError: a pattern is empty, or found in none of `names`; the message says which names are near, or which of
            `others`, parameters that Muon does not take, it is found in.
    """
    names = list(names)
    for pattern in patterns:
        if not pattern.strip():
            raise UserError("--muon-exclude '' would match every matrix; name some, or use --optimizer adam")
        if any(_found(pattern, name) for name in names):
            continue
        if there := next((name for name in others if _found(pattern, name)), None):
            raise UserError(
                f"--muon-exclude {pattern} matches none of Muon's {len(names)} matrices, only parameters that Muon "
                f"does not take ({there}); leave it out"
            )
        near = ", ".join(nearest(pattern, names))
        raise UserError(
            f"--muon-exclude {pattern} matches none of Muon's {len(names)} matrices; the nearest names are {near} "
            "(--muon-log-params lists all)"
        )
    return [name for name in names if any(_found(pattern, name) for pattern in patterns)]


def nearest(pattern: str, names: Sequence[str], count: int = 3) -> list[str]:
    """The names that hold something most like `pattern`, one for each kind of parameter, the nearest first."""
    wanted = re.sub(r"[*?\[\]]+", "", pattern)
    kinds: dict[str, str] = {}
    for name in names:
        kinds.setdefault(re.sub(r"\d+", "N", name), name)
    return sorted(kinds.values(), key=lambda name: -_likeness(wanted, name))[:count]


def _found(pattern: str, name: str) -> bool:
    return fnmatchcase(name, f"*{pattern}*")


def _likeness(wanted: str, name: str) -> float:
    """How much the run of dotted parts of `name` that is most like `wanted` is like it, from 0 to 1."""
    parts = name.split(".")
    runs = {".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1)}
    return max(difflib.SequenceMatcher(None, wanted, run).ratio() for run in runs)
