"""Who owns which matrix: one rank, or a team where a matrix is more than a rank's share.

The work of all ranks is made as even as it can be; of even assignments that which moves the fewest bytes is taken. A
team costs more than it saves on a small matrix: every member repeats the polynomial of the Gram matrix and waits for
the sums. So the planner looks for the lowest load that some sizes of teams reach, and takes teams only where they
bring it down.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_muon.core.layout import Layout
from megatron_muon.core.portions import TEAM_SIZES, Team, chunks

_GAIN = 0.9
"""Teams are taken where they bring the largest load to this part of what it is without them."""

_TRIED = 4
"""So many choices of sizes are tried."""


@dataclass(frozen=True)
class TeamRules:
    """Which teams may own a matrix.

    Attributes:
        cost: the work of each rank of a team on a block, from its rows, its columns and the size of the team.
        nodes: the node of each rank; a team lies in one.
        size: of every team; 0 leaves it to the planner.
    """

    cost: Callable[[int, int, int], float]
    nodes: Sequence[int]
    size: int = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """That teams may have, from 1 on."""
        most = max(Counter(self.nodes).values(), default=1)
        wanted = (1, self.size) if self.size else TEAM_SIZES
        return tuple(size for size in wanted if size <= most)


@dataclass(frozen=True)
class _Division:
    """How a team of some size divides the blocks of a matrix: `Team.cuts`, and what each rank has to do."""

    cuts: tuple[tuple[int, int], ...] | None
    loads: tuple[float, ...]

    @property
    def heaviest(self) -> float:
        """What the rank with most to do has to do."""
        return max(self.loads)


def _heaviest(division: _Division) -> float:
    return division.heaviest


def assign(layout: Layout, costs: Sequence[float], rules: TeamRules | None) -> list[Team]:
    """The owners of each matrix.

    Args:
        layout: all matrices of the group.
        costs: the work of orthogonalising each matrix by one rank, in the unit of `rules.cost`.
        rules: which teams may be formed; None forms none.
    """
    alone = [_Division(None, (cost,)) for cost in costs]
    teams, heaviest = _place(layout, alone, ())
    if rules is None or rules.sizes == (1,):
        return teams
    blocks = [tuple(matrix.blocks) for matrix in layout.matrices]
    limit = float("inf") if rules.size else _GAIN * heaviest
    chosen: list[_Division] | None = None
    for bound, divisions in _divisions(layout.world_size, blocks, costs, rules):
        if bound > limit:
            break
        _, heaviest = _place(layout, divisions, rules.nodes, caps=(0.0,))
        if heaviest <= limit:
            chosen, limit = divisions, heaviest * (1.0 - 1e-9)
    return teams if chosen is None else _place(layout, chosen, rules.nodes)[0]


_Blocks = tuple[tuple[int, int], ...]
_Kind = tuple[_Blocks, float]
"""What matrices have in common: their blocks, and what one rank has to do for them."""


def _divisions(
    ranks: int, blocks: Sequence[_Blocks], costs: Sequence[float], rules: TeamRules
) -> Iterator[tuple[float, list[_Division]]]:
    """Some choices of sizes of teams, each with a load that some rank has then; the one with the lowest load first."""
    kinds: Counter[_Kind] = Counter(zip(blocks, costs, strict=True))
    options = {
        (of, cost): {size: _divide(rules, of, size) if size > 1 else _Division(None, (cost,)) for size in rules.sizes}
        for of, cost in kinds
    }

    def chosen(limit: float) -> dict[_Kind, _Division]:
        """The smallest teams of which no rank has more to do than `limit`; where there is none, the fastest."""
        return {
            kind: next((d for d in found.values() if d.heaviest <= limit), min(found.values(), key=_heaviest))
            for kind, found in options.items()
        }

    def bound(choice: Mapping[_Kind, _Division]) -> float:
        """A load that some rank reaches."""
        mean = sum(sum(choice[kind].loads) * count for kind, count in kinds.items()) / ranks
        return max(mean, *map(_heaviest, choice.values()))

    if rules.size:
        choices = [{kind: found[max(found)] for kind, found in options.items()}]
    else:
        limits = sorted({division.heaviest for found in options.values() for division in found.values()})
        different = {tuple(choice.values()): choice for choice in map(chosen, limits)}
        choices = sorted(different.values(), key=bound)[:_TRIED]
    for choice in choices:
        yield bound(choice), [choice[kind] for kind in zip(blocks, costs, strict=True)]


def _divide(rules: TeamRules, blocks: _Blocks, size: int) -> _Division:
    """Divide a matrix's blocks over a team: each goes to one rank, or to 2, 4, ... that lie side by side."""
    sizes = [each for each in TEAM_SIZES if each <= size]
    cost = {(block, each): rules.cost(*block, each) for block in set(blocks) for each in sizes if each <= max(block)}
    order = sorted(range(len(blocks)), key=lambda number: (-cost[blocks[number], 1], number))
    best: _Division | None = None
    for limit in sorted(set(cost.values())) if not rules.size else [0.0]:
        loads = np.zeros(size)
        cuts = [(0, 1)] * len(blocks)
        for number in order:
            options = [each for each in sizes if (blocks[number], each) in cost]
            if rules.size:
                count = options[-1]
            else:
                fits = [each for each in options if cost[blocks[number], each] <= limit]
                count = fits[0] if fits else min(options, key=lambda each: cost[blocks[number], each])
            first = int(loads.reshape(-1, count).max(axis=1).argmin()) * count
            loads[first : first + count] += cost[blocks[number], count]
            cuts[number] = (first, count)
        division = _Division(tuple(cuts), tuple(loads.tolist()))
        if best is None or division.heaviest < best.heaviest:
            best = division
    assert best is not None
    return best


def _place(
    layout: Layout,
    divisions: Sequence[_Division],
    nodes: Sequence[int],
    caps: Sequence[float] = (0.0, 1.0, 1.01, 1.03),
) -> tuple[list[Team], float]:
    """The most even of a few longest-first assignments, then the one that moves least; and its largest load.

    Each assignment lets a matrix with one owner stay with the rank that holds most of it as long as that rank's load
    stays below a cap, in even shares, and otherwise gives it to the least loaded rank. A cap of zero is the classical
    longest-processing-time rule. A team takes the ranks of a node whose largest load is the least.
    """
    order = sorted(range(len(divisions)), key=lambda index: (-divisions[index].heaviest, index))
    held: dict[int, dict[int, int]] = {}  # elements by rank, most first, of matrices that share their shards
    for matrix in layout.matrices:
        if id(matrix.shards) not in held:
            largest_first = sorted((-s.numel, rank) for s in matrix.shards for rank in s.holders)
            held[id(matrix.shards)] = {rank: -numel for numel, rank in largest_first}
    by_cut = {cut: np.fromiter(by_rank, np.int64) for cut, by_rank in held.items()}
    holders = [by_cut[id(matrix.shards)] for matrix in layout.matrices]
    largest = max((division.heaviest for division in divisions), default=0.0)
    fair = max(sum(sum(division.loads) for division in divisions) / layout.world_size, largest)
    sizes = {len(division.loads) for division in divisions} - {1}
    places = {
        size: np.array([ranks for ranks in chunks(nodes, size) if len(ranks) == size], dtype=np.int64) for size in sizes
    }
    best: tuple[float, int] | None = None
    chosen: list[Team] = []
    most = 0.0
    for cap in caps:
        teams, heaviest = _place_under(cap * fair, order, divisions, holders, places, layout.world_size)
        moved = sum(
            matrix.numel - held[id(matrix.shards)].get(team.ranks[0], 0)
            for matrix, team in zip(layout.matrices, teams, strict=True)
            if len(team.ranks) == 1
        )
        # Loads within 3 % of the even share count as equal: below that, bytes decide.
        merit = (max(heaviest / fair, 1.03) if fair else 0.0, moved)
        if best is None or merit < best:
            best, chosen, most = merit, teams, heaviest
    return chosen, most


def _place_under(
    cap: float,
    order: Sequence[int],
    divisions: Sequence[_Division],
    holders: Sequence[np.ndarray[Any, np.dtype[np.int64]]],
    places: Mapping[int, np.ndarray[Any, np.dtype[np.int64]]],
    world_size: int,
) -> tuple[list[Team], float]:
    """Owners, and the largest load."""
    loads = np.zeros(world_size)
    teams: list[Team | None] = [None] * len(order)
    for index in order:
        division = divisions[index]
        if len(division.loads) > 1:
            of_size = places[len(division.loads)]
            ranks = of_size[int((loads[of_size] + division.loads).max(axis=1).argmin())]
        else:
            (cost,) = division.loads
            of_holders = loads[holders[index]]
            owner = int(loads.argmin())
            fits = of_holders + cost <= cap
            fits = fits if fits.any() else of_holders <= loads[owner]
            ranks = holders[index][fits.argmax(keepdims=True)] if fits.any() else np.array([owner])
        loads[ranks] += division.loads
        teams[index] = Team(tuple(ranks.tolist()), division.loads, division.cuts)
    assert None not in teams
    return teams, float(loads.max())  # type: ignore[return-value]
