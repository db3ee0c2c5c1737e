"""A team at work: the sums that its ranks form together while each orthogonalises its part of a block.

Of two teams that share a rank one holds the other, and each rank takes the sums of a wave in one order, so no two ranks
wait for each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_muon.core.portions import TEAM_SIZES, chunks
from megatron_muon.core.probe import SILENT, Probe


@dataclass(frozen=True)
class TeamGroup:
    """Ranks that orthogonalise a block together."""

    ranks: tuple[int, ...]
    group: dist.ProcessGroup

    def total(self, part: torch.Tensor, probe: Probe = SILENT) -> torch.Tensor:
        """The sum of the ranks' parts, formed in fp32, of the dtype of `part`. Collective.

        In a ring, every rank has the same bits, and receives all but one part of the sum twice.
        """
        total = part.float()
        probe.received(2 * (len(self.ranks) - 1) * total.nbytes // len(self.ranks))
        dist.all_reduce(total, group=self.group)
        return total.to(part.dtype)

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """The largest of the ranks' values, element by element, in place. Collective."""
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)
        return values

    def all(self, flags: torch.Tensor) -> torch.Tensor:
        """Which flags are set on all ranks, bool. Collective."""
        lowest = flags.int()
        dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=self.group)
        return lowest.bool()


Teams = Mapping[tuple[int, ...], TeamGroup]
"""The teams that this rank is in, by their ranks in the group of the layout."""


def make_teams(group: dist.ProcessGroup, nodes: Sequence[int], largest: int) -> Teams:
    """Process groups for the teams of up to `largest` ranks that this rank is in; a communicator is made at first use.

    torch names a group by how many groups a rank has made, and ranks that disagree wait for each other. So every rank
    of `group` makes one group for each size, also where a smaller team is left over, or no matrix has such a team.
    Collective over `group`.
    """
    world, rank = dist.get_process_group_ranks(group), group.rank()
    teams = {}
    for size in TEAM_SIZES[1:]:
        if size <= largest:
            (ranks,) = (ranks for ranks in chunks(nodes, size) if rank in ranks)
            made = dist.new_group([world[r] for r in ranks], use_local_synchronization=True)
            teams[ranks] = TeamGroup(ranks, made)
    return teams
