"""No exchange: every rank holds whole matrices and orthogonalises all of them, part by part."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_muon.core.exchange.steps import BatchMaker, Exchange, RowPhases
from megatron_muon.core.layout import Layout
from megatron_muon.core.probe import Probe


class LocalExchange(Exchange):
    """Carries out a step of matrices that every rank holds whole, without communication.

    Args:
        layout: the matrices.
        group: the ranks that hold them.
        batches: makes batches of matrices.
        buffer_bytes: what the matrices of a part may fill; a larger matrix is a part by itself.
        device: where the matrices lie.
    """

    def __init__(
        self,
        layout: Layout,
        group: dist.ProcessGroup,
        batches: BatchMaker,
        *,
        buffer_bytes: int,
        device: torch.device,
    ) -> None:
        super().__init__(layout, group, device=device)
        parts: list[list[int]] = []
        room = 0
        for index, matrix in enumerate(layout.matrices):
            size = 4 * matrix.numel
            if not parts or size > room:
                parts.append([])
                room = buffer_bytes
            parts[-1].append(index)
            room -= size
        self._parts = [(part, batches(part)) for part in parts]

    def run(self, rows: RowPhases, probe: Probe) -> None:
        """One step, part by part. Not collective."""
        for indices, batch in self._parts:
            self._update_whole(indices, batch, rows, probe)
