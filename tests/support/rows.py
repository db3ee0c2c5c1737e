"""The rows of a step for tests of exchanges, matrix by matrix, without an optimizer; and a whole
matrix's update.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_muon.core.layout import Matrix, RowSplit
from megatron_muon.core.orthogonalize import Orthogonalizer
from megatron_muon.core.slices import Team
from megatron_muon.core.wave import Chunk


def orthogonalized(
    orthogonalizer: Orthogonalizer, matrix: torch.Tensor, split: RowSplit | None = None
) -> torch.Tensor:
    """The scaled update of a whole matrix `(rows, cols)` fp32, zero where it is not finite."""
    described = Matrix("w", (matrix.shape[0], matrix.shape[1]), split=split)  # type: ignore[arg-type]
    update = matrix.clone()
    slots = Team((0,), ()).slots(0, described)
    for slot, block in zip(slots, described.split.views(update), strict=True):
        flat = block.reshape(slot.of)
        wide = flat.mT.contiguous() if slot.is_tall else flat.clone()
        orthogonalizer.orthogonalize_stack(wide[None], slot.kind(orthogonalizer.scale(slot.of)))
        block.copy_((wide.mT if slot.is_tall else wide).view(block.shape))
    return update if update.isfinite().all() else torch.zeros_like(update)


class ByMatrix:
    """Stands for the optimizer in a step of an exchange.

    Args:
        rows: this rank's prepared rows `(rows, cols)` of a matrix, by index.
        apply: takes a matrix's index and this rank's rows of its update.

    Attributes:
        prepared, applied: indices of matrices, in order.
    """

    def __init__(
        self,
        rows: Callable[[int], torch.Tensor],
        apply: Callable[[int, torch.Tensor], None] = lambda _, __: None,
    ) -> None:
        self.prepared: list[int] = []
        self.applied: list[int] = []
        self._rows, self._apply = rows, apply

    def prepare(self, chunk: Chunk) -> None:
        for held in chunk.rows:
            self.prepared.append(held.of)
            chunk.prepared[held.start : held.start + held.shard.numel].copy_(
                self._rows(held.of).reshape(-1)
            )

    def packed(self, chunk: Chunk) -> None:
        chunk.prepared.fill_(torch.nan)

    def apply(self, chunk: Chunk) -> None:
        for held in chunk.rows:
            assert held.of in self.prepared
            assert held.of not in self.applied, "an update is applied twice"
            self.applied.append(held.of)
            update = chunk.updates[held.start : held.start + held.shard.numel]
            self._apply(
                held.of,
                update.view(held.shard.rows, held.shard.cols).clone(),
            )
