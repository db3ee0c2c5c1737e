"""Sets of ranks that hold matrices together: a mesh's, or those that share whole matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from megatron_muon.core.layout import Matrix, whole
from megatron_muon.core.ranks import Alone
from megatron_muon.core.user_errors import UserError
from megatron_muon.fsdp import cuts
from megatron_muon.fsdp.selection import Selection
from megatron_muon.patterns import steps_of


@dataclass
class RankSet:
    """Parameters whose matrices one set of ranks holds.

    Attributes:
        ranks: none if every rank works alone.
        matrices: of each parameter, still without shards.
    """

    ranks: tuple[int, ...]
    matrices: dict[torch.Tensor, list[Matrix]] = field(default_factory=dict)

    @property
    def replicated(self) -> bool:
        """True if every rank holds whole matrices."""
        for p in self.matrices:
            if isinstance(p, DTensor) and not all(
                isinstance(cut, Replicate) for cut in p.placements
            ):
                return False
        return True

    def group(self, given: Mapping[str, Any]) -> Any:
        """The process group, or `Alone`. Collective over the ranks."""
        first = next(iter(self.matrices))
        if isinstance(first, DTensor):
            return cuts.group_of(first.device_mesh)
        if given["share_replicated"]:
            return given["process_group"] or dist.group.WORLD
        return Alone()


def rank_sets(selection: Selection, given: Mapping[str, Any]) -> list[RankSet]:
    """The sets of ranks in one order on all of them, as what follows is collective."""
    views = selection.views
    names = [selection.name(p) for p in views]
    steps = steps_of(names, given["ns_steps_for"] or {}, argument="ns_steps_for")
    found: dict[tuple[int, ...], RankSet] = {}
    for p, view in views.items():
        choice = selection.choices[p]
        split = choice.split or whole(view.matrix[0])
        matrices = [
            Matrix(name, view.matrix, (), split, steps.get(choice.name, 0))
            for name in view.names(choice.name)
        ]
        ranks = cuts.ranks_of(choice.name, p)
        found.setdefault(ranks, RankSet(ranks)).matrices[p] = matrices
    if () in found and given["share_replicated"]:
        found[()].ranks = tuple(dist.get_process_group_ranks(given["process_group"]))
    return [found[ranks] for ranks in sorted(found)]


def check_within_largest(sets: Sequence[RankSet], given: Mapping[str, Any]) -> None:
    """Raise a UserError if metrics would be summed over ranks that do not hold all matrices."""
    largest = set(max(sets, key=lambda each: len(each.ranks)).ranks)
    if given["metrics_interval"] and not all(largest.issuperset(each.ranks) for each in sets):
        raise UserError(
            f"metrics_interval={given['metrics_interval']!r} needs a mesh with the ranks of all"
            " others; use metrics_interval=0"
        )
