"""Ranks that orthogonalize a block together, and what the owners of a matrix agree on.

A block's scale is a power of two, from its largest magnitude. A matrix of which one element is not
finite gets NaN for all of its blocks, on all of its owners, so all of its update becomes NaN.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
        probe.received(2 * (len(self.ranks) - 1) * buffer.nbytes // len(self.ranks))
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
    for _ in range(max(members.values(), default=0) - len(ours)):
        group_among([rank], group)
    return made


class _Shared(NamedTuple):
    """Matrices that the same ranks own.

    Attributes:
        team: of several ranks.
        total: number of matrices.
        places: of this rank's slots.
        matrices: the matrix of each slot among these.
    """

    team: TeamGroup | None
    total: int
    places: Tensor
    matrices: Tensor


def _shared(
    team: TeamGroup | None, indices: Sequence[int], slots: Sequence[int], device: torch.device
) -> _Shared:
    """Matrices that a team owns, of which slots are parts."""
    numbers = {index: number for number, index in enumerate(indices)}
    places = [place for place, index in enumerate(slots) if index in numbers]
    matrices = [numbers[slots[place]] for place in places]
    on_device = torch.tensor(
        [places, matrices],
        dtype=torch.int64,
        device=device,
    )
    return _Shared(team, len(indices), *on_device)


class Agreement:
    """Makes the magnitudes of a wave's slots those of their matrices, with the other owners of these."""

    def __init__(
        self,
        route: Route,
        owners: Sequence[Team],
        teams: Teams,
        rank: int,
        device: torch.device,
    ) -> None:
        self.teams = teams
        self._spans: list[tuple[slice, TeamGroup]] = []
        first = 0
        for stack in route.stacks:
            end = first + len(stack.slots)
            if stack.kind.ranks:
                self._spans.append((slice(first, end), teams[stack.kind.ranks]))
            first = end
        by_owners: dict[tuple[int, ...], list[int]] = {}
        for index in route.indices:  # in the order of all ranks
            ranks = owners[index].ranks
            if rank in ranks:
                by_owners.setdefault(ranks, []).append(index)
        slots = [slot.index for slot in route.slots]
        several = len(slots) > len(set(slots))
        self.shared: list[_Shared] = []
        for ranks, indices in sorted(by_owners.items()):
            if several or len(ranks) > 1:
                team = teams[ranks] if len(ranks) > 1 else None
                self.shared.append(
                    _shared(
                        team,
                        indices,
                        slots,
                        device,
                    )
                )

    def agree(self, largest: Tensor) -> None:
        """Make magnitudes those of whole blocks, NaN where a matrix is not finite. Collective in teams.

        Args:
            largest: `(slots, 1, 1)` fp32, not finite where a slot is not; changed in place.
        """
        marks = largest - largest  # 0, or NaN where it is not finite
        flat = marks.view(-1)
        for shared in self.shared:
            failed = torch.zeros(
                shared.total,
                dtype=torch.float32,
                device=marks.device,
            )
            failed.index_add_(0, shared.matrices, flat[shared.places])
            if shared.team is not None:
                dist.all_reduce(failed, group=shared.team.group)
            flat[shared.places] = failed[shared.matrices]
        for span, team in self._spans:
            dist.all_reduce(
                largest[span],
                op=dist.ReduceOp.MAX,
                group=team.group,
            )
        largest.add_(marks)
