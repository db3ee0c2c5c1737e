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


def normal(seed: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def moved(
    scale: float,
    dtype: torch.dtype = torch.float32,
    **given: Any,
) -> torch.Tensor:
    """The sum of three updates, for gradients of size `scale`."""
    start = normal(7) if "hyperball" in given else torch.zeros(SHAPE)
    p = nn.Parameter(start.clone().to(dtype))
    optimizer = megatron_muon.Muon([p], lr=0.5, weight_decay=0.0, **given)
    for seed in range(3):
        p.grad = (normal(seed) * scale).to(dtype)
        optimizer.step()
    assert optimizer.skipped_updates() == {}
    return p.detach().float() - start


@pytest.mark.parametrize("variant", VARIANTS)
def test_three_steps_are_those_of_gradients_of_size_one(variant: str) -> None:
    """With torch's eps of 1e-7 as the default, updates vanished from gradients of 1e-9 on."""
    given = {"fp32_matmul_prec": "highest", **VARIANTS[variant]}
    reference = moved(1.0, **given)
    assert reference.norm() > 1.0
    for scale in SCALES:
        found = moved(scale, **given)
        assert torch.allclose(found, reference, rtol=1e-4, atol=2e-5), scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("momentum", ["fp32", "bf16", "int8"])
def test_neither_bf16_nor_rounded_momentum_depends_on_the_scale(
    momentum: str, dtype: torch.dtype
) -> None:
    """Each rounds by up to some hundredths of an update's size, at other places for another
    scale.
    """
    reference = moved(1.0, fp32_matmul_prec="highest")
    for scale in SCALES:
        found = moved(scale, dtype, momentum_dtype=momentum)
        assert (found - reference).norm() < 0.05 * reference.norm(), scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradients_whose_sum_overflows_are_finite(dtype: torch.dtype) -> None:
    """Those of 1e36 were skipped as not finite, as their magnitudes add up to more than fp32
    has.
    """
    too_large = 1e300 if dtype == torch.float64 else math.inf  # for momentum in fp32
    values = (1e36, math.nan, too_large, -math.inf)
    parameters = [nn.Parameter(torch.zeros(64, 64, dtype=dtype)) for _ in values]
    optimizer = megatron_muon.Muon(parameters, lr=1.0)
    for p, value in zip(parameters, values, strict=True):
        p.grad = torch.full((64, 64), 1e36, dtype=dtype)
        p.grad[-1, -1] = value
    optimizer.step()
    assert list(optimizer.skipped_updates().values()) == [1, 1, 1]
    finite, *bad = parameters
    assert finite.detach().abs().max() > 0.001
    for p in bad:
        assert not p.detach().any()
        assert not optimizer.state[p]["momentum_buffer"].any()


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_the_measured_norm_of_momentum_is_right_at_any_scale(scale: float) -> None:
    """Squares in fp32 made it 0 or infinite."""
    p = nn.Parameter(torch.zeros(SHAPE))
    optimizer = megatron_muon.Muon([p], momentum=0.5, metrics_interval=1)
    p.grad = normal(0) * scale
    optimizer.step()
    norm = 0.5 * scale * normal(0).double().norm().item()
    assert optimizer.metrics.latest is not None
    found = optimizer.metrics.latest.values["momentum_norm"]
    assert found == pytest.approx(norm, rel=1e-5, abs=0.0)


def test_hyperball_keeps_the_norm_of_tiny_weights() -> None:
    """Norms below 1e-8 fell with every step."""
    before = 1e-12 * normal(7)
    p = nn.Parameter(before.clone())
    optimizer = megatron_muon.Muon([p], lr=0.1, weight_decay=0.0, hyperball=True)
    p.grad = normal(0)
    optimizer.step()
    norm = before.double().norm().item()
    after = p.detach().double().norm().item()
    assert after == pytest.approx(norm, rel=1e-5, abs=0.0)
    assert (p.detach() - before).norm() > 0.05 * before.norm()
