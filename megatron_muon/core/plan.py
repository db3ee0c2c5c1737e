"""Who orthogonalises which matrix, in which waves the rows travel, and when each wave goes on.

A plan is made once, before the first step, from a layout and the cost of each matrix; every rank
makes the same plan by itself. Owners are given by `assignment`; the matrices that travel are cut
into waves that fit memory.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from megatron_muon.core.assignment import TeamRules, assign
from megatron_muon.core.layout import Ints, Layout
from megatron_muon.core.memory import AUTO_BYTES, Memory, stacks
from megatron_muon.core.slices import BlockKind, BlockSlice, Team
from megatron_muon.core.traffic import Traffic, Transfers

DIGEST_LENGTH = 12
"""Hexadecimal digits: they fit an int64."""

MIN_WAVES = 3
"""So many waves that one can arrive and one can leave while one is worked on."""

SMALL_BYTES = 2**22
"""What travels in one wave, where it is no more: a collective's own time is longer than what it could overlap (hidden
size 16, 64 layers, two ranks over gloo: one wave instead of four)."""

STAGES = 4
"""Of a wave: until its rows travel, until they are orthogonalised, until updates travel, until they are applied."""
MOMENTS = 3
"""Of a stage, for the lifetime of buffers: what arrived is waited for, copied, and then used."""

LIFETIMES = {
    "prepared": ((0, 0), (0, 2)),
    "send": ((0, 0), (1, 0)),
    "own": ((0, 0), (1, 1)),
    "receive": ((0, 0), (1, 1)),
    "stacks": ((1, 1), (2, 2)),
    "work": ((1, 2), (1, 2)),
    "back": ((2, 0), (3, 0)),
    "returned": ((2, 0), (3, 2)),
    "updates": ((3, 0), (3, 2)),
}
"""From which stage and moment of a wave on a buffer is needed, and until when."""


@dataclass(frozen=True)
class Plan:
    """Owners and waves of a layout."""

    layout: Layout
    teams: tuple[Team, ...]  # the ranks that orthogonalise each matrix
    # for each rank, the matrices that lie whole on it, their owner: no wire
    whole: tuple[tuple[int, ...], ...]
    waves: tuple[tuple[int, ...], ...]  # matrices that travel together, in the order of the step
    loads: tuple[float, ...]  # cost owned by each rank, in the unit of the given costs
    memory: Memory
    buffer_bytes: int  # what a step may take on a rank beyond weights, gradients and state
    wave_bytes: int  # the part of it that one wave may fill
    by_pairs: bool = False  # messages go to those ranks alone for which there are bytes

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """The first owner of each matrix: the only one where there are no teams."""
        return tuple(team.ranks[0] for team in self.teams)

    def slices(self, index: int) -> list[BlockSlice]:
        """What ranks orthogonalise of a matrix."""
        return self.teams[index].slices(index, self.layout.matrices[index])

    def figures(self) -> dict[str, Any]:
        """What there is to know of it, under the names that `megatron-muon plan` has in its JSON file."""
        sizes = Counter(len(team.ranks) for team in self.teams)
        return {
            "matrices": len(self.layout.matrices),
            "travelling": sum(map(len, self.waves)),
            "owners": sum(load > 0 for load in self.loads),
            "matrices_of_teams": {
                str(size): count for size, count in sorted(sizes.items()) if size > 1
            },
            "max_over_mean": self.imbalance,
            "exchange_bytes": max(self.exchanged_bytes(), default=0),
            "peers": self.peers(),
            "waves": len(self.waves),
            "buffer_bytes": self.buffer_bytes,
        }

    @property
    def imbalance(self) -> float:
        """Largest load over the mean load; 1.0 is even."""
        mean = sum(self.loads) / len(self.loads)
        return max(self.loads) / mean if mean else 1.0

    def digest(self) -> str:
        """A short hash of who does what: equal for equal shapes, blocks, steps, owners and waves, on any machine."""
        matrices = self.layout.matrices
        content = [
            [matrix.shape for matrix in matrices],
            [(matrix.split.groups, matrix.split.parts) for matrix in matrices],
            [matrix.steps for matrix in matrices],
            [(team.ranks, team.cuts) for team in self.teams],
            self.whole,
            self.waves,
            self.wave_bytes,
        ]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:DIGEST_LENGTH]

    @cached_property
    def traffic(self) -> Traffic:
        """What ranks send each other."""
        return Traffic(self.layout, self.teams)

    def fillers(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """The whole matrices of `rank` in parts: one beside each wave, or more where they would overfill the buffer."""
        if not self.whole[rank]:
            return ()
        left = self.memory.beside_waves(self.buffer_bytes, int(self._under_way[rank]))
        return self.memory.parts(
            self.layout,
            self.whole[rank],
            left,
            max(len(self.waves), 1),
        )

    @cached_property
    def _under_way(self) -> Ints:
        """The most bytes that each rank sends, keeps and receives of one wave."""
        ranks = self.layout.world_size
        most = np.zeros(ranks, dtype=np.int64)
        for wave in self.waves:
            rows = self.traffic.gathered(wave)
            most = np.maximum(most, rows.sent(ranks) + rows.between_ranks().received(ranks))
        return self.memory.element_bytes * most

    def all_to_alls(self) -> Iterator[tuple[Transfers, Transfers]]:
        """What those of each wave carry: its rows, and its updates."""
        for wave in self.waves:
            yield (
                self.traffic.gathered(wave).between_ranks(),
                self.traffic.returned(wave).between_ranks(),
            )

    def peers(self) -> int:
        """The most others with which a rank exchanges bytes in one all-to-all."""
        carried = itertools.chain(*self.all_to_alls())
        return max(
            (int(found.peers(self.layout.world_size).max(initial=0)) for found in carried),
            default=0,
        )

    def exchanged_bytes(self) -> tuple[int, ...]:
        """Bytes that each rank receives in a step: rows for what it owns, and its update rows of what others own."""
        received = np.zeros(self.layout.world_size, dtype=np.int64)
        for transfers in itertools.chain(*self.all_to_alls()):
            received += transfers.received(len(received))
        return tuple((received * self.memory.element_bytes).tolist())


def make_plan(
    layout: Layout,
    costs: Sequence[float],
    *,
    memory: Memory,
    buffer_bytes: int | None = None,
    rules: TeamRules | None = None,
) -> Plan:
    """Plan a layout: the same on every rank that has the same arguments.

    `costs` are the work of orthogonalising each matrix, in any unit; `buffer_bytes` what a step may
    take on a rank, None `AUTO_BYTES` or as much as whole blocks need; `rules` None forms no teams,
    on one node.

    Raises:
        UserError: the buffer is too small.
    """
    rules = rules or TeamRules(memory.iteration.cost, [0] * layout.world_size, size=1)
    needs = _fitting_needs(layout, costs, rules, memory, buffer_bytes)
    loads = np.zeros(layout.world_size)
    for team in needs.teams:
        loads[list(team.ranks)] += team.loads
    if buffer_bytes is None:
        buffer_bytes = max(AUTO_BYTES, needs.usual)
    wave_bytes = memory.of_wave(buffer_bytes, needs.beside) if needs.travelling else 0
    if wave_bytes >= needs.single:
        waves = needs.waves(wave_bytes)
    else:
        waves, wave_bytes = tuple((index,) for index in needs.interleaved()), needs.single
    whole = tuple(map(tuple, needs.whole))
    plan = Plan(
        layout,
        tuple(needs.teams),
        whole,
        waves,
        tuple(loads.tolist()),
        memory,
        buffer_bytes,
        wave_bytes,
    )
    largest = max(waves, key=len, default=())
    peers = plan.traffic.gathered(largest).between_ranks().peers(layout.world_size)
    return replace(plan, by_pairs=2 * int(peers.max(initial=0)) < layout.world_size - 1)


class _Needs:
    """Bytes that matrices with these owners take on the rank that has most, and the waves that follow."""

    def __init__(self, layout: Layout, teams: Sequence[Team], memory: Memory) -> None:
        """Sort matrices into travelling ones and those whole on their owner; size the buffer."""
        self._layout, self._memory, self.teams = layout, memory, teams
        self.whole: list[list[int]] = [[] for _ in range(layout.world_size)]
        self.travelling: list[int] = []
        for index, (matrix, team) in enumerate(zip(layout.matrices, teams, strict=True)):
            if (
                team.cuts is None
                and len(matrix.shards) == 1
                and matrix.shards[0].holders == team.ranks
            ):
                self.whole[team.ranks[0]].append(index)
            else:
                self.travelling.append(index)
        self._in_wave = {index: self._bytes_in_wave(index) for index in self.travelling}
        # Bytes of the largest wave of one matrix.
        self.single = max(
            (int(sizes.max()) for _, sizes in self._in_wave.values()),
            default=0,
        )
        pairs = ((layout.matrices[index], teams[index]) for index in self.travelling)
        alike = Counter(
            (tuple(matrix.blocks), team.cuts, len(team.ranks), matrix.steps)
            for matrix, team in pairs
        )
        taken = [memory.of_owners(*kind) for kind in alike]
        # Bytes of a wave in which every rank owns a matrix as large as the largest, and serves as many
        # rows to others.
        self.busy = max((each.wave for each in taken), default=0)
        kinds: Counter[BlockKind] = Counter()
        for (blocks, cuts, _, steps), count in alike.items():
            kinds.update({kind: each * count for kind, each in stacks(blocks, cuts, steps).items()})
        local = (layout.matrices[index] for index in itertools.chain(*self.whole))
        fillers = [
            memory.whole([one])
            for one in {(one.shape, one.split, one.steps): one for one in local}.values()
        ]
        least_beside = max([0, *fillers, *(each.beside for each in taken)])
        # Bytes beside the waves: temporaries, or matrices that do not travel.
        self.beside = max(memory.of_stacks(kinds), least_beside)
        # Bytes of a step with waves of one matrix, and with waves that keep all ranks busy.
        self.smallest = memory.of_step(self.single, least_beside)
        self.usual = memory.of_step(max(self.single, self.busy), self.beside)

    def _bytes_in_wave(self, index: int) -> tuple[Ints, Ints]:
        """The ranks on which a matrix takes memory of its wave, each once, and how many bytes on each.

        A rank sends its rows and gets their updates, an owner has the matrix; a sole owner has its
        own rows with it.
        """
        team, held, memory = self.teams[index], self._layout.holders[index], self._memory
        elements = held.elements[held.numbers]
        sizes = memory.held_bytes(is_team=team.cuts is not None) * elements
        owned: Counter[int] = Counter()
        for block_slice in team.slices(index, self._layout.matrices[index]):
            owned[block_slice.rank] += block_slice.numel * memory.element_bytes
        others: dict[int, int] = {}  # owners that hold nothing
        for rank, size in owned.items():
            here = held.ranks == rank
            if not here.any():
                others[rank] = size
            elif team.cuts is None:
                sizes[here] = np.maximum(size, memory.moment.held * elements[here])
            else:
                sizes[here] += size
        ranks = np.append(held.ranks, list(others)).astype(np.int64)
        return ranks, np.append(sizes, list(others.values())).astype(np.int64)

    def waves(self, wave_bytes: int) -> tuple[tuple[int, ...], ...]:
        """The travelling matrices in waves in which owners have their share of work and no rank's buffer overflows.

        A wave ends where the next matrix would overflow a buffer, or where it has its share of all
        bytes, unless that is little, or leaves no room for one of the largest matrices on every
        rank: alone, it would leave every other rank idle.
        """
        filled = np.zeros(self._layout.world_size, dtype=np.int64)
        for ranks, sizes in self._in_wave.values():
            filled[ranks] += sizes
        most = int(filled.max(initial=0))
        fits = most <= min(SMALL_BYTES, wave_bytes)
        limit = most if fits else min(wave_bytes, max(math.ceil(most / MIN_WAVES), self.busy))
        waves: list[list[int]] = []
        for index in self.interleaved():
            ranks, sizes = self._in_wave[index]
            if not waves or (filled[ranks] + sizes).max() > limit:
                waves.append([])
                filled[:] = 0
            waves[-1].append(index)
            filled[ranks] += sizes
        return tuple(map(tuple, waves))

    def interleaved(self) -> list[int]:
        """Travelling matrices by the share of their owners' work that lies before them, costly ones first."""
        teams, matrices, ranks = self.teams, self._layout.matrices, self._layout.world_size
        order = sorted(
            self.travelling,
            key=lambda i: (-max(teams[i].loads), matrices[i].shape, i),
        )
        total, before = np.zeros(ranks), np.zeros(ranks)
        for index in order:
            total[list(teams[index].ranks)] += teams[index].loads
        total[total == 0] = 1.0
        sequence = []
        for index in order:
            owners = list(teams[index].ranks)
            sequence.append((float((before[owners] / total[owners]).max()), index))
            before[owners] += teams[index].loads
        return [index for _, index in sorted(sequence)]


def _fitting_needs(
    layout: Layout,
    costs: Sequence[float],
    rules: TeamRules,
    memory: Memory,
    buffer_bytes: int | None,
) -> _Needs:
    """Owners with whom a step fits its buffer; where those that are fastest do not, others that take less."""

    def of(rules: TeamRules, allowed: int | None) -> _Needs:
        return _Needs(layout, assign(layout, costs, rules, memory, allowed), memory)

    for allowed in (buffer_bytes, (buffer_bytes or 0) // 2):
        needs = of(rules, allowed)
        if buffer_bytes is None or needs.smallest <= buffer_bytes:
            return needs
    smaller = [rules, *(replace(rules, size=size) for size in rules.sizes if not rules.size)]
    needs = min((of(each, 1) for each in smaller), key=lambda each: each.smallest)
    memory.check(buffer_bytes, needs.smallest, layout)
    return needs


def schedule(travelling: int, local: int) -> list[int]:
    """The waves in the order in which they go on, those that do not travel numbered behind those that do.

    While wave k is orthogonalised, rows of wave k+1 and updates of wave k-1 are under way; before
    its own updates leave, those of wave k-1 are applied, so that no more than three waves hold
    memory.
    """
    rest = iter(range(travelling, travelling + local))
    beside = -(-local // max(travelling, 1))
    order = [0] if travelling else []
    for wave in range(travelling):
        order += [wave + 1] if wave + 1 < travelling else []
        order += [number for number in itertools.islice(rest, beside) for _ in range(STAGES)]
        order += [wave, *([wave - 1] if wave else []), wave]
    order += [travelling - 1] if travelling else []
    return order + [number for number in rest for _ in range(STAGES)]


def moments_of(order: Sequence[int]) -> list[list[int]]:
    """For each wave, the first moment of each of its stages.

    `order[position]` is the wave that runs its next stage there; a stage has `MOMENTS` moments.
    """
    waves = max(order, default=-1) + 1
    moments: list[list[int]] = [[] for _ in range(waves)]
    for position, wave in enumerate(order):
        moments[wave].append(position * MOMENTS)
    return moments
