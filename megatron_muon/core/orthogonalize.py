"""Orthogonalisation of stacks: which iteration, in which precision, inputs of any magnitude, the result's scale."""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from emerging_optimizers import utils as eo_utils
from emerging_optimizers.orthogonalized_optimizers import get_muon_scale_factor

from megatron_muon.core import memory
from megatron_muon.core import newton_schulz as ns
from megatron_muon.core.collectives import TeamGroup
from megatron_muon.core.cost import GRAM, KERNEL, Iteration
from megatron_muon.core.layout import Matrix
from megatron_muon.core.probe import SILENT, Probe
from megatron_muon.core.route import Stack
from megatron_muon.core.slices import BlockKind, BlockSlice


def largest_magnitude(blocks: torch.Tensor, scratch: torch.Tensor | None = None) -> torch.Tensor:
    """The largest magnitude of each `(..., m, n)` block, `(..., 1, 1)` fp32; `scratch` is like `blocks`."""
    if blocks.device.type == "cpu" and blocks.dtype in _MAGNITUDE_BITS:
        # Magnitudes are ordered as their bits are, NaN last; torch 2.13 takes 28 times as long over
        # a norm of bf16.
        dtype, mask = _MAGNITUDE_BITS[blocks.dtype]
        out = torch.empty_like(blocks) if scratch is None else scratch
        magnitudes = torch.bitwise_and(blocks.view(dtype), mask, out=out.view(dtype))
        return magnitudes.amax(dim=(-2, -1), keepdim=True).view(blocks.dtype).float()
    norms: torch.Tensor = torch.linalg.vector_norm(
        blocks, ord=math.inf, dim=(-2, -1), keepdim=True, dtype=torch.float32
    )
    return norms


_MAGNITUDE_BITS = {torch.bfloat16: (torch.int16, 0x7FFF), torch.float32: (torch.int32, 0x7FFFFFFF)}
"""The integers that show a number's bits, and all bits but the sign's."""


def unit_factor(largest: torch.Tensor) -> torch.Tensor:
    """The power of two that brings this magnitude into [0.5, 1), fp32; within 2^-126 and 2^125, and so of zero 2^125.

    Squares of small entries vanish, and an eps in the normalisation shrinks the update of small
    momentum, for instance after clipping by a tiny factor. A power of two changes no bit of the
    mantissa.
    """
    within = largest.clamp(2.0**-126, 2.0**125)
    return torch.frexp(within).mantissa.div_(within)


def to_unit_magnitude(
    blocks: torch.Tensor,
    dtype: torch.dtype,
    factor: torch.Tensor | None = None,
    work: ns.Work | None = None,
) -> torch.Tensor:
    """Each block times its `unit_factor`, of `dtype`: in place, or else in a buffer of `work`, rounded once."""
    factor = unit_factor(largest_magnitude(blocks)) if factor is None else factor
    if blocks.dtype == dtype:
        return blocks.mul_(factor.to(dtype))
    out = (work or ns.Work()).take(
        "x",
        blocks.new_empty(0, dtype=dtype),
        blocks.shape,
    )
    return torch.mul(blocks, factor, out=out)


@dataclass
class Orthogonalizer:
    """Turns momentum matrices into Muon's update directions, block by block.

    Attributes:
        iteration: coefficients, steps, precision and method; its `products` become those of
            `device`.
        scale_mode: "spectral", "unit_rms_norm" or "shape_scaling" (emerging-optimizers'
            `get_muon_scale_factor`).
        extra_scale_factor: multiplies every update; 0.2 with "spectral" matches AdamW's update RMS
            (https://arxiv.org/abs/2502.16982, section 2.2).
        eps: blocks of a smaller norm are divided by this instead, so that their updates are small
            too.
        scaled: whether updates are scaled; adaptive Muon normalises before it scales by
            `row_scales`.

    Raises:
        ValueError: the iteration is not proven.
    """

    iteration: Iteration = field(default_factory=Iteration)
    scale_mode: str = "spectral"
    extra_scale_factor: float = 1.0
    eps: float = 0.0
    scaled: bool = True
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        self.iteration.check()
        # an unknown set is refused here
        ns.coefficients(self.iteration.coefficient_type, self.iteration.steps)
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

    def work_bytes(self, stacks: Iterable[Stack], element_bytes: int) -> dict[str, int]:
        """Bytes of the buffers that iterating over any of these stacks takes, by name."""
        most = Counter[str]()
        for kind, _, slots in stacks:
            count = min(self._together(kind), len(slots))
            most |= Counter(memory.work_bytes(self.iteration, kind, count, element_bytes))
        return dict(most)

    def _together(self, kind: BlockKind) -> int:
        device = "cpu" if self.device.type == "cpu" else "cuda"
        return memory.blocks_together(kind.smaller, kind.longer, kind.team, device)

    def orthogonalize_stack(
        self,
        stack: torch.Tensor,
        kind: BlockKind,
        team: TeamGroup | None = None,
        probe: Probe = SILENT,
        work: ns.Work | None = None,
    ) -> torch.Tensor:
        """Put a stack's scaled updates in its place, NaN where one is not finite. Collective in a team.

        `stack` is `(batch, m, n)` fp32 or bf16 with m <= n; a tall block is its transpose here.
        With `team`, n are this rank's columns. Returns for each update, or this rank's part, 0.0 if
        it is finite, else NaN: `(batch, 1, 1)` fp32.
        """
        all_marks, together = [], self._together(kind)
        total = None if team is None else functools.partial(team.total, probe=probe)
        for number, part in enumerate(stack.split(together) if together < len(stack) else (stack,)):
            scratch = (
                None
                if work is None or part.dtype != self.dtype
                else work.take("wide", part, part.shape)
            )
            largest = largest_magnitude(part, scratch)
            if team is not None:
                largest = team.largest(largest)
            factor = unit_factor(largest)
            least_norm = factor * self.eps if self.eps else None
            start = to_unit_magnitude(part, self.dtype, factor, work)
            updates = self._iterate(start, kind, least_norm, total, work)
            if number == 0:
                probe.block(updates[0], kind.scale, team)
            marks = updates.sum(
                dim=(-2, -1),
                keepdim=True,
                dtype=torch.float32,
            ).mul_(0.0)
            torch.add(updates, marks.to(updates.dtype), out=part)
            all_marks.append(marks)
        return torch.cat(all_marks) if len(all_marks) > 1 else all_marks[0]

    def kernel_kinds(self, slots: Sequence[BlockSlice]) -> list[BlockKind]:
        """The kinds of these blocks whose products the symmetric kernel forms; none where it is not used."""
        kinds = (
            {slot.kind(self.scale(slot.of)) for slot in slots}
            if self.iteration.products is KERNEL
            else set()
        )
        # Also where X X^T is formed by a dense product, squares of it may be the kernel's.
        return sorted(kind for kind in kinds if KERNEL.shares(kind.smaller, kind.smaller)[0] < 1.0)

    def warm_up(self, kinds: Iterable[BlockKind]) -> None:
        """Compile the symmetric kernel for these kinds; in a step others would wait for that in a collective.

        Coefficients are constants of a compilation, and the last step's depend on the scale and the
        number of steps.
        """
        for kind in kinds:
            self._iterate(
                torch.ones(1, kind.smaller, kind.length, dtype=self.dtype, device=self.device), kind
            )

    def _iterate(
        self,
        start: torch.Tensor,
        kind: BlockKind,
        least_norm: torch.Tensor | None = None,
        total: ns.Total | None = None,
        work: ns.Work | None = None,
    ) -> torch.Tensor:
        """The scaled updates of blocks whose largest magnitude is near 1, of the iteration's dtype."""
        iteration = self.iteration.with_steps(kind.steps)
        *first, (a, b, c) = ns.coefficients(iteration.coefficient_type, iteration.steps)
        # no pass for the scale alone
        scaled = [*first, (a * kind.scale, b * kind.scale, c * kind.scale)]
        iterate: Callable[..., torch.Tensor] = ns.standard
        if iteration.method_for(kind.smaller, kind.longer, kind.team) == GRAM:
            iterate = functools.partial(ns.gram, runs=iteration.runs)
        if kind.ranks and total is None:  # compiling alone
            total = torch.clone
        # Setting the precision of fp32 products fails beside torch's newer switches, so not where
        # there are none.
        half, precision = self.iteration.half, self.iteration.precision
        with _sums_in_fp32() if half else eo_utils.fp32_matmul_precision(precision):
            return iterate(start, scaled, least_norm, total, work)


@contextlib.contextmanager
def _sums_in_fp32() -> Iterator[None]:
    """Keep cuBLAS from adding parts of a bf16 product in bf16, which its default allows and no proof here covers."""
    switches, name = torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"
    # A setting of two parts, of which a bool sets the second to True; torch 2.11 may not tell of
    # it.
    before = [getattr(switches, name), getattr(switches, f"{name}_split_k", True)]
    setattr(switches, name, [False, before[1]])
    try:
        yield
    finally:
        setattr(switches, name, before)
