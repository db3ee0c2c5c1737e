"""The kernels of the passes in Triton's interpreter, against the passes in torch operations.

Triton decides when it is imported whether it interprets: `tests/unit/test_kernels.py` runs these in a
process with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch

import megatron_muon
from megatron_muon.core import kernels
from megatron_muon.core.copies import Copy
from megatron_muon.core.fused import FusedPasses
from megatron_muon.core.passes import Passes, unit_factor
from megatron_muon.core.tiles import FLAT, TALL, tiles_of
from megatron_muon.fsdp import part
from tests.support.interpreted import interpreted

CPU = torch.device("cpu")
SHAPES = [(33, 70), (70, 20), (1, 65), (65, 1), (130, 33), (33, 130), (64, 64)]


def trained(passes: type[Passes], dtype: torch.dtype, **settings: Any) -> Any:
    """Weights and momentum after three steps of a model of odd shapes."""
    torch.manual_seed(0)
    named = {}
    for number, shape in enumerate(SHAPES):
        named[f"w{number}"] = torch.nn.Parameter(torch.randn(shape).to(dtype))
    with mock.patch.object(part, "Passes", passes):
        optimizer = megatron_muon.Muon(list(named.items()), lr=0.02, **settings)
    for step in range(3):
        for number, p in enumerate(named.values()):
            p.grad = torch.randn(p.shape).to(dtype)
            if (step, number) == (1, 4):
                p.grad[0, 0] = math.nan
        optimizer.step()
    states = [optimizer.state[p] for p in named.values()]
    momentum = [state["momentum_buffer"] for state in states if "momentum_buffer" in state]
    return [p.detach() for p in named.values()], momentum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_are_those_of_torch_operations(dtype: torch.dtype) -> None:
    expected, expected_momentum = trained(Passes, dtype, weight_decay=0.1)
    with interpreted():
        weights, momentum = trained(FusedPasses, dtype, weight_decay=0.1)
    for one, other in zip(momentum, expected_momentum, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-7, atol=1e-7, equal_nan=True)
    for one, other in zip(weights, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_tiles_carry_every_element_once() -> None:
    """Runs, rectangles, transposed ones, groups of rows."""
    lane = torch.arange(40_000, dtype=torch.float32) + 1
    copies = [
        Copy(0, 0, ((1, 0, 0), (7, 100, 100), (100, 1, 1))),  # a run
        Copy(1000, 2000, ((1, 0, 0), (9, 50, 30), (30, 1, 1))),  # a rectangle
        Copy(3000, 5000, ((1, 0, 0), (70, 66, 1), (66, 1, 70))),  # transposed
        Copy(9000, 12000, ((3, 500, 400), (10, 40, 40), (40, 1, 1))),  # groups of runs
        Copy(12000, 15000, ((1, 0, 0), (1, 5000, 5000), (5000, 1, 1))),
        Copy(20000, 25000, ((1, 0, 0), (5, 3, 1), (1, 1, 5))),  # a column
    ]
    module = kernels
    stacks = torch.zeros(40_000)
    expected = torch.zeros(40_000)
    for copy in copies:
        sizes, near, far = zip(*copy.dims, strict=True)
        source = lane.as_strided(sizes, near, copy.source)
        expected.as_strided(sizes, far, copy.target).copy_(source)
    largest = torch.zeros(len(copies), dtype=torch.int32)
    for tiles in tiles_of(copies, range(len(copies)), CPU):
        constants = [*(TALL if tiles.tall else FLAT), tiles.tall, tiles.aligned]
        module.fill[(len(tiles.tiles),)](
            tiles.tiles, tiles.pieces, lane, stacks, largest, *constants
        )
    assert torch.equal(stacks, expected)
    for number, copy in enumerate(copies):
        sizes, near, _ = zip(*copy.dims, strict=True)
        found = largest.view(torch.float32)[number]
        assert found == lane.as_strided(sizes, near, copy.source).max()
    back = torch.zeros_like(lane)
    for tiles in tiles_of(copies, range(len(copies)), CPU):
        constants = [*(TALL if tiles.tall else FLAT), tiles.tall, tiles.aligned]
        module.drain[(len(tiles.tiles),)](tiles.tiles, tiles.pieces, back, stacks, *constants)
    carried = back != 0
    assert carried.sum() == sum(math.prod(size for size, *_ in copy.dims) for copy in copies)
    assert torch.equal(back[carried], lane[carried])


def test_offsets_beyond_two_to_the_31_are_not_cut() -> None:
    """In numbers alone: the tables and sums are int64."""
    far = 2**31 + 5
    copies = [Copy(far, 2 * far, ((1, 0, 0), (2, far, 1024), (8, 1, 1)))]
    (tiles,) = tiles_of(copies, [0], CPU)
    assert tiles.pieces.dtype == torch.int64
    assert tiles.pieces[0, 1:5].tolist() == [far, far, 2 * far, 1024]


def test_factors_are_those_of_torch_and_magnitudes_begin_at_zero() -> None:
    values = [0.0, 1.0, 0.75, 3e38, 1e-40, 2.0**-126, 0.5, math.inf, math.nan]
    magnitudes = torch.tensor(values)
    bits = magnitudes.clone().view(torch.int32)
    out = torch.zeros(len(values))
    kernels.factors[(1,)](bits, out, len(values), 256)
    assert torch.equal(out.nan_to_num(7.0), unit_factor(magnitudes).nan_to_num(7.0))
    assert not bits.any()
