"""Every coefficient set, number of steps and iteration that a run may have keeps singular values at most 1.3.

With cans in bf16 they went to 44 in five steps and to NaN in eight, and weights with them: gradients alone are checked.
"""

from __future__ import annotations

import math

import pytest
import torch

from megatron_muon.optim import newton_schulz as ns
from megatron_muon.optim.orthogonalize import Orthogonalizer, to_unit_magnitude
from megatron_muon.sharding.cost import FEWEST_STEPS, FP32_SETS, MOST_STEPS, check_stable

LARGEST = 1.3
CONDITIONS = (1.0, 10.0, 1e2, 1e4, 1e6, 1e8)
ROWS = 24


def blocks(ratio: int) -> torch.Tensor:
    """Blocks `(7, m, ratio * m)`: one of each condition, and a random one."""
    m, n = ROWS, ratio * ROWS
    generator = torch.Generator().manual_seed(ratio)
    u, _ = torch.linalg.qr(torch.randn(m, m, dtype=torch.double, generator=generator))
    v, _ = torch.linalg.qr(torch.randn(n, m, dtype=torch.double, generator=generator))
    spectra = [torch.logspace(0, -math.log10(condition), m, dtype=torch.double) for condition in CONDITIONS]
    return torch.stack([*((u * values) @ v.T for values in spectra), torch.randn(m, n, generator=generator)]).float()


def largest(coefficient_type: str, steps: int, dtype: torch.dtype) -> float:
    """The largest singular value over both iterations, all ratios and conditions; inf where one is not finite."""
    found = 0.0
    for ratio in (1, 2, 3, 4, 6, 8):
        start = to_unit_magnitude(blocks(ratio), dtype)
        for iterate in (ns.standard, ns.gram):
            result = iterate(start, ns.coefficients(coefficient_type, steps)).double()
            if not result.isfinite().all():
                return math.inf
            found = max(found, float(torch.linalg.matrix_norm(result, 2).max()))
    return found


def allowed(coefficient_type: str, steps: int, dtype: torch.dtype) -> bool:
    try:
        check_stable(coefficient_type, steps, half=dtype == torch.bfloat16)
    except ValueError:
        return False
    return True


def test_every_set_of_emerging_optimizers_is_listed() -> None:
    assert set(FEWEST_STEPS) == set(ns.muon_utils._COEFFICIENT_SETS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("coefficient_type", FEWEST_STEPS)
def test_singular_values_stay_below_the_bound_exactly_where_a_run_may_start(
    coefficient_type: str, dtype: torch.dtype
) -> None:
    for steps in range(1, MOST_STEPS + 1):
        within = largest(coefficient_type, steps, dtype) <= LARGEST
        if allowed(coefficient_type, steps, dtype):
            assert within, steps
        elif coefficient_type not in FP32_SETS or dtype == torch.float32:
            assert not within, f"{steps} steps are refused for nothing"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"coefficient_type": "cans"},
            "--muon-coefficient-type cans is not stable in bf16; use --muon-fp32-matmul-prec",
        ),
        ({"coefficient_type": "polar_express", "num_steps": 4}, "--muon-num-ns-steps 4 .* polar_express takes 5 to 12"),
        ({"num_steps": 0}, "--muon-num-ns-steps 0 is out of range"),
        ({"num_steps": 13}, "--muon-num-ns-steps 13 is out of range"),
        ({"method": "newton"}, "--muon-ns newton does not exist; choose one of auto, standard, gram"),
    ],
)
def test_an_iteration_that_is_not_proven_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Orthogonalizer(**settings)
    Orthogonalizer(coefficient_type="cans", matmul_precision="high")
