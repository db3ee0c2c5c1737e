"""Who owns which matrix: one rank, or a team where a matrix is more than a rank's share.

The work of all ranks is made as even as it can be; of even assignments that which moves the fewest bytes is taken. A
team costs more than it saves on a small matrix: every member repeats the polynomial of the Gram matrix and waits for
the sums. So the planner looks for the lowest load that some sizes of teams reach, and takes teams only where they
bring it down.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from megatron_muon.core.errors import UserError
from megatron_muon.core.layout import Layout, Shard
from megatron_muon.core.memory import AUTO_BYTES, Memory
from megatron_muon.core.slices import TEAM_SIZES, Cuts, Team, chunks

_GAIN = 0.9
"""Teams are taken where they bring the largest load to this part of what it is without them."""

_TRIED = 4
"""So many choices of sizes are tried."""


@dataclass(frozen=True)
class TeamRules:
    """Which teams may own a matrix.

    Attributes:
        cost: the work of each rank of a team on a block, from its rows, its columns and the size of the team.
        nodes: the node of each rank, counted from 0; a team lies in one.
        size: of every team; 1 forms none, 0 leaves it to the planner.
    """

    cost: Callable[[int, int, int, int], float]
    nodes: Sequence[int]
    size: int = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """That teams may have, from 1 on."""
        wanted = sorted({1, self.size}) if self.size else TEAM_SIZES
        return tuple(size for size in wanted if size <= self._most)

    @property
    def _most(self) -> int:
        """Ranks of the largest node."""
        return max(Counter(self.nodes).values(), default=1)

    def unmet(self) -> dict[str, Unmet]:
        """The settings that these ranks cannot have, by flag."""
        found = {}
        if self.size not in (0, *self.sizes):
            largest = max(size for size in TEAM_SIZES if size <= self._most)
            found["--muon-team-size"] = Unmet(
                self.size, "is more than the ranks of a node that share these matrices", f"auto, or {largest}"
            )
        return found

    def possible(self) -> TeamRules:
        """These rules, with 1 in the place of what the ranks cannot have."""
        return replace(self, size=1) if self.unmet() else self


class Unmet(NamedTuple):
    """A setting that some ranks cannot have."""

    value: int
    reason: str
    remedy: str


def refuse_unmet(groups: Mapping[str, Mapping[str, Unmet]]) -> list[str]:
    """What to say where some groups, by name, use 1 in the place of a setting.

    Raises:
        UserError: no group can have a setting.
    """
    said = []
    for flag, first in {flag: one for of_group in groups.values() for flag, one in of_group.items()}.items():
        without = [name for name, of_group in groups.items() if flag in of_group]
        if len(without) == len(groups):
            raise UserError(f"{flag} {first.value} {first.reason}; use {first.remedy}")
        said.append(f"{flag} {first.value} {first.reason}: 1 is used for {' and '.join(without)} matrices")
    return said


@dataclass(frozen=True)
class _Division:
    """How a team of some size divides the blocks of a matrix: `Team.cuts`, and what each rank has to do."""

    cuts: Cuts | None
    loads: tuple[float, ...]

    @property
    def heaviest(self) -> float:
        """What the rank with most to do has to do."""
        return max(self.loads)

    @property
    def is_cut(self) -> bool:
        """Whether several ranks share a block."""
        return self.cuts is not None and any(count > 1 for _, count in self.cuts)


def _heaviest(division: _Division) -> float:
    return division.heaviest


def assign(
    layout: Layout, costs: Sequence[float], rules: TeamRules, memory: Memory, buffer_bytes: int | None
) -> list[Team]:
    """The owners of each matrix.

    Args:
        layout: all matrices of the group.
        costs: the work of orthogonalising each matrix by one rank, in the unit of `rules.cost`.
        rules: which teams may be formed.
        memory: what matrices take on their owners.
        buffer_bytes: what a step may take on a rank. None is what is usual, or as much as whole blocks need.
    """
    matrices = [(tuple(matrix.blocks), matrix.steps, cost) for matrix, cost in zip(layout.matrices, costs, strict=True)]
    kinds: Counter[_Kind] = Counter(matrices)
    options: _Options = {kind: _options(rules, *kind) for kind in kinds}
    if not rules.size:
        options = _that_fit(options, memory, buffer_bytes)
    chosen = [options[kind][0] for kind in matrices]
    held = _held(layout, rules)
    placed = _place(held, chosen, rules, _WAYS[:1])
    limit = _GAIN * placed.heaviest
    for bound, choice in _choices(layout.world_size, kinds, options):
        if bound > limit:
            break
        divisions = [choice[kind] for kind in matrices]
        other = _place(held, divisions, rules, _WAYS[:1])
        if other.heaviest <= limit:
            chosen, placed, limit = divisions, other, other.heaviest * (1.0 - 1e-9)
    return min(placed, _place(held, chosen, rules, _WAYS[1:]), key=lambda found: found.merit).teams


_Blocks = tuple[tuple[int, int], ...]
_Kind = tuple[_Blocks, int, float]
"""What matrices have in common: their blocks, `Matrix.steps`, and what one rank has to do for them."""
_Options = Mapping[_Kind, Sequence[_Division]]


def _options(rules: TeamRules, blocks: _Blocks, steps: int, cost: float) -> list[_Division]:
    """The ways to divide matrices of a kind, over few ranks first; where a size is given, over teams of that alone."""
    found = [_Division(None, (cost,))]
    for size in rules.sizes[1:]:
        if rules.size:
            return [_divide(rules, blocks, steps, size)]
        apart = [_divide(rules, blocks, steps, size, cut=False)] if len(blocks) > 1 else []
        found += [division for division in (*apart, _divide(rules, blocks, steps, size)) if division not in found]
    return found


def _that_fit(options: _Options, memory: Memory, buffer_bytes: int | None) -> _Options:
    """The divisions of each kind with which no rank takes more than it may, or, where there is none, takes least."""
    taken = {
        (blocks, steps, cost): [
            memory.of_step(*memory.of_owners(blocks, division.cuts, len(division.loads), steps)) for division in found
        ]
        for (blocks, steps, cost), found in options.items()
    }
    if buffer_bytes is None:
        of_whole_blocks = (
            min(size for size, division in zip(taken[kind], found, strict=True) if not division.is_cut)
            for kind, found in options.items()
        )
        buffer_bytes = max([AUTO_BYTES, *of_whole_blocks])
    return {
        kind: [
            division
            for size, division in zip(taken[kind], found, strict=True)
            if size <= max(buffer_bytes, min(taken[kind]))
        ]
        for kind, found in options.items()
    }


def _choices(ranks: int, kinds: Mapping[_Kind, int], options: _Options) -> list[tuple[float, dict[_Kind, _Division]]]:
    """Some choices of divisions, each with a load that some rank has then; the one with the lowest load first."""

    def chosen(limit: float) -> dict[_Kind, _Division]:
        """The smallest teams of which no rank has more to do than `limit`; where there is none, the fastest."""
        return {
            kind: next((d for d in found if d.heaviest <= limit), min(found, key=_heaviest))
            for kind, found in options.items()
        }

    def bound(choice: Mapping[_Kind, _Division]) -> float:
        """A load that some rank reaches."""
        mean = sum(sum(choice[kind].loads) * count for kind, count in kinds.items()) / ranks
        return max(mean, *map(_heaviest, choice.values()))

    limits = sorted({division.heaviest for found in options.values() for division in found})
    different = {tuple(choice.values()): choice for choice in map(chosen, limits)}
    return sorted(((bound(choice), choice) for choice in different.values()), key=itemgetter(0))[:_TRIED]


def _divide(rules: TeamRules, blocks: _Blocks, steps: int, size: int, *, cut: bool = True) -> _Division:
    """Divide a matrix's blocks over a team: each to one rank, with `cut` also to 2, 4, ... that lie side by side."""
    sizes = [each for each in TEAM_SIZES if each <= size] if cut else [1]
    cost = {
        (block, each): rules.cost(*block, each, steps) for block in set(blocks) for each in sizes if each <= max(block)
    }
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


@dataclass(frozen=True)
class _Held:
    """Who holds matrices that are cut alike.

    Attributes:
        numel: elements of the matrix.
        by_rank: elements of each rank that holds some.
        by_node: elements in each node; a replica counts in its own, too.
        ranks: the holders, those of nodes with most elements first, and of these the ones with most.
    """

    numel: int
    by_rank: Mapping[int, int]
    by_node: np.ndarray[Any, np.dtype[np.int64]]
    ranks: np.ndarray[Any, np.dtype[np.int64]]

    @classmethod
    def of(cls, shards: Sequence[Shard], nodes: np.ndarray[Any, np.dtype[np.int64]]) -> _Held:
        """The holders of `shards`."""
        by_rank = {rank: shard.numel for shard in shards for rank in shard.holders}
        ranks, elements = np.array(list(by_rank.items()), dtype=np.int64).T
        by_node = np.bincount(nodes[ranks], weights=elements, minlength=int(nodes.max()) + 1).astype(np.int64)
        return cls(
            sum(shard.numel for shard in shards),
            by_rank,
            by_node,
            ranks[np.lexsort((ranks, -elements, -by_node[nodes[ranks]]))],
        )


def _held(layout: Layout, rules: TeamRules) -> list[_Held]:
    """Who holds each matrix."""
    nodes = np.array(rules.nodes, dtype=np.int64)
    by_cut = {id(matrix.shards): matrix.shards for matrix in layout.matrices}
    held_by = {cut: _Held.of(shards, nodes) for cut, shards in by_cut.items()}
    return [held_by[id(matrix.shards)] for matrix in layout.matrices]


_WAYS = ((0.0, False), (1.0, False), (1.03, False), (1.0, True))
"""Caps of loads, in even shares, and whether rows are spread over nodes, that are tried."""


class _Placed(NamedTuple):
    """Owners, how good they are, less being better, and their largest load."""

    merit: tuple[float, float, int]
    teams: list[Team]
    heaviest: float


def _place(
    held: Sequence[_Held], divisions: Sequence[_Division], rules: TeamRules, ways: Sequence[tuple[float, bool]]
) -> _Placed:
    """The most even of a few longest-first assignments, then the one that moves least.

    What moves between nodes counts first, on the rank that receives most: that link is the slowest. Each assignment
    lets a matrix with one owner stay with a rank that holds some of it, and a team take any node, as long as the load
    stays below a cap, in even shares; otherwise the least loaded take it. Of these it takes the node that holds most,
    or, spreading, that which then receives least. A cap of zero is the classical longest-processing-time rule.
    """
    # Of equal loads those of teams go first: they have fewer places to choose from.
    order = sorted(range(len(divisions)), key=lambda i: (-divisions[i].heaviest, -len(divisions[i].loads), i))
    node_of, nodes = list(rules.nodes), np.array(rules.nodes, dtype=np.int64)
    largest = max((division.heaviest for division in divisions), default=0.0)
    fair = max(sum(sum(division.loads) for division in divisions) / len(rules.nodes), largest)
    sizes = {len(division.loads) for division in divisions} - {1}
    places = {
        size: np.array([ranks for ranks in chunks(rules.nodes, size) if len(ranks) == size], dtype=np.int64)
        for size in sizes
    }
    found: list[_Placed] = []
    for cap, is_spread in ways:
        teams, heaviest = _place_under(cap * fair, order, divisions, held, places, nodes, is_spread=is_spread)
        missing = [
            (of.numel - int(of.by_node[node_of[team.ranks[0]]])) / len(team.ranks)
            for of, team in zip(held, teams, strict=True)
        ]
        near = sum(
            of.numel - (of.by_rank.get(team.ranks[0], 0) if len(team.ranks) == 1 else 0)
            for of, team in zip(held, teams, strict=True)
        )
        members = np.fromiter(itertools.chain.from_iterable(team.ranks for team in teams), np.int64)
        of_members = np.repeat(missing, [len(team.ranks) for team in teams])
        far = float(np.bincount(members, of_members, len(rules.nodes)).max())
        # Loads within 3 % of the even share count as equal: below that, bytes decide.
        merit = (max(heaviest / fair, 1.03) if fair else 0.0, far, near)
        found.append(_Placed(merit, teams, heaviest))
    return min(found, key=lambda placed: placed.merit)


def _place_under(
    cap: float,
    order: Sequence[int],
    divisions: Sequence[_Division],
    held: Sequence[_Held],
    places: Mapping[int, np.ndarray[Any, np.dtype[np.int64]]],
    nodes: np.ndarray[Any, np.dtype[np.int64]],
    *,
    is_spread: bool,
) -> tuple[list[Team], float]:
    """Owners, and the largest load."""
    loads, received = np.zeros(len(nodes)), np.zeros(int(nodes.max()) + 1)
    teams: list[Team | None] = [None] * len(order)
    for index in order:
        division, of = divisions[index], held[index]
        if len(division.loads) > 1:
            of_size = places[len(division.loads)]
            after = (loads[of_size] + division.loads).max(axis=1)
            fits = after <= max(cap, after.min())
            missing = np.where(fits, (received - of.by_node)[nodes[of_size[:, 0]]], np.inf)
            chosen = of_size[int(np.where(missing == missing.min(), after, np.inf).argmin())]
            loads[chosen] += division.loads
            ranks = tuple(chosen.tolist())
        else:
            (cost,) = division.loads
            of_holders = loads[of.ranks]
            fits = of_holders + cost <= cap
            place = int(fits.argmax())  # of those that fit, in the node that holds most, with most of that
            if not fits[place]:
                owner = int(loads.argmin())
                fits = of_holders <= loads[owner]
                place = int(fits.argmax())
            if fits[place]:
                if is_spread:
                    near = nodes[of.ranks]
                    place = int(np.where(fits, received[near] - of.by_node[near], np.inf).argmin())
                owner = int(of.ranks[place])
            loads[owner] += cost
            ranks = (owner,)
        if is_spread:
            node = nodes[ranks[0]]
            received[node] += of.numel - of.by_node[node]
        teams[index] = Team(ranks, division.loads, division.cuts)
    assert None not in teams
    return teams, float(loads.max())  # type: ignore[return-value]
