"""The owners of each matrix: one rank, or a team where a matrix is more than a rank's share.

The work of all ranks is made as even as it can be; of even assignments that which moves the fewest
bytes is taken. A team costs more than it saves on a small matrix, so teams are taken only where
they bring the lowest load down.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from megatron_muon.core.buffers import AUTO_BYTES, LANES
from megatron_muon.core.layout import Ints, Layout, Shards
from megatron_muon.core.slices import TEAM_SIZES, Cuts, Team
from megatron_muon.errors import SettingError

_GAIN = 0.9
"""Teams are taken where they bring the largest load to this part of that without them."""

_TRIED = 4
"""Choices of team sizes that are tried."""

_WAYS = (
    (1.0, False),
    (1.03, False),
    (1.0, True),
)
"""Ways that are tried: a cap of loads, in even shares, and spreading rows over nodes."""

Block = tuple[int, int]


@dataclass(frozen=True)
class TeamRules:
    """The teams that may own a matrix.

    `cost` is the work of each rank of a team on a block, from its rows, its columns, the size of
    the team and the matrix's steps; `nodes` the node of each rank, counted from 0, in one of which
    a team lies; `size` that of every team: 1 forms none, 0 leaves it to the planner. With
    `state_bytes`, those of a block by rows and columns, owners are even in these, too, and a team
    cuts no block.
    """

    cost: Callable[[int, int, int, int], float]
    nodes: Sequence[int]
    size: int = 0
    state_bytes: Callable[[int, int], int] | None = None

    def kept(self, block: Block) -> float:
        """Bytes of the state of a block."""
        return self.state_bytes(*block) if self.state_bytes else 0.0

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes that teams may have, from 1 on."""
        sizes = sorted({1, self.size}) if self.size else TEAM_SIZES
        most = max(Counter(self.nodes).values())
        return tuple(size for size in sizes if size <= most)

    def unmet(self) -> SettingError | None:
        """The error for a size that these ranks cannot have."""
        if self.size in (0, *self.sizes):
            return None
        largest = replace(self, size=0).sizes[-1]
        return SettingError(
            "muon_team_size",
            self.size,
            "is more than the ranks of a node that share these matrices",
            f"use auto, or {largest}",
        )

    def possible(self) -> TeamRules:
        """These rules, with an unsupported size replaced by 1."""
        return replace(self, size=1) if self.unmet() else self


class _Kind(NamedTuple):
    """Blocks, `Matrix.steps`, and one rank's work on all blocks of matrices that are alike."""

    blocks: tuple[Block, ...]
    steps: int
    cost: float


class _Division(NamedTuple):
    """Blocks of a matrix divided over a team.

    Attributes:
        cuts: `Team.cuts`.
        loads: work of each rank.
        elements: of the rank that has most.
        kept: bytes of state of each rank.
    """

    cuts: Cuts | None
    loads: tuple[float, ...]
    elements: int
    kept: tuple[float, ...]

    @property
    def heaviest(self) -> float:
        return max(self.loads)

    @property
    def is_cut(self) -> bool:
        return any(count > 1 for _, count in self.cuts or ())


_Options = dict[_Kind, list[_Division]]


def assign(
    layout: Layout,
    costs: Sequence[float],
    rules: TeamRules,
    element_bytes: int,
    buffer_bytes: int | None,
) -> list[Team]:
    """The owners of each matrix.

    `costs` are the work of one rank on each, in the unit of `rules.cost`; `buffer_bytes` what a
    step may take on a rank, None as much as is usual, or as whole blocks need.
    """
    kinds = []
    for matrix, cost in zip(layout.matrices, costs, strict=True):
        kinds.append(_Kind(tuple(matrix.blocks), matrix.steps, cost))
    counts = Counter(kinds)
    options = {kind: _options(rules, kind) for kind in counts}
    if not rules.size:
        options = _that_fit(options, element_bytes, buffer_bytes)
    placement = _Placement(layout, rules)
    divisions = [options[kind][0] for kind in kinds]
    best = placement.place(divisions)
    limit = _GAIN * best.heaviest
    for bound, choice in _choices(layout.world_size, counts, options):
        if bound > limit:
            break
        chosen = [choice[kind] for kind in kinds]
        placed = placement.place(chosen)
        if placed.heaviest <= limit:
            divisions, best = chosen, placed
            limit = placed.heaviest * (1.0 - 1e-9)
    tried = [best]
    for cap, is_spread in _WAYS:
        tried.append(placement.place(divisions, cap, is_spread=is_spread))
    return min(tried, key=lambda placed: placed.merit).teams


def _options(rules: TeamRules, kind: _Kind) -> list[_Division]:
    """The ways to divide matrices of a kind, over few ranks first.

    Where a size is given, over teams of that size alone.
    """
    found = [
        _Division(
            None,
            (kind.cost,),
            sum(map(math.prod, kind.blocks)),
            (sum(map(rules.kept, kind.blocks)),),
        )
    ]
    for size in rules.sizes[1:]:
        if rules.state_bytes and size > len(kind.blocks):
            continue
        for parts in (1,) if rules.state_bytes else (1, size, math.inf):
            found.append(_divide(rules, kind, size, parts))
        if rules.size:
            return found[-1:]
    return list(dict.fromkeys(found))


def _divide(
    rules: TeamRules,
    kind: _Kind,
    size: int,
    parts: float,
) -> _Division:
    """Divide a matrix over a team: the costliest block in so many parts, others by their cost.

    No block has more parts than the team ranks; costly ones choose their ranks first.
    """
    whole = [rules.cost(*block, 1, kind.steps) for block in kind.blocks]
    loads = np.zeros(size)
    elements = np.zeros(size, dtype=np.int64)
    kept = np.zeros(size)
    cuts = [(0, 1)] * len(whole)
    for number in sorted(range(len(whole)), key=lambda number: -whole[number]):
        block = kind.blocks[number]
        most = min(size, max(block), parts * whole[number] / max(whole))
        count = max(count for count in TEAM_SIZES if count <= max(most, 1))
        first = int(loads.reshape(-1, count).max(axis=1).argmin()) * count
        ranks = slice(first, first + count)
        loads[ranks] += rules.cost(*block, count, kind.steps)
        elements[ranks] += math.ceil(math.prod(block) / count)
        kept[ranks] += rules.kept(block)
        cuts[number] = first, count
    return _Division(
        tuple(cuts),
        tuple(loads.tolist()),
        int(elements.max()),
        tuple(kept.tolist()),
    )


def _that_fit(options: _Options, element_bytes: int, buffer_bytes: int | None) -> _Options:
    """The divisions of each kind that fit the buffer of a step, or else those that take least.

    A step takes lanes twice as large as an owner's stacks, and a scratch like a lane.
    """
    wholes = [0]
    if buffer_bytes is None:
        buffer_bytes = AUTO_BYTES
        for found in options.values():
            wholes.append(min(each.elements for each in found if not each.is_cut))
    allowed = max(buffer_bytes // (2 * (LANES + 1) * element_bytes), *wholes)
    fitting = {}
    for kind, found in options.items():
        most = max(allowed, min(each.elements for each in found))
        fitting[kind] = [each for each in found if each.elements <= most]
    return fitting


def _choices(
    ranks: int, counts: Mapping[_Kind, int], options: _Options
) -> list[tuple[float, dict[_Kind, _Division]]]:
    """Some choices of divisions, each with a load that some rank has then; the lowest load first.

    Each takes the smallest teams of which no rank has more work than a limit, or else the fastest.
    """
    bounds: dict[tuple[_Division, ...], float] = {}
    limits = {each.heaviest for found in options.values() for each in found}
    for limit in sorted(limits):
        chosen = []
        total = 0.0
        for kind, found in options.items():
            chosen.append(
                min(found, key=lambda each: max(each.heaviest, limit)),
            )
            total += sum(chosen[-1].loads) * counts[kind]
        heaviest = max(each.heaviest for each in chosen)
        bounds[tuple(chosen)] = max(total / ranks, heaviest)
    best = sorted(bounds, key=bounds.__getitem__)[:_TRIED]
    return [
        (
            bounds[chosen],
            dict(zip(options, chosen, strict=True)),
        )
        for chosen in best
    ]


class _Held(NamedTuple):
    """Elements of a matrix on each node, replicas included, and its holders, best owners first."""

    by_node: np.ndarray[Any, np.dtype[np.float64]]
    ranks: Ints


def _held(shards: Shards, nodes: Ints) -> _Held:
    ranks = shards.ranks
    elements = shards.elements[shards.numbers]
    here = nodes[ranks]
    by_node = np.bincount(here, elements, int(nodes.max()) + 1)
    order = np.lexsort((ranks, -elements, -by_node[here]))
    return _Held(by_node, ranks[order])


class _Placed(NamedTuple):
    """Owners, how good they are, less being better, and their largest load."""

    merit: tuple[float, float, int]
    teams: list[Team]
    heaviest: float


class _Placement:
    """Gives matrices, divided in some way, to ranks."""

    def __init__(self, layout: Layout, rules: TeamRules) -> None:
        self._matrices = layout.matrices
        self._nodes = np.array(rules.nodes, dtype=np.int64)
        by_cut = {id(matrix.shards): matrix.shards for matrix in layout.matrices}
        held = {key: _held(shards, self._nodes) for key, shards in by_cut.items()}
        self._held = [held[id(matrix.shards)] for matrix in layout.matrices]
        self._places = {size: _places(self._nodes, size) for size in TEAM_SIZES[1:]}

    def place(
        self, divisions: Sequence[_Division], cap: float = 0.0, *, is_spread: bool = False
    ) -> _Placed:
        """Give out matrices, longest first; loads stay below `cap` even shares if they can.

        A matrix with one owner stays with a rank that holds some of it, and a team takes any node,
        as long as the load stays below the cap; otherwise the least loaded take it. Of these it
        takes the node that holds most, or, spreading, that which then receives least. A cap of zero
        is the classical longest-processing-time rule.
        """
        ranks = len(self._nodes)
        total = sum(sum(each.loads) for each in divisions)
        state = sum(sum(each.kept) for each in divisions)
        self._per_byte = total / state if state else 0.0
        work = []
        for each in divisions:
            largest = max(each.heaviest, max(each.kept) * self._per_byte)
            work.append((largest, len(each.loads)))
        mean = total / ranks
        fair = max(mean, max(work)[0])
        self._loads = np.zeros(ranks)
        self._state = np.zeros(ranks)
        self._received = np.zeros(int(self._nodes.max()) + 1)
        far = np.zeros(ranks)
        near = 0
        teams: dict[int, Team] = {}
        # of equal loads those of teams go first: they have fewer places to choose from
        for index in sorted(range(len(work)), key=work.__getitem__, reverse=True):
            division = divisions[index]
            held = self._held[index]
            matrix = self._matrices[index]
            owners = self._owners(division, held, cap * fair)
            self._loads[owners] += division.loads
            self._state[owners] += np.array(division.kept) * self._per_byte
            node = self._nodes[owners[0]]
            missing = matrix.numel - held.by_node[node]
            if is_spread:
                self._received[node] += missing
            far[owners] += missing / len(owners)
            near += matrix.numel
            if len(owners) == 1:
                near -= matrix.held_by(owners[0]).numel
            teams[index] = Team(tuple(owners), division.loads, division.cuts)
        heaviest = float(np.maximum(self._loads, self._state).max())
        # Loads within 3 % of the even share count as equal: below that, bytes decide, between nodes
        # first, on the rank that receives most: that link is the slowest.
        unevenness = max(heaviest / fair, 1.03) if fair else 0.0
        merit = unevenness, float(far.max()), near
        return _Placed(
            merit,
            [teams[index] for index in range(len(teams))],
            heaviest,
        )

    def _owners(
        self,
        division: _Division,
        held: _Held,
        cap: float,
    ) -> list[int]:
        """The owners of a matrix, by the work and the state of each."""
        loads = division.loads
        state = np.array(division.kept) * self._per_byte
        is_team = len(loads) > 1
        places = self._places[len(loads)] if is_team else held.ranks[:, None]
        after = np.maximum(self._loads[places] + loads, self._state[places] + state).max(axis=1)
        everywhere = self._loads
        if self._per_byte:
            everywhere = np.maximum(self._loads, self._state + (state[0] - loads[0]))
        least = after.min() if is_team else everywhere.min() + loads[0]
        fits = after <= max(cap, least)
        if not fits.any():
            return [int(everywhere.argmin())]
        node = self._nodes[places[:, 0]]
        missing = (self._received - held.by_node)[node]
        missing = np.where(fits, missing, np.inf)
        chosen = missing.argmin()
        if is_team:
            chosen = np.where(
                missing == missing[chosen],
                after,
                np.inf,
            ).argmin()
        return list(places[chosen].tolist())


def _places(nodes: Ints, size: int) -> Ints:
    """The ranks of all teams of `size`, `(teams, size)`: consecutive ones of a node."""
    places = []
    for node in np.unique(nodes):
        ranks = np.flatnonzero(nodes == node)
        full = len(ranks) // size * size
        places.append(ranks[:full].reshape(-1, size))
    return np.concatenate(places)
