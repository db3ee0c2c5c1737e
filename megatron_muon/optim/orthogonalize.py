"""Orthogonalisation of one block by Newton-Schulz iteration.

The iteration, its coefficient sets and the scale factors are emerging-optimizers'; this module adds what a distributed
optimizer needs around them: blocks, inputs of any magnitude, and a count of what was done. It never communicates.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from emerging_optimizers import utils as eo_utils
from emerging_optimizers.orthogonalized_optimizers import get_muon_scale_factor
from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz

from megatron_muon.optim.blocks import RowSplit


def unit_magnitude_exponent(block: torch.Tensor) -> torch.Tensor:
    """The power of two that brings the largest magnitude of `block` into [0.5, 1), as an int32 scalar tensor.

    Newton-Schulz normalises its input with an eps of 1e-7 (emerging-optimizers), which shrinks the update of a matrix
    whose momentum is smaller, for instance after clipping by a tiny factor. The update must not depend on the input's
    magnitude, and a power of two changes no bit of the mantissa.
    """
    return torch.frexp(block.abs().amax().float()).exponent.clamp(-126, 126)


def to_unit_magnitude(block: torch.Tensor) -> torch.Tensor:
    """`block` times a power of two that brings its largest magnitude into [0.5, 1); zero stays zero. A new tensor."""
    return torch.ldexp(block, -unit_magnitude_exponent(block))


@dataclass
class Orthogonalizer:
    """Turns a momentum matrix into Muon's update direction, block by block.

    Attributes:
        coefficient_type: coefficient set of emerging-optimizers, for instance "quintic".
        num_steps: Newton-Schulz steps.
        scale_mode: "spectral", "unit_rms_norm" or "shape_scaling" (emerging-optimizers' `get_muon_scale_factor`).
        extra_scale_factor: multiplies every update; 0.2 with "spectral" matches AdamW's update RMS
            (https://arxiv.org/abs/2502.16982, section 2.2).
        matmul_precision: "highest" or "high" iterate in fp32, "medium" in bf16, as torch.set_float32_matmul_precision
            names them.
        blocks_done: blocks orthogonalised since construction, the figure that shows that none was left out or done
            twice.
    """

    coefficient_type: str = "quintic"
    num_steps: int = 5
    scale_mode: str = "spectral"
    extra_scale_factor: float = 1.0
    matmul_precision: str = "medium"
    blocks_done: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ValueError(f"--muon-num-ns-steps must be at least 1, got {self.num_steps}")

    def __call__(self, matrix: torch.Tensor, split: RowSplit) -> torch.Tensor:
        """The scaled update of a whole matrix.

        Args:
            matrix: 2D `(rows, cols)` fp32, the whole matrix without padding; not modified.
            split: how its rows make blocks.

        Returns:
            2D `(rows, cols)` fp32, every block orthogonalised alone and scaled by its own shape.
        """
        return split.merge([self.orthogonalize_block(block) for block in split.split(matrix)])

    def orthogonalize_block(self, block: torch.Tensor) -> torch.Tensor:
        """The scaled update of one block, 2D `(rows, cols)` fp32 in and out; the input is not modified."""
        self.blocks_done += 1
        with eo_utils.fp32_matmul_precision(self.matmul_precision):
            update: torch.Tensor = newton_schulz(
                to_unit_magnitude(block), steps=self.num_steps, coefficient_type=self.coefficient_type
            )
        scale: float = get_muon_scale_factor(block.shape[0], block.shape[1], mode=self.scale_mode)
        return update * scale * self.extra_scale_factor  # one by one, as TensorParallelMuon does: to the last bit
