"""Newton-Schulz iterations on stacks of wide blocks.

Both take the polynomial steps X <- a X + b (X X^T) X + c (X X^T)^2 X with emerging-optimizers'
coefficients. The standard one takes them on X; the Gram iteration takes them on the small Gram
matrix and touches the wide matrix twice in a run instead of twice in a step. emerging-optimizers'
own iteration has no Gram form, no buffers, no teams, and divides X by its norm, which rounds it
once more. Here that is part of the first step: ||X||^2 is the trace of X X^T, and the factor goes
into the small matrices.

A block may be cut along its longer side over the ranks of a team. Each multiplies its own columns;
X X^T is summed over them, and all ranks compute the same from it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from emerging_optimizers.orthogonalized_optimizers import muon_utils
from torch import Tensor

from megatron_muon.core.cost import GRAM, Coefficients
from megatron_muon.core.methods.symmetric import SymmetricProducts

# as muon_utils.newton_schulz treats these sets
_REPEATS_LAST = ("polar_express", "cans", "deepseekv4")

_LEAST_SQUARE = 2.0**-100
"""A block of zeros stays zero: the squared norm of others is at least a quarter, as their largest magnitude is half."""


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
    spare = x
    x = _first_run(x, first, products, least_norm)
    for run in others:
        r = products.gram(x)
        if method == GRAM:
            q = _factor_of_run(r, run, products)
            x, spare = torch.bmm(q, x, out=spare), x
        else:
            a, b, c = run[0]
            z = products.quadratic(r, b, c)
            x, spare = (
                torch.baddbmm(
                    x,
                    z,
                    x,
                    beta=a,
                    out=spare,
                ),
                x,
            )
    return x


def _first_run(
    x: Tensor,
    steps: Coefficients,
    products: SymmetricProducts,
    least_norm: Tensor | None,
) -> Tensor:
    """Normalize X and take a run of steps; the result lies in "wide"."""
    r = products.gram(x)
    diagonal = r.diagonal(dim1=-2, dim2=-1)
    square = diagonal.sum(dim=-1, dtype=torch.float32).view(-1, 1, 1)
    if least_norm is not None:
        square = torch.maximum(square, least_norm.square())
    inverse = square.clamp_min_(_LEAST_SQUARE).reciprocal_()
    torch.mul(r, inverse, out=r)
    q = _factor_of_run(r, steps, products, inverse.sqrt())
    return torch.bmm(q, x, out=products.work.take("wide", x.shape, x.dtype))


def _factor_of_run(
    r: Tensor,
    steps: Coefficients,
    products: SymmetricProducts,
    factor: Tensor | None = None,
) -> Tensor:
    """Q of a run that starts with this R, times `factor`, `(count, m, m)`."""
    (a, b, c), *others = steps
    # Z without its a I
    z = products.quadratic(r, b, c)
    q = z
    if others:
        q = products.work.take("q", z.shape, z.dtype).copy_(z)
    _add_identity(q, a, products.work.one, factor)
    # Products with Q go to the buffer that does not have it.
    for (next_a, b, c), spare in zip(others, itertools.cycle("tq"), strict=False):
        between = products.product(spare, z, r, r, beta=a)
        r = products.product("r", between, z, between, beta=a)
        a = next_a
        # R from three products is symmetric up to rounding.
        z = products.quadratic(r, b, c, is_exact=False)
        q = products.product(spare, z, q, q, beta=a)
    return q


def _add_identity(
    z: Tensor,
    a: float,
    one: Tensor,
    factor: Tensor | None,
) -> None:
    """Replace Z `(count, m, m)` by factor * (Z + a I), rounded once."""
    diagonal = z.diagonal(dim1=-2, dim2=-1)
    if factor is None:
        torch.add(diagonal, one, alpha=a, out=diagonal)
        return
    sums = torch.add(diagonal, one, alpha=a).mul_(factor[:, 0])
    torch.mul(z, factor, out=z)
    diagonal.copy_(sums)
