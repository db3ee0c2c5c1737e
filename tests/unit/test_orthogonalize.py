"""Newton-Schulz with everything around it: scale, magnitude, blocks, zero."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from megatron_muon.core.cost import HALVES, KERNEL, Iteration
from megatron_muon.core.layout import Matrix, RowSplit
from megatron_muon.core.methods import symmetric
from megatron_muon.core.methods.newton_schulz import NewtonSchulz
from tests.support.rows import orthogonalized, started

SHAPES = [(8, 8), (12, 5), (5, 12), (1, 9)]


def randn(rows: int, cols: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))


def unscaled() -> NewtonSchulz:
    """An NewtonSchulz whose scale is 1 for matrices with no more rows than columns."""
    return NewtonSchulz(Iteration(precision="highest"), scale_mode="shape_scaling")


SCALES = {
    "spectral": lambda m, n: math.sqrt(max(m, n)),
    "unit_rms_norm": lambda m, n: math.sqrt(m / n),
    "shape_scaling": lambda m, n: math.sqrt(max(1.0, m / n)),
}


@pytest.mark.parametrize("mode", SCALES)
@pytest.mark.parametrize("shape", SHAPES)
def test_scale_is_that_of_the_block(mode: str, shape: tuple[int, int]) -> None:
    one = orthogonalized(
        NewtonSchulz(Iteration(precision="highest"), scale_mode=mode), randn(*shape)
    )
    fifth = NewtonSchulz(Iteration(precision="highest"), scale_mode=mode, extra_scale_factor=0.2)
    torch.testing.assert_close(orthogonalized(fifth, randn(*shape)), 0.2 * one)
    plain = orthogonalized(unscaled(), randn(*shape)) / SCALES["shape_scaling"](*shape)
    torch.testing.assert_close(one, plain * SCALES[mode](*shape))


@pytest.mark.parametrize("exponent", [-120, -1, 100])
def test_powers_of_two_change_no_bit(exponent: int) -> None:
    """A tiny clip factor pushed inputs under the eps of the normalisation, and the update
    shrank.
    """
    block = randn(12, 5)
    expected = orthogonalized(unscaled(), block)
    found = orthogonalized(unscaled(), torch.ldexp(block, torch.tensor(exponent)))
    assert torch.equal(found, expected)


def test_zero_stays_zero() -> None:
    assert torch.equal(
        orthogonalized(NewtonSchulz(), torch.zeros(4, 3)),
        torch.zeros(4, 3),
    )
    assert torch.equal(
        started(torch.zeros(2, 2), torch.float32),
        torch.zeros(2, 2),
    )


def test_bf16_iterates_beside_torchs_newer_precision_switch() -> None:
    """torch refuses to read the older switch once a script has set the newer one; bf16 products
    heed neither.
    """
    switch = torch.backends.cuda.matmul
    before = switch.fp32_precision
    switch.fp32_precision = "tf32"
    try:
        orthogonalized(NewtonSchulz(Iteration(precision="medium")), randn(3, 3))
        assert switch.fp32_precision == "tf32"
    finally:
        switch.fp32_precision = before


def test_row_scales_are_those_of_blocks() -> None:
    """Adaptive Muon scales by hand what plain Muon's update has been scaled by."""
    split = RowSplit(2, (3, 1))
    matrix = torch.randn(8, 5, generator=torch.Generator().manual_seed(1))
    settings = {"iteration": Iteration(precision="highest"), "extra_scale_factor": 0.2}
    raw = NewtonSchulz(**settings, scaled=False)
    scaled = orthogonalized(NewtonSchulz(**settings), matrix, split)
    factors = raw.row_scales(Matrix("w", (8, 5), split=split))
    torch.testing.assert_close(
        orthogonalized(raw, matrix, split) * factors, scaled, rtol=1e-5, atol=0.0
    )
    assert len(set(factors.flatten().tolist())) == 2


def test_an_iteration_that_moves_to_another_device_costs_what_it_costs_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With --muon-ns-device cpu the plan counted the GPU's products, and its kernel was tuned for
    nothing.
    """
    monkeypatch.setattr(
        symmetric,
        "products_on",
        lambda device, dtype: KERNEL if device.type == "cuda" else HALVES,
    )
    on_gpu = NewtonSchulz(device=torch.device("cuda"))
    assert on_gpu.iteration.products is KERNEL
    on_cpu = dataclasses.replace(on_gpu, device=torch.device("cpu"))
    assert on_cpu.iteration.products is HALVES


@pytest.mark.parametrize("before", [(True, True), (False, False)])
def test_bf16_products_are_summed_in_fp32_and_the_switch_is_put_back(
    monkeypatch: pytest.MonkeyPatch, before: tuple[bool, bool]
) -> None:
    """cuBLAS may add parts of X X^T in bf16 by default, which the proven bounds do not cover."""
    switches, seen = torch.backends.cuda.matmul, []

    def found() -> tuple[bool, bool]:
        name = "allow_bf16_reduced_precision_reduction"
        return getattr(switches, name), getattr(switches, f"{name}_split_k")

    def product(*_: object, **__: object) -> torch.Tensor:
        seen.append(found())
        raise KeyError

    monkeypatch.setattr(symmetric.SymmetricProducts, "product", product)
    at_first = found()
    try:
        switches.allow_bf16_reduced_precision_reduction = before
        for precision in ("medium", "highest"):
            with pytest.raises(KeyError):
                orthogonalized(NewtonSchulz(Iteration(precision=precision)), randn(8, 8))
            assert found() == before
    finally:
        switches.allow_bf16_reduced_precision_reduction = at_first
    assert seen == [(False, before[1]), before]
