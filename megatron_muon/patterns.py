"""Patterns that users give for names of parameters, and what they find."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from megatron_muon.core.errors import UserError

_OF = {
    "flatten": "the {} parameters of more than two dimensions",
    "stacks": "the {} parameters of more than two dimensions",
    "matrices": "the {} parameters of two or more dimensions",
}
"""Among what an argument's patterns look, where that is not Muon's matrices."""


def matching(
    argument: str,
    patterns: Sequence[str],
    names: Iterable[str],
    *,
    others: Iterable[str] = (),
    hint: str = "",
) -> list[str]:
    """The names in which at least one of the patterns of `argument` is found, in their order.

    A pattern is shell-style and case-sensitive, and matches whole components of a name, anywhere in
    it: `layers.1` is found in `layers.1.weight` and not in `layers.10.weight`, and a star matches
    dots too.

    Raises:
        UserError: a pattern is empty or found in none of `names`; the message says where among
            `others` it is found, or the nearest component of a name, and ends with `hint`.
    """
    names = list(names)
    if isinstance(patterns, str):
        raise UserError(f"{argument} {patterns!r} is one string; pass a list of patterns")
    for pattern in patterns:
        if not pattern.strip():
            raise UserError(f"{argument} '' would match every matrix; name some, or leave it out")
        if any(_found(pattern, name) for name in names):
            continue
        nothing = f"{argument} {pattern} matches none of {_OF.get(argument, "Muon's {} matrices").format(len(names))}"
        if there := next((name for name in others if _found(pattern, name)), None):
            raise UserError(
                f"{nothing}, only parameters that are not among these ({there}); leave it out"
            )
        components = sorted({part for name in names for part in name.split(".")})
        parts = pattern.strip(".").split(".")
        near = ".".join(
            (difflib.get_close_matches(part, components, 1) or [part])[0] for part in parts
        )
        wider = (
            each
            for each in (f"{pattern}*", f"*{pattern}*", near)
            if any(_found(each, name) for name in names)
        )
        if meant := next(wider, ""):
            meant = f"; did you mean {meant}?"
        elif names:
            meant = f"; one of them is {names[0]}"
        raise UserError(f"{nothing} by whole components of their names{meant}{hint}")
    return [name for name in names if any(_found(pattern, name) for pattern in patterns)]


def _found(pattern: str, name: str) -> bool:
    return fnmatchcase(f".{name}.", f"*.{pattern.strip('.')}.*")


def steps_of(
    names: Iterable[str],
    steps_for: Mapping[str, int],
    *,
    others: Iterable[str] = (),
    hint: str = "",
) -> dict[str, int]:
    """The Newton-Schulz steps of matrices by name, from those of patterns; the last pattern that is found in one holds.

    Raises a UserError for a pattern as `matching` does.
    """
    names, others = list(names), list(others)
    found = {}
    for pattern, steps in steps_for.items():
        matched = matching("--muon-ns-steps-for", [pattern], names, others=others, hint=hint)
        found.update(dict.fromkeys(matched, steps))
    return found
