"""Choice of the Newton-Schulz iteration for a block, and its cost in operations.

A product of `(m, k) @ (k, n)` counts 2 m n k operations; normalization and elementwise work are
left out. Plain arithmetic on shapes, for training, `plan` and the floor of `benchmarks.step`
alike.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

Coefficients = Sequence[tuple[float, float, float]]
"""`(a, b, c)` of each step's polynomial a x + b x^3 + c x^5."""

STANDARD = "standard"
GRAM = "gram"
AUTO = "auto"

GRAM_IN_HALF: dict[object, int] = {
    "simple": 12,
    "quintic": 5,
    "polar_express": 12,
    "deepseekv4": 12,
}
"""Sets that the Gram iteration is proven with in bf16, and up to how many steps."""
ALONE_IN_HALF: dict[object, int] = {"polar_express": 3}
"""First steps of a set of which each is a run of its own in the Gram iteration in bf16. Those of
polar_express multiply small singular values by 8, 4 and 4, and what squaring has lost with them: in
runs of two, a singular value can be 50 after five steps and inf after seven, where another
direction dominates."""


@dataclass(frozen=True)
class Products:
    """How a device forms products whose result is symmetric."""

    square: float = 1.0  # operations of X X^T as a share of the dense product's
    symmetric: float = 1.0  # likewise, of two different symmetric matrices that commute
    from_rows: int = 1  # blocks with fewer rows get dense products
    multiple_of: int = 1  # so do blocks of which a side is no multiple of this
    per_byte: int = 1900
    """Operations in the time in which a team's all-reduce moves a byte: an H100 at 65 % of its bf16
    rate, NVLink at 75 %."""
    per_sum: int = 20_000_000_000
    """Operations in the time that an all-reduce takes whatever its size: 30 microseconds."""

    def shares(self, rows: int, cols: int) -> tuple[float, float]:
        """`square` and `symmetric` for a block of `(rows, cols)`."""
        is_small = min(rows, cols) < self.from_rows
        if is_small or rows % self.multiple_of or cols % self.multiple_of:
            return 1.0, 1.0
        return self.square, self.symmetric


DENSE = Products()
HALVES = Products(
    square=0.75,
    symmetric=0.75,
    from_rows=384,
    per_byte=100,
    per_sum=100_000_000,
)
"""A processor forms three of the four quarters of a symmetric product.

Measured with torch 2.13 on an AVX-512 processor, one core: the whole iteration takes 0.85 to 0.93
of the time from 512 rows on, in fp32 and bf16, and at 256 rows in bf16 it takes 1.1 times as long,
because the parts become too small."""
KERNEL = Products(square=0.5, from_rows=4096, multiple_of=8)
"""emerging-optimizers' symmetric kernel on a GPU of compute capability 9 or 10, in bf16.

It takes one block at a time, as A A^T. On an H100 X X^T of 4,096 rows took two thirds of the dense
product's time, of 8,192 half, and the iteration gained 11 to 20 %; with 3,072 rows it took as long
as dense products, with 2,048, where a batch of dense ones is one launch that fills the device, up
to 1.6 times as long (docs/gpu.md)."""

QUACK = Products(square=0.5, symmetric=0.5, from_rows=256, multiple_of=8)
"""QuACK's symmetric products, of whole stacks and of two matrices that commute, in bf16.

They add the base as they write, where cuBLAS copies it first. Shares and the least rows are
assumed: no GPU has measured them here, so `methods.symmetric.FASTER_WITH_QUACK` names none.
"""

TOGETHER = {"cpu": 2**20, "cuda": 2**23}
"""Elements of the blocks that are iterated together, or of rows that several operations take. On a
processor they stay in its cache; on a GPU such buffers stay small beside a wave's."""

MOST_TOGETHER = 2**25
"""The same of small blocks on a GPU, where launches would take longer than products."""

WORK_OF_LAUNCHES = 400_000_000_000
"""Operations that an H100 does in bf16 at 65 % of its rate in twice the time of 60 launches, 5
microseconds each. One showed 60 % and 7 microseconds (docs/gpu.md)."""


@dataclass(frozen=True)
class Iteration:
    """Settings that decide which iteration a block gets and what it costs.

    `precision` "highest" and "high" iterate in fp32, "medium" and "low" in bf16, as
    torch.set_float32_matmul_precision names them.
    """

    # a set, or each step's, last repeated
    coefficient_type: str | tuple[tuple[float, float, float], ...] = "quintic"
    steps: int = 5
    precision: str = "medium"
    # "standard", "gram", or "auto" for the one with fewer operations, of those that are proven
    method: str = AUTO
    products: Products = DENSE  # how the device forms symmetric products

    @property
    def half(self) -> bool:
        """True if products run in bf16, not in fp32."""
        return self.precision in ("medium", "low")

    @property
    def gram_is_proven(self) -> bool:
        """True if the Gram iteration is proven for these settings; the standard one must be."""
        return not self.half or self.steps <= GRAM_IN_HALF.get(self.coefficient_type, 0)

    def runs(self, method: str) -> tuple[int, ...]:
        """Numbers of steps that `method` takes before it starts again from the matrix.

        Squaring loses small singular values in half precision, and every step amplifies what is
        lost. Runs of two steps in bf16 stay within 0.003 of the standard iteration's error
        (relative to the polar factor's norm, over condition numbers of 1 to 1e8); runs of three
        were off by up to 0.045. In fp32 three are safe.
        """
        if method == STANDARD:
            return (1,) * self.steps
        longest = 3
        alone = 0
        if self.half:
            longest = 2
            alone = min(ALONE_IN_HALF.get(self.coefficient_type, 0), self.steps)
        starts = range(alone, self.steps, longest)
        return (1,) * alone + tuple(min(longest, self.steps - start) for start in starts)

    def method_for(
        self,
        rows: int,
        cols: int,
        team: int = 1,
    ) -> str:
        """Iteration of blocks of `(rows, cols)`, each cut by `team` ranks: "standard" or "gram"."""
        if self.method != AUTO:
            return self.method
        if not self.gram_is_proven:
            return STANDARD
        return min(
            (STANDARD, GRAM), key=lambda name: replace(self, method=name).cost(rows, cols, team)
        )

    def with_steps(self, steps: int) -> Iteration:
        """This iteration with `Matrix.steps`; 0 keeps its own."""
        return replace(self, steps=steps) if steps else self

    @functools.cache  # noqa: B019  # there are few kinds of blocks, and few instances
    def cost(
        self,
        rows: int,
        cols: int,
        team: int = 1,
        steps: int = 0,
    ) -> int:
        """Operations of a block on each rank of its team; the time of sums counts as operations.

        A standard step forms X X^T, its square and the product with X
        (https://kellerjordan.github.io/posts/muon, "Runtime analysis"). A run of the Gram iteration
        does so once; each further step takes four products of symmetric matrices
        (https://github.com/Dao-AILab/gram-newton-schulz).
        """
        iteration = self.with_steps(steps)
        m = min(rows, cols)
        n = -(-max(rows, cols) // team)
        runs = len(iteration.runs(iteration.method_for(rows, cols, team)))
        gram_share, _ = self.products.shares(m, n)
        square_share, symmetric_share = self.products.shares(m, m)
        wide = 2 * m * m * n
        small = 2 * m**3
        total = runs * ((gram_share + 1) * wide + square_share * small)
        total += 4 * (iteration.steps - runs) * symmetric_share * small
        if team > 1:
            moved_bytes = 2 * (team - 1) / team * 4 * m * m  # X X^T in fp32
            total += runs * (self.products.per_sum + self.products.per_byte * moved_bytes)
        return round(total)
