"""Comparison of values between ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from megatron_muon.errors import UserError
from megatron_muon.ranks import in_the_world, numbers_of_all_ranks, of_all_ranks


def check_agreement(values: Mapping[str, str], group: Any, remedy: str) -> None:
    """Compare named values between the ranks of a group; None takes all. Collective.

    Raises:
        UserError: on every rank, with the first name whose values differ; ends with `remedy`.
    """
    digest = hashlib.sha256(repr(values).encode()).digest()
    digests = numbers_of_all_ranks([int.from_bytes(digest[:7])], group)
    if all(other == digests[0] for other in digests):
        return
    first, *others = of_all_ranks(values, group)
    ranks = in_the_world(group)
    for rank, other in zip(ranks[1:], others, strict=True):
        for name in {**first, **other}:
            one = first.get(name, "not set")
            two = other.get(name, "not set")
            if one != two:
                difference = f"{one} on rank {ranks[0]} and {two} on rank {rank}"
                raise UserError(f"{name} is {difference}; {remedy}")
