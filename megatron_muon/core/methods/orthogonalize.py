"""Muon's method: orthogonalize a stack by a Newton-Schulz iteration, with the scale of its updates."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, override

import torch
from emerging_optimizers.orthogonalized_optimizers import get_muon_scale_factor
from emerging_optimizers.utils import fp32_matmul_precision
from torch import Tensor

from megatron_muon.core.cost import KERNEL, Coefficients, Iteration
from megatron_muon.core.layout import Matrix
from megatron_muon.core.methods import newton_schulz, symmetric
from megatron_muon.core.methods.method import Method, Work
from megatron_muon.core.methods.newton_schulz import coefficients
from megatron_muon.core.methods.symmetric import SymmetricProducts
from megatron_muon.core.probe import SILENT, Probe
from megatron_muon.core.slices import BlockKind, BlockSlice
from megatron_muon.core.teams import TeamGroup


@dataclass
class NewtonSchulz(Method):
    """Turns momentum into Muon's updates, block by block.

    Attributes:
        iteration: coefficients, steps, precision and method; its `products` become those of
            `device`.
        scale_mode: "spectral", "unit_rms_norm" or "shape_scaling" (emerging-optimizers'
            `get_muon_scale_factor`).
        extra_scale_factor: multiplies every update; 0.2 with "spectral" matches AdamW's update RMS
            (https://arxiv.org/abs/2502.16982, section 2.2).
        eps: blocks of a smaller norm are divided by this instead, so that their updates are small
            too.
        scaled: whether updates are scaled; adaptive Muon normalizes before it scales by
            `row_scales`.
    """

    serves_teams: ClassVar[bool] = True

    iteration: Iteration = field(default_factory=Iteration)
    scale_mode: str = "spectral"
    extra_scale_factor: float = 1.0
    eps: float = 0.0
    scaled: bool = True
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        products = symmetric.products_on(self.device, self.dtype)
        self.iteration = replace(self.iteration, products=products)

    @property
    @override
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.iteration.half else torch.float32

    @override
    def cost(
        self,
        rows: int,
        cols: int,
        team: int = 1,
        steps: int = 0,
    ) -> int:
        return self.iteration.cost(rows, cols, team, steps)

    @override
    def scale(self, shape: tuple[int, int]) -> float:
        if not self.scaled:
            return 1.0
        return float(get_muon_scale_factor(*shape, mode=self.scale_mode)) * self.extra_scale_factor

    @override
    def row_scales(self, matrix: Matrix) -> Tensor:
        """Factors of the rows of a matrix's update, `(rows, 1)` fp32: the scale of each row's block."""
        scaled = replace(self, scaled=True)
        factors = torch.empty(matrix.shape[0], 1, dtype=torch.float32)
        blocks = matrix.split.views(factors)
        for rows, shape in zip(blocks, matrix.blocks, strict=True):
            rows.fill_(scaled.scale(shape))
        return factors

    @override
    def work_bytes(
        self,
        kind: BlockKind,
        count: int,
        element_bytes: int,
    ) -> dict[str, int]:
        return self.iteration.work_bytes(kind, count, element_bytes)

    @override
    def together(self, kind: BlockKind) -> int:
        return self.iteration.together(kind)

    @override
    def run(
        self,
        stack: Tensor,
        kind: BlockKind,
        factors: Tensor,
        work: Work,
        *,
        state: Mapping[str, Tensor] | None = None,
        team: TeamGroup | None = None,
        probe: Probe = SILENT,
    ) -> None:
        iteration = self.iteration
        products = SymmetricProducts(iteration.products, work, team, probe)
        method, runs = _runs_of(iteration, kind)
        # Setting the precision of fp32 products fails beside torch's newer switches, so not where
        # there are none.
        with _sums_in_fp32() if iteration.half else fp32_matmul_precision(iteration.precision):
            x = stack
            if stack.dtype != self.dtype:
                x = work.take("x", stack.shape, self.dtype)
            # rounded once, as factors are powers of two
            torch.mul(stack, factors.to(stack.dtype), out=x)
            least_norm = factors * self.eps if self.eps else None
            updates = newton_schulz.iterate(x, runs, method, products, least_norm)
            if updates is not stack:
                stack.copy_(updates)
        probe.blocks(stack, kind.scale, team)

    @override
    def warm_up(self, slots: Sequence[BlockSlice]) -> None:
        """Compile the symmetric kernel for blocks; in a step others would wait for that in a collective.

        Coefficients are constants of a compilation, and the last step's depend on the scale and the
        number of steps.
        """
        if self.iteration.products is KERNEL:
            for kind in {slot.kind(self.scale(slot.of)) for slot in slots}:
                self._run_once(kind)

    def _run_once(self, kind: BlockKind) -> None:
        """Iterate over one block of ones."""
        shape = 1, kind.smaller, kind.length
        stack = torch.ones(shape, dtype=self.dtype, device=self.device)
        sizes = self.work_bytes(kind, 1, stack.itemsize)
        work = Work.allocated(sizes, self.device)
        factors = torch.ones(
            1,
            1,
            1,
            dtype=torch.float32,
            device=self.device,
        )
        self.run(stack, kind, factors, work)


@functools.cache
def _runs_of(iteration: Iteration, kind: BlockKind) -> tuple[str, list[Coefficients]]:
    """Method and coefficients of the steps of a kind's blocks, by runs; the last ones times the scale."""
    iteration = iteration.with_steps(kind.steps)
    method = iteration.method_for(kind.smaller, kind.longer, kind.team)
    *first, (a, b, c) = coefficients(iteration.coefficient_type, iteration.steps)
    # no pass for the scale alone
    last = a * kind.scale, b * kind.scale, c * kind.scale
    remaining = iter([*first, last])
    runs = iteration.runs(method)
    return method, [list(itertools.islice(remaining, length)) for length in runs]


@contextlib.contextmanager
def _sums_in_fp32() -> Iterator[None]:
    """Keep cuBLAS from adding parts of a bf16 product in bf16, which its default allows and no proof here covers."""
    switches = torch.backends.cuda.matmul
    name = "allow_bf16_reduced_precision_reduction"
    # A setting of two parts, of which a bool sets the second to True; torch 2.11 may not tell of
    # it.
    before = [getattr(switches, name), getattr(switches, f"{name}_split_k", True)]
    setattr(switches, name, [False, before[1]])
    try:
        yield
    finally:
        setattr(switches, name, before)
