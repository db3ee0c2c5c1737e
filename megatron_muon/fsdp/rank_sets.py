"""Sets of ranks that hold matrices together: a mesh's, or those that share whole matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.tensor import DTensor

from megatron_muon.errors import UserError
from megatron_muon.fsdp.parameter_groups import Choice
from megatron_muon.fsdp.selection import Selection
from megatron_muon.ranks import Alone, group_among


@dataclass
class RankSet:
    """Parameters whose matrices one set of ranks holds.

    Attributes:
        ranks: none if every rank works alone.
    """

    ranks: tuple[int, ...]
    matrices: dict[torch.Tensor, Choice]

    @property
    def replicated(self) -> bool:
        """True if every rank holds whole matrices."""
        placements = [getattr(p, "placements", ()) for p in self.matrices]
        return all(cut.is_replicate() for cuts in placements for cut in cuts)

    def group(self, given: Mapping[str, Any]) -> Any:
        """The process group, or `Alone`. Collective over the ranks."""
        first = next(iter(self.matrices))
        if not isinstance(first, DTensor):
            if given["share_replicated"]:
                return given["process_group"] or c10d._get_default_group()
            return Alone()
        if first.device_mesh.ndim == 1:
            return first.device_mesh.get_group()
        world = c10d._get_default_group()
        if len(self.ranks) == world.size():
            return world
        return group_among(self.ranks, world)


def rank_sets(selection: Selection) -> list[RankSet]:
    """The sets of ranks in one order on all of them, as what follows is collective."""
    found: dict[tuple[int, ...], RankSet] = {}
    for p, choice in selection.matrices.items():
        ranks = _ranks_of(choice.name, p)
        found.setdefault(ranks, RankSet(ranks, {})).matrices[p] = choice
    return [found[ranks] for ranks in sorted(found)]


def _ranks_of(
    name: str,
    parameter: torch.Tensor,
) -> tuple[int, ...]:
    """The ranks of a parameter's mesh, ascending; none for a plain tensor."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh = parameter.device_mesh
    if mesh.get_coordinate() is None:
        raise UserError(
            f"{name} is on {mesh}, which rank {dist.get_rank()} is not in; give Muon on each rank"
            " only parameters whose mesh has that rank"
        )
    return tuple(sorted(mesh.mesh.flatten().tolist()))


def largest_of(groups: Sequence[Any], metrics_interval: int) -> Any:
    """The largest of these groups, which metrics are summed over.

    Raises a UserError if they would miss ranks.
    """
    largest = max(groups, key=lambda group: group.size())
    sharing = [group for group in groups if not isinstance(group, Alone)]
    every = set().union(*map(dist.get_process_group_ranks, sharing))
    if metrics_interval and len(every) > largest.size():
        raise UserError(
            "metrics_interval needs a mesh with the ranks of all others; use metrics_interval=0"
        )
    return largest
