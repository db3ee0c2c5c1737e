"""Newton-Schulz iterations on stacks of wide blocks.

Both take the polynomial steps X <- a X + b (X X^T) X + c (X X^T)^2 X with emerging-optimizers'
coefficients. The standard one takes them on X; the Gram iteration takes them on the small Gram
matrix and touches the wide matrix twice in a run instead of twice in a step. emerging-optimizers'
own iteration has no Gram form, no buffers, no teams, and divides X by its norm, which rounds it
once more. Here that is part of the first step: ||X||^2 is the trace of X X^T, and the factor goes
into the small matrices.

A block may be cut along its longer side over the ranks of a team. Each multiplies its own columns;
X X^T is the sum of the parts', which `total` adds up, and what follows from it every rank computes
alike.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from emerging_optimizers.orthogonalized_optimizers import muon_utils

from megatron_muon.core.cost import (
    DENSE,
    HALVES,
    KERNEL,
    REVERSING_SETS,
    Coefficients,
    Products,
    gram_runs,
)
from megatron_muon.core.memory import aligned
from megatron_muon.core.user_errors import SettingError

Total = Callable[[torch.Tensor], torch.Tensor]
"""The sum of a team's parts `(batch, m, m)` of X X^T, in their place, the same bits on all its ranks. Collective."""

# as muon_utils.newton_schulz treats these sets
_REPEATS_LAST = ("polar_express", "cans", "deepseekv4")


def coefficients(
    coefficient_type: str | Coefficients, steps: int
) -> list[tuple[float, float, float]]:
    """The coefficients `(a, b, c)` of each step, of given ones the last repeated; a UserError for an unknown set."""
    if not isinstance(coefficient_type, str):
        return list(
            muon_utils.get_coefficient_iterator(steps, coefficient_type, mode="repeat_last")
        )
    sets = muon_utils._COEFFICIENT_SETS
    if coefficient_type not in sets:
        usable = ", ".join(name for name in sets if name not in REVERSING_SETS)
        raise SettingError(
            "muon_coefficient_type", coefficient_type, "does not exist", f"choose one of {usable}"
        )
    mode: muon_utils.CoeffIterMode = "repeat_last" if coefficient_type in _REPEATS_LAST else "cycle"
    return list(muon_utils.get_coefficient_iterator(steps, sets[coefficient_type], mode=mode))


class Work:
    """Buffers of an iteration by name.

    With `sizes`, bytes by name, they are views of `memory`, flat, uint8, of `nbytes`, each made
    once, and the iteration may overwrite the blocks that it is given. Without, each is a new
    tensor.
    """

    def __init__(self, sizes: Mapping[str, int] | None = None) -> None:
        self.overwrites = sizes is not None
        self.memory: torch.Tensor | None = None
        *places, self.nbytes = itertools.accumulate(
            map(aligned, (sizes or {}).values()),
            initial=0,
        )
        self._places = dict(zip(sizes or {}, places, strict=True))
        self._views: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        self._blocks: dict[int, Sequence[torch.Tensor]] = {}
        self._numbers: dict[float, torch.Tensor] = {}

    def take(self, name: str, like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """A buffer of this shape, of the dtype of `like`."""
        if self.memory is None:
            return like.new_empty(shape)
        key = name, tuple(shape)
        if key not in self._views:
            start = self._places[name]
            end = start + math.prod(shape) * like.dtype.itemsize
            view = self.memory[start:end].view(like.dtype).view(shape)
            self._views[key] = view
            self._blocks[id(view)] = view.unbind()
        return self._views[key]

    def blocks(self, stack: torch.Tensor) -> Sequence[torch.Tensor]:
        """The blocks of a stack; those of a buffer exist."""
        return self._blocks.get(id(stack)) or stack.unbind()

    def number(self, value: float, device: torch.device) -> torch.Tensor:
        """`(1,)` fp32."""
        if value not in self._numbers:
            self._numbers[value] = torch.full((1,), value, dtype=torch.float32, device=device)
        return self._numbers[value]


def standard(
    x: torch.Tensor,
    steps: Coefficients,
    least_norm: torch.Tensor | None = None,
    total: Total | None = None,
    work: Work | None = None,
) -> torch.Tensor:
    """The standard iteration.

    Args:
        x: `(batch, m, n)` with m <= n, fp32 or bf16, what the products run in; overwritten where
            `work` says so. Its largest magnitude must be near 1, so that squares neither overflow
            nor vanish; its norm may be any.
        steps: coefficients of each step. A factor on the last step's scales the result.
        least_norm: `(batch, 1, 1)` fp32; a block of a smaller norm is divided by this.
        total: adds up a team's parts; None where `x` are whole blocks, m <= n only then.
        work: buffers, in which the result lies.

    Returns:
        `(batch, m, n)` of the same dtype; a block with an element that is not finite becomes NaN.
    """
    work = work or Work()
    product = functools.partial(_product, work=work)
    first, *others = steps
    square, inverse_norm = _normalized(_gram_matrix(x, total, work), least_norm)
    factor = product("z", square, square, square, beta=first[1], alpha=first[2])
    wide = torch.bmm(
        _with_diagonal(factor, first[0], inverse_norm, work), x, out=work.take("wide", x, x.shape)
    )
    x, spare = wide, x if work.overwrites else torch.empty_like(x)
    for a, b, c in others:
        del square, factor  # before the next
        square = _gram_matrix(x, total, work)
        factor = product("z", square, square, square, beta=b, alpha=c)
        x, spare = torch.baddbmm(x, factor, x, beta=a, out=spare), x
    return x


def gram(
    x: torch.Tensor,
    steps: Coefficients,
    least_norm: torch.Tensor | None = None,
    total: Total | None = None,
    work: Work | None = None,
    runs: Sequence[int] = (),
) -> torch.Tensor:
    """The Gram iteration with restarts; arguments and result as `standard`. `runs` are `Iteration.runs`.

    With R = X X^T a step is X <- Z X and R <- Z R Z for Z = a I + b R + c R^2. All Z are
    polynomials in R and commute, so a run accumulates Q <- Z Q and applies it once, and every
    product but the last is symmetric. Source: https://github.com/Dao-AILab/gram-newton-schulz.
    """
    work = work or Work()
    product = functools.partial(_product, work=work)
    remaining = list(steps)
    runs = runs or gram_runs(len(remaining), half=x.dtype.itemsize < 4)
    spare: torch.Tensor | None = None
    for number, length in enumerate(runs):
        run, remaining = remaining[:length], remaining[length:]
        square, inverse_norm = _gram_matrix(x, total, work), None
        if number == 0:
            square, inverse_norm = _normalized(square, least_norm)
        name, other = "q", "t"  # of the buffer that has q, and of the one beside it
        for step, (a, b, c) in enumerate(run):
            is_exact = step == 0  # R from three products is symmetric up to rounding
            # Z without its a I
            factor = product("z", square, square, square, beta=b, alpha=c, is_exact=is_exact)
            if step == 0:
                q = factor if len(run) == 1 else work.take(name, factor, factor.shape).copy_(factor)
                _with_diagonal(q, a, inverse_norm, work)
            else:
                q = product(other, factor, q, q, beta=a)
                name, other = other, name
            if step + 1 < len(run):
                between = product(other, factor, square, square, beta=a)
                del square  # before the next
                square = product("r", between, factor, between, beta=a)
                del between
        del square, factor
        if spare is None:
            wide, spare = (
                work.take("wide", x, x.shape),
                (x if work.overwrites else torch.empty_like(x)),
            )
            x = torch.bmm(q, x, out=wide)
        else:
            x, spare = torch.bmm(q, x, out=spare), x
    return x


def products_on(device: torch.device, dtype: torch.dtype) -> Products:
    """How `device` forms symmetric products in `dtype`.

    emerging-optimizers' kernel wants bf16, Triton's tensor descriptors (3.4), and a GPU that has
    them in hardware and shared memory for `Tiles`: GeForce and RTX cards of capability 12 have half
    of a data centre's.
    """
    if device.type == "cpu":
        return HALVES
    kernel = (
        device.type == "cuda"
        and dtype == torch.bfloat16
        and muon_utils.triton_kernels.HAS_TRITON_340
        and torch.cuda.get_device_capability(device)[0] in (9, 10)
    )
    return KERNEL if kernel else DENSE


def _gram_matrix(x: torch.Tensor, total: Total | None, work: Work) -> torch.Tensor:
    """X X^T of each block, `(batch, m, m)`, or a team's sum of them."""
    made = _product("r", x, x, work=work)
    return made if total is None else total(made)


def _normalized(
    r: torch.Tensor, least_norm: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The Gram matrix `(batch, m, m)` of each block over its norm, in place; one over the norm, `(batch, 1, 1)` fp32.

    A block of zeros stays zero: the squared norm of others is at least a quarter, as their largest
    magnitude is half.
    """
    square = (
        r.diagonal(dim1=-2, dim2=-1)
        .sum(
            dim=-1,
            keepdim=True,
            dtype=torch.float32,
        )
        .unsqueeze(-1)
    )
    if least_norm is not None:
        square = torch.maximum(square, least_norm.square())
    inverse = square.clamp_min_(_LEAST_SQUARE).reciprocal_()
    return torch.mul(r, inverse, out=r), inverse.sqrt()


_LEAST_SQUARE = 2.0**-100


def _with_diagonal(
    z: torch.Tensor, a: float, factor: torch.Tensor | None, work: Work
) -> torch.Tensor:
    """factor * (z + a I), rounded once, `(batch, m, m)`, in the memory of `z`."""
    diagonal, added = z.diagonal(dim1=-2, dim2=-1), work.number(a, z.device)
    if factor is None:
        torch.add(diagonal, added, out=diagonal)
        return z
    sums = torch.add(diagonal, added).mul_(factor[:, 0])
    torch.mul(z, factor, out=z)
    diagonal.copy_(sums)
    return z


def _product(
    name: str,
    left: torch.Tensor,
    right: torch.Tensor,
    base: torch.Tensor | None = None,
    *,
    work: Work,
    beta: float = 0.0,
    alpha: float = 1.0,
    is_exact: bool = True,
) -> torch.Tensor:
    """beta * base + alpha * left @ right^T of each block, `(batch, m, m)`, symmetric, in the buffer of this name.

    That is X X^T for blocks `(m, n)`, and the product of `(m, m)` matrices that are symmetric and
    commute. `is_exact` says that `base` is symmetric to the last bit.
    """
    batch, m, n = left.shape
    products = products_on(left.device, left.dtype)
    out = work.take(name, left, (batch, m, m))
    is_dense = products.shares(m, n)[0 if left is right else 1] == 1.0
    if is_dense or (products is KERNEL and not is_exact):
        if base is None:
            return torch.bmm(left, right.mT, out=out)
        return torch.baddbmm(base, left, right, beta=beta, alpha=alpha, out=out)
    if products is KERNEL:
        bases = [None] * batch if base is None else work.blocks(base)
        for a, c, result in zip(work.blocks(left), bases, work.blocks(out), strict=True):
            symmetric_kernel(a, c, result, alpha=alpha, beta=beta)
        return out
    half = m // 2
    blocks = [work.blocks(stack) for stack in (out if base is None else base, left, right, out)]
    for c, a, b, result in zip(*blocks, strict=True):
        # Rows of a symmetric matrix are its columns, and lie together.
        torch.addmm(
            c[:, :half],
            a,
            b[:half].mT,
            beta=beta,
            alpha=alpha,
            out=result[:, :half],
        )
        torch.addmm(
            c[half:, half:],
            a[half:],
            b[half:].mT,
            beta=beta,
            alpha=alpha,
            out=result[half:, half:],
        )
    out[:, :half, half:].copy_(out[:, half:, :half].mT)
    return out


class Tiles(NamedTuple):
    """A configuration of the symmetric kernel: a program makes `rows` x `cols` of the result, `depth` at a time."""

    rows: int
    cols: int
    depth: int
    group: int
    warps: int
    stages: int


SQUARE = Tiles(128, 128, 64, 8, 4, 4)
WIDE = Tiles(128, 256, 64, 8, 8, 3)
"""X X^T on an H100, of 180 configurations: square tiles were the fastest at 4,096 rows, within 1 %, wide ones at 8,192.

A step with them took as long as with configurations that Triton's tuner chose from the best (docs/gpu.md); it would
compile and time all 180 for each size at every start."""
WIDE_FROM_ROWS = 6144


def symmetric_kernel(
    a: torch.Tensor,
    c: torch.Tensor | None,
    out: torch.Tensor,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
) -> None:
    """alpha * a @ a^T + beta * c by emerging-optimizers' kernel, whose own function tunes, and makes a tensor.

    `a` is `(m, n)`, `c` and `out` `(m, m)`, all bf16 and contiguous; alpha and beta are constants
    of a compilation. `c` is symmetric to the last bit: two programs write the elements of a tile on
    the diagonal, each from its half of `c`.
    """
    syrk, (m, n) = muon_utils.triton_kernels.syrk, a.shape
    tiles = WIDE if m >= WIDE_FROM_ROWS else SQUARE

    def described(tensor: torch.Tensor, *block: int) -> Any:
        return syrk.TensorDescriptor(tensor, tensor.shape, tensor.stride(), list(block))

    syrk.syrk_kernel_bf16.fn[(-(-m // tiles.rows) * -(-m // tiles.cols),)](
        described(out, tiles.rows, tiles.cols),
        described(out, tiles.cols, tiles.rows),
        described(a, tiles.rows, tiles.depth),
        described(a, tiles.cols, tiles.depth),
        None if c is None else described(c, tiles.rows, tiles.cols),
        alpha,
        beta,
        False,
        False,
        m,
        n,
        *tiles[:4],
        False,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
