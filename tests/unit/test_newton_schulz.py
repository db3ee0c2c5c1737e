"""The Gram iteration against the standard one, and both against polar factors and
emerging-optimizers.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emerging_optimizers import utils as eo_utils
from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz

from megatron_muon.core.build import sizes_of
from megatron_muon.core.cost import DENSE, GRAM, KERNEL, QUACK, STANDARD, Iteration
from megatron_muon.core.layout import Matrix, replicated_layout
from megatron_muon.core.methods import newton_schulz as ns
from megatron_muon.core.methods import symmetric
from megatron_muon.core.methods.newton_schulz import NewtonSchulz
from megatron_muon.core.plan import make_plan
from megatron_muon.core.route import make_stacks
from megatron_muon.core.slices import Team
from megatron_muon.proven import check_iteration
from tests.support.rows import iterated, run, started

QUINTIC = ns.coefficients("quintic", 5)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def polynomial(block: torch.Tensor, steps: ns.Coefficients) -> torch.Tensor:
    """The standard iteration in fp64, normalised as emerging-optimizers does."""
    x = block.double()
    x = x / x.norm()
    for a, b, c in steps:
        r = x @ x.mT
        x = a * x + (b * r + c * r @ r) @ x
    return x


@pytest.mark.parametrize(
    "shape",
    [(12, 20), (72, 72), (1, 9)],
)
@pytest.mark.parametrize("coefficient_type", ["simple", "quintic", "polar_express", "aol"])
def test_the_standard_iteration_is_emerging_optimizers_in_fp32(
    coefficient_type: str, shape: tuple[int, int]
) -> None:
    """The norm goes into the first step's small matrices: a last bit may differ, which six steps
    enlarge.
    """
    stack = torch.randn(3, *shape, generator=seeded(0)) * 1e-3
    steps = ns.coefficients(coefficient_type, 6)
    found = iterated(started(stack, torch.float32), steps)
    with eo_utils.fp32_matmul_precision("highest"):
        expected = newton_schulz(stack, steps=6, coefficient_type=coefficient_type)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=2e-5)


@pytest.mark.parametrize(
    "shape",
    [(72, 72), (40, 160), (128, 128)],
)
def test_a_matrix_rounded_on_the_wire_is_rounded_once(shape: tuple[int, int]) -> None:
    """Dividing the rounded matrix by its norm rounded it again: the error grew by up to 39 %
    against no_shard's.

    The error to an fp64 iteration, over seeds, of the iteration on rows that travelled in bf16, and
    of upstream's on the fp32 matrix. The negative control divides by the norm.
    """
    ours, theirs, twice = [], [], []
    for seed in range(40):
        block = (
            torch.randn(
                1,
                *shape,
                generator=seeded(seed),
            )
            * 1e-3
            * (1 + 0.02 * seed)
        )
        exact = polynomial(block[0], QUINTIC)
        wire = block.bfloat16()
        with eo_utils.fp32_matmul_precision("medium"):
            plain = newton_schulz(block[0], steps=5, coefficient_type="quintic")
            rounded_twice = newton_schulz(wire[0].float(), steps=5, coefficient_type="quintic")
        found = iterated(started(wire, torch.bfloat16), QUINTIC)[0]
        for errors, update in ((ours, found), (theirs, plain), (twice, rounded_twice)):
            errors.append(
                float((update.double() - exact).norm() / exact.norm()),
            )
    assert sum(ours) <= 1.02 * sum(theirs)
    assert sum(twice) > 1.025 * sum(theirs)


@pytest.mark.parametrize(
    ("precision", "gram"),
    [
        ("high", lambda a: 8 * a + 28),
        (
            "medium",
            lambda a: 12 * a + 22,
        ),
    ],
)
def test_auto_takes_gram_where_it_needs_fewer_operations(precision, gram) -> None:
    """Five steps: 20 a + 10 against `gram` in units of n^3, equal at 1.5."""
    n, auto = 64, Iteration(precision=precision)
    for ratio in (1, 2, 8):
        standard = replace(auto, method=STANDARD).cost(n, ratio * n)
        assert standard == (20 * ratio + 10) * n**3
        assert replace(auto, method=GRAM).cost(ratio * n, n) == gram(ratio) * n**3
        assert auto.method_for(n, ratio * n) == (STANDARD if ratio == 1 else GRAM)
        assert auto.cost(n, ratio * n) == min(standard, gram(ratio) * n**3)


def test_an_unknown_set_is_named() -> None:
    with pytest.raises(
        ValueError, match="muon_coefficient_type cubic does not exist; choose one of simple"
    ):
        check_iteration(Iteration("cubic"))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, ...]]:
    """A dense stand-in of the GPU's symmetric kernel, from 16 rows on; the sizes and constants of
    its calls.
    """
    calls: list[tuple[float, ...]] = []
    small = replace(KERNEL, from_rows=16)

    def symmetric_kernel(
        a: torch.Tensor, c: Any, out: torch.Tensor, *, alpha: float = 1.0, beta: float = 0.0
    ) -> None:
        assert a.dtype == torch.bfloat16
        assert a.ndim == 2
        assert a.is_contiguous()
        assert out.is_contiguous()
        calls.append((*a.shape, alpha, beta))
        product = alpha * (a.float() @ a.float().mT)
        out.copy_(product if c is None else product + beta * c.float())

    for module in (symmetric, ns):
        monkeypatch.setattr(module, "KERNEL", small)
    monkeypatch.setattr(
        symmetric, "products_on", lambda device, dtype: small if dtype == torch.bfloat16 else DENSE
    )
    monkeypatch.setattr(symmetric, "symmetric_kernel", symmetric_kernel)
    return calls


@pytest.mark.parametrize("runs", [None, Iteration().runs(GRAM)])
def test_the_symmetric_kernel_forms_the_squares_of_both_iterations(
    kernel, monkeypatch, runs
) -> None:
    stack = torch.randn(2, 16, 40, generator=seeded(0)).bfloat16()
    found = iterated(stack, QUINTIC, runs)
    wide = [call for call in kernel if call[:2] == (16, 40)]
    squares = [call for call in kernel if call[:2] == (16, 16)]
    assert len(wide) == 2 * (3 if runs else 5)
    # of matrices that are symmetric to the last bit
    assert len(squares) == 2 * (3 if runs else 5)
    monkeypatch.setattr(symmetric, "products_on", lambda device, dtype: DENSE)
    torch.testing.assert_close(found, iterated(stack, QUINTIC, runs), rtol=0.0, atol=0.03)


@pytest.mark.parametrize("runs", [None, Iteration().runs(GRAM)])
def test_quack_forms_symmetric_products_of_whole_stacks(monkeypatch, runs) -> None:
    """It runs on a GPU alone; a stand-in checks what it is given."""
    calls = []

    def gemm_symmetric(a, b, *, C, out, alpha, beta) -> None:
        assert a.dtype == b.dtype == out.dtype == torch.bfloat16
        assert a.shape == b.mT.shape
        calls.append(tuple(a.shape))
        base = 0.0 if C is None else beta * C.float()
        out.copy_(base + alpha * (a.float() @ b.float()))

    module = SimpleNamespace(gemm_symmetric=gemm_symmetric)
    monkeypatch.setitem(sys.modules, "quack", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", module)
    small = replace(QUACK, from_rows=16)
    monkeypatch.setattr(symmetric, "QUACK", small)
    stack = torch.randn(2, 16, 40, generator=seeded(0)).bfloat16()
    expected = iterated(stack, QUINTIC, runs)
    monkeypatch.setattr(symmetric, "products_on", lambda device, dtype: small)
    found = iterated(stack, QUINTIC, runs)
    # X X^T and R R of each run, and four products of each further step
    assert len(calls) == (2 * 3 + 4 * 2 if runs else 2 * 5)
    assert set(calls) == {(2, 16, 40), (2, 16, 16)}
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.03)


def test_quack_is_off_where_nobody_has_measured_it(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    gpu = torch.device("cuda", 0)
    assert symmetric.products_on(gpu, torch.bfloat16) is not QUACK
    monkeypatch.setattr(symmetric, "FASTER_WITH_QUACK", ("NVIDIA H100",))
    assert symmetric.products_on(gpu, torch.bfloat16) is QUACK
    assert symmetric.products_on(gpu, torch.float32) is DENSE


def test_ranks_agree_on_quack_by_the_plan() -> None:
    layout, _ = replicated_layout([Matrix("w", (8, 8))], 1)
    method = NewtonSchulz()
    plan = make_plan(layout, [1.0], sizes=sizes_of(method, "bf16", (), processor=False))
    before = plan.digest()
    method.iteration = replace(method.iteration, products=QUACK)
    assert plan.digest() != before


ALONE = Team((0,), ())
OF_TWO = Team((1, 0), (), ((0, 2),))
"""One owner, and a team of which rank 0 has the second part of each block."""


SHAPES_ALONE = [(16, 40), (40, 16), (24, 24), (8, 40)]
SIZES_ALONE = {(16, 16), (16, 40), (24, 24)}


@pytest.mark.parametrize(
    ("steps", "team", "shapes", "sizes"),
    [
        (0, ALONE, SHAPES_ALONE, SIZES_ALONE),
        (7, ALONE, SHAPES_ALONE, SIZES_ALONE),
        (
            3,
            OF_TWO,
            [(40, 16)],
            {(16, 16), (16, 24)},
        ),
        (
            3,
            OF_TWO,
            [(16, 48)],
            {(16, 16), (16, 24)},
        ),
    ],
)
def test_the_symmetric_kernel_is_compiled_before_the_first_step(
    kernel, steps: int, team: Team, shapes: list[Any], sizes: set[Any]
) -> None:
    """In a step the other ranks waited for compilations in a collective, also with
    `--muon-ns-steps-for` and teams.
    """
    orthogonalizer = ns.NewtonSchulz()
    matrices = [Matrix("w", shape, steps=steps) for shape in shapes]
    of_all = itertools.chain(
        *(team.slices(i, matrix) for i, matrix in enumerate(matrices)),
    )
    slots = [slot for slot in of_all if slot.rank == 0]
    orthogonalizer.warm_up(slots)
    compiled = set(kernel)
    assert {call[:2] for call in compiled} == sizes
    kernel.clear()
    sums: Any = SimpleNamespace(ranks=team.ranks, total=lambda part, buffer, probe: part)
    for of in make_stacks(slots, orthogonalizer.kind):
        part = torch.randn(of.shape).bfloat16()
        run(orthogonalizer, part, of.kind, sums if of.kind.ranks else None)
    assert set(kernel) == compiled
    kernel.clear()
    ns.NewtonSchulz(Iteration(precision="high")).warm_up(slots)
    assert kernel == []


def test_the_kernel_is_launched_as_its_own_function_launches_it() -> None:
    """By Triton's interpreter, which rounds bf16 in its own way: the same bits, and other ones for
    other constants.
    """
    code = """
import torch
from emerging_optimizers.orthogonalized_optimizers import muon_utils
from megatron_muon.core.methods.symmetric import SQUARE, symmetric_kernel
kernels = muon_utils.triton_kernels
names = ("TILE_M", "TILE_N", "TILE_K", "GROUP_SIZE_M")
kernel = kernels.syrk.syrk_kernel_bf16
square = [c for c in kernel.configs if tuple(c.kwargs[n] for n in names) == SQUARE[:4]]
kernel.configs[:] = square[:1]
a = torch.randn(136, 72, generator=torch.Generator().manual_seed(0)).bfloat16()
c, seen = kernels.tsyrk_ex(a), []
for base, alpha, beta in ((None, 1.0, 0.0), (c, 0.5, 0.25), (c, 0.5, 2.0)):
    out = torch.empty(136, 136, dtype=torch.bfloat16)
    symmetric_kernel(a, base, out, alpha=alpha, beta=beta)
    assert torch.equal(out, kernels.tsyrk_ex(a, base, alpha=alpha, beta=beta))
    assert not any(torch.equal(out, other) for other in seen)
    seen.append(out)
"""
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=300)
