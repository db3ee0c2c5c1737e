"""The collectives within a step: those that carry a wave's rows and updates, and the sums of a team.

A team's ranks form its sums while each orthogonalises its part of a block.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_muon.core.probe import SILENT, Probe
from megatron_muon.core.ranks import group_among
from megatron_muon.core.slices import Team


@dataclass(frozen=True)
class Works:
    """Several collectives, or messages of pairs, under way."""

    works: Sequence[Any] = ()

    def wait(self) -> None:
        """The stream of products waits for all of them."""
        for work in self.works:
            work.wait()


def exchange_pairs(
    received: torch.Tensor,
    sent: torch.Tensor,
    received_counts: Sequence[int],
    sent_counts: Sequence[int],
    group: dist.ProcessGroup,
) -> Any:
    """An asynchronous all-to-all without empty messages; in NCCL, the group has had another collective before it.

    That of torch.distributed takes a message to every rank, also an empty one: NCCL (from 2.14 on,
    as torch calls it) then connects all pairs and keeps buffers for them, gloo waits for each.
    """
    messages = [
        dist.P2POp(start, flat.narrow(0, end - count, count), group=group, group_peer=peer)
        for start, flat, counts in (
            (dist.irecv, received, received_counts),
            (dist.isend, sent, sent_counts),
        )
        for peer, (count, end) in enumerate(zip(counts, itertools.accumulate(counts), strict=True))
        if count
    ]
    return Works(dist.batch_isend_irecv(messages) if messages else [])


@dataclass(frozen=True)
class TeamGroup:
    """Ranks that orthogonalise a block together."""

    ranks: tuple[int, ...]
    group: dist.ProcessGroup

    def total(self, part: torch.Tensor, probe: Probe = SILENT) -> torch.Tensor:
        """The sum of the ranks' parts, formed in fp32, the same bits on each, in place of `part`. Collective."""
        total = part.float()
        probe.received(2 * (len(self.ranks) - 1) * total.nbytes // len(self.ranks))
        dist.all_reduce(total, group=self.group)
        return part.copy_(total)

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """The largest of the ranks' values, element by element, in place. Collective."""
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)
        return values


Teams = Mapping[tuple[int, ...], TeamGroup]
"""The teams that this rank is in, by their ranks in the group of the layout."""


def make_teams(group: dist.ProcessGroup, teams: Iterable[Team]) -> Teams:
    """Process groups for those of a plan's `teams`, and of their parts that cut a block, that this rank is in.

    Small teams come first, so that no two ranks wait for each other. A rank in fewer teams than
    another gets groups of its own: torch's names of groups count those that a rank is in.
    Collective over the ranks of each team.
    """
    cuts = {(team.ranks, team.cuts) for team in teams if team.cuts is not None}
    together = {ranks for ranks, _ in cuts} | {
        ranks[k : k + n] for ranks, of in cuts for k, n in of
    }
    together = {ranks for ranks in together if len(ranks) > 1}
    ours = sorted(
        (ranks for ranks in together if group.rank() in ranks),
        key=lambda ranks: (len(ranks), ranks),
    )
    most = max(Counter(rank for ranks in together for rank in ranks).values(), default=0)
    made = {ranks: TeamGroup(ranks, group_among(ranks, group)) for ranks in ours}
    for _ in range(most - len(ours)):
        group_among([group.rank()], group)
    return made
