"""What a step of the owner scheme takes of a rank's memory beyond weights, gradients and state, by arithmetic.

Adds up the buffers of all ranks' waves that are in use at the same time, by the lifetimes of `core.plan`;
`megatron-muon rehearse` has the places that buffers get, and a test holds the two within 10 %.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from megatron_muon.core.layout import Ints, Matrix
from megatron_muon.core.memory import CHUNK, ROW_BYTES, TOGETHER
from megatron_muon.core.plan import LIFETIMES, MOMENTS, Plan, moments_of, schedule
from megatron_muon.core.slices import BlockSlice

_MADE = "made"
"""Memory that is allocated within the step, beside buffers that exist since construction."""

Batches = Mapping[int, tuple[Sequence[Matrix], Sequence[BlockSlice]]]
"""What each rank orthogonalises: whole matrices, and slices of others."""


def extra_bytes(plan: Plan) -> Ints:
    """The most that each rank takes in a step."""
    waves, fillers = [_wave(plan, indices) for indices in plan.waves], _fillers(plan)
    nothing = np.zeros(plan.layout.world_size, dtype=np.int64)
    made = np.max([nothing, *(each.pop(_MADE) for each in (*waves, *fillers))], axis=0)
    order = schedule(len(waves), len(fillers))
    taken = np.zeros((MOMENTS * len(order) + 1, len(nothing)), dtype=np.int64)
    for when, buffers in zip(moments_of(order), [*waves, *fillers], strict=True):
        for name, size in buffers.items():
            (first, after), (last, until) = LIFETIMES[name]
            taken[when[first] + after : when[last] + until + 1] += size
    found: Ints = taken.max(axis=0) + made
    return found


def _wave(plan: Plan, indices: Sequence[int]) -> dict[str, Ints]:
    """Bytes of a wave's buffers on each rank."""
    traffic, ranks = plan.traffic, plan.layout.world_size
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
    sent = rows.sent(ranks)
    return _buffers(
        plan, held, largest, owned,
        send=sent, own=gathered.sent(ranks) - sent, receive=rows.received(ranks), back=updates.sent(ranks),
    )  # fmt: skip


def _fillers(plan: Plan) -> list[dict[str, Ints]]:
    """Bytes of the buffers of the matrices that need no wire, part by part, on each rank."""
    ranks = plan.layout.world_size
    parts = [plan.fillers(rank) for rank in range(ranks)]
    found: list[dict[str, Ints]] = []
    for number in range(max(map(len, parts), default=0)):
        owned: dict[int, tuple[list[Matrix], list[BlockSlice]]] = {
            rank: ([plan.layout.matrices[index] for index in of_rank[number]], [])
            for rank, of_rank in enumerate(parts)
            if number < len(of_rank)
        }
        sizes = [[matrix.numel for matrix in owned.get(rank, ([], []))[0]] for rank in range(ranks)]
        held, largest = np.array([sum(each) for each in sizes]), np.array([max(each, default=0) for each in sizes])
        found.append(_buffers(plan, held, largest, owned, own=held))
    return found


def _buffers(plan: Plan, held: Ints, largest: Ints, owned: Batches, **travelling: Ints) -> dict[str, Ints]:
    """Bytes by buffer from elements: held, of the largest shard, and travelling."""
    wire, moment = plan.memory.element_bytes, plan.memory.moment
    stacks, work, made = (np.zeros_like(held) for _ in range(3))
    for rank, batch in owned.items():
        stacks[rank], work[rank], made[rank] = plan.memory.of_batch(*batch)
    chunk = np.maximum(np.minimum(held, CHUNK["cuda"]), largest)
    applied = np.maximum(largest, np.minimum(chunk, TOGETHER["cuda"])) if moment.together else largest
    return {
        "prepared": ROW_BYTES * chunk,
        "stacks": stacks,
        "work": work,
        "returned": wire * held,
        "updates": ROW_BYTES * chunk,
        _MADE: np.maximum(made, moment.held * applied),
        **{name: wire * elements for name, elements in travelling.items()},
    }
