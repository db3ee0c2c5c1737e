"""Newton-Schulz iterations on stacks of wide blocks.

The standard iteration is emerging-optimizers'. The Gram iteration does the same polynomial steps on the small Gram
matrix and touches the wide matrix twice in a run instead of twice in a step; coefficients are emerging-optimizers' too.
This module knows nothing of matrices, splits or ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from emerging_optimizers.orthogonalized_optimizers import muon_utils

from megatron_muon.sharding.cost import GRAM, STANDARD, gram_flops, standard_flops

AUTO = "auto"
METHODS = (AUTO, STANDARD, GRAM)

HALVES_FROM = 384
"""Rows from which `in_halves` pays on a processor."""

_REPEATS_LAST = ("polar_express", "cans", "deepseekv4")  # as muon_utils.newton_schulz treats these sets


def choose_method(rows: int, cols: int, *, method: str = AUTO, steps: int = 5, dtype: torch.dtype) -> str:
    """The iteration for blocks of `(rows, cols)`: "standard" or "gram".

    "auto" takes the Gram iteration where it needs fewer operations: with five steps, from a ratio of sides of 1.5. Its
    error against the polar factor is that of the standard iteration to within the rounding of the dtype
    (tests/unit/test_newton_schulz.py).
    """
    if method != AUTO:
        return method
    return min((STANDARD, GRAM), key=lambda choice: operations(rows, cols, method=choice, steps=steps, dtype=dtype))


def operations(rows: int, cols: int, *, method: str, steps: int, dtype: torch.dtype) -> int:
    """Floating-point operations of `method`, "standard" or "gram", on a block of `(rows, cols)`."""
    if method == STANDARD:
        return standard_flops(rows, cols, steps)
    return gram_flops(rows, cols, steps, restarts=len(gram_runs(steps, dtype)) - 1)


def gram_runs(steps: int, dtype: torch.dtype) -> tuple[int, ...]:
    """How many steps each run of the Gram iteration takes before it starts again from the matrix.

    Squaring loses small singular values in half precision, and what is lost comes back amplified by every step. Runs of
    two steps in bf16 stay within 0.003 of the standard iteration's error (relative to the polar factor's norm, over
    condition numbers of 1 to 1e8); runs of three were off by up to 0.045. In fp32 three are safe.
    """
    longest = 2 if dtype.itemsize < 4 else 3
    return tuple(min(longest, steps - done) for done in range(0, steps, longest))


def coefficients(coefficient_type: str, steps: int) -> list[tuple[float, float, float]]:
    """The polynomial coefficients `(a, b, c)` of each step of X <- a X + b (X X^T) X + c (X X^T)^2 X.

    Raises:
        ValueError: a set that emerging-optimizers does not have.
    """
    sets = muon_utils._COEFFICIENT_SETS
    if coefficient_type not in sets:
        raise ValueError(f"--muon-coefficient-type {coefficient_type} does not exist; choose one of {', '.join(sets)}")
    mode: muon_utils.CoeffIterMode = "repeat_last" if coefficient_type in _REPEATS_LAST else "cycle"
    return list(muon_utils.get_coefficient_iterator(steps, sets[coefficient_type], mode=mode))


def standard(stack: torch.Tensor, *, coefficient_type: str, steps: int, dtype: torch.dtype) -> torch.Tensor:
    """The standard iteration.

    Args:
        stack: `(batch, m, n)` fp32 with m <= n; not modified.
        coefficient_type: coefficient set of emerging-optimizers.
        steps: number of steps.
        dtype: torch.float32 or torch.bfloat16, what the products run in.

    Returns:
        `(batch, m, n)` of `dtype`, orthogonalised.
    """
    x = _normalized(stack, dtype)
    if _has_symmetric_kernel(x):
        step = muon_utils.newton_schulz_step_tsyrk
        blocks = []
        for block in x:
            for a, b, c in coefficients(coefficient_type, steps):
                block = step(block, a, b, c)
            blocks.append(block)
        return torch.stack(blocks)
    for a, b, c in coefficients(coefficient_type, steps):
        r = _square(x)
        z = _symmetric(r, r, r, beta=b, alpha=c)
        x = torch.baddbmm(x, z, x, beta=a)
    return x


def gram(stack: torch.Tensor, *, coefficient_type: str, steps: int, dtype: torch.dtype) -> torch.Tensor:
    """The Gram iteration with restarts; arguments and result as `standard`.

    With R = X X^T a step is X <- Z X and R <- Z R Z for Z = a I + b R + c R^2. All Z are polynomials in R and commute,
    so a run accumulates Q <- Z Q and applies it once, and every product but the last is symmetric. Source:
    https://github.com/Dao-AILab/gram-newton-schulz.
    """
    x = _normalized(stack, dtype)
    remaining: Sequence[tuple[float, float, float]] = coefficients(coefficient_type, steps)
    for length in gram_runs(steps, dtype):
        run, remaining = remaining[:length], remaining[length:]
        r = _square(x)  # (batch, m, m)
        q: torch.Tensor | None = None
        for number, (a, b, c) in enumerate(run):
            z = _symmetric(r, r, r, beta=b, alpha=c)  # Z without its a I
            if q is None:
                q = z.clone()
                q.diagonal(dim1=-2, dim2=-1).add_(a)
            else:
                q = _symmetric(q, z, q, beta=a)
            if number + 1 < len(run):
                zr = _symmetric(r, z, r, beta=a)
                r = _symmetric(zr, zr, z, beta=a)
        assert q is not None
        x = q @ x
    return x


def in_halves(rows: int, device: torch.device) -> bool:
    """Whether symmetric products of `rows` rows are formed from three of their four quarters.

    A processor then does 3/4 of their operations. Measured with torch 2.13 on an AVX-512 processor, one core: the whole
    iteration takes 0.85 to 0.93 of the time from 512 rows on, in fp32 and bf16, and at 256 rows in bf16 it takes 1.1
    times as long, because the parts become too small.
    """
    return device.type == "cpu" and rows >= HALVES_FROM


def _square(x: torch.Tensor) -> torch.Tensor:
    """X X^T of each `(m, n)` block, `(batch, m, m)`."""
    batch, m = x.shape[:2]
    if not in_halves(m, x.device):
        return x @ x.mT
    half = m // 2
    out = x.new_empty(batch, m, m)
    for block, result in zip(x, out, strict=True):
        torch.mm(block, block[:half].mT, out=result[:, :half])
        torch.mm(block[half:], block[half:].mT, out=result[half:, half:])
    return _mirrored(out)


def _symmetric(
    base: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: float, alpha: float = 1.0
) -> torch.Tensor:
    """beta * base + alpha * left @ right, all `(batch, m, m)` and symmetric, the product too."""
    m = base.shape[-1]
    if not in_halves(m, base.device):
        return torch.baddbmm(base, left, right, beta=beta, alpha=alpha)
    half = m // 2
    out = torch.empty_like(base)
    for c, a, b, result in zip(base, left, right, out, strict=True):
        # Rows of a symmetric matrix are its columns, and lie together.
        torch.addmm(c[:, :half], a, b[:half].mT, beta=beta, alpha=alpha, out=result[:, :half])
        torch.addmm(c[half:, half:], a[half:], b[half:].mT, beta=beta, alpha=alpha, out=result[half:, half:])
    return _mirrored(out)


def _mirrored(x: torch.Tensor) -> torch.Tensor:
    """Each block with the quarter above the diagonal's halves filled from the one below, in place."""
    half = x.shape[-1] // 2
    x[:, :half, half:].copy_(x[:, half:, :half].mT)
    return x


def _normalized(stack: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Each block over its Frobenius norm, computed in fp32, as `dtype`: its singular values are at most 1."""
    norm: torch.Tensor = torch.linalg.vector_norm(stack, dim=(-2, -1), keepdim=True)
    return stack.div(norm.clamp_min(1e-7)).to(dtype)


def _has_symmetric_kernel(x: torch.Tensor) -> bool:
    """Whether emerging-optimizers' symmetric-product kernel takes these blocks.

    It wants bf16, Triton's tensor descriptors (3.4) with rows of whole 16-byte lines, and a GPU that has them in
    hardware.
    """
    return bool(
        x.is_cuda
        and x.dtype == torch.bfloat16
        and muon_utils.triton_kernels.HAS_TRITON_340
        and torch.cuda.get_device_capability(x.device) >= (9, 0)
        and x.shape[-1] % 8 == 0
        and x.shape[-2] % 8 == 0
    )
