"""How a whole matrix splits into the blocks that are orthogonalised alone.

Fused projections keep several matrices in one parameter: QKV interleaves query, key and value rows group by group.
Orthogonalising the fused matrix would mix their singular vectors. This module splits rows of a whole matrix and puts
them back; it never sees shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `plan` reads layouts without torch
    import torch


@dataclass(frozen=True)
class RowSplit:
    """Rows of a matrix as `groups` repetitions of consecutive `parts`; block i gathers part i of every group.

    `RowSplit(1, (rows,))` is the whole matrix, `RowSplit(query_groups, (q, k, v))` Megatron's fused QKV with `q`, `k`
    and `v` rows in each query group (source: megatron.core.transformer.attention,
    SelfAttention.get_query_key_value_tensors), `RowSplit(T, (f, f))` the gate and up rows of a gated MLP that T
    tensor-parallel ranks share, `RowSplit(1, (w,) * heads)` heads of w rows each by itself.
    """

    groups: int
    parts: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.groups < 1 or not self.parts or min(self.parts) < 1:
            raise ValueError(f"groups and parts must be positive, got groups={self.groups}, parts={self.parts}")

    @property
    def rows(self) -> int:
        """Rows of the whole matrix."""
        return self.groups * sum(self.parts)

    def block_shapes(self, cols: int) -> list[tuple[int, int]]:
        """Shapes of the blocks of a matrix with `cols` columns."""
        return [(self.groups * part, cols) for part in self.parts]

    def views(self, matrix: torch.Tensor) -> list[torch.Tensor]:
        """The blocks of `matrix`, 2D `(rows, cols)`, as views `(groups, part, cols)`: row after row they are a block.

        Raises:
            ValueError: the matrix does not have `rows` rows.
        """
        self._check(matrix.shape)
        grouped = matrix.unflatten(0, (self.groups, -1))
        return list(grouped.split(self.parts, dim=1))

    def _check(self, shape: Sequence[int]) -> None:
        if len(shape) != 2 or shape[0] != self.rows:
            raise ValueError(
                f"a split of {self.groups} x {self.parts} rows needs a 2D matrix of {self.rows} rows, "
                f"got {tuple(shape)}"
            )


def whole(rows: int) -> RowSplit:
    """The split of a matrix of `rows` rows that is one block."""
    return RowSplit(groups=1, parts=(rows,))


def repeated(split: RowSplit, times: int) -> RowSplit:
    """The split of `times` matrices of one group each, one below the other, every one split as `split`."""
    assert split.groups == 1, split
    return RowSplit(groups=1, parts=split.parts * times)
