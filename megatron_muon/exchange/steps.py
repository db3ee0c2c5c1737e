"""What an optimizer and its exchange tell each other in a step.

The exchange sets the pace, because it knows the waves; the optimizer does what is elementwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

Advance = Callable[[Sequence[int]], list[torch.Tensor]]
"""Takes the matrices with the given indices one step on, up to orthogonalisation: this rank's rows `(rows, cols)` fp32
of what is orthogonalised of each. Asked for every matrix of which this rank holds rows, once in a step."""

Apply = Callable[[Sequence[int], Sequence[torch.Tensor]], None]
"""Takes this rank's rows `(rows, cols)`, of any floating dtype, of the scaled updates of the given matrices."""


class Exchange(Protocol):
    """Makes matrices whole, has them orthogonalised, and brings the update's rows back."""

    def run(self, advance: Advance, apply: Apply) -> None:
        """One step of all matrices."""
