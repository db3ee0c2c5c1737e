"""Storage formats of momentum: error bounds, no bias, random bits that depend on the place alone,
no structure in them.

The random bits are a function of step and place, so what is measured here is the same in every run.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from megatron_muon.offload.codecs import BLOCK_COLS, CODECS, Codec, Place, matrix_key
from tests.unit.test_noise import random_numbers

STOCHASTIC = ["bf16", "int8"]
HERE = Place(key=matrix_key("a matrix"), row=0, col=0)
SIZES = st.integers(0, 40)
WIDTHS = st.integers(0, 300)
SEEDS = st.integers(0, 2**16)
STEPS = st.integers(0, 2**40)


def random_values(rows: int, cols: int, seed: int = 0) -> Tensor:
    """Normal numbers whose rows differ in magnitude by up to 1e6."""
    generator = torch.Generator().manual_seed(seed)
    exponents = 6 * torch.rand(rows, 1, generator=generator) - 3
    return torch.randn(rows, cols, generator=generator) * 10**exponents


def encoded(
    codec: Codec,
    values: Tensor,
    place: Place = HERE,
    *,
    step: int = 0,
) -> Tensor:
    size = codec.record_bytes(*values.shape)
    record = torch.full((size,), 0xA5, dtype=torch.uint8)
    codec.encode(values, record, place, step=step)
    return record


def stored(
    codec: Codec,
    values: Tensor,
    place: Place = HERE,
    *,
    step: int = 0,
) -> Tensor:
    return codec.decode(encoded(codec, values, place, step=step), *values.shape)


def bf16_spacing(values: Tensor) -> Tensor:
    """Distance of the two bf16 numbers around each value: 2^(exponent - 7)."""
    return torch.exp2((torch.frexp(values).exponent - 8).double())


def int8_scales(values: Tensor) -> Tensor:
    """Largest magnitude of each 128 columns of a row over 127^2, repeated to the shape of the
    values.
    """
    scales = torch.empty_like(values)
    for block, scale in zip(
        values.split(BLOCK_COLS, 1),
        scales.split(BLOCK_COLS, 1),
        strict=True,
    ):
        if block.numel():
            scale[:] = block.abs().amax(dim=1, keepdim=True) / 127**2
    return scales


def int8_spacing(values: Tensor) -> Tensor:
    """Distance of the two squares times scale around each value."""
    scales = int8_scales(values)
    codes = (values / scales).abs().nan_to_num().sqrt().floor()
    return scales * (2 * codes.clamp(max=126) + 1)


def spacing_of(codec: Codec, values: Tensor) -> Tensor:
    return bf16_spacing(values) if codec.name == "bf16" else int8_spacing(values)


@given(rows=SIZES, cols=WIDTHS, seed=SEEDS)
def test_fp32_keeps_every_bit_and_decodes_to_the_record_itself(
    rows: int, cols: int, seed: int
) -> None:
    """NaNs with payloads and subnormal numbers included."""
    torch.manual_seed(seed)
    bits = torch.randint(
        -(2**31),
        2**31,
        (rows, cols),
    ).int()
    record = encoded(CODECS["fp32"], bits.view(torch.float32))
    assert torch.equal(record.view(torch.int32), bits.flatten())
    CODECS["fp32"].decode(record, rows, cols).fill_(1.5)
    assert (record.view(torch.float32) == 1.5).all()


@pytest.mark.parametrize("name", CODECS)
@given(rows=SIZES, cols=WIDTHS)
@example(rows=0, cols=7)
@example(rows=7, cols=0)
def test_zero_bytes_are_zeros_and_zeros_stay(name: str, rows: int, cols: int) -> None:
    codec, zeros = CODECS[name], torch.zeros(rows, cols)
    empty = torch.zeros(codec.record_bytes(rows, cols), dtype=torch.uint8)
    assert torch.equal(codec.decode(empty, rows, cols), zeros)
    assert torch.equal(stored(codec, zeros), zeros)


@pytest.mark.parametrize("name", STOCHASTIC)
@given(rows=SIZES, cols=WIDTHS, seed=SEEDS, step=STEPS)
@example(rows=2, cols=129, seed=0, step=0)
def test_error_is_under_one_spacing(name: str, rows: int, cols: int, seed: int, step: int) -> None:
    """int8: plus 2e-5 spacings for the rounding of the scale and of value / scale, each within
    2^-23 of up to 127^2.
    """
    codec, values = CODECS[name], random_values(rows, cols, seed)
    found = stored(
        codec,
        values,
        Place(key=seed, row=step >> 16, col=0),
        step=step,
    )
    tolerance = 2e-5 if name == "int8" else 0.0
    assert ((found - values).abs() <= spacing_of(codec, values) * (1.0 + tolerance)).all()


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize(
    ("rows", "cols"),
    [(512, 1024), (2**19, 1)],
)
def test_what_was_decoded_is_encoded_as_it_was(name: str, rows: int, cols: int) -> None:
    """A resumed training was not bit for bit the same: after loading, every fourth of int8's scales
    had changed.

    Of one column every value has a scale of its own.
    """
    codec = CODECS[name]
    record = encoded(codec, random_values(rows, cols, seed=1), step=1)
    for step in (2, 3):
        assert torch.equal(
            encoded(codec, codec.decode(record, rows, cols), step=step),
            record,
        )


def test_bf16_keeps_nan_and_infinities() -> None:
    """A NaN whose bits are all ones plus random bits would carry over into -0; infinity must not
    become NaN.
    """
    nan_bits = torch.tensor([0x7FFFFFFF, -1, 0x7F800001, -0x7FFFFF, 0x7FC00000])
    nans = nan_bits.to(torch.int32).view(torch.float32)
    others = torch.tensor([math.inf, -math.inf, 1.0, -0.0])
    values = torch.cat((nans, others)).expand(64, -1)
    found = stored(CODECS["bf16"], values)
    torch.testing.assert_close(found, values, rtol=0.0, atol=0.0, equal_nan=True)
    many = torch.full((512, 512), math.inf)  # every one of the 2^16 random numbers about four times
    assert torch.equal(stored(CODECS["bf16"], many), many)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_int8_marks_the_block_of_what_is_not_finite(bad: float) -> None:
    values = random_values(4, 300)
    values[1, 130] = bad
    values[2, 299] = bad
    found = stored(CODECS["int8"], values)
    spoilt = torch.zeros(4, 300, dtype=torch.bool)
    spoilt[1, 128:256] = spoilt[2, 256:] = True
    assert torch.equal(~found.isfinite(), spoilt)


def test_int8_does_not_wrap_at_the_largest_magnitude() -> None:
    """Where the largest value over its scale comes out above 127^2, the largest of the random
    numbers makes it 128.
    """
    candidates = 1.0 + torch.arange(1000) * 2.0**-23
    over = candidates * (candidates * (1.0 / 127**2)).reciprocal()
    assert over.max() > 127**2
    values = torch.full((512, 1024), -float(candidates[over.argmax()]))
    assert random_numbers(512, 1024).abs().max() == 0.5 - 2.0**-17
    error = (stored(CODECS["int8"], values) - values).abs()
    assert (error <= int8_spacing(values) * (1 + 2e-5)).all()


def halfway(codec: Codec) -> tuple[Tensor, float]:
    """A matrix of one value in the middle of two that the format holds, and their distance.

    The first column makes int8's scale 1, so that 10^2 is followed by 11^2.
    """
    low, spacing = (1.0, 2.0**-7) if codec.name == "bf16" else (100.0, 21.0)
    values = torch.full((64, 128), low + 0.5 * spacing)
    values[:, 0] = 127.0**2
    return values, spacing


@pytest.mark.parametrize("name", STOCHASTIC)
@pytest.mark.parametrize("shift", [-0.49, -0.2, 0.0, 0.4])
def test_the_mean_over_steps_is_the_value(name: str, shift: float) -> None:
    """A rounding errs by a variance of p (1 - p) spacings; six deviations of a mean are allowed."""
    codec, steps = CODECS[name], 128
    values, spacing = halfway(codec)
    values[:, 1:] += shift * spacing
    deviation = math.sqrt((0.5 + shift) * (0.5 - shift))
    found = torch.stack([stored(codec, values, step=step) for step in range(steps)])
    error = ((found.double() - values) / spacing)[:, :, 1:]
    for dims in ((0, 1, 2), (0, 1), (0,)):
        means = error.mean(dim=dims)
        count = error.numel() / means.numel()
        bound = (6 * deviation + 3 / math.sqrt(count)) / math.sqrt(count)
        assert means.abs().max() < bound + 2e-5  # int8's rounded division and scale


@pytest.mark.parametrize("name", CODECS)
@given(data=st.data(), rows=SIZES, cols=WIDTHS, seed=SEEDS)
def test_rounding_does_not_depend_on_the_cut(
    name: str, data: st.DataObject, rows: int, cols: int, seed: int
) -> None:
    """Cut anywhere between rows; between columns anywhere, or for int8 at multiples of its
    block.
    """
    codec, values, key = CODECS[name], random_values(rows, cols, seed), matrix_key(str(seed))
    row = data.draw(st.integers(0, 1000))
    col = BLOCK_COLS * data.draw(st.integers(0, 5))
    grid = BLOCK_COLS if name == "int8" else 1
    row_cuts = sorted(
        data.draw(st.lists(st.integers(0, rows), max_size=3)),
    )
    cuts = data.draw(st.lists(st.integers(0, cols // grid), max_size=3))
    col_cuts = sorted(grid * cut for cut in cuts)
    whole = stored(codec, values, Place(key, row, col), step=seed)
    for top, bottom in itertools.pairwise([0, *row_cuts, rows]):
        for left, right in itertools.pairwise([0, *col_cuts, cols]):
            part = values[top:bottom, left:right]
            found = stored(codec, part, Place(key, row + top, col + left), step=seed)
            assert torch.equal(found, whole[top:bottom, left:right])


@pytest.mark.parametrize("name", STOCHASTIC)
def test_rounding_depends_on_step_and_place(name: str) -> None:
    """The negative control of the test above: another step, matrix, row or column rounds
    otherwise.
    """
    codec = CODECS[name]
    values, _ = halfway(codec)
    others = [HERE._replace(key=1), HERE._replace(row=1), HERE._replace(col=128)]
    found = [stored(codec, values, place)[:, 1:] for place in (HERE, *others)]
    found.append(stored(codec, values, HERE, step=1)[:, 1:])
    for one, other in itertools.combinations(found, 2):
        assert 0.4 < (one == other).double().mean() < 0.6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize(
    "shape",
    [(257, 300), (1, 1), (0, 5)],
)
def test_records_of_a_gpu_equal_those_of_a_cpu(name: str, shape: tuple[int, int]) -> None:
    codec = CODECS[name]
    random = random_values(*shape)
    for step, values in enumerate((random, torch.zeros(shape), 1e-37 * random)):
        record = encoded(codec, values, step=step)
        on_gpu = torch.zeros_like(record, device="cuda")
        codec.encode(values.cuda(), on_gpu, HERE, step=step)
        assert torch.equal(on_gpu.cpu(), record)
        assert torch.equal(
            codec.decode(on_gpu, *shape).cpu(),
            codec.decode(record, *shape),
        )
