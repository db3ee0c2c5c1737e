"""What an optimizer and its exchange tell each other in a step.

The exchange sets the pace, because it knows the waves; the optimizer does what is elementwise.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from megatron_muon.core.layout import Shard

Advance = Callable[[Sequence[int]], list[torch.Tensor]]
"""Takes the matrices with the given indices one step on, up to orthogonalisation: this rank's rectangle
`(rows, cols)` fp32 of what is orthogonalised of each. Asked for every matrix of which this rank holds some, once in a
step. They are read by what is enqueued before the next call."""

Apply = Callable[[Sequence[int], Sequence[torch.Tensor], torch.Tensor], None]
"""Takes this rank's rectangle `(rows, cols)`, of any floating dtype, of the scaled update of each given matrix, and
which of these updates are finite, `(matrices,)` bool on their device. The others are zero: those matrices keep
their weights."""


class Exchange(Protocol):
    """Makes matrices whole, has them orthogonalised, and brings the update's rows back."""

    def run(self, advance: Advance, apply: Apply) -> None:
        """One step of all matrices."""


class FiniteMarks:
    """Says in a buffer of updates on its way which of them are not finite: their first element is NaN.

    The updates of such matrices are zero otherwise. Reading and writing wait for nothing on the device.

    Args:
        sizes: elements of each update in the buffer, one after the other.
        device: where the buffer lies.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        starts = [0, *itertools.accumulate(sizes)][: len(sizes)]
        self._first = torch.tensor(starts, dtype=torch.int64, device=device)

    def write(self, buffer: torch.Tensor, finite: torch.Tensor) -> None:
        """Mark the updates that are not `finite`, `(updates,)` bool."""
        buffer[self._first] = torch.where(finite, buffer[self._first], torch.nan)

    def read(self, buffer: torch.Tensor) -> torch.Tensor:
        """Which updates are finite, `(updates,)` bool; takes the marks away."""
        first = buffer[self._first]
        finite = first.isfinite()
        buffer[self._first] = torch.where(finite, first, 0.0)
        return finite


def part(matrix: torch.Tensor, shard: Shard) -> torch.Tensor:
    """The rectangle of `matrix` that `shard` describes, a view."""
    return matrix.narrow(0, shard.row_start, shard.rows).narrow(1, shard.col_start, shard.cols)
