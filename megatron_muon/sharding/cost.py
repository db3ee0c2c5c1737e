"""What orthogonalising a block costs, in floating-point operations.

Plain arithmetic on shapes, for owners' loads and for estimates. Counts are those of dense products (2 m n k for an
`(m, k) @ (k, n)`); normalisation and elementwise work are left out, they are linear in the elements.
"""

from __future__ import annotations

STANDARD = "standard"
GRAM = "gram"


def standard_flops(rows: int, cols: int, steps: int = 5) -> int:
    """Operations of the standard Newton-Schulz iteration on an `(rows, cols)` block.

    With n the smaller and m the larger side, a step forms X X^T (2 n^2 m), its square (2 n^3) and the product with X
    (2 n^2 m). Source: https://kellerjordan.github.io/posts/muon, "Runtime analysis".
    """
    n, m = min(rows, cols), max(rows, cols)
    return steps * (4 * n * n * m + 2 * n**3)


def gram_flops(rows: int, cols: int, steps: int = 5, restarts: int = 1) -> int:
    """Operations of the Gram iteration on an `(rows, cols)` block: n x n products between as few wide ones as possible.

    Each of the `restarts + 1` runs forms the Gram matrix and applies its result (4 n^2 m); a step costs the polynomial
    (2 n^3) and updates of the accumulated factor and of the Gram matrix (2 n^3 and 4 n^3). The first step of a run has
    no factor to update and the last no Gram matrix. Source: https://github.com/Dao-AILab/gram-newton-schulz.
    """
    n, m = min(rows, cols), max(rows, cols)
    runs = restarts + 1
    return runs * 4 * n * n * m + steps * 8 * n**3 - runs * 6 * n**3


def flops(rows: int, cols: int, *, method: str = STANDARD, steps: int = 5) -> int:
    """Operations of `method`, "standard" or "gram", on an `(rows, cols)` block."""
    return gram_flops(rows, cols, steps) if method == GRAM else standard_flops(rows, cols, steps)
