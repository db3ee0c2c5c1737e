"""Owners of the matrices of a plan without teams."""

from __future__ import annotations

from megatron_muon.core.plan import Plan


def owners_of(plan: Plan) -> tuple[int, ...]:
    """The first owner of each matrix: the only one where there are no teams."""
    return tuple(team.ranks[0] for team in plan.teams)
