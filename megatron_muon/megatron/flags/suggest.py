"""Which known flag, key or command a user may have meant: difflib's nearest."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_CUTOFF = 0.75
"""difflib's ratio from which names are alike; lower ones suggest flags that have nothing to do with what was typed."""


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
