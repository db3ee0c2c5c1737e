"""The matrices that rules work on, and sums of numbers over the ranks that hold them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_muon.core.layout import Layout, Rectangle, Shard


@dataclass(frozen=True)
class Held:
    """The matrices of an optimizer, and this rank's part of them.

    Attributes:
        layout: who holds which rectangle of each matrix; the same on every rank.
        group: the ranks of the layout.
        device: of weights and gradients.
        rectangles: this rank's, by matrix; even an empty one has a place, and rows or columns. Only
            NorMuon needs them.
        scales: factors of each update's rows, `(rows, 1)` fp32, if a rule applies them.
        replicated: every rank holds whole matrices and all of their state.
        repeated: every rank orthogonalizes every matrix.
        over_tp: matrices are whole over tensor-parallel ranks.
    """

    layout: Layout
    group: ProcessGroup
    device: torch.device
    rectangles: Sequence[Rectangle] = ()
    scales: Sequence[Tensor] = ()
    replicated: bool = False
    repeated: bool = False
    over_tp: bool = True

    @functools.cached_property
    def shards(self) -> list[Shard]:
        """This rank's shard of each matrix, empty if it holds none."""
        return self.layout.held(self.group.rank())

    def counts(self, index: int) -> bool:
        """True if this rank's numbers of its shard enter sums; of replicas those of one rank do."""
        shard = self.shards[index]
        is_first = self.replicated or shard.rank == self.group.rank()
        return is_first and shard.numel > 0

    def add_up(self, numbers: Tensor, *, alike: bool) -> None:
        """Sum `numbers` over all ranks, in place, unless all have them `alike`. Collective."""
        if self.group.size() > 1 and not alike:
            dist.all_reduce(numbers, group=self.group)
