"""Products of stacks whose result is symmetric: dense, in halves on a processor, or by a GPU kernel."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

import torch
from emerging_optimizers.orthogonalized_optimizers import muon_utils
from torch import Tensor

from megatron_muon.core.cost import DENSE, HALVES, KERNEL, QUACK, Products
from megatron_muon.core.methods.method import Work
from megatron_muon.core.probe import SILENT, Probe
from megatron_muon.core.teams import TeamGroup


def products_on(device: torch.device, dtype: torch.dtype) -> Products:
    """Symmetric products of `device` in `dtype`.

    QuACK's are taken on GPUs that are known to be faster with them, if it can be imported.
    emerging-optimizers' kernel needs bf16, Triton's tensor descriptors (3.4), and a GPU that has
    them in hardware and shared memory for `WIDE` tiles: GeForce and RTX cards of capability 12 have half
    of a data centre's.
    """
    if device.type == "cpu":
        return HALVES
    if device.type != "cuda" or dtype != torch.bfloat16:
        return DENSE
    is_faster = FASTER_WITH_QUACK and torch.cuda.get_device_name(device).startswith(
        FASTER_WITH_QUACK
    )
    if is_faster and importlib.util.find_spec("quack"):
        return QUACK
    has_hardware = torch.cuda.get_device_capability(device)[0] in (9, 10)
    return KERNEL if has_hardware and muon_utils.triton_kernels.HAS_TRITON_340 else DENSE


FASTER_WITH_QUACK: tuple[str, ...] = ()
"""Names of GPUs, or their beginnings, on which `python -m benchmarks.gpu` and `doctor --gpu --only
arithmetic` have shown QuACK's products to be faster, within the proven bounds."""


class SymmetricProducts:
    """Forms symmetric products of stacks in the buffers of `work`.

    Args:
        products: the device's, `products_on`.
        work: buffers "r", "z" and, with a team, "sum".
        team: ranks that each have some columns of the blocks.
        probe: counts the bytes of the team's sums.
    """

    def __init__(
        self,
        products: Products,
        work: Work,
        team: TeamGroup | None = None,
        probe: Probe = SILENT,
    ) -> None:
        self.work = work
        self._products = products
        self._shares: dict[int, tuple[float, float]] = {}  # by columns; all blocks have m rows
        self._team = team
        self._probe = probe

    def product(
        self,
        name: str,
        left: Tensor,
        right: Tensor,
        base: Tensor | None = None,
        *,
        beta: float = 0.0,
        alpha: float = 1.0,
        is_exact: bool = True,
    ) -> Tensor:
        """beta * base + alpha * left @ right^T of each block, `(count, m, m)`, in the buffer `name`.

        Without `base` it is X X^T: over all columns of a team, and collective there. Otherwise
        `left` and `right` are the same blocks `(m, n)`, or symmetric matrices that commute.
        `is_exact`: `base` is symmetric to the last bit.
        """
        count, m, n = left.shape
        out = self.work.take(name, (count, m, m), left.dtype)
        if n not in self._shares:
            self._shares[n] = self._products.shares(m, n)
        square, symmetric = self._shares[n]
        share = square if left is right else symmetric
        uses_kernel = self._products is KERNEL
        if share == 1.0 or (uses_kernel and not is_exact):
            if base is None:
                torch.bmm(left, right.mT, out=out)
            else:
                torch.baddbmm(base, left, right, beta=beta, alpha=alpha, out=out)
        elif self._products is QUACK:
            # its result is symmetric to the last bit, whatever the base is
            quack: Any = importlib.import_module("quack.gemm_interface")
            quack.gemm_symmetric(left, right.mT, C=base, out=out, alpha=alpha, beta=beta)
        else:
            blocks = self.work.blocks
            bases = [None] * count if base is None else blocks(base)
            operands = zip(blocks(left), blocks(right), bases, blocks(out), strict=True)
            for a, b, c, result in operands:
                if uses_kernel:
                    symmetric_kernel(a, c, result, alpha=alpha, beta=beta)
                else:
                    _form_in_halves(a, b, c, result, alpha=alpha, beta=beta)
        if base is None and self._team is not None:
            buffer = self.work.take("sum", out.shape, torch.float32)
            self._team.total(out, buffer, self._probe)
        return out


def _form_in_halves(
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    out: Tensor,
    *,
    alpha: float,
    beta: float,
) -> None:
    """alpha * a @ b^T + beta * c, symmetric, `(m, m)`: three of its four quarters, and one of them again."""
    c = out if c is None else c
    half = len(out) // 2
    left = out[:, :half]
    corner = out[half:, half:]
    product = functools.partial(torch.addmm, beta=beta, alpha=alpha)
    # Rows of a symmetric matrix are its columns, and lie together.
    product(c[:, :half], a, b[:half].mT, out=left)
    product(c[half:, half:], a[half:], b[half:].mT, out=corner)
    out[:half, half:].copy_(left[half:].mT)


SQUARE = (128, 128, 64, 8, 4, 4)
WIDE = (128, 256, 64, 8, 8, 3)
"""Configurations of the kernel: rows and columns of the result that a program forms, depth of a pass, group size, warps
and stages.

X X^T on an H100, of 180 configurations: square tiles were the fastest at 4,096 rows, within 1 %, wide ones at 8,192.
A step with them took as long as with configurations that Triton's tuner chose from the best (docs/gpu.md); it would
compile and time all 180 for each size at every start."""
WIDE_FROM_ROWS = 6144


def symmetric_kernel(
    a: Tensor,
    c: Tensor | None,
    out: Tensor,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
) -> None:
    """alpha * a @ a^T + beta * c by emerging-optimizers' kernel, whose own function tunes, and makes a tensor.

    `a` is `(m, n)`, `c` and `out` `(m, m)`, all bf16 and contiguous; alpha and beta are constants
    of a compilation. `c` is symmetric to the last bit: two programs write the elements of a tile on
    the diagonal, each from its half of `c`.
    """
    syrk = muon_utils.triton_kernels.syrk
    m, n = a.shape
    rows, cols, depth, group, warps, stages = WIDE if m >= WIDE_FROM_ROWS else SQUARE
    programs = -(-m // rows) * -(-m // cols)

    def described(tensor: Tensor, *tile: int) -> Any:
        return syrk.TensorDescriptor(tensor, tensor.shape, tensor.stride(), list(tile))

    syrk.syrk_kernel_bf16.fn[(programs,)](
        described(out, rows, cols),
        described(out, cols, rows),
        described(a, rows, depth),
        described(a, cols, depth),
        None if c is None else described(c, rows, cols),
        alpha,
        beta,
        False,
        False,
        m,
        n,
        rows,
        cols,
        depth,
        group,
        False,
        num_warps=warps,
        num_stages=stages,
    )
