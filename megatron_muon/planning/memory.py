"""What a step of the owner scheme takes of a rank's memory beyond weights, gradients and state, by arithmetic.

Follows the buffers of `core.exchange.owner` through a step: what is on its way of three waves, the matrices that are
assembled, the rows that are prepared, and the temporaries of the iteration as `core.newton_schulz` has them.
`megatron-muon rehearse` counts the same by running that code; a test holds the two within 10 %.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_muon.core.cost import GRAM, HALVES, KERNEL, Iteration, gram_runs
from megatron_muon.core.layout import Matrix
from megatron_muon.core.plan import Plan, held_by
from megatron_muon.core.portions import Portion

Ints = np.ndarray[Any, np.dtype[np.int64]]

TOGETHER = {"cpu": 2**20, "cuda": 2**23}
"""Elements of the blocks that are iterated together: `core.orthogonalize` has the same figures, and wants torch."""
_ROW_BYTES = 4
"""Of an element of prepared rows, fp32."""


@dataclass(frozen=True)
class Memory:
    """What decides the bytes: of an element on the wire, the iteration, and whether momentum looks ahead (Nesterov)."""

    element_bytes: int
    iteration: Iteration
    looks_ahead: bool

    def of_ranks(self, plan: Plan) -> Ints:
        """The most that each rank takes in a step."""
        waves = [_Wave(plan, indices, self) for indices in plan.waves]
        nothing = np.zeros(plan.layout.world_size, dtype=np.int64)
        filler = np.array([self._filler(plan, rank) for rank in range(plan.layout.world_size)], dtype=np.int64)
        if not waves:
            return filler
        most = waves[0].sent + np.maximum(waves[0].rows_sent, waves[0].gathered)
        leaving = results = nothing  # of the wave before
        for wave, following in itertools.zip_longest(waves, waves[1:]):
            held = leaving + wave.arriving + results
            if following is not None:
                packing = following.sent + np.maximum(following.rows_sent, following.gathered)
                most = np.maximum(most, held + packing)
                held = held + following.arriving
            assembling = wave.matrices + np.maximum(wave.rows_kept, wave.temporaries)
            most = np.maximum(most, held + np.maximum(filler, assembling))
            returning = held - results + wave.results + wave.leaving
            most = np.maximum(most, returning)
            leaving, results = wave.leaving, wave.results
        return most

    def _filler(self, plan: Plan, rank: int) -> int:
        """Bytes of the largest part of the matrices that need no wire."""
        parts = [[plan.layout.matrices[index] for index in part] for part in plan.fillers(rank)]
        return max(map(self._whole, parts), default=0)

    def _whole(self, matrices: Sequence[Matrix]) -> int:
        assembled, _, temporaries = self.of_batch(matrices)
        rows = sum(matrix.numel for matrix in matrices) * self.row_bytes
        return assembled + max(rows, temporaries)

    @property
    def row_bytes(self) -> int:
        """Of an element of rows that are prepared; without look-ahead they are the momentum itself."""
        return _ROW_BYTES * self.looks_ahead

    def of_batch(self, matrices: Sequence[Matrix], portions: Sequence[Portion] = ()) -> tuple[int, int, int]:
        """Bytes of matrices that are orthogonalised together: assembled, of their updates, and of temporaries.

        As `core.batch` has them: blocks in stacks of equal shape; a matrix of one block is a view of its stack.
        """
        blocks: dict[tuple[int, int, int, int], int] = defaultdict(int)  # rows, columns, of the whole block, team
        kept = set[tuple[int, int, int, int]]()  # stacks that updates are views of
        several = 0
        for matrix in matrices:
            for rows, cols in matrix.blocks:
                blocks[min(rows, cols), max(rows, cols), max(rows, cols), 1] += 1
            if len(matrix.split.parts) > 1:
                several += matrix.numel
            else:
                kept.add((min(matrix.shape), max(matrix.shape), max(matrix.shape), 1))
        for portion in portions:
            kind = min(portion.of), portion.numel // min(portion.of), max(portion.of), len(portion.ranks)
            blocks[kind] += 1
            kept.add(kind)
        stacks = sum(kind[0] * kind[1] * count for kind, count in blocks.items())
        updates = several + sum(kind[0] * kind[1] * blocks[kind] for kind in kept)
        temporaries = max((self.of_stack(*kind, count) for kind, count in blocks.items()), default=0)
        return (stacks + several) * self.element_bytes, updates * self.element_bytes, temporaries

    def of_stack(self, rows: int, cols: int, longer: int, team: int, count: int) -> int:
        """Bytes that iterating over `count` wide blocks takes beside them, as `core.newton_schulz` makes tensors.

        `cols` are this rank's of `longer` columns, which `team` ranks cut.
        """
        iteration = self.iteration
        products, size = iteration.products, 2 if iteration.half else 4
        each = rows * -(-longer // team)
        together = min(max(TOGETHER["cpu" if products is HALVES else "cuda"] // each, 1), count)
        wide, small = rows * cols * size, rows * rows * size  # of a block: as it is, and its Gram matrix
        # The symmetric kernel makes its results one by one, which are then copied into a stack.
        made = 2 if products is KERNEL and products.shares(rows, cols)[0] < 1.0 else 1
        # A team's sum is fp32; this rank's part, and the sum in the iteration's dtype, are there beside it.
        total = 2 * small + 4 * rows * rows if team > 1 else 0
        if iteration.method_for(rows, longer, team) == GRAM:
            runs = gram_runs(iteration.steps, half=iteration.half)
            before = 2 if max(runs) == 1 else 3  # Gram matrix, polynomial and their product
            first = max((made + before) * small, total)
            later = wide + max(made * small, total) + before * small if len(runs) > 1 else 0
            most = max(first, later, wide * min(len(runs), 2) + 3 * small)
        else:
            most = max((1 + made) * small, wide + 2 * small, total)
            if iteration.steps > 1:
                most = max(wide + 2 * small + max(made * small, total), 2 * wide + 2 * small)
        if self.element_bytes != size:
            most += wide  # in the iteration's dtype
        most = max(most, rows * cols * self.element_bytes)  # magnitudes, before it begins
        second = min(count - together, together)  # beside the updates of the blocks before it
        return max(together * most, second * most + together * wide if second else 0)


class _Wave:
    """Bytes of a wave on each rank."""

    def __init__(self, plan: Plan, indices: Sequence[int], memory: Memory) -> None:
        ranks, wire, row = plan.layout.world_size, memory.element_bytes, memory.row_bytes
        sent, gathered, given, kept, leaving = (np.zeros(ranks, dtype=np.int64) for _ in range(5))  # elements
        self.matrices, self.results, self.temporaries = (np.zeros(ranks, dtype=np.int64) for _ in range(3))
        owned: dict[int, tuple[list[Matrix], list[Portion]]] = defaultdict(lambda: ([], []))
        for index in indices:
            matrix, is_team = plan.layout.matrices[index], plan.teams[index].cuts is not None
            holders, numbers = held_by(matrix)
            held = np.array([shard.numel for shard in matrix.shards], dtype=np.int64)[numbers]
            others = is_team | (holders != plan.owners[index])
            given[holders[others]] += held[others]
            kept[holders[~others]] += held[~others]
            parts = np.zeros(len(holders), dtype=np.int64)  # from which a holder's update comes
            for portion, elements in plan.common(index):
                owner = portion.rank
                if is_team:
                    owned[owner][1].append(portion)
                else:
                    owned[owner][0].append(matrix)
                sources = np.array([shard.source(owner, ranks) for shard in matrix.shards])
                leave = (sources != owner) | is_team  # what a team's rank has itself waits with what it sends
                np.add.at(sent, sources[leave], elements[leave])
                gathered[owner] += elements[sources != owner].sum()
                there = elements[numbers]
                parts += (there > 0) & (there < held)
                away = holders != owner
                leaving[owner] += there[away].sum()
                leaving[holders[away]] += there[away]
            if is_team:
                alone = np.isin(holders, plan.teams[index].ranks)  # whose own part is no parcel that arrives
                assembled = (parts > 0) | alone
                leaving[holders[assembled]] += held[assembled]
        for owner, (matrices, portions) in owned.items():
            self.matrices[owner], self.results[owner], self.temporaries[owner] = memory.of_batch(matrices, portions)
        self.sent, self.gathered = wire * sent, wire * gathered
        self.rows_sent, self.rows_kept = row * given, row * kept
        self.leaving: Ints = wire * leaving

    @property
    def arriving(self) -> Ints:
        """What gathering fills."""
        return self.sent + self.gathered
