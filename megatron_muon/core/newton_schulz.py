"""Newton-Schulz iterations on stacks of wide blocks.

Both iterations take the polynomial steps X <- a X + b (X X^T) X + c (X X^T)^2 X with emerging-optimizers' coefficients.
The standard one takes them on X; the Gram iteration takes them on the small Gram matrix and touches the wide matrix
twice in a run instead of twice in a step. Which blocks get which is decided in `core.cost`. This module knows
nothing of matrices, splits or ranks.

A block may be cut along its longer side over the ranks of a team. Each multiplies its own columns; X X^T is the sum of
the parts', which `total` adds up, and what follows from it every rank computes alike.

The division by the norm is part of the first step: ||X||^2 is the trace of X X^T, which the step needs anyway, and the
factor goes into the small matrices. So X is rounded once, where it came into the iteration's dtype, and no pass over it
only scales it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from emerging_optimizers.orthogonalized_optimizers import muon_utils

from megatron_muon.core.cost import DENSE, HALVES, KERNEL, REVERSING_SETS, Coefficients, Products, gram_runs
from megatron_muon.core.errors import UserError

Total = Callable[[torch.Tensor], torch.Tensor]
"""The sum of a team's parts `(batch, m, m)` of X X^T, of their dtype, the same bits on all its ranks. Collective."""

_REPEATS_LAST = ("polar_express", "cans", "deepseekv4")  # as muon_utils.newton_schulz treats these sets


def coefficients(coefficient_type: str | Coefficients, steps: int) -> list[tuple[float, float, float]]:
    """The polynomial coefficients `(a, b, c)` of each step; of given ones the last are repeated.

    Raises:
        UserError: a set that emerging-optimizers does not have.
    """
    if not isinstance(coefficient_type, str):
        return list(muon_utils.get_coefficient_iterator(steps, coefficient_type, mode="repeat_last"))
    sets = muon_utils._COEFFICIENT_SETS
    if coefficient_type not in sets:
        usable = ", ".join(name for name in sets if name not in REVERSING_SETS)
        raise UserError(f"--muon-coefficient-type {coefficient_type} does not exist; choose one of {usable}")
    mode: muon_utils.CoeffIterMode = "repeat_last" if coefficient_type in _REPEATS_LAST else "cycle"
    return list(muon_utils.get_coefficient_iterator(steps, sets[coefficient_type], mode=mode))


def standard(
    x: torch.Tensor, steps: Coefficients, least_norm: torch.Tensor | None = None, total: Total | None = None
) -> torch.Tensor:
    """The standard iteration.

    Args:
        x: `(batch, m, n)` with m <= n, fp32 or bf16, what the products run in; not modified. Its largest magnitude must
            be near 1, so that squares neither overflow nor vanish; its norm may be any.
        steps: coefficients of each step. A factor on the last step's scales the result.
        least_norm: `(batch, 1, 1)` fp32; a block of a smaller norm is divided by this.
        total: adds up a team's parts; None where `x` are whole blocks, m <= n only then.

    Returns:
        `(batch, m, n)` of the same dtype, orthogonalised. A block with an element that is not finite becomes NaN.
    """
    first, *others = steps
    r, inverse_norm = _normalized(_gram_matrix(x, total), least_norm)
    z = _product(r, r, r, beta=first[1], alpha=first[2])
    del r
    x = _with_diagonal(z, first[0], inverse_norm) @ x
    for a, b, c in others:
        del z  # before there is another Gram matrix
        r = _gram_matrix(x, total)
        z = _product(r, r, r, beta=b, alpha=c)
        del r
        x = torch.baddbmm(x, z, x, beta=a)
    return x


def gram(
    x: torch.Tensor,
    steps: Coefficients,
    least_norm: torch.Tensor | None = None,
    total: Total | None = None,
    runs: Sequence[int] = (),
) -> torch.Tensor:
    """The Gram iteration with restarts; arguments and result as `standard`. `runs` are `Iteration.runs`.

    With R = X X^T a step is X <- Z X and R <- Z R Z for Z = a I + b R + c R^2. All Z are polynomials in R and commute,
    so a run accumulates Q <- Z Q and applies it once, and every product but the last is symmetric. Source:
    https://github.com/Dao-AILab/gram-newton-schulz.
    """
    remaining = list(steps)
    inverse_norm: torch.Tensor | None = None
    for number, length in enumerate(runs or gram_runs(len(remaining), half=x.dtype.itemsize < 4)):
        run, remaining = remaining[:length], remaining[length:]
        r = _gram_matrix(x, total)
        if number == 0:
            r, inverse_norm = _normalized(r, least_norm)
        q: torch.Tensor | None = None
        for step, (a, b, c) in enumerate(run):
            z = _product(r, r, r, beta=b, alpha=c)  # Z without its a I
            if q is None:
                q = _with_diagonal(z.clone(), a, inverse_norm if number == 0 else None)
            else:
                q = _product(z, q, q, beta=a)
            if step + 1 < len(run):
                r = _product(z, r, r, beta=a)
                r = _product(r, z, r, beta=a)
        assert q is not None
        del r, z
        x = q @ x
        del q  # before there is another Gram matrix
    return x


def products_on(device: torch.device, dtype: torch.dtype) -> Products:
    """How `device` forms symmetric products in `dtype`.

    emerging-optimizers' kernel wants bf16, Triton's tensor descriptors (3.4), and a GPU that has them in hardware.
    """
    if device.type == "cpu":
        return HALVES
    kernel = (
        device.type == "cuda"
        and dtype == torch.bfloat16
        and muon_utils.triton_kernels.HAS_TRITON_340
        and torch.cuda.get_device_capability(device) >= (9, 0)
    )
    return KERNEL if kernel else DENSE


def _gram_matrix(x: torch.Tensor, total: Total | None) -> torch.Tensor:
    """X X^T of each block, `(batch, m, m)`."""
    part = _product(x, x)
    return part if total is None else total(part)


def _normalized(r: torch.Tensor, least_norm: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The Gram matrix `(batch, m, m)` of each block over its norm, and one over the norm, `(batch, 1, 1)` fp32.

    A block of zeros stays zero; the trace of one with an element that is not finite is not finite, nor is the result.
    """
    square = r.diagonal(dim1=-2, dim2=-1).float().sum(dim=-1)[:, None, None]
    if least_norm is not None:
        square = torch.maximum(square, least_norm.square())
    inverse = torch.where(square == 0, 0.0, square.reciprocal())
    return torch.mul(r, inverse, out=torch.empty_like(r)), inverse.sqrt()


def _with_diagonal(z: torch.Tensor, a: float, factor: torch.Tensor | None) -> torch.Tensor:
    """factor * (z + a I), rounded once, `(batch, m, m)`, in the memory of `z`."""
    diagonal = z.diagonal(dim1=-2, dim2=-1).float() + a
    if factor is not None:
        diagonal *= factor[:, 0]
        torch.mul(z, factor, out=z)
    z.diagonal(dim1=-2, dim2=-1).copy_(diagonal)
    return z


def _product(
    left: torch.Tensor, right: torch.Tensor, base: torch.Tensor | None = None, *, beta: float = 0.0, alpha: float = 1.0
) -> torch.Tensor:
    """beta * base + alpha * left @ right^T of each block, `(batch, m, m)`, where all of it is symmetric.

    That is X X^T for blocks `(m, n)`, and the product of `(m, m)` matrices that are symmetric and commute.
    """
    batch, m, n = left.shape
    products = products_on(left.device, left.dtype)
    if products.shares(m, n)[0 if left is right else 1] == 1.0:
        return left @ right.mT if base is None else torch.baddbmm(base, left, right, beta=beta, alpha=alpha)
    if products is KERNEL:
        bases = [None] * batch if base is None else base
        tsyrk = muon_utils.triton_kernels.tsyrk_ex
        formed = [tsyrk(a, c, alpha=alpha, beta=beta) for a, c in zip(left, bases, strict=True)]
        return torch.stack(formed) if batch > 1 else formed[0][None]
    half = m // 2
    out = left.new_empty(batch, m, m)
    for c, a, b, result in zip(out if base is None else base, left, right, out, strict=True):
        # Rows of a symmetric matrix are its columns, and lie together.
        torch.addmm(c[:, :half], a, b[:half].mT, beta=beta, alpha=alpha, out=result[:, :half])
        torch.addmm(c[half:, half:], a[half:], b[half:].mT, beta=beta, alpha=alpha, out=result[half:, half:])
    out[:, :half, half:].copy_(out[:, half:, :half].mT)
    return out
