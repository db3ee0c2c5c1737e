"""Ranks that orthogonalize a block together, and what the owners of a matrix agree on.

A block's scale is a power of two, from its largest magnitude. A matrix of which one element is not
finite gets NaN for all of its blocks, on all of its owners, so all of its update becomes NaN.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_muon.core.probe import SILENT, Probe
from megatron_muon.core.route import Route
from megatron_muon.core.slices import Team
from megatron_muon.ranks import group_among


@dataclass(frozen=True)
class TeamGroup:
    """Ranks that orthogonalize a block together."""

    ranks: tuple[int, ...]
    group: ProcessGroup

    def total(
        self,
        part: Tensor,
        buffer: Tensor,
        probe: Probe = SILENT,
    ) -> Tensor:
        """Sum the ranks' parts in place, the same bits on each. Collective.

        The sum is formed in `buffer`, fp32, which may be `part`.
        """
        buffer.copy_(part)
        probe.received(
            2 * (len(self.ranks) - 1) * buffer.nbytes // len(self.ranks),
        )
        dist.all_reduce(buffer, group=self.group)
        return part.copy_(buffer)


Teams = Mapping[tuple[int, ...], TeamGroup]
"""The teams of this rank, by their ranks in the group of the layout."""


def make_teams(group: ProcessGroup, teams: Iterable[Team]) -> Teams:
    """Process groups of this rank's teams, and of their parts that cut a block.

    Small teams come first, so that no two ranks wait for each other. A rank in fewer teams than
    another gets groups of its own: torch's names of groups count those that a rank is in.
    Collective over the ranks of each team.
    """
    together = set[tuple[int, ...]]()
    for team in teams:
        if team.cuts is not None:
            together.add(team.ranks)
            together |= {team.ranks[first : first + count] for first, count in team.cuts}
    together = {ranks for ranks in together if len(ranks) > 1}
    rank = group.rank()
    ours = [ranks for ranks in together if rank in ranks]
    ours.sort(key=lambda ranks: (len(ranks), ranks))
    members = Counter(itertools.chain(*together))
    made = {ranks: TeamGroup(ranks, group_among(ranks, group)) for ranks in ours}
    for _ in range(
        max(members.values(), default=0) - len(ours),
    ):
        group_among([rank], group)
    return made


class Agreement:
    """Makes the magnitudes of a wave's slots those of their matrices, with the other owners of these.

    Attributes:
        shared: some matrix has several slots, or several owners.
    """

    def __init__(
        self,
        route: Route,
        owners: Sequence[Team],
        teams: Teams,
        rank: int,
        device: torch.device,
    ) -> None:
        self.teams = teams
        self._cut: list[tuple[slice, TeamGroup]] = []  # slots that are parts of blocks
        first = 0
        for stack in route.stacks:
            end = first + len(stack.slots)
            if stack.kind.ranks:
                self._cut.append(
                    (slice(first, end), teams[stack.kind.ranks]),
                )
            first = end
        by_owners: dict[tuple[int, ...], list[int]] = {}
        for index in route.indices:  # in the order of all ranks
            ranks = owners[index].ranks
            if rank in ranks:
                by_owners.setdefault(ranks, []).append(index)
        self._owned: list[tuple[slice, TeamGroup]] = []  # matrices of several owners
        numbers: dict[int, int] = {}
        for ranks, indices in sorted(by_owners.items()):
            first = len(numbers)
            for index in indices:
                numbers[index] = len(numbers)
            if len(ranks) > 1:
                self._owned.append(
                    (slice(first, len(numbers)), teams[ranks]),
                )
        matrices = [numbers[slot.index] for slot in route.slots]
        self.shared = bool(self._owned) or len(matrices) > len(set(matrices))
        self._matrices = torch.tensor(matrices, dtype=torch.int64, device=device)
        self._count = len(numbers)

    @property
    def is_among_ranks(self) -> bool:
        """Some slot's magnitude, or whether a matrix is finite, depends on other ranks."""
        return bool(self._owned or self._cut)

    def agree(self, largest: Tensor) -> None:
        """Make magnitudes those of whole blocks, NaN where a matrix is not finite. Collective in teams.

        Args:
            largest: `(slots, 1, 1)` fp32, not finite where a slot is not; changed in place.
        """
        failed = largest.new_zeros(self._count)
        # the difference is 0, or NaN where it is not finite
        failed.index_add_(
            0,
            self._matrices,
            (largest - largest).view(-1),
        )
        for matrices, team in self._owned:
            dist.all_reduce(failed[matrices], group=team.group)
        for slots, team in self._cut:
            dist.all_reduce(
                largest[slots],
                op=dist.ReduceOp.MAX,
                group=team.group,
            )
        largest.view(-1).add_(failed[self._matrices])
