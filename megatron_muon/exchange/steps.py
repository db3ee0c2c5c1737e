"""What an optimizer and its exchange tell each other in a step.

The exchange sets the pace, because it knows the waves; the optimizer does what is elementwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from megatron_muon.sharding.layout import Shard

Advance = Callable[[Sequence[int]], list[torch.Tensor]]
"""Takes the matrices with the given indices one step on, up to orthogonalisation: this rank's rectangle
`(rows, cols)` fp32 of what is orthogonalised of each. Asked for every matrix of which this rank holds some, once in a
step."""

Apply = Callable[[Sequence[int], Sequence[torch.Tensor]], None]
"""Takes this rank's rectangle `(rows, cols)`, of any floating dtype, of the scaled update of each given matrix."""


class Exchange(Protocol):
    """Makes matrices whole, has them orthogonalised, and brings the update's rows back."""

    def run(self, advance: Advance, apply: Apply) -> None:
        """One step of all matrices."""


def part(matrix: torch.Tensor, shard: Shard) -> torch.Tensor:
    """The rectangle of `matrix` that `shard` describes, a view."""
    return matrix.narrow(0, shard.row_start, shard.rows).narrow(1, shard.col_start, shard.cols)
