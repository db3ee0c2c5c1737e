"""Orthogonalisation of momentum matrices: which iteration, in which precision, and the scale of its result.

The iterations are in `newton_schulz`; this module adds what an optimizer needs around them: inputs of any magnitude,
the scale of each block's own shape, and a look at whether the result is finite. It never communicates.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from emerging_optimizers import utils as eo_utils
from emerging_optimizers.orthogonalized_optimizers import get_muon_scale_factor

from megatron_muon.core import newton_schulz as ns
from megatron_muon.core.batch import BlockBatch, BlockKind, Cut, Normalize
from megatron_muon.core.cost import GRAM, KERNEL, Iteration
from megatron_muon.core.layout import Matrix, RowSplit, whole
from megatron_muon.core.memory import TOGETHER
from megatron_muon.core.numbers import check_number
from megatron_muon.core.portions import Portion
from megatron_muon.core.probe import SILENT, Probe
from megatron_muon.core.teams import Teams


def unit_magnitude_exponent(blocks: torch.Tensor) -> torch.Tensor:
    """The power of two that divides the largest magnitude of each `(..., m, n)` block into [0.5, 1).

    Int32 `(..., 1, 1)`. The update must not depend on the input's magnitude: squares of small entries vanish, and the
    eps of emerging-optimizers' normalisation shrinks the update of a matrix whose momentum is small, for instance after
    clipping by a tiny factor. A power of two changes no bit of the mantissa. Zeros have the least, so that another part
    of their block decides.
    """
    largest = blocks.abs().amax(dim=(-2, -1), keepdim=True).float()
    return torch.where(largest == 0.0, -126, torch.frexp(largest).exponent).clamp(-126, 126)


def to_unit_magnitude(blocks: torch.Tensor, dtype: torch.dtype, exponent: torch.Tensor | None = None) -> torch.Tensor:
    """Each block times a power of two that brings its largest magnitude into [0.5, 1), of `dtype`.

    In the blocks' own memory where that is their dtype already, else in a new tensor, rounded once. `exponent` is
    their `unit_magnitude_exponent`, where it is known.
    """
    exponent = unit_magnitude_exponent(blocks) if exponent is None else exponent
    factor = torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), -exponent)
    if blocks.dtype == dtype:
        return blocks.mul_(factor.to(dtype))
    return torch.mul(blocks, factor, out=torch.empty_like(blocks, dtype=dtype))


@dataclass
class Orthogonalizer:
    """Turns momentum matrices into Muon's update directions, block by block.

    Attributes:
        iteration: coefficients, steps, precision and method; its `products` become those of `device`.
        scale_mode: "spectral", "unit_rms_norm" or "shape_scaling" (emerging-optimizers' `get_muon_scale_factor`).
        extra_scale_factor: multiplies every update; 0.2 with "spectral" matches AdamW's update RMS
            (https://arxiv.org/abs/2502.16982, section 2.2).
        eps: blocks of a smaller norm are divided by this instead, so that their updates are small too.
        scaled: whether updates are scaled; adaptive Muon normalises before it scales by `row_scales`.
        device: where it runs, which decides what an iteration costs.

    Raises:
        ValueError: a setting is out of range, or the iteration is not proven.
    """

    iteration: Iteration = field(default_factory=Iteration)
    scale_mode: str = "spectral"
    extra_scale_factor: float = 1.0
    eps: float = 0.0
    scaled: bool = True
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        check_number("muon_extra_scale_factor", self.extra_scale_factor)
        self.iteration.check()
        ns.coefficients(self.iteration.coefficient_type, self.iteration.steps)  # an unknown set is refused here
        self.iteration = replace(self.iteration, products=ns.products_on(self.device, self.dtype))

    @property
    def dtype(self) -> torch.dtype:
        """What the iteration's products run in."""
        return torch.bfloat16 if self.iteration.half else torch.float32

    def flops(self, matrix: Matrix) -> int:
        """Operations of orthogonalising a matrix, over its blocks, by the iteration that each gets."""
        return sum(self.iteration.flops(*block, steps=matrix.steps) for block in matrix.blocks)

    def scale(self, shape: tuple[int, int]) -> float:
        """What the update of a block of `shape` is multiplied by, where `scaled`."""
        return self._factor(shape) if self.scaled else 1.0

    def row_scales(self, matrix: Matrix) -> torch.Tensor:
        """What each row of a matrix's update is to be multiplied by, `(rows, 1)` fp32: its block's scale."""
        factors = torch.empty(matrix.shape[0], 1, dtype=torch.float32)
        for rows, block in zip(matrix.split.views(factors), matrix.blocks, strict=True):
            rows.fill_(self._factor(block))
        return factors

    def _factor(self, shape: tuple[int, int]) -> float:
        return float(get_muon_scale_factor(*shape, mode=self.scale_mode)) * self.extra_scale_factor

    def batch(
        self,
        matrices: Sequence[Matrix],
        normalize: Normalize | None = None,
        portions: Sequence[Portion] = (),
        teams: Teams | None = None,
    ) -> BlockBatch:
        """Room for these matrices, and portions of others, to be orthogonalised together.

        `normalize` is given every whole update last; `teams` has those that cut blocks.
        """
        return BlockBatch(matrices, self.orthogonalize_stack, self.scale, normalize, portions, teams)

    def __call__(self, matrix: torch.Tensor, split: RowSplit | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The scaled update of one whole matrix.

        Args:
            matrix: 2D `(rows, cols)` fp32, the whole matrix without padding; not modified.
            split: how its rows make blocks; None makes it one block.

        Returns:
            2D `(rows, cols)` fp32, every block orthogonalised alone and scaled by its own shape; and whether it was
            finite, `(1,)` bool. It is zero where it was not.
        """
        batch = self.batch([Matrix("", (matrix.shape[0], matrix.shape[1]), split=split or whole(len(matrix)))])
        batch.allocate(matrix)[0].copy_(matrix)
        updates, finite = batch.orthogonalize()
        return updates[0], finite

    def orthogonalize_stack(
        self, stack: torch.Tensor, scale: float, cut: Cut | None = None, probe: Probe = SILENT, steps: int = 0
    ) -> torch.Tensor:
        """Put a stack's scaled updates in its place, zero where one is not finite. Collective in a team.

        Args:
            stack: `(batch, m, n)` fp32 or bf16 with m <= n; a tall block is its transpose here. With `cut`, n are this
                rank's columns.
            scale: multiplies the updates.
            cut: whole blocks and their team, where the stack has parts of them.
            probe: is shown the first update, or this rank's part of it.
            steps: of these matrices, `Matrix.steps`.

        Returns:
            Whether each update, or this rank's part of it, is finite, `(batch,)` bool.
        """
        _, rows, cols = stack.shape
        longer, team, total = cols, 1, None
        if cut is not None:
            longer, team, total = cut.longer, len(cut.team.ranks), functools.partial(cut.team.total, probe=probe)
            cols = -(-longer // team)  # so that all ranks take as many at a time
        together = max(TOGETHER["cpu" if stack.device.type == "cpu" else "cuda"] // (rows * cols), 1)
        all_finite = []
        for number, part in enumerate(stack.split(together)):
            exponent = unit_magnitude_exponent(part)
            if cut is not None:
                exponent = cut.team.largest(exponent)
            least_norm = None
            if self.eps:
                least_norm = torch.ldexp(torch.full_like(exponent, self.eps, dtype=torch.float32), -exponent)
            updates = self._iterate(  # a name for its first argument would keep that alive
                to_unit_magnitude(part, self.dtype, exponent),
                scale,
                least_norm,
                longer=longer,
                team=team,
                total=total,
                steps=steps,
            )
            if number == 0:
                probe.block(updates[0], scale, None if cut is None else cut.team)
            finite = updates.sum(dim=(-2, -1), dtype=torch.float32).isfinite()
            _copy_where(finite[:, None, None], updates, part)
            del updates  # before the next are made
            all_finite.append(finite)
        return torch.cat(all_finite)

    def kernel_kinds(self, matrices: Iterable[Matrix], portions: Iterable[Portion] = ()) -> list[BlockKind]:
        """The kinds of blocks whose products the symmetric kernel forms; none where it is not used."""
        if self.iteration.products is not KERNEL:
            return []
        kinds = self.batch(list(matrices), portions=list(portions)).kinds
        # Also where X X^T is formed by a dense product, squares of it may be the kernel's.
        return [kind for kind in kinds if KERNEL.shares(kind.smaller, kind.smaller)[0] < 1.0]

    def warm_up(self, kinds: Iterable[BlockKind]) -> None:
        """Compile the symmetric kernel for these kinds; a team's sums are left out.

        Coefficients are constants of a compilation, and the last step's depend on the scale and the number of steps. In
        a step the other ranks would wait for compilations in a collective.
        """
        for kind in kinds:
            start = torch.ones(1, kind.smaller, kind.length, dtype=self.dtype, device=self.device)
            self._iterate(
                start,
                kind.scale,
                longer=kind.longer,
                team=len(kind.ranks) or 1,
                total=torch.clone if kind.ranks else None,
                steps=kind.steps,
            )

    def _iterate(
        self,
        start: torch.Tensor,
        scale: float,
        least_norm: torch.Tensor | None = None,
        *,
        longer: int,
        team: int = 1,
        total: ns.Total | None = None,
        steps: int = 0,
    ) -> torch.Tensor:
        """The updates times `scale` of blocks whose largest magnitude is near 1, of the iteration's dtype.

        Their longer side is `longer`, of which `start` may have one part of a `team`, whose sums `total` forms.
        """
        iteration = self.iteration.with_steps(steps)
        *first, (a, b, c) = ns.coefficients(iteration.coefficient_type, iteration.steps)
        scaled = [*first, (a * scale, b * scale, c * scale)]  # the last step scales: no pass for that alone
        iterate: Callable[..., torch.Tensor] = ns.standard
        if iteration.method_for(start.shape[1], longer, team) == GRAM:
            iterate = functools.partial(ns.gram, runs=iteration.runs)
        # Setting the precision of fp32 products fails beside torch's newer switches, so not where there are none.
        half, precision = self.iteration.half, self.iteration.precision
        with _sums_in_fp32() if half else eo_utils.fp32_matmul_precision(precision):
            return iterate(start, scaled, least_norm, total)


def kernel_operands(kinds: Iterable[BlockKind]) -> list[tuple[int, int]]:
    """The sizes `(rows, cols)` that the symmetric kernel meets in blocks of these kinds, ascending."""
    sizes = {(kind.smaller, cols) for kind in kinds for cols in (kind.length, kind.smaller)}
    return sorted(size for size in sizes if KERNEL.shares(*size)[0] < 1.0)


@contextlib.contextmanager
def _sums_in_fp32() -> Iterator[None]:
    """Keep cuBLAS from adding parts of a bf16 product in bf16, which its default allows and no proof here covers."""
    switches, name = torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"
    # A setting of two parts, of which a bool sets the second to True; torch 2.11 may not tell of it.
    before = [getattr(switches, name), getattr(switches, f"{name}_split_k", True)]
    setattr(switches, name, [False, before[1]])
    try:
        yield
    finally:
        setattr(switches, name, before)


def _copy_where(keep: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """target <- source where `keep` (broadcast) holds, else zero, also for NaN, in the one pass that a copy takes."""
    values = source.to(target.dtype)
    bits = {2: torch.int16, 4: torch.int32}[target.dtype.itemsize]
    mask = -keep.to(bits)  # all bits set, or none
    torch.bitwise_and(values.view(bits), mask, out=target.view(bits))
