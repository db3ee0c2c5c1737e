"""An all-to-all in two stages: between nodes, from each rank to that of the same place, and within a node.

With N nodes of G ranks, a rank has at most N - 1 and G - 1 peers instead of N * G - 1. What goes between nodes is under
way as the one all-to-all would be; what goes within a node, on its fast link, is waited for where it is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_muon.core.exchange.steps import InFlight
from megatron_muon.core.traffic import Ints, Transfers


@dataclass(frozen=True)
class Relays:
    """The process groups of a rank.

    Attributes:
        each: ranks of a node.
        node: the ranks of this rank's node.
        rail: the ranks of its place, one in each node.
    """

    each: int
    node: dist.ProcessGroup
    rail: dist.ProcessGroup

    def by_place(self, rank: int) -> tuple[int, int]:
        """Orders ranks by their place, and then by their node."""
        return rank % self.each, rank // self.each


@dataclass(frozen=True)
class Stages:
    """One all-to-all of this rank in two stages.

    What is for ranks of a relay lies together, and so does what comes from one: of rows, which go between nodes first,
    what is sent is ordered by rank and what arrives `by_place`; of updates the other way.

    Attributes:
        relays: the groups.
        between_first: whether the stage between nodes is the first.
        sent: elements for each rank of the first group.
        arriving: elements that this rank relays, from each rank of the first group.
        leaving: the same, to each rank of the second group.
        pieces: their sizes in the order in which they arrive, by rank of the first group and then of the second.
        order: in which they leave, by rank of the second group and then of the first.
        received: elements from each rank of the second group.
    """

    relays: Relays
    between_first: bool
    sent: list[int]
    arriving: list[int]
    leaving: list[int]
    pieces: list[int]
    order: list[int]
    received: list[int]

    @classmethod
    def of(cls, transfers: Transfers, rank: int, relays: Relays, *, between_first: bool) -> Stages:
        """Those of `rank`, where all ranks have `transfers` for others."""
        sources, targets, elements = leave = transfers.between_ranks()
        by = leave.relays(relays.each, between_first=between_first)
        nodes, places = relays.rail.size(), relays.each
        first, second = (nodes, places) if between_first else (places, nodes)

        def of_first(ranks: Ints) -> Ints:
            return ranks // places if between_first else ranks % places

        def of_second(ranks: Ints) -> Ints:
            return ranks % places if between_first else ranks // places

        def table(here: np.ndarray[Any, np.dtype[np.bool_]], rows: Ints, columns: Ints) -> Ints:
            found = np.zeros((first, second), dtype=np.int64)
            np.add.at(found, (rows[here], columns[here]), elements[here])
            return found

        passed = table(by == rank, of_first(sources), of_second(targets))
        numbers = np.full_like(passed, -1)
        numbers[passed > 0] = np.arange(np.count_nonzero(passed))
        return cls(
            relays,
            between_first,
            sent=table(sources == rank, of_first(by), of_second(targets)).sum(axis=1).tolist(),
            arriving=passed.sum(axis=1).tolist(),
            leaving=passed.sum(axis=0).tolist(),
            pieces=passed[passed > 0].tolist(),
            order=[number for number in numbers.T.ravel().tolist() if number >= 0],
            received=table(targets == rank, of_first(sources), of_second(by)).sum(axis=0).tolist(),
        )

    def start(self, send: torch.Tensor) -> InFlight:
        """Send what is for others, and expect what they have for this rank."""
        passed = send.new_empty(sum(self.pieces))
        work = self._first(passed, send, is_async=self.between_first)
        if self.between_first:
            return InFlight(work, passed, send, then=self._then)
        return self._second(self._regrouped(passed), is_async=True)

    def _then(self, passed: torch.Tensor) -> torch.Tensor:
        return self._second(self._regrouped(passed), is_async=False).received

    def _first(self, passed: torch.Tensor, send: torch.Tensor, *, is_async: bool) -> Any:
        group = self.relays.rail if self.between_first else self.relays.node
        return dist.all_to_all_single(passed, send, self.arriving, self.sent, group=group, async_op=is_async)

    def _regrouped(self, passed: torch.Tensor) -> torch.Tensor:
        """What this rank relays, by the ranks that it goes to."""
        pieces = passed.split(self.pieces)
        return torch.cat([pieces[number] for number in self.order]) if self.order else passed

    def _second(self, relayed: torch.Tensor, *, is_async: bool) -> InFlight:
        group = self.relays.node if self.between_first else self.relays.rail
        received = relayed.new_empty(sum(self.received))
        work = dist.all_to_all_single(received, relayed, self.received, self.leaving, group=group, async_op=is_async)
        return InFlight(work, received, relayed)

    @property
    def elements(self) -> int:
        """Those that this rank receives from others, in both stages."""
        rail, node = self.relays.rail.rank(), self.relays.node.rank()
        first, second = (rail, node) if self.between_first else (node, rail)
        return sum(self.arriving) - self.arriving[first] + sum(self.received) - self.received[second]


def make_relays(group: dist.ProcessGroup, each: int) -> Relays:
    """The groups of this rank, for nodes of `each` ranks side by side in `group`. Collective over `group`.

    torch names a group by how many groups a rank has made: every rank makes two.
    """
    world, rank = dist.get_process_group_ranks(group), group.rank()
    node, place = divmod(rank, each)

    def made(ranks: Sequence[int]) -> dist.ProcessGroup:
        group: dist.ProcessGroup = dist.new_group(list(ranks), use_local_synchronization=True)
        return group

    return Relays(each, made(world[node * each : (node + 1) * each]), made(world[place::each]))
