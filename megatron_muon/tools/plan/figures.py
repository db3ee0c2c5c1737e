"""The figures of plans that `megatron-muon plan` shows, in the form of its JSON file."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from megatron_muon.core.plan import Plan, all_gather_bytes
from megatron_muon.tools.plan.estimate import GroupPlan, Hardware, KindPlan, Settings

OfRanks = Callable[[GroupPlan], Sequence[float]]
"""A figure that a plan has for each rank of its group."""


def report(plans: Sequence[KindPlan], world_size: int, settings: Settings, hardware: Hardware) -> dict[str, Any]:
    """The figures of a rank, which is in one group of each kind, and of each group, in the form of the JSON file.

    Where groups of a kind have several plans, the slowest is shown; the digest is rank 0's.
    """
    return {
        "digest": "-".join(kind.of(0).plan.digest() for kind in plans),
        "world_size": world_size,
        **_figures([kind.worst for kind in plans], [kind.of_ranks for kind in plans]),
        "hardware": hardware.name,
        "node_ranks": hardware.node_ranks,
        "settings": {
            "buffer_mb": settings.buffer_mb,
            "exchange_dtype": settings.exchange_dtype,
            "team_size": settings.team_size,
            "ns": settings.iteration.method,
            "ns_dtype": "bf16" if settings.iteration.half else "fp32",
            "ns_steps": settings.iteration.steps,
        },
        "matrices_of_steps": _of_steps(plans),
        "groups": [
            {
                "name": kind.group.name,
                "ranks": kind.group.layout.world_size,
                "plans": len(kind.plans),
                "whole_matrices": sum(map(len, kind.worst.plan.whole)),
                **_figures([kind.worst], [functools.partial(_of_one, kind.worst)]),
            }
            for kind in plans
        ],
    }


def _of_steps(plans: Sequence[KindPlan]) -> dict[str, int]:
    """How many matrices take another number of steps, by that number: `--muon-ns-steps-for`."""
    steps = Counter(matrix.steps for kind in plans for matrix in kind.group.layout.matrices if matrix.steps)
    return {str(number): count for number, count in sorted(steps.items())}


def _of_one(item: GroupPlan, figure: OfRanks) -> np.ndarray[Any, Any]:
    return np.array(figure(item))


def _figures(
    plans: Sequence[GroupPlan], of_ranks: Sequence[Callable[[OfRanks], np.ndarray[Any, Any]]]
) -> dict[str, Any]:
    """Figures of ranks that step groups one by one: times add up, buffers do not.

    `of_ranks` has, for each of the plans, what gives a figure for each rank.
    """

    def total(per_rank: Callable[[Plan], Sequence[float]]) -> np.ndarray[Any, Any]:
        return np.sum([of(lambda item: per_rank(item.plan)) for of in of_ranks], axis=0)

    matrices = [matrix for item in plans for matrix in item.plan.layout.matrices]
    loads, largest = total(lambda plan: plan.loads), max(item.largest for item in plans)
    mean = float(loads.mean()) or 1.0
    return {
        "matrices": len(matrices),
        "parameters": sum(matrix.numel for matrix in matrices),
        "ns_load": {
            "max_over_mean": float(loads.max()) / mean if loads.any() else 1.0,
            "least_possible": max(largest / mean, 1.0),  # with these teams, for the sake of the costliest matrix
        },
        "matrices_of_teams": {
            str(size): count
            for size, count in sorted(Counter(len(t.ranks) for item in plans for t in item.plan.teams).items())
            if size > 1
        },
        "exchange_bytes": {
            "max_per_rank": int(total(lambda plan: plan.exchanged_bytes()).max()),
            "allgather_per_rank": int(
                total(lambda plan: all_gather_bytes(plan.layout, plan.memory.element_bytes)).max()
            ),
        },
        "peers": max(item.plan.peers() for item in plans),
        "extra_bytes_max": max(item.extra_bytes for item in plans),
        "waves": sum(len(item.plan.waves) for item in plans),
        "buffer_bytes": max(item.plan.buffer_bytes for item in plans),
        "plan_seconds": sum(item.seconds for item in plans),
        "estimated_ms": {
            name: sum(getattr(item, f"{name}_ms") for item in plans) for name in ("step", "ns", "exchange", "host")
        },
    }
