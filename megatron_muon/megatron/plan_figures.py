"""Figures of a plan, and warnings about it, as a run logs and `megatron-muon plan` prints them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_muon.core.buffers import ROW_BYTES
from megatron_muon.core.layout import Ints
from megatron_muon.core.plan import Plan
from megatron_muon.core.traffic import Transfers, transfers
from megatron_muon.errors import SettingError


def figures(plan: Plan) -> dict[str, Any]:
    """Figures under the names that `megatron-muon plan` has in its JSON file."""
    sizes = Counter(len(team.ranks) for team in plan.teams)
    del sizes[1]
    ranks = plan.layout.world_size
    exchanges = all_to_alls(plan)
    return {
        "matrices": len(plan.layout.matrices),
        "travelling": sum(map(len, plan.waves)),
        "owners": sum(load > 0 for load in loads_of(plan)),
        "matrices_of_teams": {str(size): sizes[size] for size in sorted(sizes)},
        "max_over_mean": imbalance(plan),
        "exchange_bytes": max(received_bytes(plan, exchanges)),
        "peers": max(int(each.peers(ranks).max()) for each in itertools.chain(*exchanges)),
        "waves": len(plan.waves),
        "buffer_bytes": plan.buffer_bytes,
    }


def loads_of(plan: Plan) -> list[float]:
    """Cost owned by each rank, in the unit of the plan's costs."""
    loads = np.zeros(plan.layout.world_size)
    for team in plan.teams:
        loads[list(team.ranks)] += team.loads
    return loads.tolist()


def imbalance(plan: Plan) -> float:
    """Largest load over the mean load; 1.0 is even."""
    loads = loads_of(plan)
    mean = sum(loads) / len(loads)
    return max(loads) / mean if mean else 1.0


def all_to_alls(plan: Plan) -> list[tuple[Transfers, Transfers]]:
    """The transfers of each wave: its rows, and its updates."""
    return [transfers(plan.layout, plan.teams, wave) for wave in plan.waves]


def received_bytes(
    plan: Plan,
    exchanges: Sequence[tuple[Transfers, Transfers]],
) -> tuple[int, ...]:
    """Bytes that each rank receives in a step, of rows and of updates, `all_to_alls`."""
    ranks = plan.layout.world_size
    elements = np.zeros(ranks, dtype=np.int64)
    for each in itertools.chain(*exchanges):
        elements += received(each, ranks)
    return tuple((elements * plan.sizes.dtype.itemsize).tolist())


def received(transfers: Transfers, ranks: int) -> Ints:
    """Elements that each of `ranks` ranks receives."""
    return np.bincount(transfers.targets, transfers.elements, ranks).astype(np.int64)


def sent(transfers: Transfers, ranks: int) -> Ints:
    """Elements that each of `ranks` ranks sends."""
    return np.bincount(transfers.sources, transfers.elements, ranks).astype(np.int64)


def state_bytes(plan: Plan) -> Ints:
    """Bytes of the method's state on each rank."""
    found = np.zeros(plan.layout.world_size, dtype=np.int64)
    for team, matrix in zip(plan.teams, plan.layout.matrices, strict=True):
        numels = plan.sizes.method.state_numels(matrix)
        for block in team.slices(0, matrix):
            found[block.rank] += ROW_BYTES * sum(numels[block.block].values())
    return found


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
