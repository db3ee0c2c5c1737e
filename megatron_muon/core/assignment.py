"""Who owns which matrix: one rank, or a team where a matrix is more than a rank's share.

The work of all ranks is made as even as it can be; of even assignments that which moves the fewest
bytes is taken. A team costs more than it saves on a small matrix, so teams are taken only where
they bring the lowest load down.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from megatron_muon.core.layout import Holders, Ints, Layout
from megatron_muon.core.memory import AUTO_BYTES, Memory
from megatron_muon.core.slices import TEAM_SIZES, Cuts, Team, chunks
from megatron_muon.core.user_errors import SettingError

_GAIN = 0.9
"""Teams are taken where they bring the largest load to this part of what it is without them."""

_TRIED = 4
"""So many choices of sizes are tried."""

_WAYS = ((0.0, False), (1.0, False), (1.03, False), (1.0, True))
"""Caps of loads, in even shares, and whether rows are spread over nodes, that are tried."""


class Unmet(NamedTuple):
    """A setting that some ranks cannot have."""

    setting: str
    value: int
    reason: str
    remedy: str


@dataclass(frozen=True)
class TeamRules:
    """Which teams may own a matrix.

    `cost` is the work of each rank of a team on a block, from its rows, its columns, the size of
    the team and the matrix's steps; `nodes` the node of each rank, counted from 0, in one of which
    a team lies; `size` that of every
    team: 1 forms none, 0 leaves it to the planner.
    """

    cost: Callable[[int, int, int, int], float]
    nodes: Sequence[int]
    size: int = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """That teams may have, from 1 on."""
        most = max(Counter(self.nodes).values(), default=1)
        return tuple(
            size for size in (sorted({1, self.size}) if self.size else TEAM_SIZES) if size <= most
        )

    def unmet(self) -> Unmet | None:
        """The setting that these ranks cannot have, if there is one."""
        if self.size in (0, *self.sizes):
            return None
        reason = "is more than the ranks of a node that share these matrices"
        return Unmet(
            "muon_team_size", self.size, reason, f"auto, or {replace(self, size=0).sizes[-1]}"
        )

    def possible(self) -> TeamRules:
        """These rules, with unsupported settings replaced by 1."""
        return replace(self, size=1) if self.unmet() else self


def refuse_unmet(groups: Mapping[str, Unmet | None]) -> list[SettingError]:
    """Warnings for groups, by name, that use 1 in place of a setting; raised where no group supports it."""
    without = {name: unmet for name, unmet in groups.items() if unmet is not None}
    if not without:
        return []
    unmet = list(without.values())[-1]
    if len(without) == len(groups):
        raise SettingError(unmet.setting, unmet.value, unmet.reason, f"use {unmet.remedy}")
    used = f"1 is used for {' and '.join(without)} matrices"
    return [SettingError(unmet.setting, unmet.value, unmet.reason, used)]


class _Kind(NamedTuple):
    """What matrices have in common: their blocks, `Matrix.steps`, and what one rank has to do for them."""

    blocks: tuple[tuple[int, int], ...]
    steps: int
    cost: float


class _Division(NamedTuple):
    """How a team of some size divides the blocks of a matrix, `Team.cuts`, and what each rank has to do."""

    cuts: Cuts | None
    loads: tuple[float, ...]

    @property
    def heaviest(self) -> float:
        return max(self.loads)


_Options = Mapping[_Kind, Sequence[_Division]]


def assign(
    layout: Layout,
    costs: Sequence[float],
    rules: TeamRules,
    memory: Memory,
    buffer_bytes: int | None,
) -> list[Team]:
    """The owners of each matrix.

    `costs` are the work of one rank on each, in the unit of `rules.cost`; `buffer_bytes` what a
    step may take on a rank, None as much as is usual, or as whole blocks need.
    """
    pairs = zip(layout.matrices, costs, strict=True)
    kinds = [_Kind(tuple(matrix.blocks), matrix.steps, cost) for matrix, cost in pairs]
    counts = Counter(kinds)
    options: _Options = {kind: _options(rules, kind) for kind in counts}
    if not rules.size:
        options = _that_fit(options, memory, buffer_bytes)
    chosen = [options[kind][0] for kind in kinds]
    placement = _Placement(layout, rules)
    placed = placement.best(chosen, _WAYS[:1])
    limit = _GAIN * placed.heaviest
    for bound, choice in _choices(layout.world_size, counts, options):
        if bound > limit:
            break
        divisions = [choice[kind] for kind in kinds]
        other = placement.best(divisions, _WAYS[:1])
        if other.heaviest <= limit:
            chosen, placed, limit = divisions, other, other.heaviest * (1.0 - 1e-9)
    return min(placed, placement.best(chosen, _WAYS[1:]), key=lambda each: each.merit).teams


def _options(rules: TeamRules, kind: _Kind) -> list[_Division]:
    """The ways to divide matrices of a kind, over few ranks first; where a size is given, over teams of that alone."""
    found = [_Division(None, (kind.cost,))]
    for size in rules.sizes[1:]:
        if rules.size:
            return [_divide(rules, kind, size)]
        apart = [_divide(rules, kind, size, cut=False)] if len(kind.blocks) > 1 else []
        found += [
            division for division in (*apart, _divide(rules, kind, size)) if division not in found
        ]
    return found


def _divide(rules: TeamRules, kind: _Kind, size: int, *, cut: bool = True) -> _Division:
    """Divide a matrix's blocks over a team: each to one rank, with `cut` also to 2, 4, ... that lie side by side."""
    blocks, sizes = kind.blocks, [each for each in TEAM_SIZES if each <= size] if cut else [1]
    cost = {
        block: {each: rules.cost(*block, each, kind.steps) for each in sizes if each <= max(block)}
        for block in set(blocks)
    }
    order = sorted(
        range(len(blocks)),
        key=lambda number: (-cost[blocks[number]][1], number),
    )
    limits = (
        [0.0]
        if rules.size
        else sorted({each for of_block in cost.values() for each in of_block.values()})
    )
    found = []
    for limit in limits:
        loads, cuts = np.zeros(size), [(0, 1)] * len(blocks)
        for number in order:
            of_block = cost[blocks[number]]
            if rules.size:
                count = max(of_block)
            else:
                fits = (each for each in of_block if of_block[each] <= limit)
                count = next(fits, min(of_block, key=of_block.__getitem__))
            first = int(loads.reshape(-1, count).max(axis=1).argmin()) * count
            loads[first : first + count] += of_block[count]
            cuts[number] = (first, count)
        found.append(_Division(tuple(cuts), tuple(loads.tolist())))
    return min(found, key=lambda division: division.heaviest)


def _that_fit(options: _Options, memory: Memory, buffer_bytes: int | None) -> _Options:
    """The divisions of each kind with which no rank takes more than it may, or, where there is none, takes least."""

    def taken(kind: _Kind, division: _Division) -> int:
        return memory.of_step(
            *memory.of_owners(kind.blocks, division.cuts, len(division.loads), kind.steps)
        )

    if buffer_bytes is None:
        uncut = (
            min(
                taken(kind, one)
                for one in found
                if one.cuts is None or all(count == 1 for _, count in one.cuts)
            )
            for kind, found in options.items()
        )
        buffer_bytes = max([AUTO_BYTES, *uncut])
    fitting = {}
    for kind, found in options.items():
        limit = max(buffer_bytes, min(taken(kind, division) for division in found))
        fitting[kind] = [division for division in found if taken(kind, division) <= limit]
    return fitting


def _choices(
    ranks: int, counts: Mapping[_Kind, int], options: _Options
) -> list[tuple[float, dict[_Kind, _Division]]]:
    """Some choices of divisions, each with a load that some rank has then; the one with the lowest load first."""

    def chosen(limit: float) -> dict[_Kind, _Division]:
        """The smallest teams of which no rank has more to do than `limit`; where there is none, the fastest."""
        return {
            kind: next(
                (d for d in found if d.heaviest <= limit), min(found, key=lambda d: d.heaviest)
            )
            for kind, found in options.items()
        }

    def bound(choice: Mapping[_Kind, _Division]) -> float:
        mean = sum(sum(choice[kind].loads) * count for kind, count in counts.items()) / ranks
        return max(mean, *(division.heaviest for division in choice.values()))

    limits = sorted({division.heaviest for found in options.values() for division in found})
    different = {tuple(choice.values()): choice for choice in map(chosen, limits)}
    return sorted(((bound(choice), choice) for choice in different.values()), key=itemgetter(0))[
        :_TRIED
    ]


class _Held(NamedTuple):
    """Who holds matrices that are cut alike: elements in all, by rank and by node, and the ranks, best owners first."""

    numel: int
    by_rank: Mapping[int, int]
    by_node: Ints  # a replica counts in its own node, too
    ranks: Ints

    @classmethod
    def of(cls, held: Holders, nodes: Ints) -> _Held:
        """The holders, whose ranks lie in these nodes."""
        ranks, elements = held.ranks, held.elements[held.numbers]
        by_node = np.bincount(
            nodes[ranks], weights=elements, minlength=int(nodes.max()) + 1
        ).astype(np.int64)
        order = np.lexsort((ranks, -elements, -by_node[nodes[ranks]]))
        by_rank = dict(zip(ranks.tolist(), elements.tolist(), strict=True))
        return cls(int(held.elements.sum()), by_rank, by_node, ranks[order])


class _Placed(NamedTuple):
    """Owners, how good they are, less being better, and their largest load."""

    merit: tuple[float, float, int]
    teams: list[Team]
    heaviest: float


class _Placement:
    """Gives matrices, divided in some way, to ranks."""

    def __init__(self, layout: Layout, rules: TeamRules) -> None:
        self._nodes = np.array(rules.nodes, dtype=np.int64)
        by_cut = {id(held): held for held in layout.holders}
        found = {cut: _Held.of(held, self._nodes) for cut, held in by_cut.items()}
        self._held = [found[id(held)] for held in layout.holders]
        self._places = {
            size: np.array(
                [ranks for ranks in chunks(rules.nodes, size) if len(ranks) == size], dtype=np.int64
            )
            for size in TEAM_SIZES[1:]
        }

    def best(self, divisions: Sequence[_Division], ways: Sequence[tuple[float, bool]]) -> _Placed:
        """The most even of a few longest-first assignments, then the one that moves least.

        Between nodes first, on the rank that receives most: that link is the slowest.
        """
        # Of equal loads those of teams go first: they have fewer places to choose from.
        order = sorted(
            range(len(divisions)),
            key=lambda i: (-divisions[i].heaviest, -len(divisions[i].loads), i),
        )
        ranks = len(self._nodes)
        largest = max((division.heaviest for division in divisions), default=0.0)
        fair = max(sum(sum(division.loads) for division in divisions) / ranks, largest)
        found: list[_Placed] = []
        for cap, is_spread in ways:
            teams, heaviest = self._place_under(cap * fair, order, divisions, is_spread=is_spread)
            far, near = [0.0] * ranks, 0
            for of, team in zip(self._held, teams, strict=True):
                first, *others = team.ranks
                missing = (of.numel - int(of.by_node[self._nodes[first]])) / len(team.ranks)
                for rank in team.ranks:
                    far[rank] += missing
                near += of.numel - (0 if others else of.by_rank.get(first, 0))
            # Loads within 3 % of the even share count as equal: below that, bytes decide.
            merit = (max(heaviest / fair, 1.03) if fair else 0.0, max(far), near)
            found.append(_Placed(merit, teams, heaviest))
        return min(found, key=lambda each: each.merit)

    def _place_under(
        self, cap: float, order: Sequence[int], divisions: Sequence[_Division], *, is_spread: bool
    ) -> tuple[list[Team], float]:
        """Owners, and the largest load, where loads stay below a cap if they can.

        A matrix with one owner stays with a rank that holds some of it, and a team takes any node,
        as long as the load stays below the cap; otherwise the least loaded take it. Of these it
        takes the node that holds most, or, spreading, that which then receives least. A cap of zero
        is the classical longest-processing-time rule.
        """
        nodes = self._nodes
        loads, received = np.zeros(len(nodes)), np.zeros(int(nodes.max()) + 1)
        teams: dict[int, Team] = {}
        for index in order:
            division, of = divisions[index], self._held[index]
            if len(division.loads) > 1:
                places = self._places[len(division.loads)]
                after = (loads[places] + division.loads).max(axis=1)
                fits = after <= max(cap, after.min())
                missing = np.where(
                    fits,
                    (received - of.by_node)[nodes[places[:, 0]]],
                    np.inf,
                )
                chosen = places[int(np.where(missing == missing.min(), after, np.inf).argmin())]
                loads[chosen] += division.loads
                ranks = tuple(chosen.tolist())
            else:
                (cost,) = division.loads
                of_holders = loads[of.ranks]
                fits = of_holders + cost <= cap
                if not fits.any():
                    ranks = (int(loads.argmin()),)
                    fits = of_holders <= loads[ranks[0]]
                if fits.any():
                    missing = (
                        (received - of.by_node)[nodes[of.ranks]]
                        if is_spread
                        else np.zeros(len(fits))
                    )
                    ranks = (int(of.ranks[np.where(fits, missing, np.inf).argmin()]),)
                loads[ranks[0]] += cost
            if is_spread:
                node = nodes[ranks[0]]
                received[node] += of.numel - of.by_node[node]
            teams[index] = Team(ranks, division.loads, division.cuts)
        return [teams[index] for index in range(len(order))], float(loads.max())
