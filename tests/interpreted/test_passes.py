"""The kernels of the passes in Triton's interpreter, against the passes in torch operations.

Triton decides when it is imported whether it interprets: `tests/unit/test_kernels.py` runs these in
a process with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_muon
from megatron_muon.core import kernels
from megatron_muon.core.copies import Copy
from megatron_muon.core.passes import unit_factor
from megatron_muon.core.tiles import split_at, tiles_of
from megatron_muon.offload.codecs import CODECS, Place, seeds
from tests.support.interpreted import interpreted
from tests.support.wide import wide_but

CPU = torch.device("cpu")
SHAPES = [(33, 70), (70, 20), (1, 65), (65, 1), (130, 33), (33, 130), (64, 64), (20, 300)]
MISSING, BROKEN = 2, 4

Trained = tuple[list[Tensor], list[dict[str, Tensor]], dict[str, int]]


def trained(
    dtype: torch.dtype = torch.float32,
    factor: float = 1.0,
    gradient: Callable[[Tensor], Tensor] = lambda values: values,
    **settings: Any,
) -> Trained:
    """Weights, state and skipped updates after three steps of a model of odd shapes.

    In the second step one matrix has no gradient, and one has NaN.
    """
    torch.manual_seed(0)
    named = {}
    for number, shape in enumerate(SHAPES):
        named[f"w{number}"] = torch.nn.Parameter(torch.randn(shape).to(dtype))
    usual = {"lr": 0.02, "weight_decay": 0.1, "fp32_matmul_prec": "highest", "matrices": ["*"]}
    settings = usual | settings
    optimizer = megatron_muon.Muon(list(named.items()), **settings)
    for step in range(3):
        for number, p in enumerate(named.values()):
            p.grad = gradient(factor * torch.randn(p.shape).to(dtype))
            if (step, number) == (1, MISSING):
                p.grad = None
            if (step, number) == (1, BROKEN):
                p.grad[0, 0] = math.nan
        optimizer.step()
    states = [dict(optimizer.state[p]) for p in named.values()]
    return [p.detach() for p in named.values()], states, optimizer.skipped_updates()


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "without look-ahead": {"nesterov": False},
    "cautious": {"cautious_weight_decay": True},
    "no decay": {"weight_decay": 0.0},
    "AdaMuon": {"moment2_method": "adamuon"},
    "NorMuon": {"moment2_method": "normuon"},
    "NorMuon, cautious": {"moment2_method": "normuon", "cautious_weight_decay": True},
    "hyperball": {"hyperball": True, "weight_decay": 0.0},
    "eps": {"eps": 1.0},
    "iteration in bf16": {"fp32_matmul_prec": "medium"},
    "bf16 momentum": {"momentum_dtype": "bf16"},
    "int8 momentum": {"momentum_dtype": "int8"},
    "int8 momentum, AdaMuon": {"momentum_dtype": "int8", "moment2_method": "adamuon"},
}


ONCE = "plain", "AdaMuon", "NorMuon, cautious", "hyperball", "eps", "int8 momentum"
"""Variants that the usual run makes in fp32."""

CASES = list(itertools.product(VARIANTS, [torch.float32, torch.bfloat16]))
USUAL = [*((name, torch.float32) for name in ONCE), ("iteration in bf16", torch.bfloat16)]


@pytest.mark.parametrize(("variant", "dtype"), wide_but(USUAL, CASES))
def test_steps_are_those_of_torch_operations(variant: str, dtype: torch.dtype) -> None:
    settings = VARIANTS[variant]
    expected, expected_states, expected_skips = trained(dtype, **settings)
    with interpreted() as launched:
        weights, states, skips = trained(dtype, **settings)
    assert launched["descend"] + launched["move"] > 0
    assert skips == expected_skips
    for state, other in zip(states, expected_states, strict=True):
        assert state.keys() == other.keys()
        for slot, values in state.items():
            torch.testing.assert_close(values, other[slot], rtol=2e-5, atol=2e-6, msg=slot)
    close = {"rtol": 1e-4, "atol": 2e-5}
    if "AdaMuon" in variant:  # divides by roots of small numbers
        close["atol"] = 1e-3
    if dtype is torch.bfloat16:
        close = {"rtol": 8e-3, "atol": 8e-3}
    for one, other in zip(weights, expected, strict=True):
        torch.testing.assert_close(one, other, **close)


@pytest.mark.parametrize("factor", [1e-20, 1e15])
def test_blocks_far_from_one_are_brought_near(factor: float) -> None:
    expected, _, _ = trained(factor=factor)
    with interpreted():
        weights, _, _ = trained(factor=factor)
    for one, other in zip(weights, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)


def test_learning_rates_may_be_tensors_and_gradients_may_have_gaps() -> None:
    rate = torch.tensor(0.02)

    def gap(values: Tensor) -> Tensor:
        rows, cols = values.shape
        return torch.cat([values, values], dim=1)[:, :cols] if rows > 1 else values

    expected, _, _ = trained(lr=rate, gradient=gap)
    with interpreted():
        weights, _, _ = trained(lr=rate, gradient=gap)
    for one, other in zip(weights, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)


def test_weights_may_lose_their_order_between_steps() -> None:
    def steps() -> Tensor:
        torch.manual_seed(0)
        p = torch.nn.Parameter(torch.randn(40, 20))
        optimizer = megatron_muon.Muon([("w", p)], lr=0.02)
        for step in range(3):
            if step == 1:
                p.data = p.data.t().contiguous().t()
            p.grad = torch.randn(40, 20)
            optimizer.step()
        return p.detach()

    expected = steps()
    with interpreted():
        found = steps()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_another_share_of_momentum_is_noticed() -> None:
    """The control: the comparison sees a wrong step."""
    expected, _, _ = trained(momentum=0.9)
    with interpreted():
        weights, _, _ = trained(momentum=0.95)
    assert any(
        (one - other).abs().max() > 1e-3 for one, other in zip(weights, expected, strict=True)
    )


COPIES = [
    Copy(0, 0, ((1, 0, 0), (7, 100, 100), (100, 1, 1))),  # without gaps
    Copy(1000, 2000, ((1, 0, 0), (9, 50, 30), (30, 1, 1))),  # columns of wider rows
    Copy(3000, 5000, ((1, 0, 0), (70, 66, 1), (66, 1, 70))),  # transposed
    Copy(9000, 12000, ((3, 500, 400), (10, 40, 40), (40, 1, 1))),  # groups of rows
    Copy(12000, 15000, ((1, 0, 0), (1, 5000, 5000), (5000, 1, 1))),  # a row
    Copy(20000, 25000, ((1, 0, 0), (5, 3, 1), (1, 1, 5))),  # a column
    Copy(21000, 26000, ((1, 0, 0), (0, 3, 3), (3, 1, 1))),  # nothing
]


def view(flat: Tensor, copy: Copy, end: int) -> Tensor:
    """The elements of a copy at its source, end 1, or target, end 2."""
    sizes, *strides = zip(*copy.dims, strict=True)
    return flat.as_strided(sizes, strides[end - 1], copy[end - 1])


def test_tiles_carry_every_element_once() -> None:
    lane = torch.arange(40_000, dtype=torch.float32) + 1
    stacks = torch.zeros(40_000)
    expected = torch.zeros(40_000)
    for copy in COPIES:
        view(expected, copy, 2).copy_(view(lane, copy, 1))
    largest = torch.zeros(len(COPIES), dtype=torch.int32)
    none = torch.zeros(1, dtype=torch.int32)
    tiles = tiles_of(COPIES, range(len(COPIES)), CPU)
    given = [tiles.tiles, tiles.pieces]
    constants = [*tiles.shape, tiles.aligned, tiles.tall_aligned]
    programs = (len(tiles.tiles),)
    unused = [none, none, largest, none, none]
    kernels.fill[programs](*given, lane, stacks, *unused, False, True, *constants)
    assert torch.equal(stacks, expected)
    for number, copy in enumerate(COPIES):
        found = largest.view(torch.float32)[number]
        values = view(lane, copy, 1)
        assert found == (values.max() if values.numel() else 0.0)
    back = torch.zeros_like(lane)
    kernels.drain[programs](*given, back, stacks, *constants)
    carried = back != 0
    assert carried.sum() == sum(math.prod(size for size, *_ in copy.dims) for copy in COPIES)
    assert torch.equal(back[carried], lane[carried])


SPLIT = [
    Copy(0, 7, ((1, 0, 0), (3, 25, 30), (20, 1, 1))),  # rows from an offset
    Copy(0, 2, ((1, 0, 0), (4, 6, 1), (6, 1, 30))),  # columns are rows
    Copy(0, 32, ((1, 0, 0), (5, 1, 1), (1, 1, 30))),  # one column, in one row
    Copy(0, 0, ((2, 3, 60), (2, 30, 30), (3, 1, 1))),  # repeated
]


@pytest.mark.parametrize("row", range(7))
@pytest.mark.parametrize("copy", SPLIT)
def test_rows_from_one_on_are_moved(copy: Copy, row: int) -> None:
    lane = torch.arange(400.0) + 1
    expected, found = torch.zeros(1000), torch.zeros(1000)
    view(expected, copy, 2).copy_(view(lane, copy, 1))
    expected[600 + 30 * row : 800] = expected[30 * row : 200]
    expected[30 * row : 200] = 0
    for part in split_at([copy], 30, row, 600):
        view(found, part, 2).copy_(view(lane, part, 1))
    assert torch.equal(found, expected)


def test_one_column_in_rows_of_one_element_is_split() -> None:
    copy = Copy(0, 0, ((1, 0, 0), (1, 5, 1), (5, 1, 1)))
    targets = [part.target for part in split_at([copy], 1, 2, 100)]
    assert targets == [0, 102]


def test_offsets_beyond_two_to_the_31_are_not_cut() -> None:
    """In numbers alone: the tables and sums are int64."""
    far = 2**31 + 5
    tiles = tiles_of([Copy(far, 2 * far, ((1, 0, 0), (2, far, 1024), (8, 1, 1)))], [0], CPU)
    assert tiles.pieces.dtype == torch.int64
    assert tiles.pieces[0, 1:5].tolist() == [far, far, 2 * far, 1024]


VALUES = [0.0, 1.0, 0.75, 3e38, 1e-40, 2.0**-126, 2.0**-41, 2.0**-40, 2.0**40, 2.0**41]


def levelled(values: list[float], siblings: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Slots of one value each, after their matrices' levelling; factors, and magnitudes left."""
    count = len(values)
    stacks = torch.tensor(values)
    largest = stacks.abs().view(torch.int32).clone()
    factors = torch.zeros(count)
    table = [[0] * 6 for _ in values]
    flat: list[int] = []
    for alike in siblings:
        for slot in alike:
            table[slot] = [slot, 1, len(flat), len(alike), 0, 0]
        flat += alike
    heads = torch.tensor([alike[0] for alike in siblings])
    tables = [heads, torch.tensor(table), torch.tensor(flat)]
    kernels.level[(len(heads),)](*tables, largest, stacks, factors, True)
    return stacks, factors, largest


def test_levelling_multiplies_by_powers_of_two_where_it_must() -> None:
    stacks, factors, largest = levelled(VALUES, [[slot] for slot in range(len(VALUES))])
    magnitudes = torch.tensor(VALUES)
    is_usual = (magnitudes == 0) | ((magnitudes >= 2.0**-40) & (magnitudes <= 2.0**40))
    expected = torch.where(is_usual, 1.0, unit_factor(magnitudes))
    assert torch.equal(factors, expected)
    assert torch.equal(stacks, magnitudes * expected)
    assert not largest.any()


def test_a_matrix_is_nan_where_one_of_its_blocks_is_not_finite() -> None:
    stacks, factors, _ = levelled([1.0, math.inf, 2.0, math.nan], [[0, 1], [2], [3]])
    assert stacks.isnan().tolist() == factors.isnan().tolist() == [True, True, False, True]


@pytest.mark.parametrize("name", ["bf16", "int8"])
def test_momentum_is_rounded_as_on_a_cpu(name: str) -> None:
    """Rows and columns of a larger matrix, in the same random bits."""
    torch.manual_seed(0)
    codec = CODECS[name]
    rows, cols = 70, 300
    values = torch.randn(rows, cols) * torch.logspace(-3, 3, cols)
    values[3, 200] = math.nan
    place = Place(12345, 8, 256)
    expected = torch.zeros(codec.record_bytes(rows, cols), dtype=torch.uint8)
    codec.encode(values, expected, place, step=7)
    record = torch.zeros_like(expected)
    tiles = tiles_of([Copy(0, 0, ((1, 0, 0), (rows, cols, cols), (cols, 1, 1)))], [0], CPU)
    start = record.data_ptr()
    momenta = torch.tensor([start + codec.scale_bytes(rows, cols)])
    seed = torch.tensor([*seeds(place, 7), place.row, place.col], dtype=torch.int32)
    none = torch.zeros(1, dtype=torch.int64)
    groups = torch.zeros(1, dtype=torch.int32)
    # share 0: momentum becomes the gradient
    numbers = torch.tensor([0.0, 1.0, 0, 0, 0, 0, 0, 0])
    with interpreted():
        kernels.advance[(len(tiles.tiles),)](
            tiles.tiles,
            tiles.pieces,
            none,
            torch.tensor([values.data_ptr()]),
            momenta,
            torch.tensor([start]),
            seed,
            groups,
            numbers,
            numbers,
            torch.zeros(rows * cols),
            *[none] * 5,
            *(False, codec.format, True, False, False, True, True),
            *tiles.shape,
            *(1, 1),
        )
    found, wanted = (codec.decode(one, rows, cols) for one in (record, expected))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    elements = slice(codec.scale_bytes(rows, cols), None)
    assert torch.equal(record[elements], expected[elements])
