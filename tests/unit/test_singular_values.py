"""Every coefficient set, number of steps and iteration that a run may have gives updates near
orthogonal.

With cans in bf16 singular values went to 44 in five steps and to NaN in eight, and weights with
them: gradients alone are checked. With aol they changed their sign, so that a run went uphill;
after six steps of quintic they were an eighth; with polar_express the Gram iteration in bf16 made
50 of them, where a direction dominated, until each of its first three steps had a run of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from megatron_muon.core import cost
from megatron_muon.core.cost import (
    GRAM,
    STANDARD,
    Iteration,
)
from megatron_muon.core.methods import newton_schulz as ns
from megatron_muon.proven import (
    FULL_PRECISION_SETS,
    PROVEN_STEPS,
    REVERSING_SETS,
    check_iteration,
)
from tests.support.rows import iterated, started

LARGEST = 1.3
SMALLEST = 0.6
"""Of what was at least STRONG, from five steps on."""
STRONG = 0.3
"""Of a block's norm."""
SEEN = 0.05
"""Of a block's norm; the sign of weaker singular values may be lost in bf16's noise."""
CONDITIONS = (1.0, 10.0, 1e2, 1e4, 1e6, 1e8)
DOMINANT = (0.8, 0.9, 0.95, 0.99, 1.0)
"""Share of a block's norm in its first direction; 1 is rank 1."""
RANDOM = 12
"""Random spectra of each of three kinds: powers, exponentials, one dominant direction."""
ROWS = 24
BOTH = (STANDARD, GRAM)
SETS = (*PROVEN_STEPS, *REVERSING_SETS)


class _TF32(TorchFunctionMode):
    """Rounds the operands of fp32 products to the ten bits of TF32, as a GPU does for "high"."""

    def __torch_function__(
        self,
        call: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        name = getattr(call, "__name__", "")
        if name in ("matmul", "__matmul__"):
            args = tuple(map(_rounded, args))
        elif name in ("addmm", "baddbmm"):
            args = (args[0], *map(_rounded, args[1:]))
        return call(*args, **(kwargs or {}))


def _rounded(x: torch.Tensor) -> torch.Tensor:
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0x0FFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


@contextmanager
def arithmetic(precision: str) -> Iterator[torch.dtype]:
    """The products of `--muon-fp32-matmul-prec`."""
    with _TF32() if precision == "high" else nullcontext():
        yield torch.bfloat16 if precision == "medium" else torch.float32


@cache
def blocks(ratio: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Blocks `(batch, m, ratio * m)` of each spectrum, and their U, singular values over the norm,
    and V.
    """
    m, n = ROWS, ratio * ROWS
    generator = torch.Generator().manual_seed(ratio)
    u, _ = torch.linalg.qr(
        torch.randn(m, m, dtype=torch.double, generator=generator),
    )
    v, _ = torch.linalg.qr(
        torch.randn(n, m, dtype=torch.double, generator=generator),
    )
    spectra = [
        torch.logspace(0, -math.log10(condition), m, dtype=torch.double) for condition in CONDITIONS
    ]
    for share in DOMINANT:
        rest = math.sqrt((1 - share**2) / (m - 1))
        spectra.append(
            torch.tensor([share] + [rest] * (m - 1), dtype=torch.double),
        )
    spectra.append(
        torch.linalg.svdvals(torch.randn(m, n, dtype=torch.double, generator=generator)),
    )
    for _ in range(RANDOM):
        exponents, dominant = torch.rand(2, m, dtype=torch.double, generator=generator)
        strength, power = torch.rand(2, dtype=torch.double, generator=generator)
        spectra.append(torch.arange(1, m + 1).double() ** (-3 * power))
        spectra.append(torch.exp(-20 * strength * exponents))
        dominant[1:] *= (
            math.sqrt(
                1 - (0.5 + strength / 2) ** 2,
            )
            / dominant[1:].norm()
        )
        dominant[0] = 0.5 + strength / 2
        spectra.append(dominant)
    values = torch.stack(spectra)
    made = (u * values[:, None]) @ v.T
    return made.float(), u, values / values.norm(dim=1, keepdim=True), v


def fault(
    coefficient_type: str, steps: int, precision: str, *, iterations: Sequence[str] = BOTH
) -> str | None:
    """What is wrong with the results of the iterations, over all ratios and spectra."""
    for ratio in (1, 2, 4, 8):
        start, u, values, v = blocks(ratio)
        for method in iterations:
            runs = Iteration(coefficient_type, steps, precision).runs(GRAM)
            with arithmetic(precision) as dtype:
                result = iterated(
                    started(start, dtype),
                    ns.coefficients(coefficient_type, steps),
                    runs if method == GRAM else None,
                )
            result = result.double()
            if (
                not result.isfinite().all()
                or torch.linalg.eigvalsh(result @ result.mT).max() > LARGEST**2
            ):
                return "too large"
            found = (u.T @ result @ v).diagonal(dim1=1, dim2=2)
            if (found[values >= SEEN] < 0).any():
                return "reversed"
            if steps >= 5 and (found[values >= STRONG] < SMALLEST).any():
                return "too small"
    return None


def allowed(coefficient_type: str, steps: int, precision: str) -> bool:
    try:
        check_iteration(Iteration(coefficient_type, steps, precision))
    except ValueError:
        return False
    return True


def test_every_set_of_emerging_optimizers_is_listed() -> None:
    assert set(SETS) == set(ns.muon_utils._COEFFICIENT_SETS)


@pytest.mark.parametrize(
    ("coefficient_type", "precision"),
    [
        pytest.param(
            name,
            precision,
            marks=pytest.mark.wide if precision == "high" and name != "quintic" else (),
        )
        for name in SETS
        for precision in ("highest", "high", "medium")
    ],
)
def test_updates_are_near_orthogonal_exactly_where_a_run_may_start(
    coefficient_type: str, precision: str
) -> None:
    for steps in range(1, 13):
        proven = BOTH if Iteration(coefficient_type, steps, precision).gram_is_proven else BOTH[:1]
        if allowed(coefficient_type, steps, precision):
            assert fault(coefficient_type, steps, precision, iterations=proven) is None, steps
        elif coefficient_type not in FULL_PRECISION_SETS or precision == "highest":
            assert fault(coefficient_type, steps, precision) is not None, (
                f"{steps} steps are refused for nothing"
            )


@pytest.mark.parametrize("steps", [5, 7, 8])
def test_polar_express_in_runs_of_two_is_not_stable(
    monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """Negative control of the runs that its first steps have."""
    monkeypatch.delitem(cost.ALONE_IN_HALF, "polar_express")
    assert fault("polar_express", steps, "medium", iterations=[GRAM]) == "too large"


def test_gram_is_left_out_where_it_is_not_proven() -> None:
    assert fault("quintic", 10, "medium", iterations=[GRAM]) == "too large"
    assert Iteration("quintic", 10).method_for(128, 1024) == "standard"
    assert Iteration("quintic", 10, "high").method_for(128, 1024) == GRAM
    with pytest.raises(ValueError, match="muon_ns gram is not stable in bf16 with 10 steps of"):
        check_iteration(Iteration("quintic", 10, method=GRAM))


@pytest.mark.parametrize(
    ("name", "steps", "precision", "message"),
    [
        ("cans", 5, "high", "cans is not stable with muon_fp32_matmul_prec high; use highest"),
        ("aol", 5, "highest", "muon_coefficient_type aol turns updates round .* such as quintic"),
        ("polar_express", 4, "medium", "steps 4 is not proven .*; choose one of 5, 6, 7, 8,"),
        ("quintic", 6, "medium", "muon_num_ns_steps 6 is not proven with .* quintic; choose one"),
        ("quintic", 0, "medium", "muon_num_ns_steps 0 is out of range"),
    ],
)
def test_an_iteration_that_is_not_proven_is_refused(name, steps, precision, message) -> None:
    with pytest.raises(ValueError, match=message):
        check_iteration(Iteration(name, steps, precision))
