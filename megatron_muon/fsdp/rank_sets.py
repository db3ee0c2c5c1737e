"""Sets of ranks that hold matrices together: a mesh's, or those that share whole matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
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
    matrices: dict[torch.Tensor, Choice] = field(default_factory=dict)

    @property
    def replicated(self) -> bool:
        """True if every rank holds whole matrices."""
        sharded = [p for p in self.matrices if isinstance(p, DTensor)]
        return all(cut.is_replicate() for p in sharded for cut in p.placements)

    def group(self, given: Mapping[str, Any]) -> Any:
        """The process group, or `Alone`. Collective over the ranks."""
        first = next(iter(self.matrices))
        world = dist.group.WORLD
        if isinstance(first, DTensor):
            if first.device_mesh.ndim == 1:
                return first.device_mesh.get_group()
            assert world is not None
            if len(self.ranks) == world.size():
                return world
            return group_among(self.ranks, world)
        if given["share_replicated"]:
            return given["process_group"] or world
        return Alone()


def rank_sets(
    selection: Selection,
    given: Mapping[str, Any],
) -> list[RankSet]:
    """The sets of ranks in one order on all of them, as what follows is collective."""
    found: dict[tuple[int, ...], RankSet] = {}
    for p, choice in selection.matrices.items():
        ranks = _ranks_of(choice.name, p)
        found.setdefault(ranks, RankSet(ranks)).matrices[p] = choice
    if () in found and given["share_replicated"]:
        sharing = dist.get_process_group_ranks(given["process_group"])
        found[()].ranks = tuple(sharing)
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


def check_within_largest(
    sets: Sequence[RankSet],
    given: Mapping[str, Any],
) -> None:
    """Raise a UserError if metrics would be summed over ranks that do not hold all matrices."""
    every = set().union(*(each.ranks for each in sets))
    largest = max(len(each.ranks) for each in sets)
    if given["metrics_interval"] and len(every) > largest:
        raise UserError(
            f"metrics_interval={given['metrics_interval']!r} needs a mesh with the ranks of all"
            " others; use metrics_interval=0"
        )
