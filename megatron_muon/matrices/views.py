"""How Muon reads a parameter as matrices, and the matrices that it reads.

    2D                  a matrix
    more dimensions     a stack of matrices, such as `(E, m, n)` of experts or `(L, E, m, n)` of
                        all layers' experts; each is orthogonalized and scaled alone
    by `flatten=`       all dimensions but the first are columns: `(out, in * k * k)`
    `transposed=`       (inputs, outputs) weights: the rows of a matrix are their columns

Gradients, weights and state stay as they are; what the core gets are views of the part that this
rank holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_muon.core.layout import Matrix, Rectangle, RowSplit, whole
from megatron_muon.matrices.table import blocks


@dataclass(frozen=True)
class View:
    """How a parameter of this shape, whole over all ranks, is read."""

    shape: tuple[int, ...]
    flat: bool = False
    transposed: bool = False

    @property
    def is_stack(self) -> bool:
        """True if the leading dimensions count matrices."""
        return len(self.shape) > 2 and not self.flat

    @property
    def is_itself(self) -> bool:
        """True if the parameter is the matrix."""
        return len(self.shape) == 2 and not self.transposed

    @property
    def stacked(self) -> tuple[int, ...]:
        """The leading dimensions of a stack; none of a matrix."""
        return self.shape[:-2] if self.is_stack else ()

    @property
    def count(self) -> int:
        """Number of matrices."""
        return math.prod(self.stacked)

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of each matrix."""
        first, *others = self.shape[len(self.stacked) :]
        rows, cols = first, math.prod(others)
        return (cols, rows) if self.transposed else (rows, cols)

    def names(self, name: str) -> list[str]:
        """A name for each matrix, `name[l,e]` in a stack."""
        if not self.is_stack:
            return [name]
        places = [",".join(map(str, place)) for place in np.ndindex(*self.stacked)]
        return [f"{name}[{numbers}]" for numbers in places]

    def described(self) -> str:
        """A note for the table; empty for a matrix that is the parameter itself."""
        size = " x ".join(map(str, self.matrix))
        if self.is_stack:
            count = " x ".join(map(str, self.stacked))
            return f"{count} matrices of {size}"
        if self.is_itself:
            return ""
        return f"as {size}"

    def rectangles(
        self,
        offsets: Sequence[int],
        sizes: Sequence[int],
    ) -> list[Rectangle]:
        """The rectangle of each matrix that a rank holds.

        Args:
            offsets: the first element held in each dimension of the parameter.
            sizes: the number of elements held. A flat parameter is whole in all dimensions but the
                first.
        """
        # a tensor-parallel part, read alone, begins at a multiple of its size in the parameter
        offsets = [first % size for first, size in zip(offsets, self.shape, strict=True)]
        if self.flat:
            offsets = offsets[0], 0
            sizes = sizes[0], math.prod(self.shape[1:])
        *leading, row, col = zip(offsets, sizes, strict=True)
        mine: Rectangle = (*col, *row) if self.transposed else (*row, *col)
        held = np.zeros(self.stacked, dtype=bool)
        held[tuple(slice(first, first + count) for first, count in leading)] = True
        return [mine if is_held else (0, 0, 0, 0) for is_held in held.flat]

    def tensors(self, local: torch.Tensor) -> list[torch.Tensor]:
        """The matrices `(rows, cols)` of this rank's part of a tensor like the parameter."""
        return self.unstacked(self.whole(local))

    def unstacked(self, read: torch.Tensor) -> list[torch.Tensor]:
        """The matrices of a tensor in the form that `whole` returns."""
        if not self.is_stack:
            return [read]
        return list(read.flatten(0, -3).unbind())

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor like the parameter, also a DTensor, as `(rows, cols)` or `(..., rows, cols)`."""
        folded = tensor.flatten(1) if self.flat else tensor
        return folded.mT if self.transposed else folded


@dataclass(kw_only=True)
class Matrices:
    """The matrices of a parameter, still without shards.

    Attributes:
        split: the blocks of each; None if it is one block.
        steps: their Newton-Schulz steps; 0 for as many as all have.
    """

    name: str
    view: View
    split: RowSplit | None = None
    steps: int = 0

    def __iter__(self) -> Iterator[Matrix]:
        split = self.split or whole(self.view.matrix[0])
        for name in self.view.names(self.name):
            yield Matrix(name, self.view.matrix, split=split, steps=self.steps)

    def note(self) -> str:
        """A note for the table; empty for a matrix of one block."""
        notes = self.view.described(), blocks(self.split)
        return "; ".join(filter(None, notes))
