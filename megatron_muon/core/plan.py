"""Who orthogonalises which matrix, and in which waves the rows travel.

A plan is made once, before the first step, from a layout and the cost of each matrix; every rank makes the same plan by
itself. It gives every matrix one owner, or a team of them (`assignment`), so that the ranks' work is even and few bytes
move, then cuts the matrices that travel into waves that fit a buffer. Nothing here sends anything.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_muon.core.assignment import TeamRules, assign
from megatron_muon.core.layout import Layout, Matrix
from megatron_muon.core.portions import Portion, Team, rectangles

UPDATE_BYTES = 4
"""Room for each element that an owner iterates over, twice, beside the assembled matrix: what the temporaries of the
iteration take. For square blocks on a processor they take up to 14 bytes an element, of a few blocks at a time."""

DIGEST_LENGTH = 12
"""Hexadecimal digits: they fit an int64."""

_Ints = np.ndarray[Any, np.dtype[np.int64]]

MIN_WAVES = 3
"""So many waves that one can arrive and one can leave while one is worked on."""


@dataclass(frozen=True)
class Plan:
    """Owners and waves of a layout.

    Attributes:
        layout: what is planned.
        teams: the ranks that orthogonalise each matrix, by matrix index.
        whole: for each rank, the matrices that lie whole on it and that it owns: they need no wire.
        waves: matrix indices that travel together, in the order of the step.
        loads: cost owned by each rank, in the unit of the given costs.
        oversized: matrices that fill more than a wave's buffer by themselves.
        wave_bytes: what a wave, or a part of the matrices that need no wire, may fill on a rank.
    """

    layout: Layout
    teams: tuple[Team, ...]
    whole: tuple[tuple[int, ...], ...]
    waves: tuple[tuple[int, ...], ...]
    loads: tuple[float, ...]
    oversized: tuple[int, ...]
    wave_bytes: int

    @property
    def owners(self) -> tuple[int, ...]:
        """The first owner of each matrix: the only one where there are no teams."""
        return tuple(team.ranks[0] for team in self.teams)

    def portions(self, index: int) -> list[Portion]:
        """What ranks orthogonalise of a matrix."""
        return self.teams[index].portions(index, self.layout.matrices[index])

    @property
    def imbalance(self) -> float:
        """Largest load over the mean load; 1.0 is even."""
        mean = sum(self.loads) / len(self.loads)
        return max(self.loads) / mean if mean else 1.0

    def digest(self) -> str:
        """A short hash of who does what: equal for equal shapes, blocks, owners and waves, on any machine."""
        shapes = [matrix.shape for matrix in self.layout.matrices]
        blocks = [(matrix.split.groups, matrix.split.parts) for matrix in self.layout.matrices]
        teams = [(team.ranks, team.cuts) for team in self.teams]
        content = json.dumps([shapes, blocks, teams, self.whole, self.waves, self.wave_bytes])
        return hashlib.sha256(content.encode()).hexdigest()[:DIGEST_LENGTH]

    def fillers(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """The whole matrices of `rank` in parts: one beside each wave, or more where they would overfill the buffer."""
        whole = self.whole[rank]
        filled = sum(2 * self.layout.matrices[index].numel * UPDATE_BYTES for index in whole)
        parts = min(max(len(self.waves), 1, math.ceil(filled / self.wave_bytes)), len(whole))
        return tuple(whole[k::parts] for k in range(parts))

    def exchanged_bytes(self, element_bytes: int) -> tuple[int, ...]:
        """Bytes that each rank receives in a step: rows for its own matrices, and its update rows of the others."""
        received = np.zeros(self.layout.world_size, dtype=np.int64)
        for index in itertools.chain(*self.waves):
            holders, numbers = held_by(self.layout.matrices[index])
            for portion, elements in self.common(index):
                others = holders != portion.rank
                # Each holder but the owner gets its update rows, and the owner the rows unless it holds them.
                np.add.at(received, holders[others], elements[numbers[others]])
                received[portion.rank] += elements.sum() - elements[numbers[~others]].sum()
        return tuple((received * element_bytes).tolist())

    def common(self, index: int) -> Iterator[tuple[Portion, _Ints]]:
        """The portions of a matrix, and how many elements each of its shards has of them."""
        of_shards = rectangles(self.layout.matrices[index].shards)
        for portion in self.portions(index):
            yield portion, portion.overlaps(of_shards)

    def footprints(self, element_bytes: int) -> Iterator[_Ints]:
        """Bytes that each rank holds for a wave, wave by wave: what it sends, what it assembles, what it returns."""
        footprints = _Footprints(element_bytes)
        for wave in self.waves:
            filled = np.zeros(self.layout.world_size, dtype=np.int64)
            for index in wave:
                ranks, sizes = footprints.of(self.layout.matrices[index], self.portions(index))
                filled[ranks] += sizes
            yield filled

    def buffer_bytes(self, element_bytes: int) -> int:
        """The most bytes that a rank holds for one wave."""
        return max((int(filled.max()) for filled in self.footprints(element_bytes)), default=0)


def all_gather_bytes(layout: Layout, element_bytes: int) -> tuple[int, ...]:
    """Bytes that each rank receives in a step of the all-gather scheme: all of every matrix but its own part."""
    missing = [sum(matrix.numel for matrix in layout.matrices)] * layout.world_size
    for shard in itertools.chain(*(matrix.shards for matrix in layout.matrices)):
        for holder in shard.holders:
            missing[holder] -= shard.numel
    return tuple(elements * element_bytes for elements in missing)


def held_by(matrix: Matrix) -> tuple[_Ints, _Ints]:
    """The ranks that hold shards of a matrix, and for each the number of its shard."""
    pairs = [(holder, number) for number, shard in enumerate(matrix.shards) for holder in shard.holders]
    holders, numbers = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    return holders, numbers


def make_plan(
    layout: Layout,
    costs: Sequence[float],
    *,
    buffer_bytes: int,
    element_bytes: int,
    rules: TeamRules | None = None,
) -> Plan:
    """Plan a layout.

    Args:
        layout: all matrices of the group.
        costs: the work of orthogonalising each matrix, in any unit.
        buffer_bytes: what the waves that are under way at a time may fill on a rank.
        element_bytes: of an element on the wire.
        rules: which teams may own a matrix; None forms none.

    Raises:
        ValueError: a cost for each matrix is missing, or the buffer is not positive.
    """
    if len(costs) != len(layout.matrices):
        raise ValueError(f"{len(layout.matrices)} matrices need as many costs, got {len(costs)}")
    if buffer_bytes <= 0:
        raise ValueError(f"--muon-exchange-buffer-mb must be positive, got {buffer_bytes / 2**20:g}")
    wave_bytes = max(buffer_bytes // MIN_WAVES, 1)
    teams = assign(layout, costs, rules)
    loads = np.zeros(layout.world_size)
    whole: list[list[int]] = [[] for _ in range(layout.world_size)]
    travelling = []
    for index, (matrix, team) in enumerate(zip(layout.matrices, teams, strict=True)):
        loads[list(team.ranks)] += team.loads
        if team.cuts is None and len(matrix.shards) == 1 and matrix.shards[0].holders == team.ranks:
            whole[team.ranks[0]].append(index)
        else:
            travelling.append(index)
    waves, oversized = _waves(layout, teams, travelling, wave_bytes, element_bytes)
    return Plan(layout, tuple(teams), tuple(map(tuple, whole)), waves, tuple(loads.tolist()), oversized, wave_bytes)


def _waves(
    layout: Layout,
    teams: Sequence[Team],
    travelling: list[int],
    wave_bytes: int,
    element_bytes: int,
) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Cut the travelling matrices into waves in which every owner has its share of work and no rank's buffer overflows.

    Owners' matrices are interleaved by the share of the owner's work that lies before them, equal shapes together, so
    that any prefix of the sequence is even over owners. A wave ends where the next matrix would overflow a buffer, or
    where it has its share of all bytes.

    Where a matrix is larger than the buffer, every wave may fill what the largest one and its rows take, whatever the
    number of layers: that memory is needed anyway, and alone in a wave a matrix would leave every other rank idle.
    """
    footprints = _Footprints(element_bytes)

    def footprint(index: int) -> tuple[_Ints, _Ints]:
        matrix = layout.matrices[index]
        return footprints.of(matrix, teams[index].portions(index, matrix))

    peak = np.zeros(layout.world_size, dtype=np.int64)
    beyond = []
    for index in travelling:
        ranks, sizes = footprint(index)
        peak[ranks] += sizes
        if sizes.max() > wave_bytes:
            beyond.append(index)
    oversized = tuple(beyond)
    # A limit smaller than the largest matrix would put every matrix into a wave of its own: a rank has to own it while
    # it serves as many rows to other owners.
    largest = max((layout.matrices[index].numel // len(teams[index].ranks) for index in travelling), default=0)
    least = 2 * largest * (2 * element_bytes + UPDATE_BYTES)
    room = max(wave_bytes, least) if oversized else wave_bytes
    limit = min(room, max(math.ceil(int(peak.max(initial=0)) / MIN_WAVES), least))
    waves: list[list[int]] = []
    filled = np.zeros(layout.world_size, dtype=np.int64)
    for index in _interleave(travelling, teams, layout):
        ranks, sizes = footprint(index)
        if not waves or (filled[ranks] + sizes).max() > limit:
            waves.append([])
            filled[:] = 0
        waves[-1].append(index)
        filled[ranks] += sizes
    return tuple(map(tuple, waves)), oversized


def _interleave(indices: Sequence[int], teams: Sequence[Team], layout: Layout) -> list[int]:
    """The matrices ordered by the share of their owners' work that lies before them, costly ones first."""
    order = sorted(indices, key=lambda i: (-max(teams[i].loads), layout.matrices[i].shape, i))
    total, before = np.zeros(layout.world_size), np.zeros(layout.world_size)
    for index in order:
        total[list(teams[index].ranks)] += teams[index].loads
    total[total == 0] = 1.0
    sequence = []
    for index in order:
        ranks = list(teams[index].ranks)
        sequence.append((float((before[ranks] / total[ranks]).max()), index))
        before[ranks] += teams[index].loads
    sequence.sort()
    return [index for _, index in sequence]


class _Footprints:
    """What matrices take on each rank while their wave is under way; those that share their shards are counted once.

    A rank sends its rows and gets their updates; where these come from several ranks it puts them together, too. A sole
    owner has its own rows with the matrix.
    """

    def __init__(self, element_bytes: int) -> None:
        self._element_bytes = element_bytes
        self._held: dict[int, tuple[_Ints, _Ints]] = {}  # ranks in ascending order, and their elements

    def of(self, matrix: Matrix, portions: Sequence[Portion]) -> tuple[_Ints, _Ints]:
        """The ranks on which a matrix takes memory, each once, and how many bytes on each."""
        if id(matrix.shards) not in self._held:
            holders, numbers = held_by(matrix)
            order = holders.argsort()
            elements = np.array([shard.numel for shard in matrix.shards], dtype=np.int64)[numbers]
            self._held[id(matrix.shards)] = holders[order], elements[order]
        holders, elements = self._held[id(matrix.shards)]
        owned: dict[int, int] = {}
        for portion in portions:
            each = 2 * portion.numel * (self._element_bytes + UPDATE_BYTES)
            owned[portion.rank] = owned.get(portion.rank, 0) + each
        sole = len(owned) == 1
        sizes = (2 if sole else 3) * self._element_bytes * elements
        places = np.searchsorted(holders, list(owned))
        more: dict[int, int] = {}
        for (rank, size), place in zip(owned.items(), places.tolist(), strict=True):
            if place == len(holders) or holders[place] != rank:
                more[rank] = size
            else:
                sizes[place] = size + (0 if sole else sizes[place])
        return np.append(holders, list(more)).astype(np.int64), np.append(sizes, list(more.values())).astype(np.int64)
