"""Every rank orthogonalises all matrices: what to read first.

`AllGatherExchange` is the readable reference: N ranks do the Newton-Schulz work N times and receive (N-1)/N of every
matrix. The phases of a matrix are prepare, gather, orthogonalise, finalize own rows. `LocalExchange` is the same where
every rank holds the matrices whole.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_muon.core.exchange.steps import BatchMaker, Exchange, RowPhases, rectangle_view
from megatron_muon.core.layout import Layout, Matrix
from megatron_muon.core.memory import AUTO_BYTES, Memory
from megatron_muon.core.probe import Probe
from megatron_muon.core.ranks import all_gather_single


class AllGatherExchange(Exchange):
    """One padded all-gather for each matrix, in the layout's order on every rank; batches are of one matrix each."""

    def __init__(self, layout: Layout, group: dist.ProcessGroup, batches: BatchMaker, *, device: torch.device) -> None:
        super().__init__(layout, group, device=device)
        self._batches = [batches([index]) for index in range(len(layout.matrices))]

    def run(self, rows: RowPhases, probe: Probe) -> None:
        """One step, matrix by matrix."""
        for index, (matrix, batch) in enumerate(zip(self.layout.matrices, self._batches, strict=True)):
            shard = matrix.shard_of(self._rank)
            own = rows.prepare([index])[0] if shard else self._nothing
            (whole,) = batch.allocate(self._nothing)
            with probe.phase("gather_wait"):
                self._gather(matrix, own, whole, probe)
            with probe.phase("orthogonalize"):
                (update,), finite = batch.orthogonalize(probe)
            if shard is not None:
                rows.finalize([index], [rectangle_view(update, shard)], finite)

    def _gather(self, matrix: Matrix, own: torch.Tensor, whole: torch.Tensor, probe: Probe) -> None:
        """Fill the whole matrix `(rows, cols)` from shards of any size.

        Every rank sends as many elements as the largest shard has, because gloo's all-gather wants equal sizes; the
        padding is dropped when the matrix is assembled, so it never enters the iteration. Of replicas one is taken.
        """
        most = max(shard.numel for shard in matrix.shards)
        send = own.new_zeros(most)
        send[: own.numel()].copy_(own.reshape(-1))
        received = own.new_empty((self.layout.world_size, most))
        probe.received(received.nbytes - send.nbytes)
        all_gather_single(received.view(-1), send, group=self.group)
        for shard in matrix.shards:
            part = received[shard.rank, : shard.numel].view(shard.rows, shard.cols)
            rectangle_view(whole, shard).copy_(part)


class LocalExchange(Exchange):
    """Matrices that every rank holds whole, part by part, without communication.

    A part takes at most `buffer_bytes`, with its temporaries; None is 256 MiB, or as much as the largest matrix needs.

    Raises:
        UserError: that is too small for a matrix.
    """

    def __init__(
        self,
        layout: Layout,
        group: dist.ProcessGroup,
        batches: BatchMaker,
        *,
        memory: Memory,
        buffer_bytes: int | None = None,
        device: torch.device,
    ) -> None:
        super().__init__(layout, group, device=device)
        indices = range(len(layout.matrices))
        memory.check(buffer_bytes, max((memory.whole([matrix]) for matrix in layout.matrices), default=0), layout)
        count = memory.parts(layout.matrices, buffer_bytes or AUTO_BYTES)
        self._parts = [(indices[k::count], batches(indices[k::count])) for k in range(count)]

    def run(self, rows: RowPhases, probe: Probe) -> None:
        """One step, part by part. Not collective."""
        for indices, batch in self._parts:
            self._update_whole(indices, batch, rows, probe)
