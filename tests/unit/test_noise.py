"""The random bits of stochastic rounding: a published hash of step and place.

When it was chosen, 2^20 numbers were uniform, without correlation between neighbors, steps and
matrices, and without a part of low rank, which orthogonalization would amplify.
"""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_muon.offload import codecs
from megatron_muon.offload.codecs import CODECS, Place, matrix_key

HERE = Place(key=matrix_key("a matrix"), row=0, col=0)


def random_numbers(rows: int, cols: int) -> Tensor:
    """The random numbers of a rectangle, fp64, centered: uniform in (-1/2, 1/2)."""
    noise = codecs._noise(torch.empty(rows, cols), HERE, step=0)
    chunks = [numbers.clone() for _, numbers in noise]
    return (torch.cat(chunks).double() + 0.5) / 2**16


def lowbias32(x: np.ndarray) -> np.ndarray:
    """The published hash, in unsigned numbers: https://github.com/skeeto/hash-prospector."""
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x7FEB352D)
    x = x ^ (x >> np.uint32(15))
    x = x * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


@pytest.mark.parametrize(
    ("rows", "cols", "step", "key"),
    [
        (1, 1, 0, 0),
        (20, 200, 2**40, 2**32 - 1),
        (7, 129, 17, 3),
    ],
)
def test_bf16_against_unsigned_arithmetic(rows: int, cols: int, step: int, key: int) -> None:
    """torch has signed numbers only: the same hash and rounding in numpy's unsigned ones give the
    same bits.
    """
    place = Place(key, row=3 * rows, col=5 * cols)
    seed = np.frombuffer(
        hashlib.blake2b(
            f"{step} {key}".encode(),
            digest_size=8,
        ).digest(),
        "<u4",
    )
    of_row = lowbias32(
        np.arange(place.row, place.row + rows, dtype=np.uint32) ^ seed[0],
    )
    of_col = lowbias32(
        np.arange(place.col, place.col + cols, dtype=np.uint32) ^ seed[1],
    )
    mixed = (of_row[:, None] ^ of_col) * np.uint32(0x7FEB352D)
    mixed = (mixed ^ (mixed >> np.uint32(15))) * np.uint32(0x846CA68B)
    values = torch.randn(rows, cols, generator=torch.Generator().manual_seed(step % 1000))
    rounded = values.numpy().view(np.uint32) + (mixed >> np.uint32(16))
    expected = rounded & np.uint32(0xFFFF0000)
    record = torch.empty(2 * rows * cols, dtype=torch.uint8)
    CODECS["bf16"].encode(values, record, place, step=step)
    found = CODECS["bf16"].decode(record, rows, cols).numpy()
    assert np.array_equal(found, expected.view(np.float32))
