"""The Gram iteration against the standard one and against polar factors in fp64."""

from __future__ import annotations

import math

import pytest
import torch
from emerging_optimizers import utils as eo_utils
from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz

from megatron_muon.optim import newton_schulz as ns
from megatron_muon.sharding.cost import GRAM, STANDARD, gram_flops, standard_flops

QUINTIC = {"coefficient_type": "quintic", "steps": 5}
PRECISIONS = {torch.float32: "highest", torch.bfloat16: "medium"}

# bf16 costs the standard iteration itself up to 0.01 on these matrices, against fp32.
ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 0.005}


def conditioned(m: int, n: int, condition: float, seed: int = 0) -> torch.Tensor:
    """A `(1, m, n)` fp32 block whose singular values fall evenly on a logarithmic scale from 1 to 1 / condition."""
    generator = torch.Generator().manual_seed(seed)
    u, _ = torch.linalg.qr(torch.randn(m, m, dtype=torch.double, generator=generator))
    v, _ = torch.linalg.qr(torch.randn(n, m, dtype=torch.double, generator=generator))
    values = torch.logspace(0, -math.log10(condition), m, dtype=torch.double)
    return ((u * values) @ v.T).float()[None]


def error(found: torch.Tensor, block: torch.Tensor) -> float:
    """Distance from the polar factor of `block` in fp64, relative to its norm."""
    u, _, vt = torch.linalg.svd(block.double(), full_matrices=False)
    polar = u @ vt
    return float((found.double() - polar).norm() / polar.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("condition", [1.0, 10.0, 1e2, 1e4, 1e6, 1e8])
@pytest.mark.parametrize("shape", [(48, 48), (48, 96), (40, 160)])
def test_gram_is_as_near_to_the_polar_factor_as_the_standard_iteration(
    dtype: torch.dtype, condition: float, shape: tuple[int, int]
) -> None:
    """Squaring loses small singular values in half precision; without a restart the loss comes back amplified."""
    block = conditioned(*shape, condition)
    gram = error(ns.gram(block, **QUINTIC, dtype=dtype), block)
    standard = error(ns.standard(block, **QUINTIC, dtype=dtype), block)
    assert gram <= standard + ROUNDING[dtype]


def test_without_a_restart_half_precision_is_unstable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the comparison above notices five steps in one run."""
    block = conditioned(40, 160, 1e4)
    standard = error(ns.standard(block, **QUINTIC, dtype=torch.bfloat16), block)
    monkeypatch.setattr(ns, "gram_runs", lambda steps, dtype: (steps,))
    gram = error(ns.gram(block, **QUINTIC, dtype=torch.bfloat16), block)
    assert not gram <= standard + ROUNDING[torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("coefficient_type", ["simple", "quintic", "polar_express", "aol"])
def test_the_standard_iteration_is_emerging_optimizers(dtype: torch.dtype, coefficient_type: str) -> None:
    stack = torch.randn(3, 12, 20, generator=torch.Generator().manual_seed(0))
    found = ns.standard(stack, coefficient_type=coefficient_type, steps=7, dtype=dtype)
    with eo_utils.fp32_matmul_precision(PRECISIONS[dtype]):
        expected = newton_schulz(stack, steps=7, coefficient_type=coefficient_type)
    assert torch.equal(found.float(), expected)


@pytest.mark.parametrize("iterate", [ns.standard, ns.gram])
def test_a_block_does_not_depend_on_its_neighbours(iterate) -> None:
    stack = torch.randn(4, 16, 24, generator=torch.Generator().manual_seed(0))
    before = stack.clone()
    together = iterate(stack, **QUINTIC, dtype=torch.float32)
    assert torch.equal(stack, before)
    for index, block in enumerate(stack):
        assert torch.equal(iterate(block[None], **QUINTIC, dtype=torch.float32)[0], together[index])


def test_runs_cover_all_steps() -> None:
    for dtype, longest in ((torch.float32, 3), (torch.bfloat16, 2)):
        for steps in range(1, 13):
            runs = ns.gram_runs(steps, dtype)
            assert sum(runs) == steps
            assert max(runs) <= longest


def test_auto_takes_gram_where_it_needs_fewer_operations() -> None:
    """Five steps: 20 a + 10 against 8 a + 28 in units of n^3, equal at a ratio of sides of 1.5."""
    assert standard_flops(64, 64) == 30 * 64**3
    assert gram_flops(64, 64) == 36 * 64**3
    assert standard_flops(64, 256) == gram_flops(64, 256) + 30 * 64**3
    for dtype in (torch.float32, torch.bfloat16):
        assert ns.choose_method(64, 64, dtype=dtype) == STANDARD
        assert ns.choose_method(64, 128, dtype=dtype) == GRAM
        assert ns.choose_method(128, 64, dtype=dtype) == GRAM
        assert ns.choose_method(64, 256, method=STANDARD, dtype=dtype) == STANDARD
        assert ns.choose_method(64, 64, method=GRAM, dtype=dtype) == GRAM


def test_an_unknown_set_is_named() -> None:
    with pytest.raises(ValueError, match="--muon-coefficient-type cubic does not exist; choose one of simple"):
        ns.coefficients("cubic", 5)
