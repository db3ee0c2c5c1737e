"""What a rank's host enqueues in a step of plain Muon on a GPU: kernels, views, allocations and collectives.

The numbers follow `core.exchange`, `core.optimizer` and `core.newton_schulz`; `megatron-muon rehearse` counts the same
by running them, and tests hold the two within 10 % for a small model and for llama3-8b.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from megatron_muon.core.copies import merged
from megatron_muon.core.cost import GRAM, KERNEL, Iteration
from megatron_muon.core.memory import CHUNK, blocks_together
from megatron_muon.core.plan import Plan
from megatron_muon.core.route import (
    ALL_TO_ALL,
    NOWHERE,
    Route,
    from_chunk,
    make_route,
    parts_of_rows,
    to_chunk,
)
from megatron_muon.core.slices import BlockKind

Counts = Counter[str]

_LOOKED_AT = 8
"""Ranks of a plan among which the busiest host is looked for."""

_LAUNCH_TENSORS, _LAUNCH_ELEMENTS = 64, 320 * 65_536
"""Of two lists of tensors that one launch takes; see `rehearse.recorder.launches`."""

_STEP = Counter(kernels=4, allocations=3)  # around the waves: which updates were skipped
_CHUNK = Counter(kernels=4)  # of rows, beside lists and copies: momentum, look-ahead, zeros for what is skipped
_STACK = Counter(kernels=10, views=4, allocations=9)  # around an iteration: magnitudes, factors, what is not finite
_NORM = Counter(kernels=5, views=2, allocations=2)  # the division by the norm, in the first step
_DIAGONAL = Counter(kernels=1, views=1)  # a multiple of the unit matrix
_FIRST_DIAGONAL = Counter(kernels=4, views=2, allocations=1)  # the same together with the norm
_AGREEMENT = Counter(kernels=8, views=4, allocations=6)  # of a team on which of its matrices are finite


def counts_of(plan: Plan, rank: int) -> Counts:
    """What the host of a rank of the plan's group enqueues in a step."""

    def route(number: int | None, indices: Sequence[int], how: str) -> Route:
        return make_route(
            plan.layout, indices, plan.teams, rank, lambda shape: float(hash(shape)),
            number=number, rows_by=how, updates_by=how,
        )  # fmt: skip

    found = Counter(_STEP)
    for number, wave in enumerate(plan.waves):
        found += _of_route(route(number, wave, ALL_TO_ALL), plan) + Counter(collectives=2)
    for indices in plan.fillers(rank):
        found += _of_route(route(None, indices, NOWHERE), plan)
    return found


def busy_hosts(plan: Plan) -> list[int]:
    """The ranks that orthogonalise most parts; the busiest host is looked for among these."""
    parts = Counter(rank for team in plan.teams for rank in team.ranks)
    return [rank for rank, _ in parts.most_common(_LOOKED_AT)]


def _of_route(route: Route, plan: Plan) -> Counts:
    found: Counts = Counter()
    for rows, numel in parts_of_rows(route, CHUNK["cuda"]):
        within = range(rows[0].start, rows[0].start + numel)
        lists = max(math.ceil(len(rows) / _LAUNCH_TENSORS), math.ceil(numel / _LAUNCH_ELEMENTS))
        copies = [from_chunk(way.copies, within) for way in (route.send, route.own)]
        copies.append(to_chunk(route.returned.copies, within))
        found += _CHUNK
        found["kernels"] += 3 * lists + sum(len(merged(each)) for each in copies)
    ways = (route.receive.copies, route.own_to_stacks, route.back.copies, route.own_updates.copies)
    found["kernels"] += sum(len(merged(each)) for each in ways)
    for stack in route.stacks:
        kind, left = stack.kind, len(stack.slots)
        together = blocks_together(kind.smaller, kind.longer, len(kind.ranks) or 1, "cuda")
        for count in (min(together, left - done) for done in range(0, left, together)):
            found += _STACK + of_iteration(plan.memory.iteration.with_steps(kind.steps), kind, count)
    if any(slot.block is not None and len(plan.layout.matrices[slot.index].blocks) > 1 for slot in route.slots):
        found += _AGREEMENT
    if any(stack.kind.ranks for stack in route.stacks):
        found["collectives"] += 1  # on what is not finite
    return found


def of_iteration(iteration: Iteration, kind: BlockKind, count: int) -> Counts:
    """What an iteration on `count` blocks of a kind enqueues."""
    team = len(kind.ranks) or 1
    by_kernel = [
        iteration.products is KERNEL and KERNEL.shares(kind.smaller, cols)[0] < 1.0
        for cols in (kind.length, kind.smaller)
    ]
    gram, square = (count if is_kernel else dense for is_kernel, dense in zip(by_kernel, (1, 2), strict=True))
    found = _NORM + _FIRST_DIAGONAL
    if team > 1:
        gram += 2  # to fp32 and back
        found["collectives"] += 1 + iteration.counts(iteration.method_for(kind.smaller, kind.longer, team)).gram
    if iteration.method_for(kind.smaller, kind.longer, team) != GRAM:
        found["kernels"] += iteration.steps * (gram + square) + 1 + 2 * (iteration.steps - 1)
        return found
    for number, length in enumerate(iteration.runs):
        found += _DIAGONAL if number else Counter()
        found["kernels"] += gram + length * square + (length > 1) + (length - 1) * 6 + 1
    return found
