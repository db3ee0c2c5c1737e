"""Proven Newton-Schulz iterations, and the errors for others.

Front ends check their settings here; `tests/unit/test_singular_values.py` is the proof.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from megatron_muon.core.cost import GRAM, Coefficients, Iteration
from megatron_muon.errors import SettingError
from megatron_muon.ranges import check_number

PROVEN_STEPS = {
    "simple": range(1, 13),
    "quintic": (1, 2, 3, 4, 5, 8, 9, 10),
    "polar_express": range(5, 13),
    "cans": range(5, 13),
    "deepseekv4": range(1, 13),
}
"""Numbers of steps, up to 12, with which a coefficient set of emerging-optimizers is proven.

Proven means, over ratios of sides of 1 to 8, condition numbers of 1 to 1e8, dominant directions,
rank 1 and random spectra: no singular value of the result exceeds 1.3, none has changed its sign,
and from five steps on those that were at least 0.3 of the norm are at least 0.6
(tests/unit/test_singular_values.py). polar_express and cans are made for five steps and more: with
fewer, singular values go up to 2. emerging-optimizers begins quintic anew after five steps, and its
first polynomials shrink what is near 1 already: after six steps, updates are an eighth of their
size."""
MOST = 1.3
"""No singular value of a result may exceed this."""

FULL_PRECISION_SETS = ("cans",)
"""Sets proven in true fp32 alone. After five steps of cans a singular value can be 600 in bf16 and
300 in TF32."""
REVERSING_SETS = ("aol",)
"""Sets that turn an update round. aol is made for another normalisation than by the norm: its first
polynomial is negative from 0.88 of the norm on."""


def check_iteration(iteration: Iteration, setting: str = "muon_num_ns_steps") -> None:
    """Raise a SettingError if the result may be far from orthogonal.

    `setting` gave the steps.
    """
    check_number("muon_num_ns_steps", iteration.steps, setting=setting)
    if isinstance(iteration.coefficient_type, str):
        _check_set(iteration, iteration.coefficient_type, setting)
    else:
        _check_coefficients(iteration.coefficient_type, iteration.steps)
    if iteration.method == GRAM and not iteration.gram_is_proven:
        given = f"{iteration.steps} steps of {iteration.coefficient_type}"
        reason = f"is not stable in bf16 with {given}"
        remedy = "use {muon_ns} auto, or {muon_fp32_matmul_prec} high"
        raise SettingError("muon_ns", iteration.method, reason, remedy)


def check_steps_for(iteration: Iteration, steps_for: Mapping[str, int]) -> None:
    """Check the steps of matrices by pattern."""
    for pattern, steps in steps_for.items():
        check_iteration(replace(iteration, steps=steps), f"muon_ns_steps_for {pattern}:")


def _check_set(iteration: Iteration, name: str, setting: str) -> None:
    proven = PROVEN_STEPS.get(name, ())
    if name in REVERSING_SETS:
        reason = "turns updates round where one direction dominates a matrix"
        remedy = "use another, such as quintic"
    elif not proven:
        reason = "does not exist"
        remedy = f"choose one of {', '.join(PROVEN_STEPS)}"
    elif name in FULL_PRECISION_SETS and iteration.precision != "highest":
        reason = f"is not stable with {{muon_fp32_matmul_prec}} {iteration.precision}"
        remedy = "use highest, or quintic"
    elif iteration.steps not in proven:
        choices = ", ".join(map(str, proven))
        reason = f"is not proven with {{muon_coefficient_type}} {name}"
        remedy = f"choose one of {choices}; 5 is usual"
        raise SettingError(setting, iteration.steps, reason, remedy)
    else:
        return
    raise SettingError("muon_coefficient_type", name, reason, remedy)


def _check_coefficients(given: Coefficients, steps: int) -> None:
    """Refuse coefficients that leave singular values outside 0 and `MOST`, before rounding."""
    values = np.geomspace(1e-8, 1.0, 4096)
    for step in range(steps):
        a, b, c = given[min(step, len(given) - 1)]
        values = a * values + b * values**3 + c * values**5
    lowest = values.min()
    highest = values.max()
    if not (lowest >= 0.0 and highest <= MOST):
        reason = f"bring singular values between {lowest:.3g} and {highest:.3g}"
        remedy = f"keep them within 0 and {MOST}, as (3.4445, -4.775, 2.0315) with 5 steps"
        raise SettingError("muon_coefficient_type", given, reason, remedy)
