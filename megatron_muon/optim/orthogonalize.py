"""Orthogonalisation of momentum matrices: which iteration, in which precision, and the scale of its result.

The iterations are in `newton_schulz`; this module adds what an optimizer needs around them: inputs of any magnitude,
the scale of each block's own shape, and a count of what was done. It never communicates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import batched

import torch
from emerging_optimizers import utils as eo_utils
from emerging_optimizers.orthogonalized_optimizers import get_muon_scale_factor

from megatron_muon.numbers import check_number
from megatron_muon.optim import newton_schulz as ns
from megatron_muon.optim.batch import BlockBatch
from megatron_muon.optim.blocks import RowSplit
from megatron_muon.sharding.cost import GRAM


def unit_magnitude_exponent(blocks: torch.Tensor) -> torch.Tensor:
    """The power of two that divides the largest magnitude of each `(..., m, n)` block into [0.5, 1).

    Int32 `(..., 1, 1)`. Newton-Schulz normalises its input with an eps of 1e-7 (emerging-optimizers), which shrinks the
    update of a matrix whose momentum is smaller, for instance after clipping by a tiny factor. The update must not
    depend on the input's magnitude, and a power of two changes no bit of the mantissa.
    """
    return torch.frexp(blocks.abs().amax(dim=(-2, -1), keepdim=True).float()).exponent.clamp(-126, 126)


def to_unit_magnitude(blocks: torch.Tensor) -> torch.Tensor:
    """Each block times a power of two that brings its largest magnitude into [0.5, 1), fp32, in a new tensor."""
    exponent = unit_magnitude_exponent(blocks)
    return blocks * torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), -exponent)


CACHED_ELEMENTS = 2**20
"""On a processor, elements of the blocks that are iterated together: what an iteration touches stays in its cache."""


@dataclass
class Orthogonalizer:
    """Turns momentum matrices into Muon's update directions, block by block.

    Attributes:
        coefficient_type: coefficient set of emerging-optimizers, for instance "quintic".
        num_steps: Newton-Schulz steps.
        scale_mode: "spectral", "unit_rms_norm" or "shape_scaling" (emerging-optimizers' `get_muon_scale_factor`).
        extra_scale_factor: multiplies every update; 0.2 with "spectral" matches AdamW's update RMS
            (https://arxiv.org/abs/2502.16982, section 2.2).
        matmul_precision: "highest" or "high" iterate in fp32, "medium" in bf16, as torch.set_float32_matmul_precision
            names them.
        method: "standard", "gram", or "auto" for the one with fewer operations.
        scaled: whether updates are scaled; adaptive Muon normalises before it scales by `row_scales`.
        watch: is shown the first orthogonalised block of every stack, unscaled, fp32, `(m, n)` with m <= n.
        blocks_done: blocks orthogonalised since construction, the figure that shows that none was left out or done
            twice.
    """

    coefficient_type: str = "quintic"
    num_steps: int = 5
    scale_mode: str = "spectral"
    extra_scale_factor: float = 1.0
    matmul_precision: str = "medium"
    method: str = ns.AUTO
    scaled: bool = True
    watch: Callable[[torch.Tensor], None] | None = field(default=None, compare=False)
    blocks_done: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        check_number("muon_num_ns_steps", self.num_steps)
        check_number("muon_extra_scale_factor", self.extra_scale_factor)
        if self.method not in ns.METHODS:
            raise ValueError(f"--muon-ns {self.method} does not exist; choose one of {', '.join(ns.METHODS)}")

    @property
    def dtype(self) -> torch.dtype:
        """What the iteration's products run in."""
        return torch.bfloat16 if self.matmul_precision in ("medium", "low") else torch.float32

    def method_for(self, rows: int, cols: int) -> str:
        """The iteration that blocks of `(rows, cols)` get: "standard" or "gram"."""
        return ns.choose_method(rows, cols, method=self.method, steps=self.num_steps, dtype=self.dtype)

    def flops(self, shape: tuple[int, int], split: RowSplit) -> int:
        """Operations of orthogonalising a matrix of `shape`, over its blocks, by the iteration that each gets."""
        return sum(
            ns.operations(*block, method=self.method_for(*block), steps=self.num_steps, dtype=self.dtype)
            for block in split.block_shapes(shape[1])
        )

    def row_scales(self, shape: tuple[int, int], split: RowSplit) -> torch.Tensor:
        """What each row of an update of `shape` is multiplied by, `(rows, 1)` fp32: its block's scale."""
        factors = torch.empty(shape[0], 1)
        for rows, block in zip(split.views(factors), split.block_shapes(shape[1]), strict=True):
            rows.fill_(get_muon_scale_factor(*block, mode=self.scale_mode) * self.extra_scale_factor)
        return factors

    def batch(self, shapes: Sequence[tuple[int, int]], splits: Sequence[RowSplit]) -> BlockBatch:
        """A batch of matrices of these shapes, each split into blocks as given."""
        return BlockBatch(shapes, splits, self.orthogonalize_stack)

    def __call__(self, matrix: torch.Tensor, split: RowSplit) -> torch.Tensor:
        """The scaled update of one whole matrix.

        Args:
            matrix: 2D `(rows, cols)` fp32, the whole matrix without padding; not modified.
            split: how its rows make blocks.

        Returns:
            2D `(rows, cols)` fp32, every block orthogonalised alone and scaled by its own shape.
        """
        batch = self.batch([(matrix.shape[0], matrix.shape[1])], [split])
        batch.allocate(matrix, torch.float32)[0].copy_(matrix)
        return batch.orthogonalize()[0]

    def orthogonalize_stack(self, stack: torch.Tensor, block_shapes: Sequence[tuple[int, int]]) -> None:
        """Put a stack's scaled updates in its place.

        Args:
            stack: `(batch, m, n)` fp32 or bf16 with m <= n; a tall block is its transpose here.
            block_shapes: each block's `(rows, cols)` in its matrix, which the scale depends on.
        """
        self.blocks_done += len(block_shapes)
        rows, cols = stack.shape[1:]
        iterate = ns.gram if self.method_for(rows, cols) == GRAM else ns.standard
        together = max(CACHED_ELEMENTS // (rows * cols), 1) if stack.device.type == "cpu" else len(block_shapes)
        for number, (part, shapes) in enumerate(
            zip(stack.split(together), batched(block_shapes, together), strict=True)
        ):
            with eo_utils.fp32_matmul_precision(self.matmul_precision):
                updates = iterate(
                    to_unit_magnitude(part),
                    coefficient_type=self.coefficient_type,
                    steps=self.num_steps,
                    dtype=self.dtype,
                ).float()
            if self.watch is not None and number == 0:
                self.watch(updates[0])
            if not self.scaled:
                part.copy_(updates)
                continue
            # One factor after the other, in fp32, as upstream's Muon does, for equal bits.
            scales = [get_muon_scale_factor(*shape, mode=self.scale_mode) for shape in shapes]
            torch._foreach_mul_(list(updates.unbind()), scales)
            part.copy_(updates.mul_(self.extra_scale_factor))
