"""Names of parameters, and the shell patterns by which arguments choose some."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from megatron_muon.core.errors import UserError

_SHOWN = 3
"""Names shown that are like a pattern."""


def kind_of(name: str) -> str:
    """The name of a parameter with a star for each number among its components."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def matching(
    argument: str, patterns: Sequence[str], names: Iterable[str], *, others: Iterable[str] = (), hint: str = ""
) -> list[str]:
    """The names in which at least one of the patterns of `argument` is found, in their order.

    A pattern is shell-style and case-sensitive, and matches whole components of a name, anywhere in it: `layers.1` is
    found in `layers.1.weight` and not in `layers.10.weight`, and a star matches dots too. Raises a UserError for one
    that is empty or found in none of `names`, with the nearest of these, or the one of `others`, which Muon does not
    take anyway, in which it is found; `hint` ends the message.
    """
    names = list(names)
    if isinstance(patterns, str):
        raise UserError(f"{argument} {patterns!r} is one string; pass a list of patterns")
    for pattern in patterns:
        if not pattern.strip():
            raise UserError(f"{argument} '' would match every matrix; name some, or leave it out")
        if any(_found(pattern, name) for name in names):
            continue
        nothing = f"{argument} {pattern} matches none of Muon's {len(names)} matrices"
        if there := next((name for name in others if _found(pattern, name)), None):
            raise UserError(f"{nothing}, only parameters that Muon does not take ({there}); leave it out")
        if wider := next((each for each in (f"{pattern}*", f"*{pattern}*") for n in names if _found(each, n)), None):
            raise UserError(f"{nothing} by whole components of their names; did you mean {wider!r}?{hint}")
        near = ", ".join(nearest(pattern, names))
        raise UserError(f"{nothing}; the nearest names are {near}{hint}")
    return [name for name in names if any(_found(pattern, name) for pattern in patterns)]


def _found(pattern: str, name: str) -> bool:
    return fnmatchcase(f".{name}.", f"*.{pattern.strip('.')}.*")


def nearest(pattern: str, names: Sequence[str]) -> list[str]:
    """The names that hold something most like `pattern`, one for each kind of parameter, the nearest first."""
    wanted = re.sub(r"[*?\[\]]+", "", pattern)
    kinds: dict[str, str] = {}
    for name in names:
        kinds.setdefault(kind_of(name), name)

    def likeness(name: str) -> float:
        parts = name.split(".")
        runs = {".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1)}
        return max(difflib.SequenceMatcher(None, wanted, run).ratio() for run in runs)

    return sorted(kinds.values(), key=likeness, reverse=True)[:_SHOWN]
