"""Muon's method: Newton-Schulz iterations on stacks of wide blocks, with the scale of updates.

Both iterations take the polynomial steps X <- a X + b (X X^T) X + c (X X^T)^2 X with emerging-optimizers'
coefficients. The standard one takes them on X; the Gram iteration takes them on the small Gram
matrix and touches the wide matrix twice in a run instead of twice in a step. emerging-optimizers'
own iteration has no Gram form, no buffers, no teams, and divides X by its norm, which rounds it
once more. Here that is part of the first step: ||X||^2 is the trace of X X^T, and the factor goes
into the small matrices.

A block may be cut along its longer side over the ranks of a team. Each multiplies its own columns;
X X^T is summed over them, and all ranks compute the same from it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import ClassVar, override

import torch
from emerging_optimizers.orthogonalized_optimizers import get_muon_scale_factor, muon_utils
from emerging_optimizers.utils import fp32_matmul_precision
from torch import Tensor

from megatron_muon.core import launches
from megatron_muon.core.cost import (
    GRAM,
    HALVES,
    KERNEL,
    MOST_TOGETHER,
    QUACK,
    TOGETHER,
    WORK_OF_LAUNCHES,
    Coefficients,
    Iteration,
)
from megatron_muon.core.layout import Matrix
from megatron_muon.core.methods import symmetric
from megatron_muon.core.methods.method import BlockState, Method, Work
from megatron_muon.core.methods.symmetric import SymmetricProducts
from megatron_muon.core.probe import SILENT, Probe
from megatron_muon.core.slices import BlockKind, BlockSlice
from megatron_muon.core.teams import TeamGroup

# as muon_utils.newton_schulz treats these sets
_REPEATS_LAST = ("polar_express", "cans", "deepseekv4")

_PARTS, _ELEMENTS = 4, 8192
"""Parts of a program of `kernels.divide`, and elements of one, or of a program of `kernels.shift`."""

_LEAST_SQUARE = 2.0**-100
"""A block of zeros stays zero: the squared norm of others is at least 2^-80, as their largest magnitude is 2^-40."""


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
    leaves_updates_in: ClassVar[str] = "wide"
    takes_levelled: ClassVar[bool] = True

    iteration: Iteration = field(default_factory=Iteration)
    scale_mode: str = "spectral"
    extra_scale_factor: float = 1.0
    eps: float = 0.0
    scaled: bool = True
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        self.dtype = torch.bfloat16 if self.iteration.half else torch.float32
        products = symmetric.products_on(self.device, self.dtype)
        self.iteration = replace(self.iteration, products=products)

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
        iteration = self.iteration.with_steps(kind.steps)
        method = iteration.method_for(kind.smaller, kind.longer, kind.team)
        each = self.dtype.itemsize
        rows = min(count, self.together(kind)) * kind.smaller
        wide = rows * kind.length * each
        small = rows * kind.smaller * each
        sizes = {"wide": wide, "r": small, "z": small}
        if max(iteration.runs(method)) > 1:
            sizes |= {"q": small, "t": small}
        if kind.team > 1:
            sizes["sum"] = 4 * rows * kind.smaller  # in fp32
        if each != element_bytes:
            sizes["x"] = wide
        return sizes

    @override
    def together(self, kind: BlockKind) -> int:
        """Number of blocks that are iterated together, the same on all ranks of a team.

        On a GPU small ones are more than `TOGETHER`: as many as have the device at work for twice
        as long as the host takes for the launches of an iteration.
        """
        numel = kind.smaller * -(-kind.longer // kind.team)
        if self.iteration.products is HALVES:
            return max(1, TOGETHER["cpu"] // numel)
        hides_launches = math.ceil(WORK_OF_LAUNCHES / (20 * kind.smaller * numel))
        return max(1, TOGETHER["cuda"] // numel, min(MOST_TOGETHER // numel, hides_launches))

    @override
    def arithmetic(self) -> AbstractContextManager[None]:
        # Setting the precision of fp32 products fails beside torch's newer switches, so not where
        # there are none.
        if self.dtype is torch.bfloat16:
            return _sums_in_fp32()
        precision: AbstractContextManager[None] = fp32_matmul_precision(self.iteration.precision)
        return precision

    @override
    def run(
        self,
        stack: Tensor,
        kind: BlockKind,
        factors: Tensor,
        work: Work,
        *,
        state: BlockState | None = None,
        team: TeamGroup | None = None,
        probe: Probe = SILENT,
    ) -> Tensor:
        iteration = self.iteration
        products = SymmetricProducts(iteration.products, work, team, probe)
        method, runs = _runs_of(iteration, kind)
        x = stack
        if stack.dtype != self.dtype:
            x = work.take("x", stack.shape, self.dtype).copy_(stack)
        least_norm = factors * self.eps if self.eps else None
        updates = iterate(x, runs, method, products, least_norm)
        probe.blocks(updates, kind.scale, team)
        return updates

    @property
    @override
    def products(self) -> str:
        return "quack" if self.iteration.products is QUACK else ""

    @override
    def warm_up(self, slots: Sequence[BlockSlice]) -> None:
        """Compile the symmetric kernel for blocks; in a step others would wait for that in a collective.

        Coefficients are constants of a compilation, and the last step's depend on the scale and the
        number of steps.
        """
        if self.iteration.products not in (KERNEL, QUACK):
            return
        for kind in {self.kind(slot) for slot in slots}:
            shape = 1, kind.smaller, kind.length
            block = torch.ones(shape, dtype=self.dtype, device=self.device)
            work = Work.allocated(self.work_bytes(kind, 1, block.itemsize), self.device)
            self.run(block, kind, block.new_ones(1, 1, 1, dtype=torch.float32), work)


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


def coefficients(coefficient_type: str | Coefficients, steps: int) -> Coefficients:
    """Coefficients `(a, b, c)` of each step of a set, or of given ones, the last repeated."""
    mode: muon_utils.CoeffIterMode = "repeat_last"
    if isinstance(coefficient_type, str):
        if coefficient_type not in _REPEATS_LAST:
            mode = "cycle"
        coefficient_type = muon_utils._COEFFICIENT_SETS[coefficient_type]
    return list(muon_utils.get_coefficient_iterator(steps, coefficient_type, mode=mode))


def iterate(
    x: Tensor,
    runs: Sequence[Coefficients],
    method: str,
    products: SymmetricProducts,
    least_norm: Tensor | None = None,
) -> Tensor:
    """Take polynomial steps on X, in runs that each begin with X X^T.

    In the Gram iteration a step of a run is R <- Z R Z for R = X X^T and Z = a I + b R + c R^2. All
    Z are polynomials in R and commute, so a run accumulates Q <- Z Q and applies it once, X <- Q X,
    and every product but the last is symmetric. Source:
    https://github.com/Dao-AILab/gram-newton-schulz. The standard iteration has runs of one step, of
    which all but the first add a X to the product.

    Args:
        x: `(count, m, n)` with m <= n, or some of n columns in a team, fp32 or bf16, the dtype of
            all products; overwritten. Its largest magnitude must be near 1, so that squares neither
            overflow nor vanish; its norm may be any.
        runs: coefficients of each step, by `Iteration.runs`. A factor on the last step's scales the
            result.
        method: "standard" or "gram".
        products: with a buffer "wide" for products with X, "q" and "t" for runs of several steps.
        least_norm: `(count, 1, 1)` fp32; a block of a smaller norm is divided by this.

    Returns:
        `(count, m, n)` of the same dtype, in "wide" or in the place of `x`; a block with an element
        that is not finite becomes NaN.
    """
    first, *others = runs
    r, root = _divide_by_trace(products.product("z", x, x), least_norm, products)
    q = _factor_of_run(r, first, products, root)
    wide = products.work.take("wide", x.shape, x.dtype)
    x, spare = torch.bmm(q, x, out=wide), x
    for run in others:
        r = products.product("r", x, x)
        if method == GRAM:
            q = _factor_of_run(r, run, products)
            x, spare = torch.bmm(q, x, out=spare), x
        else:
            a, b, c = run[0]
            z = products.product("z", r, r, r, beta=b, alpha=c)
            x, spare = torch.baddbmm(x, z, x, beta=a, out=spare), x
    return x


def _factor_of_run(
    r: Tensor,
    steps: Coefficients,
    products: SymmetricProducts,
    factor: Tensor | None = None,
) -> Tensor:
    """Q of a run that starts with this R, times `factor`, `(count, m, m)`."""
    (a, b, c), *others = steps
    # Z without its a I
    z = q = products.product("z", r, r, r, beta=b, alpha=c)
    if not others:
        return _shifted(z, a, factor, products)
    q_name, spare = "z", "t"
    for next_a, b, c in others:
        between = products.product(spare, z, r, r, beta=a)
        r = products.product("r", between, z, between, beta=a)
        if q is z:  # which was needed without a I until now
            q = _shifted(z, a, factor, products)
        a = next_a
        # R from three products is symmetric up to rounding.
        z = products.product("q", r, r, r, beta=b, alpha=c, is_exact=False)
        q = products.product(spare, z, q, q, beta=a)
        q_name, spare = spare, q_name
    return q


def _divide_by_trace(
    given: Tensor,
    least_norm: Tensor | None,
    products: SymmetricProducts,
) -> tuple[Tensor, Tensor]:
    """Blocks divided by their traces, in "r"; the roots of the traces' inverses, `(count, 1, 1)` fp32."""
    r = products.work.take("r", given.shape, given.dtype)
    if launches.has_kernels(r.device):
        count, m, _ = r.shape
        roots = r.new_empty(count, 1, 1, dtype=torch.float32)
        tensors = [given, roots if least_norm is None else least_norm, r, roots]
        programs = count * -(-m * m // (_PARTS * _ELEMENTS))
        constants = [m, m * m, least_norm is not None, _PARTS, _ELEMENTS]
        launches.launch("divide", programs, tensors, constants, 2 * r.nbytes)
        return r, roots
    square = given.diagonal(dim1=-2, dim2=-1).sum(dim=-1, dtype=torch.float32).view(-1, 1, 1)
    if least_norm is not None:
        square = torch.maximum(square, least_norm.square())
    inverse = square.clamp_min_(_LEAST_SQUARE).reciprocal_()
    torch.mul(given, inverse, out=r)
    return r, inverse.sqrt()


def _shifted(
    q: Tensor,
    a: float,
    factor: Tensor | None,
    products: SymmetricProducts,
) -> Tensor:
    """Q <- factor * (Q + a I), rounded once."""
    diagonal = q.diagonal(dim1=-2, dim2=-1)
    if factor is None:
        torch.add(diagonal, products.work.one, alpha=a, out=diagonal)
    elif launches.has_kernels(q.device):
        count, m, _ = q.shape
        programs = count * -(-m * m // _ELEMENTS)
        tensors = [q, factor]
        launches.launch("shift", programs, tensors, [a, m, m * m, _ELEMENTS], 2 * q.nbytes)
    else:
        sums = torch.add(diagonal, products.work.one, alpha=a).mul_(factor[:, 0])
        torch.mul(q, factor, out=q)
        diagonal.copy_(sums)
    return q
