"""Storage formats of momentum: a rectangle of an fp32 matrix as a record of bytes.

bf16 and int8 round *stochastically*, up with the probability of the part cut off: with momentum
0.95 the change of one step can be smaller than half the spacing of the stored values, and rounding
to the nearest loses it step after step. The random bits are a function of step, matrix, row and
column alone. So a matrix rounds to the same values however its rows are cut over ranks (and its
columns; for int8 at multiples of 128), on any device and wherever its records live. torchao 0.18.0
draws from the device's global generator; its 8-bit state and bitsandbytes 0.50.2 round to the
nearest.
"""

from __future__ import annotations

import hashlib
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple, override

import torch
from torch import Tensor

BLOCK_COLS = 128
"""Columns of a row that share one scale in int8, counted from the rectangle's first column."""

_INT8_MAX = 127
# the reciprocal of a smaller scale overflows; such a block (all below 1.9e-34) is stored as zeros
_SMALLEST_SCALE = torch.finfo(torch.float32).smallest_normal
# elements worked on at once: on a CPU the temporaries (16 bytes each) stay in cache
_CHUNK_CPU = 1 << 17
_CHUNK_DEVICE = 1 << 22  # few launches


class Place(NamedTuple):
    """Position of a rectangle: `matrix_key` of the matrix's name, first row and column in it."""

    key: int
    row: int
    col: int


class Codec(ABC):
    """A storage format. A record of zero bytes decodes to zeros in every format.

    Records are 1D contiguous uint8 tensors, aligned to at least 4 bytes, of at least `record_bytes`
    bytes; bytes beyond are left alone.
    """

    name: str
    dtype: torch.dtype
    """The dtype of the stored elements."""
    format: int
    """Its number in `core.kernels`."""

    def record_bytes(self, rows: int, cols: int) -> int:
        """Size of the record of a (rows, cols) rectangle."""
        return self.scale_bytes(rows, cols) + self.dtype.itemsize * rows * cols

    def scale_bytes(self, rows: int, cols: int) -> int:
        """Size of what precedes the elements; nothing by default."""
        return 0

    def decode(self, record: Tensor, rows: int, cols: int) -> Tensor:
        """The stored values, (rows, cols) fp32; a view of the record for fp32."""
        return self._elements(record, rows, cols).float()

    def _elements(self, record: Tensor, rows: int, cols: int) -> Tensor:
        """A view of the record, (rows, cols)."""
        stored = record[self.scale_bytes(rows, cols) : self.record_bytes(rows, cols)]
        return stored.view(self.dtype).view(rows, cols)

    @abstractmethod
    def encode(self, values: Tensor, record: Tensor, place: Place, *, step: int) -> None:
        """Store (rows, cols) fp32 values in the record, in place; `step` picks the random bits."""


class Fp32(Codec):
    """Every bit, 4 bytes per element. A decoded view costs nothing to encode again."""

    name = "fp32"
    dtype = torch.float32
    format = 0

    @override
    def encode(self, values: Tensor, record: Tensor, place: Place, *, step: int) -> None:
        stored = self.decode(record, *values.shape)
        if values.data_ptr() != stored.data_ptr():
            stored.copy_(values)


class Bf16(Codec):
    """The upper half of fp32's bits, 2 bytes per element, rounded stochastically.

    The error stays under one spacing of bf16 and averages to zero. Infinities stay, NaN stays NaN;
    a finite value within one spacing of overflow may become infinite, as in rounding to the
    nearest.
    """

    name = "bf16"
    dtype = torch.bfloat16
    format = 1

    @override
    def encode(self, values: Tensor, record: Tensor, place: Place, *, step: int) -> None:
        """Add 16 random bits to those that are cut off, and cut."""
        stored = self._elements(record, *values.shape).view(torch.int16)
        inf, nan = float("inf"), float("nan")
        for rows, noise in _noise(values, place, step=step):
            # a NaN whose bits are all ones would carry over into -0: the canonical one does not
            canonical = torch.nan_to_num(values[rows], nan=nan, posinf=inf, neginf=-inf)
            bits = noise.bitwise_and_(0xFFFF).add_(canonical.view(torch.int32))
            stored[rows].copy_(bits.bitwise_right_shift_(16))


class Int8(Codec):
    """Quadratic companding to 8 bits: code c decodes to sign(c) * c**2 * scale.

    A record holds the fp32 scales (rows, ceil(cols / 128)), one for up to 128 columns of a row, and
    then the codes (rows, cols), rounded stochastically. A scale is its block's largest magnitude
    over 127^2. Evenly spaced values would drown small columns beside large ones, whose directions
    orthogonalisation makes as large as any. The error stays under one spacing, at most 253 scales,
    and averages to zero. A block with a value that is not finite decodes to no finite value; one
    whose values all lie below 1.9e-34 decodes to zeros.
    """

    name = "int8"
    dtype = torch.int8
    format = 2

    @override
    def decode(self, record: Tensor, rows: int, cols: int) -> Tensor:
        scales, codes = self._scales_and_codes(record, rows, cols)
        values = torch.empty(rows, cols, dtype=torch.float32, device=record.device)
        for chunk in _chunks(values):
            roots = values[chunk].copy_(codes[chunk])
            squares = roots.mul_(roots.abs())
            squares.mul_(_by_column(scales[chunk], cols))
        return values

    @override
    def encode(self, values: Tensor, record: Tensor, place: Place, *, step: int) -> None:
        """Scale each block to [0, 127^2] and round each magnitude to a neighboring square."""
        rows, cols = values.shape
        scales, codes = self._scales_and_codes(record, rows, cols)
        for chunk, noise in _noise(values, place, step=step):
            magnitudes = values[chunk].abs()
            scale = _block_scales(magnitudes)
            scales[chunk] = scale
            inverse = torch.where(scale > 0, scale.reciprocal(), 0.0)
            roots = _rounded_roots(magnitudes.mul_(_by_column(inverse, cols)), noise)
            codes[chunk].copy_(roots.copysign_(values[chunk]))

    @override
    def scale_bytes(self, rows: int, cols: int) -> int:
        return 4 * rows * -(-cols // BLOCK_COLS)

    def _scales_and_codes(self, record: Tensor, rows: int, cols: int) -> tuple[Tensor, Tensor]:
        """Views of the record: (rows, blocks) fp32 and (rows, cols) int8."""
        scales = record[: self.scale_bytes(rows, cols)].view(torch.float32)
        return scales.view(rows, -(-cols // BLOCK_COLS)), self._elements(record, rows, cols)


def _block_scales(magnitudes: Tensor) -> Tensor:
    """The scale of each block, (rows, blocks): 0 if all are nearly 0, not finite if one is not."""
    padded = torch.nn.functional.pad(magnitudes, (0, -magnitudes.shape[1] % BLOCK_COLS))
    largest = padded.unflatten(1, (-1, BLOCK_COLS)).amax(dim=-1)
    # The largest code has to get the same scale when its value is encoded again, as after loading a
    # checkpoint. Divided by a tensor: CUDA would multiply by the reciprocal of a constant.
    largest_square = magnitudes.new_full((), _INT8_MAX**2)
    decoded = largest / largest_square * _INT8_MAX**2
    scale = decoded / largest_square
    return torch.where(scale < _SMALLEST_SCALE, 0.0, scale)


def _rounded_roots(squares: Tensor, noise: Tensor) -> Tensor:
    """Round to c or c + 1, for c^2 <= square < (c + 1)^2, with expectation square. Overwrites both.

    With p = (square - c^2) / (2 c + 1), the fraction of the way between the two squares, c + 1 has
    probability p.
    """
    roots = squares.sqrt().floor_()  # c
    remainders = squares.addcmul_(roots, roots, value=-1.0)
    roots.add_(0.5)
    roots.add_(remainders.div_(roots), alpha=0.5)  # c + 1/2 + p
    # (k + 1/2) / 2^14 for k in [-2^13, 2^13) has a mean of zero. It is exact in fp32 when added to
    # c + 1/2, and at most 1/2 - 2^-15, so that a square stays the same: c + p of a decoded value is
    # wrong by up to 2.3e-5.
    roots.add_(noise.bitwise_right_shift_(2), alpha=2.0**-14)
    roots.add_(2.0**-15)
    return roots.floor_().clamp_(max=_INT8_MAX)


CODECS: dict[str, Codec] = {codec.name: codec for codec in (Fp32(), Bf16(), Int8())}


def matrix_key(name: str) -> int:
    """32 bits from a parameter's name, the same in every process and run."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big")


def _by_column(scales: Tensor, cols: int) -> Tensor:
    """A number for each block (rows, blocks), repeated for each column (rows, cols)."""
    return scales[..., None].expand(-1, -1, BLOCK_COLS).flatten(1)[:, :cols]


def _chunks(values: Tensor) -> list[slice]:
    """Ranges of rows that are worked on at once; none for an empty rectangle."""
    rows, cols = values.shape
    elements = _CHUNK_CPU if values.device.type == "cpu" else _CHUNK_DEVICE
    size = max(1, elements // max(cols, BLOCK_COLS))
    starts = range(0, rows, size) if cols else ()
    return [slice(start, min(start + size, rows)) for start in starts]


# lowbias32 of Chris Wellons' hash-prospector: https://github.com/skeeto/hash-prospector (public
# domain); the second multiplier as a signed int32.
_MULTIPLIERS = (0x7FEB352D, 0x846CA68B - (1 << 32))


def _noise(values: Tensor, place: Place, *, step: int) -> Iterator[tuple[slice, Tensor]]:
    """Ranges of rows with random numbers (rows, cols), int32, uniform in [-2^15, 2^15).

    The caller may overwrite them. A hash of the row and a hash of the column are joined by xor and
    mixed again: otherwise the numbers would form a matrix of low rank, and orthogonalisation would
    amplify it.
    """
    of_row, of_col = seeds(place, step)
    rows, cols = values.shape
    of_rows = _hashes(place.row, rows, of_row, values.device)
    of_cols = _hashes(place.col, cols, of_col, values.device)
    first, second = _MULTIPLIERS
    for chunk in _chunks(values):
        # The input is a hash already and only the upper bits are used: lowbias32's first and last
        # shifts are left out.
        numbers = of_rows[chunk, None] ^ of_cols
        numbers.mul_(first)
        _xor_shift(numbers, 15)
        numbers.mul_(second)
        yield chunk, numbers.bitwise_right_shift_(16)


def seeds(place: Place, step: int) -> tuple[int, int]:
    """Of the noise of rows and columns of a matrix in a step, 32 bits with a sign."""
    seed = hashlib.blake2b(f"{step} {place.key}".encode(), digest_size=8).digest()
    row, col = struct.unpack("<ii", seed)
    return row, col


def _hashes(first: int, count: int, seed: int, device: torch.device) -> Tensor:
    """lowbias32 of each number from `first` on xor a seed: (count,) int32."""
    numbers = torch.arange(first, first + count, dtype=torch.int32, device=device)
    numbers.bitwise_xor_(seed)
    for shift, multiplier in zip((16, 15), _MULTIPLIERS, strict=True):
        _xor_shift(numbers, shift)
        numbers.mul_(multiplier)
    _xor_shift(numbers, 16)
    return numbers


def _xor_shift(numbers: Tensor, shift: int) -> None:
    """numbers ^= numbers >> shift, filled with zeros, not with the sign as torch's shift does."""
    numbers.bitwise_xor_((numbers >> shift) & ((1 << (32 - shift)) - 1))
