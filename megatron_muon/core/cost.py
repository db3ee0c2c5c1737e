"""Which Newton-Schulz iteration a block gets, and what it costs in floating-point operations.

A product of `(m, k) @ (k, n)` counts 2 m n k operations; normalisation and elementwise work are
left out. Plain arithmetic on shapes, for training, `plan` and the floor of `benchmarks.step` alike.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from megatron_muon.core.numbers import check_number
from megatron_muon.core.user_errors import SettingError

Coefficients = Sequence[tuple[float, float, float]]
"""`(a, b, c)` of each step's polynomial a x + b x^3 + c x^5."""

STANDARD = "standard"
GRAM = "gram"
AUTO = "auto"

PROVEN_STEPS = {
    "simple": range(1, 13),
    "quintic": (1, 2, 3, 4, 5, 8, 9, 10),
    "polar_express": range(5, 13),
    "cans": range(5, 13),
    "deepseekv4": range(1, 13),
}
"""Numbers of steps, up to 12, with which a coefficient set of emerging-optimizers is proven.

Proven means, over ratios of sides of 1 to 8, condition numbers of 1 to 1e8, dominant directions, rank 1 and random
spectra: no singular value of the result exceeds 1.3, none has changed its sign, and from five steps on those that were
at least 0.3 of the norm are at least 0.6 (tests/unit/test_singular_values.py). polar_express and cans are made for five
steps and more: with fewer, singular values go up to 2. emerging-optimizers begins quintic anew after five steps, and
its first polynomials shrink what is near 1 already: after six steps, updates are an eighth of their size."""
MOST = 1.3
"""No singular value of a result may exceed this."""
GRAM_IN_HALF = {"simple": 12, "quintic": 5, "polar_express": 12, "deepseekv4": 12}
"""Sets that the Gram iteration is proven with in bf16, and up to how many steps."""
ALONE_IN_HALF = {"polar_express": 3}
"""First steps of a set of which each is a run of its own in the Gram iteration in bf16. Those of polar_express multiply
small singular values by 8, 4 and 4, and what squaring has lost with them: in runs of two, a singular value can be 50
after five steps and inf after seven, where another direction dominates."""
FULL_PRECISION_SETS = ("cans",)
"""Sets proven in true fp32 alone. After five steps of cans a singular value can be 600 in bf16 and 300 in TF32."""
REVERSING_SETS = ("aol",)
"""Sets that turn an update round. aol is made for another normalisation than by the norm: its first polynomial is
negative from 0.88 of the norm on."""


@dataclass(frozen=True)
class Products:
    """How a device forms products whose result is symmetric."""

    square: float = 1.0  # operations of X X^T as a share of the dense product's
    symmetric: float = 1.0  # likewise, of two different symmetric matrices that commute
    from_rows: int = 1  # blocks with fewer rows get dense products
    multiple_of: int = 1  # so do blocks of which a side is no multiple of this
    per_byte: int = 1900
    """Operations in the time in which a team's all-reduce moves a byte: an H100 at 65 % of its bf16 rate, NVLink at
    75 %."""
    per_sum: int = 20_000_000_000
    """Operations in the time that an all-reduce takes whatever its size: 30 microseconds."""

    def shares(self, rows: int, cols: int) -> tuple[float, float]:
        """`square` and `symmetric` for a block of `(rows, cols)`."""
        if min(rows, cols) < self.from_rows or rows % self.multiple_of or cols % self.multiple_of:
            return 1.0, 1.0
        return self.square, self.symmetric


DENSE = Products()
HALVES = Products(square=0.75, symmetric=0.75, from_rows=384, per_byte=100, per_sum=100_000_000)
"""A processor forms three of the four quarters of a symmetric product.

Measured with torch 2.13 on an AVX-512 processor, one core: the whole iteration takes 0.85 to 0.93 of the time from 512
rows on, in fp32 and bf16, and at 256 rows in bf16 it takes 1.1 times as long, because the parts become too small."""
KERNEL = Products(square=0.5, from_rows=4096, multiple_of=8)
"""emerging-optimizers' symmetric kernel on a GPU of compute capability 9 or 10, in bf16.

It takes one block at a time, as A A^T. On an H100 X X^T of 4,096 rows took two thirds of the dense product's time, of
8,192 half, and the iteration gained 11 to 20 %; with 3,072 rows it took as long as dense products, with 2,048, where a
batch of dense ones is one launch that fills the device, up to 1.6 times as long (docs/gpu.md)."""


SUM_BYTES = 4
"""A team adds up its parts of X X^T in fp32."""


class ProductCounts(NamedTuple):
    """Products of an iteration on a block of `(n, m)`, n <= m."""

    gram: int  # X X^T
    square: int  # squares of (n, n) matrices that are symmetric to the last bit
    symmetric: int  # other products of symmetric (n, n) matrices
    wide: int  # (n, n) @ (n, m)


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
        """Whether the products run in bf16, and not in fp32."""
        return self.precision in ("medium", "low")

    @property
    def gram_is_proven(self) -> bool:
        """Whether the Gram iteration is proven where the standard one is."""
        return not self.half or self.steps <= GRAM_IN_HALF.get(self._set, 0)

    @property
    def runs(self) -> tuple[int, ...]:
        """How many steps each run of the Gram iteration takes before it starts again from the matrix."""
        return gram_runs(self.steps, half=self.half, alone=ALONE_IN_HALF.get(self._set, 0))

    @property
    def _set(self) -> str:
        """The name of the set; none of coefficients that are given."""
        return self.coefficient_type if isinstance(self.coefficient_type, str) else ""

    def method_for(self, rows: int, cols: int, team: int = 1) -> str:
        """The iteration that blocks of `(rows, cols)` get, each cut by `team` ranks: "standard" or "gram"."""
        if self.method != AUTO:
            return self.method
        if not self.gram_is_proven:
            return STANDARD
        return min((STANDARD, GRAM), key=lambda method: self._cost(rows, cols, method, team))

    def with_steps(self, steps: int) -> Iteration:
        """The same with as many steps as a matrix asks for, `Matrix.steps`."""
        return replace(self, steps=steps) if steps else self

    @functools.cache  # noqa: B019  # there are few kinds of blocks, and few instances
    def flops(self, rows: int, cols: int, team: int = 1, steps: int = 0) -> int:
        """Operations of the iteration that a block of `(rows, cols)` gets, on each rank of a team that cuts it."""
        taken = self.with_steps(steps)
        return taken._flops(rows, cols, taken.method_for(rows, cols, team), team)

    def cost(self, rows: int, cols: int, team: int = 1, steps: int = 0) -> int:
        """The same with the time of the team's sums, as operations."""
        taken = self.with_steps(steps)
        return taken._cost(rows, cols, taken.method_for(rows, cols, team), team)

    def _cost(self, rows: int, cols: int, method: str, team: int) -> int:
        flops = self._flops(rows, cols, method, team)
        if team == 1:
            return flops
        moved = 2 * (team - 1) / team * SUM_BYTES * min(rows, cols) ** 2
        return flops + round(
            self.counts(method).gram * (self.products.per_sum + self.products.per_byte * moved)
        )

    def _flops(self, rows: int, cols: int, method: str, team: int) -> int:
        n, m = min(rows, cols), -(-max(rows, cols) // team)
        wide, _ = self.products.shares(n, m)
        square, symmetric = self.products.shares(n, n)
        counts = self.counts(method)
        return round(
            counts.gram * wide * 2 * n * n * m
            + (counts.square * square + counts.symmetric * symmetric) * 2 * n**3
            + counts.wide * 2 * n * n * m
        )

    def counts(self, method: str) -> ProductCounts:
        """The products of `method`, "standard" or "gram".

        A standard step forms X X^T, its square and the product with X
        (https://kellerjordan.github.io/posts/muon, "Runtime analysis"). A run of the Gram iteration
        forms X X^T and applies its result to X once; each step squares, all but the first update
        the factor, all but the last update the Gram matrix
        (https://github.com/Dao-AILab/gram-newton-schulz), whose squares count as other products
        from then on.
        """
        steps, runs = self.steps, len(self.runs)
        if method == STANDARD:
            return ProductCounts(gram=steps, square=steps, symmetric=0, wide=steps)
        return ProductCounts(gram=runs, square=runs, symmetric=4 * (steps - runs), wide=runs)

    def check(self, setting: str = "muon_num_ns_steps") -> None:
        """Raise a SettingError if the result may be far from orthogonal; `setting` gave the steps."""
        check_number("muon_num_ns_steps", self.steps, setting=setting)
        coefficients = "muon_coefficient_type", self.coefficient_type
        chosen = f"{{muon_coefficient_type}} {self.coefficient_type}"
        proven = PROVEN_STEPS.get(self._set)
        if not isinstance(self.coefficient_type, str):
            self._check_coefficients(self.coefficient_type)
        if self._set in REVERSING_SETS:
            reason = "turns updates round where one direction dominates a matrix"
            raise SettingError(*coefficients, reason, "use another, such as quintic")
        if self._set in FULL_PRECISION_SETS and self.precision != "highest":
            reason = f"is not stable with {{muon_fp32_matmul_prec}} {self.precision}"
            raise SettingError(*coefficients, reason, "use highest, or quintic")
        if proven is not None and self.steps not in proven:
            remedy = f"choose one of {', '.join(map(str, proven))}; 5 is usual"
            raise SettingError(setting, self.steps, f"is not proven with {chosen}", remedy)
        if self.method == GRAM and not self.gram_is_proven:
            reason = f"is not stable in bf16 with {self.steps} steps of {chosen}"
            remedy = "use {muon_ns} auto, or {muon_fp32_matmul_prec} high"
            raise SettingError("muon_ns", self.method, reason, remedy)

    def check_steps_for(self, steps_for: Mapping[str, int]) -> None:
        """Check the steps of matrices by pattern."""
        for pattern, steps in steps_for.items():
            replace(self, steps=steps).check(f"muon_ns_steps_for {pattern}:")

    def _check_coefficients(self, given: Coefficients) -> None:
        """Refuse coefficients that do not bring singular values between 0 and `MOST`, before any rounding."""
        values = np.geomspace(1e-8, 1.0, 4096)
        for step in range(self.steps):
            a, b, c = given[min(step, len(given) - 1)]
            values = a * values + b * values**3 + c * values**5
        if not (values.min() >= 0.0 and values.max() <= MOST):
            reason = (
                f"with {self.steps} steps bring singular values between {values.min():.3g} and"
                f" {values.max():.3g}, Muon wants 0 to {MOST}"
            )
            remedy = "(3.4445, -4.775, 2.0315) with 5 steps is usual"
            raise SettingError("muon_coefficient_type", given, reason, remedy)


def gram_runs(steps: int, *, half: bool, alone: int = 0) -> tuple[int, ...]:
    """How many steps each run of the Gram iteration takes before it restarts; in `half` the first few are `alone`.

    Squaring loses small singular values in half precision, and every step amplifies what is lost.
    Runs of two steps in bf16 stay within 0.003 of the standard iteration's error (relative to the
    polar factor's norm, over condition numbers of 1 to 1e8); runs of three were off by up to 0.045.
    In fp32 three are safe.
    """
    longest = 2 if half else 3
    first = min(alone, steps) if half else 0
    return (1,) * first + tuple(min(longest, steps - done) for done in range(first, steps, longest))
