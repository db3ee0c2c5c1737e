"""A warning if Muon takes few of the matrices inside a network by default."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import NamedTuple

import torch

from megatron_muon.fsdp.name_rules import (
    CONVOLUTION,
    EMBEDDING,
    OUTPUT,
    around,
    is_embedding,
    is_numbered,
)
from megatron_muon.fsdp.selection import BY_GROUP, BY_NAME, VECTOR, Selection, may_be_stack

LEAST_SHARE = 0.5
"""Share of the elements of matrices inside the network below which there is a warning."""

LARGEST_KERNEL = 16
"""Largest side of a convolution's kernel; parameters with larger ones count as stacks."""

_NOT_COUNTED = (BY_GROUP, BY_NAME, OUTPUT, VECTOR, "vectors", "table", "no elements")
"""Reasons that users gave, and those of weights that are not matrices inside the network."""


class Inside(NamedTuple):
    """A matrix inside the network, or a stack, and why Muon leaves it, if it does."""

    name: str
    elements: int
    why: str


def warn_if_few(selection: Selection) -> None:
    """Warn, once, if under half of the elements of matrices inside the network go to Muon."""
    inside = []
    for parameter, choice in selection.choices.items():
        name = choice.name
        if choice.view is not None or is_left(name, parameter, choice.why, choice.role):
            inside.append(Inside(name, parameter.numel(), choice.why))
    remedy = (
        "name what Muon is to take in matrices= or stacks=, and put the rest into a group with"
        " optimizer='adamw'"
    )
    if text := warning_of_few(inside, remedy):
        warnings.warn(text, stacklevel=3)


def warning_of_few(inside: Iterable[Inside], remedy: str) -> str:
    """The warning; empty if at least half of the elements go to Muon."""
    inside = list(inside)
    left = [each for each in inside if each.why]
    total = sum(each.elements for each in inside)
    taken = sum(each.elements for each in inside if not each.why)
    if not left or taken >= LEAST_SHARE * total:
        return ""
    largest = max(left, key=lambda each: each.elements)
    return (
        f"Muon takes {taken / total:.1%} of the {total:,} elements of matrices inside the network;"
        f" the largest that it leaves is {largest.name} ({largest.why}): {remedy}"
    )


def is_left(name: str, parameter: torch.Tensor, why: str, role: str = "") -> bool:
    """Whether AdamW takes an apparent matrix or stack inside the network that no user excluded."""
    if not why or why in _NOT_COUNTED or parameter.ndim < 2:
        return False
    if parameter.ndim > 2:
        is_kernel = role == CONVOLUTION or min(parameter.shape[-2:]) <= LARGEST_KERNEL
        return not is_kernel and may_be_stack(name, parameter) and not is_embedding(name)
    return why != EMBEDDING or (role != EMBEDDING and is_numbered(around(name)))
