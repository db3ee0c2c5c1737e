"""The all-gather scheme: every rank receives every matrix and orthogonalises all of them.

It is the readable reference: N ranks do the Newton-Schulz work N times and receive (N-1)/N of every matrix. The phases
of a matrix are gather, assemble, orthogonalise, keep own rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megatron_muon.sharding import Layout, Matrix

Orthogonalize = Callable[[int, torch.Tensor], torch.Tensor]
"""`(matrix index, whole matrix (rows, cols) fp32) -> scaled update (rows, cols) fp32`."""


class AllGatherExchange:
    """One padded all-gather for each matrix, in the layout's order on every rank.

    Args:
        layout: the group's matrices; the same on every rank.
        group: the process group whose rank r holds the shards of rank r in `layout`.
        orthogonalize: called on every rank for every matrix.

    Raises:
        ValueError: the layout is for another number of ranks, or cuts a matrix along its columns.
    """

    def __init__(self, layout: Layout, group: dist.ProcessGroup, orthogonalize: Orthogonalize) -> None:
        if group.size() != layout.world_size:
            raise ValueError(f"the layout is for {layout.world_size} ranks, the process group has {group.size()}")
        for matrix in layout.matrices:
            if any(shard.cols != matrix.shape[1] for shard in matrix.shards):
                raise ValueError(f"{matrix.name}: the all-gather exchange carries row shards only")
        self.layout = layout
        self.group = group
        self.orthogonalize = orthogonalize
        self._rank = group.rank()

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's rows of every matrix's update.

        Args:
            inputs: one tensor for each matrix, this rank's rows `(rows, cols)` fp32, `(0, cols)` where it holds none;
                not modified.

        Returns:
            As `inputs`, fp32.
        """
        updates = list(inputs)
        for index, (matrix, rows) in enumerate(zip(self.layout.matrices, inputs, strict=True)):
            whole_update = self.orthogonalize(index, self._gather(matrix, rows))
            shard = matrix.shard_of(self._rank)
            if shard is not None:
                updates[index] = whole_update[shard.row_start : shard.row_start + shard.rows]
        return updates

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
