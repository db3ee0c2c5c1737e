"""Updates do not depend on the scale of gradients, as clipping changes it, and finite gradients are
taken as finite.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import megatron_muon

SHAPE = (24, 40)
SCALES = (1e-30, 1e-20, 1e-8, 1e8, 1e20, 1e30, 1e36)
VARIANTS: dict[str, dict[str, Any]] = {
    "muon": {},
    "gram": {"ns": "gram"},
    # of less, elements near zero are rounding alone
    "adamuon": {"moment2_method": "adamuon", "moment2_eps": 1e-2},
    "normuon": {"moment2_method": "normuon"},
    "hyperball": {"hyperball": True},
    "host": {"offload": "cpu"},
}


def weights() -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(7))


def gradients(steps: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(SHAPE, generator=generator) for _ in range(steps)]


def moved(scale: float, dtype: torch.dtype = torch.float32, **given: Any) -> torch.Tensor:
    """What three steps add to a matrix's weights, whose gradients are `scale` times those of size
    1, in `dtype`.
    """
    p = nn.Parameter(
        weights().to(dtype) if "hyperball" in given else torch.zeros(SHAPE, dtype=dtype)
    )
    before = p.detach().clone()
    optimizer = megatron_muon.Muon([p], lr=0.5, weight_decay=0.0, **given)
    for gradient in gradients():
        p.grad = (gradient * scale).to(dtype)
        optimizer.step()
    assert optimizer.skipped_updates() == {}
    return (p.detach() - before).float()


@pytest.mark.parametrize("variant", VARIANTS)
def test_three_steps_are_those_of_gradients_of_size_one(variant: str) -> None:
    """With torch's eps of 1e-7 as the default, updates vanished from gradients of 1e-9 on."""
    given = VARIANTS[variant]
    reference = moved(1.0, fp32_matmul_prec="highest", **given)
    assert reference.norm() > 1.0
    for scale in SCALES:
        found = moved(scale, fp32_matmul_prec="highest", **given)
        torch.testing.assert_close(
            found, reference, rtol=1e-4, atol=2e-5, msg=lambda text, s=scale: f"{s}: {text}"
        )


@pytest.mark.parametrize(
    "given", [{}, {"momentum_dtype": "bf16"}, {"momentum_dtype": "int8"}], ids=str
)
def test_neither_bf16_nor_rounded_momentum_depends_on_the_scale(given: dict[str, Any]) -> None:
    """Each rounds by up to some hundredths of an update's size, at other places for another
    scale.
    """
    reference = moved(1.0, fp32_matmul_prec="highest")
    for scale in SCALES:
        for dtype in (torch.float32, torch.bfloat16):
            found = moved(scale, dtype, **given)
            assert (found - reference).norm() < 0.05 * reference.norm(), (scale, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradients_whose_sum_overflows_are_finite(dtype: torch.dtype) -> None:
    """Those of 1e36 were skipped as not finite, as their magnitudes add up to more than fp32
    has.
    """
    finite, *bad = (
        nn.Parameter(
            torch.zeros(64, 64, dtype=dtype),
        )
        for _ in range(4)
    )
    optimizer = megatron_muon.Muon([finite, *bad], lr=1.0)
    finite.grad = torch.full((64, 64), 1e36, dtype=dtype)
    for p, value in zip(bad, (math.nan, math.inf, -math.inf), strict=True):
        p.grad = torch.ones(64, 64, dtype=dtype)
        p.grad[-1, -1] = value
    optimizer.step()
    assert list(optimizer.skipped_updates().values()) == [1, 1, 1]
    assert finite.detach().abs().max() > 0.001
    assert not any(p.detach().any() for p in bad)
    assert not any(optimizer.state[p]["momentum_buffer"].any() for p in bad)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_the_measured_norm_of_momentum_is_right_at_any_scale(scale: float) -> None:
    """Squares in fp32 made it 0 or infinite."""
    p = nn.Parameter(torch.zeros(SHAPE))
    optimizer = megatron_muon.Muon([p], momentum=0.5, metrics_interval=1)
    p.grad = gradients()[0] * scale
    optimizer.step()
    norm = 0.5 * scale * gradients()[0].double().norm().item()
    assert optimizer.metrics.latest is not None
    assert optimizer.metrics.latest.values["momentum_norm"] == pytest.approx(
        norm, rel=1e-5, abs=0.0
    )


def test_hyperball_keeps_the_norm_of_tiny_weights() -> None:
    """Norms below 1e-8 fell with every step."""
    p = nn.Parameter(1e-12 * weights())
    before = p.detach().clone()
    optimizer = megatron_muon.Muon([p], lr=0.1, weight_decay=0.0, hyperball=True)
    for gradient in gradients():
        p.grad = gradient
        optimizer.step()
    assert p.detach().double().norm() == pytest.approx(
        before.double().norm().item(), rel=1e-5, abs=0.0
    )
    assert (p.detach() - before).norm() > 0.05 * before.norm()
