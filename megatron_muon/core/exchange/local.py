"""No exchange: every rank holds whole matrices and orthogonalises all of them, part by part."""

from __future__ import annotations

import torch

from megatron_muon.core.exchange.owner import BatchMaker
from megatron_muon.core.exchange.steps import RowPhases
from megatron_muon.core.layout import Layout
from megatron_muon.core.probe import Probe


class LocalExchange:
    """Carries out a step of matrices that every rank holds whole, without communication.

    Args:
        layout: the matrices.
        batches: makes batches of matrices.
        buffer_bytes: what the matrices of a part may fill; a larger matrix is a part by itself.
        device: where the matrices lie.
    """

    def __init__(self, layout: Layout, batches: BatchMaker, *, buffer_bytes: int, device: torch.device) -> None:
        self.layout = layout
        self._like = torch.empty(0, device=device)
        parts: list[list[int]] = []
        room = 0
        for index, matrix in enumerate(layout.matrices):
            size = 4 * matrix.numel
            if not parts or size > room:
                parts.append([])
                room = buffer_bytes
            parts[-1].append(index)
            room -= size
        self._parts = [(tuple(part), batches(part)) for part in parts]

    def replicas(self, index: int) -> int:
        """How many ranks hold the same rows of a matrix as this one: all."""
        return self.layout.world_size

    def run(self, rows: RowPhases, probe: Probe) -> None:
        """One step, part by part. Not collective."""
        for indices, batch in self._parts:
            with probe.phase("orthogonalize"):
                torch._foreach_copy_(batch.allocate(self._like, torch.float32), rows.prepare(indices))
                updates, finite = batch.orthogonalize(probe)
            rows.finalize(indices, updates, finite)
