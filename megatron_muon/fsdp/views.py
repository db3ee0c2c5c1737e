"""How Muon reads a parameter as matrices.

    2D                  a matrix
    3D                  a stack of experts `(E, m, n)`: E matrices, each orthogonalised and scaled alone
    more, by `flatten=` all dimensions but the first are columns: `(out, in * k * k)` of a convolution
    `transposed=`       weights that are stored as (inputs, outputs): the rows of a matrix are their columns

Gradients, weights and state stay as they are; what the core gets are views of the part that this rank holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_muon.core.layout import Rectangle


@dataclass(frozen=True)
class View:
    """How a parameter of this shape, over all ranks, is read; `flat` takes more than two dimensions."""

    shape: tuple[int, ...]
    flat: bool = False
    transposed: bool = False

    @property
    def is_stack(self) -> bool:
        """Whether it holds several matrices."""
        return len(self.shape) == 3 and not self.flat

    @property
    def is_itself(self) -> bool:
        """Whether the parameter is the matrix."""
        return len(self.shape) == 2 and not self.transposed

    @property
    def count(self) -> int:
        """How many matrices it holds."""
        return self.shape[0] if self.is_stack else 1

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of each of its matrices."""
        rows, cols = self.shape[1:] if self.is_stack else (self.shape[0], math.prod(self.shape[1:]))
        return (cols, rows) if self.transposed else (rows, cols)

    def names(self, name: str) -> list[str]:
        """A name for each of its matrices."""
        return [f"{name}[{number}]" for number in range(self.count)] if self.is_stack else [name]

    def described(self) -> str:
        """What the table says of it; nothing of a matrix."""
        size = " x ".join(map(str, self.matrix))
        return f"{self.count} experts of {size}" if self.is_stack else "" if self.is_itself else f"as {size}"

    def rectangles(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[Rectangle]:
        """What a rank has of each matrix that holds `sizes` of each dimension, from `offsets` on.

        Of a flat one the dimensions that are columns are whole.
        """
        first, stacked = (offsets[0], sizes[0]) if self.is_stack else (0, 1)
        row, col = ((offsets[dim], sizes[dim]) for dim in (int(self.is_stack), int(self.is_stack) + 1))
        if self.flat:
            col = 0, math.prod(self.shape[1:])
        mine: Rectangle = (*col, *row) if self.transposed else (*row, *col)
        return [mine if first <= number < first + stacked else (0, 0, 0, 0) for number in range(self.count)]

    def tensors(self, local: torch.Tensor) -> list[torch.Tensor]:
        """The matrices, 2D each, that `local`, this rank's part of the parameter or of its like, has elements of."""
        return list(self.whole(local).unbind()) if self.is_stack else [self.whole(local)]

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """A parameter, or its like, a DTensor too, as it is read, `(rows, cols)` or `(E, rows, cols)`."""
        folded = tensor.flatten(1) if self.flat else tensor
        return folded.mT if self.transposed else folded
