"""Figures of a plan, and warnings about it, as a run logs and `megatron-muon plan` prints them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from megatron_muon.core.plan import Plan
from megatron_muon.errors import SettingError


def figures(plan: Plan) -> dict[str, Any]:
    """Figures under the names that `megatron-muon plan` has in its JSON file."""
    sizes = Counter(len(team.ranks) for team in plan.teams)
    del sizes[1]
    return {
        "matrices": len(plan.layout.matrices),
        "travelling": sum(map(len, plan.waves)),
        "owners": sum(load > 0 for load in plan.loads),
        "matrices_of_teams": {str(size): sizes[size] for size in sorted(sizes)},
        "max_over_mean": imbalance(plan),
        "exchange_bytes": max(received_bytes(plan)),
        "peers": _peers(plan),
        "waves": len(plan.waves),
        "buffer_bytes": plan.buffer_bytes,
    }


def imbalance(plan: Plan) -> float:
    """Largest load over the mean load; 1.0 is even."""
    mean = sum(plan.loads) / len(plan.loads)
    return max(plan.loads) / mean if mean else 1.0


def received_bytes(plan: Plan) -> tuple[int, ...]:
    """Bytes that each rank receives in a step, of rows and of updates."""
    received = np.zeros(plan.layout.world_size, dtype=np.int64)
    for transfers in itertools.chain(*plan.all_to_alls):
        received += transfers.received(len(received))
    return tuple((received * plan.sizes.dtype.itemsize).tolist())


def _peers(plan: Plan) -> int:
    """The most others with which a rank exchanges bytes in one all-to-all."""
    ranks = plan.layout.world_size
    every = itertools.chain(*plan.all_to_alls)
    return max(int(transfers.peers(ranks).max()) for transfers in every)


def refuse_unmet(groups: Mapping[str, SettingError | None]) -> list[SettingError]:
    """Warnings for groups, by name, that fall back to size 1.

    Raises:
        SettingError: no group supports the setting.
    """
    errors = {name: error for name, error in groups.items() if error is not None}
    if not errors:
        return []
    error = list(errors.values())[-1]
    if len(errors) == len(groups):
        raise error
    used = f"1 is used for {' and '.join(errors)} matrices"
    return [SettingError(error.setting, error.value, error.reason, used)]
