"""What a step of the owner scheme takes of a rank's memory beyond weights, gradients and state, by arithmetic.

Follows the buffers of `core.exchange.owner` through a step: what is on its way of three waves, the matrices that are
assembled, the rows that are prepared, and the temporaries of the iteration. The planner's own rule, by which it holds
`--muon-exchange-buffer-mb`, is simpler and on the safe side (`core.memory`). `megatron-muon rehearse` counts the same
by running that code; a test holds the two within 10 %.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from megatron_muon.core.layout import Matrix
from megatron_muon.core.memory import ROW_BYTES
from megatron_muon.core.plan import Plan
from megatron_muon.core.portions import Portion
from megatron_muon.core.traffic import Ints


def extra_bytes(plan: Plan, *, looks_ahead: bool) -> Ints:
    """The most that each rank takes in a step. With Nesterov momentum, prepared rows are not the momentum itself."""
    row_bytes = ROW_BYTES * looks_ahead
    waves = [_Wave(plan, indices, row_bytes) for indices in plan.waves]
    nothing = np.zeros(plan.layout.world_size, dtype=np.int64)
    fillers = _fillers(plan, row_bytes)
    if not waves:
        return fillers[0]
    most, leaving, receiving = waves[0].packing, nothing, nothing
    for wave, following, filler in itertools.zip_longest(waves, waves[1:], fillers):
        arriving, packing = (nothing, nothing) if following is None else (following.arriving, following.packing)
        for held in (
            leaving + wave.arriving + packing,
            leaving + wave.arriving + arriving + filler,
            leaving + arriving + wave.assembling,
            leaving + arriving + wave.iterating,
            receiving + arriving + wave.results,
            arriving + wave.results + wave.leaving + wave.finalizing,
        ):
            most = np.maximum(most, held)
        leaving, receiving = wave.leaving, wave.receiving
    return np.maximum(most, receiving)


def _fillers(plan: Plan, row_bytes: int) -> list[Ints]:
    """Bytes of the largest part of the matrices that need no wire, beside each wave, on each rank."""
    taken = [np.zeros(plan.layout.world_size, dtype=np.int64) for _ in plan.waves or [()]]
    for rank in range(plan.layout.world_size):
        parts = plan.fillers(rank)
        beside_a_wave = -(-len(parts) // len(taken))
        for number, part in enumerate(parts):
            size = plan.memory.whole([plan.layout.matrices[index] for index in part], row_bytes)
            wave = number // beside_a_wave
            taken[wave][rank] = max(taken[wave][rank], size)
    return taken


class _Wave:
    """Bytes of a wave on each rank."""

    def __init__(self, plan: Plan, indices: Sequence[int], row_bytes: int) -> None:
        memory, traffic, ranks = plan.memory, plan.traffic, plan.layout.world_size
        wire = memory.element_bytes
        of_teams = [index for index in indices if plan.teams[index].cuts is not None]
        alone = [index for index in indices if plan.teams[index].cuts is None]
        rows, updates = traffic.gathered(indices).between_ranks(), traffic.returned(indices).between_ranks()
        of_their_own = traffic.gathered(of_teams)
        # What a team's rank has for itself waits with what it sends.
        stayed = of_their_own.sent(ranks) - of_their_own.between_ranks().sent(ranks)
        given, kept, together = (np.zeros(ranks, dtype=np.int64) for _ in range(3))
        for index in indices:
            holders, team = traffic.holders(index), plan.teams[index]
            held = holders.elements[holders.numbers]
            if team.cuts is None:
                others = holders.ranks != team.ranks[0]
                given[holders.ranks[others]] += held[others]
                kept[holders.ranks[~others]] += held[~others]
            else:
                given[holders.ranks] += held
                whole = np.zeros(len(held), dtype=bool)  # whose update comes in one piece from another rank
                for rank, elements in traffic.common(index):
                    whole |= (elements[holders.numbers] == held) & (holders.ranks != rank)
                together[holders.ranks[~whole]] += held[~whole]
        owned: dict[int, tuple[list[Matrix], list[Portion]]] = defaultdict(lambda: ([], []))
        for index in alone:
            owned[plan.owners[index]][0].append(plan.layout.matrices[index])
        for index in of_teams:
            for portion in plan.portions(index):
                owned[portion.rank][1].append(portion)
        matrices, results, temporaries = (np.zeros(ranks, dtype=np.int64) for _ in range(3))
        for owner, (whole_ones, portions) in owned.items():
            matrices[owner], results[owner], temporaries[owner] = memory.of_batch(whole_ones, portions)
        sent, spread = rows.sent(ranks), updates.sent(ranks)
        assembling = wire * (rows.received(ranks) + stayed) + matrices + row_bytes * kept
        there, back = sent + rows.received(ranks), spread + updates.received(ranks)
        self.packing: Ints = wire * stayed + np.maximum(wire * sent + row_bytes * given, wire * there)
        self.arriving: Ints = wire * (stayed + there)
        self.assembling: Ints = assembling
        self.leaving: Ints = wire * (together + back)
        self.receiving: Ints = wire * (together + updates.received(ranks)) + memory.moment.held * given
        self.finalizing: Ints = memory.moment.held * kept
        self.iterating: Ints = matrices + temporaries
        self.results: Ints = results
