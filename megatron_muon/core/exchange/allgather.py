"""The all-gather scheme: every rank receives every matrix and orthogonalises all of them.

It is the readable reference: N ranks do the Newton-Schulz work N times and receive (N-1)/N of every matrix. The phases
of a matrix are gather, assemble, orthogonalise, keep own rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_muon.core.exchange.steps import Advance, Apply, part
from megatron_muon.core.layout import Layout, Matrix

Orthogonalize = Callable[[int, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""`(matrix index, whole matrix (rows, cols) fp32) -> scaled update (rows, cols) fp32, whether finite (1,) bool`."""


class AllGatherExchange:
    """One padded all-gather for each matrix, in the layout's order on every rank.

    Args:
        layout: the group's matrices; the same on every rank.
        group: the process group whose rank r holds the shards of rank r in `layout`.
        orthogonalize: called on every rank for every matrix.
        device: where the rows lie.

    Raises:
        ValueError: the layout is for another number of ranks.
    """

    def __init__(
        self, layout: Layout, group: dist.ProcessGroup, orthogonalize: Orthogonalize, *, device: torch.device
    ) -> None:
        if group.size() != layout.world_size:
            raise ValueError(f"the layout is for {layout.world_size} ranks, the process group has {group.size()}")
        self.layout = layout
        self.group = group
        self.orthogonalize = orthogonalize
        self._rank = group.rank()
        self._device = device

    def run(self, advance: Advance, apply: Apply) -> None:
        """One step, matrix by matrix."""
        for index, matrix in enumerate(self.layout.matrices):
            shard = matrix.shard_of(self._rank)
            own = advance([index])[0] if shard else torch.empty(0, device=self._device)
            whole_update, finite = self.orthogonalize(index, self._gather(matrix, own))
            if shard is not None:
                apply([index], [part(whole_update, shard)], finite)

    def _gather(self, matrix: Matrix, own: torch.Tensor) -> torch.Tensor:
        """The whole matrix `(rows, cols)`, from shards of any size.

        Every rank sends as many elements as the largest shard has, because gloo's all-gather wants equal sizes; the
        padding is dropped when the matrix is assembled, so it never enters the iteration. Of replicas one is taken.
        """
        most = max(shard.numel for shard in matrix.shards)
        send = own.new_zeros(most)
        send[: own.numel()].copy_(own.reshape(-1))
        received = own.new_empty((self.layout.world_size, most))
        dist.all_gather_into_tensor(received.view(-1), send, group=self.group)
        whole = own.new_empty(matrix.shape)
        for shard in matrix.shards:
            part(whole, shard).copy_(received[shard.rank, : shard.numel].view(shard.rows, shard.cols))
        return whole
