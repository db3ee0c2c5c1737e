"""What a step of the owner scheme takes of a rank's memory beyond weights, gradients and state, by arithmetic.

Adds up the buffers of all ranks' waves that are in use at the same time, by the lifetimes of `core.schedule`. The
planner's own rule, by which it holds `--muon-exchange-buffer-mb`, is simpler and on the safe side (`core.memory`).
`megatron-muon rehearse` has the places that buffers get; a test holds the two within 10 %.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from megatron_muon.core.layout import Ints, Matrix
from megatron_muon.core.memory import CHUNK, ROW_BYTES, TOGETHER
from megatron_muon.core.plan import Plan
from megatron_muon.core.schedule import LIFETIMES, MOMENTS, moments_of, schedule
from megatron_muon.core.slices import BlockSlice


def extra_bytes(plan: Plan) -> Ints:
    """The most that each rank takes in a step."""
    waves = [_wave(plan, indices) for indices in plan.waves]
    nothing = np.zeros(plan.layout.world_size, dtype=np.int64)
    fillers = _fillers(plan)
    made = np.max([nothing, *(each.pop(_MADE) for each in (*waves, *fillers))], axis=0)
    order = schedule(len(waves), len(fillers))
    moments = moments_of(order)
    most = nothing
    for moment in range(MOMENTS * len(order)):
        taken = nothing.copy()
        for when, buffers in zip(moments, [*waves, *fillers], strict=True):
            for name, size in buffers.items():
                (first, after), (last, until) = LIFETIMES[name]
                if when[first] + after <= moment <= when[last] + until:
                    taken += size
        most = np.maximum(most, taken)
    return most + made


_MADE = "made"
"""What is made within the step, beside buffers that exist since construction."""


def _wave(plan: Plan, indices: Sequence[int]) -> dict[str, Ints]:
    """Bytes of a wave's buffers on each rank."""
    traffic, ranks, wire = plan.traffic, plan.layout.world_size, plan.memory.element_bytes
    gathered, updates = traffic.gathered(indices), traffic.returned(indices).between_ranks()
    rows = gathered.between_ranks()
    held, largest = (np.zeros(ranks, dtype=np.int64) for _ in range(2))
    owned: dict[int, tuple[list[Matrix], list[BlockSlice]]] = defaultdict(lambda: ([], []))
    for index in indices:
        holders = traffic.holders(index)
        elements = holders.elements[holders.numbers]
        held[holders.ranks] += elements
        largest[holders.ranks] = np.maximum(largest[holders.ranks], elements)
        if plan.teams[index].cuts is None:
            owned[plan.owners[index]][0].append(plan.layout.matrices[index])
        else:
            for block_slice in plan.slices(index):
                owned[block_slice.rank][1].append(block_slice)
    stacks, work, made = (np.zeros(ranks, dtype=np.int64) for _ in range(3))
    for owner, (matrices, slices) in owned.items():
        stacks[owner], work[owner], made[owner] = plan.memory.of_batch(matrices, slices)
    chunk = np.maximum(np.minimum(held, CHUNK["cuda"]), largest)
    return {
        "prepared": ROW_BYTES * chunk,
        "send": wire * rows.sent(ranks),
        "own": wire * (gathered.sent(ranks) - rows.sent(ranks)),
        "receive": wire * rows.received(ranks),
        "stacks": stacks,
        "work": work,
        "back": wire * updates.sent(ranks),
        "returned": wire * held,
        "updates": ROW_BYTES * chunk,
        _MADE: np.maximum(made, _made_of_rows(plan, chunk, largest)),
    }


def _made_of_rows(plan: Plan, chunk: Ints, largest: Ints) -> Ints:
    """Bytes of what applying updates makes: of one shard, or of several at a time."""
    moment = plan.memory.moment
    elements = np.maximum(largest, np.minimum(chunk, TOGETHER["cuda"])) if moment.together else largest
    return moment.held * elements


def _fillers(plan: Plan) -> list[dict[str, Ints]]:
    """Bytes of the buffers of the matrices that need no wire, part by part, on each rank."""
    ranks, wire = plan.layout.world_size, plan.memory.element_bytes
    parts = [plan.fillers(rank) for rank in range(ranks)]
    found: list[dict[str, Ints]] = []
    for number in range(max(map(len, parts), default=0)):
        held, stacks, work, made, chunk, largest = (np.zeros(ranks, dtype=np.int64) for _ in range(6))
        for rank, of_rank in enumerate(parts):
            matrices = [plan.layout.matrices[index] for index in of_rank[number]] if number < len(of_rank) else []
            held[rank] = sum(matrix.numel for matrix in matrices)
            stacks[rank], work[rank], made[rank] = plan.memory.of_batch(matrices)
            largest[rank] = max((matrix.numel for matrix in matrices), default=0)
            chunk[rank] = max(min(int(held[rank]), CHUNK["cuda"]), int(largest[rank]))
        found.append(
            {
                "prepared": ROW_BYTES * chunk,
                "own": wire * held,
                "stacks": stacks,
                "work": work,
                "returned": wire * held,
                "updates": ROW_BYTES * chunk,
                _MADE: np.maximum(made, _made_of_rows(plan, chunk, largest)),
            }
        )
    return found
