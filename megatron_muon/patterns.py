"""Patterns for parameters' names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from megatron_muon.errors import UserError

_POSSIBLE = {
    "flatten": "the {} parameters of more than two dimensions",
    "stacks": "the {} parameters of more than two dimensions",
    "matrices": "the {} parameters of two or more dimensions",
}
"""The parameters that an argument's patterns may match, if other than Muon's matrices."""


def matching(
    argument: str,
    patterns: Sequence[str],
    names: Iterable[str],
    *,
    others: Iterable[str] = (),
    hint: str = "",
) -> list[str]:
    """The names that at least one of the patterns of `argument` matches, in their order.

    A pattern is shell-style and case-sensitive, and matches whole components of a name, anywhere in
    it: `layers.1` matches `layers.1.weight` and not `layers.10.weight`, and a star matches dots
    too.

    Raises:
        UserError: a pattern is empty or matches none of `names`; the message has the match among
            `others`, or the nearest component of a name, and ends with `hint`.
    """
    names = list(names)
    if isinstance(patterns, str):
        raise UserError(f"{argument} {patterns!r} is one string; pass a list of patterns")
    for pattern in patterns:
        if not pattern.strip():
            raise UserError(f"{argument} '' would match every matrix; name some, or leave it out")
        if any(_matches(pattern, name) for name in names):
            continue
        possible = _POSSIBLE.get(argument, "Muon's {} matrices").format(len(names))
        nothing = f"{argument} {pattern} matches none of {possible}"
        for name in others:
            if _matches(pattern, name):
                raise UserError(
                    f"{nothing}, only parameters that are not among these ({name}); leave it out"
                )
        meant = _meant(pattern, names)
        raise UserError(f"{nothing} by whole components of their names{meant}{hint}")
    return [name for name in names if any(_matches(pattern, name) for pattern in patterns)]


def _matches(pattern: str, name: str) -> bool:
    return fnmatchcase(f".{name}.", f"*.{pattern.strip('.')}.*")


def _meant(pattern: str, names: Sequence[str]) -> str:
    """A suggestion for a pattern that matches nothing."""
    components = sorted({part for name in names for part in name.split(".")})
    nearest = []
    for part in pattern.strip(".").split("."):
        nearest += difflib.get_close_matches(part, components, 1) or [part]
    for wider in (f"{pattern}*", f"*{pattern}*", ".".join(nearest)):
        if any(_matches(wider, name) for name in names):
            return f"; did you mean {wider}?"
    return f"; one of them is {names[0]}" if names else ""


def values_of(
    names: Iterable[str],
    values_for: Mapping[str, Any],
    *,
    argument: str,
    others: Iterable[str] = (),
    hint: str = "",
) -> dict[str, Any]:
    """The value of each name that a pattern matches; of several patterns the last holds.

    Raises a UserError as `matching` does.
    """
    names = list(names)
    others = list(others)
    found: dict[str, Any] = {}
    for pattern, value in values_for.items():
        matched = matching(argument, [pattern], names, others=others, hint=hint)
        found.update(dict.fromkeys(matched, value))
    return found
