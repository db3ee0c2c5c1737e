"""An all-to-all in several stages: between ranks of the same place of their nodes, and within nodes.

With N nodes of G ranks, a rank has at most N - 1 and G - 1 peers instead of N * G - 1. What goes between nodes is under
way as the one all-to-all would be; what goes within a node, on its fast link, is waited for where it is sent.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from megatron_muon.core.exchange.steps import InFlight, all_to_all
from megatron_muon.core.ranks import group_among
from megatron_muon.core.traffic import Path, Transfers


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


@dataclass(frozen=True)
class _Leg:
    """One stage of an all-to-all, as this rank has it.

    What a rank has for another lies together, ordered by the pair of ranks at the two ends of the path.

    Attributes:
        group: in which it takes place.
        sent: elements for each rank of the group.
        received: elements from each of them.
        pieces: of what arrives, the elements of each pair.
        order: in which the pieces leave in the next stage.
        by_pairs: see `all_to_all`.
    """

    group: dist.ProcessGroup
    sent: list[int]
    received: list[int]
    pieces: list[int]
    order: list[int]
    by_pairs: bool

    def start(self, flight: InFlight) -> None:
        """Begin to send what `flight` has to send. Collective."""
        all_to_all(flight, self.received, self.sent, self.group, by_pairs=self.by_pairs)

    def pass_on(self, flight: InFlight) -> None:
        """Wait, and make what has been received what is sent next."""
        flight.arrive()
        assert flight.received is not None
        pieces = flight.received.split(self.pieces)
        flight.sent = torch.cat([pieces[number] for number in self.order]) if self.order else flight.received
        flight.received = None


@dataclass(frozen=True)
class Stages:
    """One all-to-all of this rank: the stage between nodes, and those before and after it.

    What is sent first is ordered by first relay, what is received last by last relay.
    """

    before: list[_Leg]
    between: _Leg
    after: list[_Leg]

    @classmethod
    def of(cls, transfers: Transfers, path: Path, rank: int, relays: Relays, *, by_pairs: bool) -> Stages:
        """Those of `rank`, where all ranks have `transfers` for others; `by_pairs` is for the stage between nodes."""
        sources, targets, elements = transfers.between_ranks()
        points = [sources, *path.relays(sources, targets), targets]
        passing = np.any([point == rank for point in points], axis=0)
        ends, pair = np.unique(np.stack([sources[passing], targets[passing]]), axis=1, return_inverse=True)
        elements = np.bincount(pair, weights=elements[passing], minlength=ends.shape[1]).astype(np.int64)
        points = [ends[0], *path.relays(ends[0], ends[1]), ends[1]]
        legs = []
        for number, (here, there) in enumerate(itertools.pairwise(points)):
            is_between = number == path.between
            group = relays.rail if is_between else relays.node
            places = [end // relays.each if is_between else end % relays.each for end in (here, there)]
            leaving, arriving = (Transfers(places[0][mine], places[1][mine], elements[mine])
                                 for mine in (here == rank, there == rank))  # fmt: skip
            pairs = np.flatnonzero(there == rank)
            pairs = pairs[here[pairs].argsort(kind="stable")]
            following = points[number + 2][pairs] if number + 2 < len(points) else pairs
            legs.append(
                _Leg(
                    group,
                    sent=leaving.received(group.size()).tolist(),
                    received=arriving.sent(group.size()).tolist(),
                    pieces=elements[pairs].tolist(),
                    order=np.lexsort((pairs, following)).tolist(),
                    by_pairs=by_pairs and is_between,
                )
            )
        return cls(legs[: path.between], legs[path.between], legs[path.between + 1 :])

    @property
    def elements(self) -> int:
        """Those that this rank receives from others, in all stages."""
        legs = [*self.before, self.between, *self.after]
        return sum(sum(leg.received) - leg.received[leg.group.rank()] for leg in legs)

    def start(self, flight: InFlight) -> None:
        """Send what `flight` has to send, and expect what others send. Collective."""
        for leg in self.before:
            leg.start(flight)
            leg.pass_on(flight)
        self.between.start(flight)
        flight.then = self._then

    def _then(self, flight: InFlight) -> None:
        for leg, following in itertools.pairwise([self.between, *self.after]):
            leg.pass_on(flight)
            following.start(flight)
        flight.arrive()


def make_relays(group: dist.ProcessGroup, each: int) -> Relays:
    """The groups of this rank, for nodes of `each` ranks side by side in `group`. Collective over `group`."""
    node, place = divmod(group.rank(), each)
    neighbours, rail = range(node * each, (node + 1) * each), range(place, group.size(), each)
    return Relays(each, group_among(neighbours, group), group_among(rail, group))
