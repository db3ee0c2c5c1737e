"""What is asked of a plan that its groups of ranks cannot have, in the words that were typed."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from megatron_muon.core.assignment import refuse_unmet
from megatron_muon.core.errors import UserError
from megatron_muon.tools.plan.estimate import KindPlan

_FLAGS = {
    "buffer_mb": "--muon-exchange-buffer-mb",
    "team_size": "--muon-team-size",
}
"""The flags of a run that `megatron-muon plan` has under these names."""


@contextmanager
def flags_as_typed(args: argparse.Namespace) -> Iterator[None]:
    """Errors name the flag of `megatron-muon plan` where its value is from the line, else that of a run."""
    try:
        yield
    except UserError as error:
        text = str(error)
        for name, flag in _FLAGS.items():
            if getattr(args, name) is not None:
                text = text.replace(flag, f"--{name.replace('_', '-')}")
        raise UserError(text) from None


def check_unmet(plans: Sequence[KindPlan], *, alone: bool = False) -> list[str]:
    """Refuse what no group can have; says what some cannot.

    A group of one rank has nothing to share; where there is no other, settings count only if `alone`.
    """
    shared = [kind for kind in plans if kind.group.layout.world_size > 1]
    counted = shared or (plans if alone else [])
    return refuse_unmet({kind.group.name.removesuffix("s"): kind.unmet for kind in counted})
