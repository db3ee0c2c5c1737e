"""Which wave of a step goes on when, and from when until when each of its buffers is needed: plain arithmetic."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

STAGES = 4
"""Of a wave: until its rows travel, until they are orthogonalised, until updates travel, until they are applied."""
MOMENTS = 3
"""Of a stage, for the lifetime of buffers: what arrived is waited for, copied, and then used."""

LIFETIMES = {
    "prepared": ((0, 0), (0, 2)),
    "send": ((0, 0), (1, 0)),
    "own": ((0, 0), (1, 1)),
    "receive": ((0, 0), (1, 1)),
    "stacks": ((1, 1), (2, 2)),
    "work": ((1, 2), (1, 2)),
    "back": ((2, 0), (3, 0)),
    "returned": ((2, 0), (3, 2)),
    "updates": ((3, 0), (3, 2)),
}
"""From which stage and moment of a wave on a buffer is needed, and until when."""


def schedule(travelling: int, local: int) -> list[int]:
    """The waves in the order in which they go on, those that do not travel numbered behind those that do.

    While wave k is orthogonalised, rows of wave k+1 and updates of wave k-1 are under way; before its own updates
    leave, those of wave k-1 are applied, so that no more than three waves hold memory.
    """
    rest = iter(range(travelling, travelling + local))
    beside = -(-local // max(travelling, 1))
    order = [0] if travelling else []
    for wave in range(travelling):
        order += [wave + 1] if wave + 1 < travelling else []
        order += [number for number in itertools.islice(rest, beside) for _ in range(STAGES)]
        order += [wave, *([wave - 1] if wave else []), wave]
    order += [travelling - 1] if travelling else []
    return order + [number for number in rest for _ in range(STAGES)]


def moments_of(order: Sequence[int]) -> list[list[int]]:
    """For each wave the first moment of each of its stages, by the order in which waves go on."""
    moments: list[list[int]] = [[] for _ in range(max(order, default=-1) + 1)]
    for moment, number in enumerate(order):
        moments[number].append(moment * MOMENTS)
    return moments
