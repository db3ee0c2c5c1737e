"""The all-gather scheme: every rank receives every matrix and orthogonalises all of them.

It is the readable reference: N ranks do the Newton-Schulz work N times and receive (N-1)/N of every matrix. The phases
of a matrix are gather, assemble, orthogonalise, keep own rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_muon.exchange.steps import Advance, Apply
from megatron_muon.sharding import Layout, Matrix

Orthogonalize = Callable[[int, torch.Tensor], torch.Tensor]
"""`(matrix index, whole matrix (rows, cols) fp32) -> scaled update (rows, cols) fp32`."""


class AllGatherExchange:
    """One padded all-gather for each matrix, in the layout's order on every rank.

    Args:
        layout: the group's matrices; the same on every rank.
        group: the process group whose rank r holds the shards of rank r in `layout`.
        orthogonalize: called on every rank for every matrix.
        device: where the rows lie.

    Raises:
        ValueError: the layout is for another number of ranks, or cuts a matrix along its columns.
    """

    def __init__(
        self, layout: Layout, group: dist.ProcessGroup, orthogonalize: Orthogonalize, *, device: torch.device
    ) -> None:
        if group.size() != layout.world_size:
            raise ValueError(f"the layout is for {layout.world_size} ranks, the process group has {group.size()}")
        for matrix in layout.matrices:
            if any(shard.cols != matrix.shape[1] for shard in matrix.shards):
                raise ValueError(f"{matrix.name}: the all-gather exchange carries row shards only")
        self.layout = layout
        self.group = group
        self.orthogonalize = orthogonalize
        self._rank = group.rank()
        self._device = device

    def run(self, advance: Advance, apply: Apply) -> None:
        """One step, matrix by matrix."""
        for index, matrix in enumerate(self.layout.matrices):
            shard = matrix.shard_of(self._rank)
            rows = advance([index])[0] if shard else torch.empty((0, matrix.shape[1]), device=self._device)
            whole_update = self.orthogonalize(index, self._gather(matrix, rows))
            if shard is not None:
                apply([index], [whole_update[shard.row_start : shard.row_start + shard.rows]])

    def _gather(self, matrix: Matrix, rows: torch.Tensor) -> torch.Tensor:
        """The whole matrix `(rows, cols)`, from shards of any number of rows.

        Every rank sends as many rows as the largest shard has, because gloo's all-gather wants equal sizes; the padding
        is dropped before the matrix is assembled, so it never enters the iteration.
        """
        most_rows = max(shard.rows for shard in matrix.shards)
        send = rows.new_zeros((most_rows, matrix.shape[1]))
        send[: rows.shape[0]].copy_(rows)
        received = rows.new_empty((self.layout.world_size * most_rows, matrix.shape[1]))
        dist.all_gather_into_tensor(received, send, group=self.group)
        by_rank = received.view(self.layout.world_size, most_rows, matrix.shape[1])
        return torch.cat([by_rank[shard.rank, : shard.rows] for shard in matrix.shards])
