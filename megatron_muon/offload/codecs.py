"""Storage formats of momentum: a rectangle of an fp32 matrix to a record of bytes and back.

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
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import override

import torch
from torch import Tensor

BLOCK_COLS = 128
"""Columns of a row that share one scale in int8, counted from the rectangle's first column."""

_INT8_MAX = 127
# A scale below this would make its reciprocal overflow; such a block (all below 1.9e-34) is stored
# as zeros.
_SMALLEST_SCALE = torch.finfo(torch.float32).smallest_normal
# Elements worked on at once: on a CPU the temporaries (16 bytes each) stay in cache, elsewhere
# launches stay few.
_CHUNK_CPU = 1 << 17
_CHUNK_DEVICE = 1 << 22


@dataclass(frozen=True)
class Place:
    """Where a rectangle lies: `matrix_key` of its matrix's name, first row and first column in the whole matrix."""

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
    """Of the stored elements."""

    def record_bytes(self, rows: int, cols: int) -> int:
        """Bytes of the record of a (rows, cols) rectangle."""
        return self.dtype.itemsize * rows * cols

    def decode(self, record: Tensor, rows: int, cols: int) -> Tensor:
        """The stored values, (rows, cols) fp32: a view of the record for fp32, new memory otherwise."""
        return record[: self.record_bytes(rows, cols)].view(self.dtype).view(rows, cols).float()

    @abstractmethod
    def encode(self, values: Tensor, record: Tensor, place: Place, *, step: int) -> None:
        """Store (rows, cols) fp32 values in the record, in place; `step` picks the random bits."""


class Fp32(Codec):
    """Every bit, 4 bytes per element. What `decode` gives *is* the record, so encoding it again costs nothing."""

    name = "fp32"
    dtype = torch.float32

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

    @override
    def encode(self, values: Tensor, record: Tensor, place: Place, *, step: int) -> None:
        """Add 16 random bits below those that are kept, and cut."""
        stored = record[: self.record_bytes(*values.shape)].view(torch.int16).view(values.shape)
        inf = float("inf")
        for rows, noise in _noise(values, place, step=step):
            # Every NaN becomes the canonical one: a NaN whose bits are all ones would carry over
            # into -0.
            bits = torch.nan_to_num(values[rows], nan=float("nan"), posinf=inf, neginf=-inf).view(
                torch.int32
            )
            noise.bitwise_and_(0xFFFF).add_(bits).bitwise_right_shift_(16)
            stored[rows].copy_(noise)


class Int8(Codec):
    """Quadratic companding to 8 bits: code c decodes to sign(c) * c**2 * scale, rounded stochastically.

    A record holds the fp32 scales (rows, ceil(cols / 128)), one for up to 128 columns of a row, and
    then the codes (rows, cols). A scale is its block's largest magnitude over 127^2. Evenly spaced
    values would drown small columns beside large ones, whose directions orthogonalisation makes as
    large as any. The error stays under one spacing, at most 253 scales, and averages to zero. A
    block that holds a value which is not finite comes back with none that is; one whose values all
    lie below 1.9e-34 comes back as zeros.
    """

    name = "int8"
    dtype = torch.int8

    @override
    def record_bytes(self, rows: int, cols: int) -> int:
        return super().record_bytes(rows, cols) + 4 * rows * _blocks(cols)

    @override
    def decode(self, record: Tensor, rows: int, cols: int) -> Tensor:
        scales, codes = self._parts(record, rows, cols)
        values = torch.empty(rows, cols, dtype=torch.float32, device=record.device)
        for chunk in _chunks(rows, cols, record.device):
            part = values[chunk].copy_(codes[chunk])
            part.mul_(part.abs()).mul_(_by_column(scales[chunk], cols))
        return values

    @override
    def encode(self, values: Tensor, record: Tensor, place: Place, *, step: int) -> None:
        """Scale each block to [0, 127^2] and round each magnitude to one of the two squares around it."""
        rows, cols = values.shape
        scales, codes = self._parts(record, rows, cols)
        for chunk, noise in _noise(values, place, step=step):
            scaled = values[chunk].abs()
            blocks = torch.nn.functional.pad(scaled, (0, -cols % BLOCK_COLS)).unflatten(
                1, (-1, BLOCK_COLS)
            )
            # Of what the largest code will decode to, because that gives the same scale when it is
            # encoded again, as after loading a checkpoint. Zero where all values are nearly so, not
            # finite where one is not. Divided by a tensor: CUDA would multiply by the reciprocal of
            # a constant.
            largest = scaled.new_full((), _INT8_MAX**2)
            scale = blocks.amax(dim=-1) / largest * _INT8_MAX**2 / largest
            scale = torch.where(scale < _SMALLEST_SCALE, 0.0, scale)
            scales[chunk] = scale
            scaled.mul_(_by_column(torch.where(scale > 0, scale.reciprocal(), 0.0), cols))
            # The root of c^2 <= scaled < (c + 1)^2 becomes c + p + 1/2, where p is scaled's part of
            # the way between the two squares, (scaled - c^2) / (2 c + 1).
            root = scaled.sqrt().floor_()
            scaled.addcmul_(root, root, value=-1.0)
            scaled.div_(root.add_(0.5))
            root.add_(scaled, alpha=0.5)
            # (k + 1/2) / 2^14 for k in [-2^13, 2^13) has a mean of zero. It is exact in fp32 when
            # added to c + 1/2, and at most 1/2 - 2^-15, so that a square stays what it is: c + p of
            # a decoded value is wrong by up to 2.3e-5.
            root.add_(noise.bitwise_right_shift_(2), alpha=2.0**-14).add_(2.0**-15).floor_().clamp_(
                max=_INT8_MAX
            )
            codes[chunk].copy_(root.copysign_(values[chunk]))

    def _parts(self, record: Tensor, rows: int, cols: int) -> tuple[Tensor, Tensor]:
        """Scales and codes."""
        scales, codes = record[: self.record_bytes(rows, cols)].split(
            (4 * rows * _blocks(cols), rows * cols)
        )
        return scales.view(torch.float32).view(rows, _blocks(cols)), codes.view(torch.int8).view(
            rows, cols
        )


CODECS: dict[str, Codec] = {codec.name: codec for codec in (Fp32(), Bf16(), Int8())}


def matrix_key(name: str) -> int:
    """32 bits from a parameter's name, the same in every process and run."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big")


def _blocks(cols: int) -> int:
    return -(-cols // BLOCK_COLS)


def _by_column(scales: Tensor, cols: int) -> Tensor:
    """A number for each block (rows, blocks) as one for each column (rows, cols)."""
    return scales[..., None].expand(-1, -1, BLOCK_COLS).flatten(1)[:, :cols]


def _chunks(rows: int, cols: int, device: torch.device) -> Iterator[slice]:
    """Ranges of rows that are worked on at once; none for an empty rectangle."""
    if rows and cols:
        size = max(
            1, (_CHUNK_CPU if device.type == "cpu" else _CHUNK_DEVICE) // max(cols, BLOCK_COLS)
        )
        for start in range(0, rows, size):
            yield slice(start, min(start + size, rows))


# lowbias32 of Chris Wellons' hash-prospector: https://github.com/skeeto/hash-prospector (public
# domain); the second multiplier as a signed int32.
_MULTIPLIERS = (0x7FEB352D, 0x846CA68B - (1 << 32))


def _noise(values: Tensor, place: Place, *, step: int) -> Iterator[tuple[slice, Tensor]]:
    """Ranges of rows, each with its random numbers: int32 in [-2^15, 2^15), uniform, (rows of the range, cols).

    The caller may overwrite them; they are valid until the next. A hash of the row and a hash of
    the column are joined by xor and mixed again: otherwise the numbers would form a matrix of low
    rank, and orthogonalisation would amplify it.
    """
    rows, cols = values.shape
    of_row, of_col = _hashes(place, rows, cols, values.device, step=step)
    first, second = _MULTIPLIERS
    numbers = shifted = torch.empty(0)
    for chunk in _chunks(rows, cols, values.device):
        shape = (chunk.stop - chunk.start, cols)
        if numbers.shape != shape:
            numbers, shifted = torch.empty(
                2, *shape, dtype=torch.int32, device=values.device
            ).unbind()
        # The input is a hash already and only the upper bits are used: lowbias32's first and last
        # shifts are left out.
        torch.bitwise_xor(of_row[chunk, None], of_col, out=numbers)
        numbers.mul_(first)
        _xor_shift(numbers, 15, shifted)
        yield chunk, numbers.mul_(second).bitwise_right_shift_(16)


def _hashes(
    place: Place, rows: int, cols: int, device: torch.device, *, step: int
) -> tuple[Tensor, Tensor]:
    """lowbias32 of each row's and of each column's number xor a seed: (rows,) and (cols,) int32."""
    seed = hashlib.blake2b(f"{step} {place.key}".encode(), digest_size=8).digest()
    of_row = torch.arange(place.row, place.row + rows, dtype=torch.int32, device=device)
    of_col = torch.arange(place.col, place.col + cols, dtype=torch.int32, device=device)
    of_row.bitwise_xor_(int.from_bytes(seed[:4], "little", signed=True))
    of_col.bitwise_xor_(int.from_bytes(seed[4:], "little", signed=True))
    numbers = torch.cat((of_row, of_col))
    shifted = torch.empty_like(numbers)
    for shift, multiplier in zip((16, 15), _MULTIPLIERS, strict=True):
        _xor_shift(numbers, shift, shifted)
        numbers.mul_(multiplier)
    _xor_shift(numbers, 16, shifted)
    return numbers[:rows], numbers[rows:]


def _xor_shift(numbers: Tensor, shift: int, shifted: Tensor) -> None:
    """numbers ^= numbers >> shift with zeros shifted in, which torch's shift of a signed number does not do."""
    torch.bitwise_right_shift(numbers, shift, out=shifted)
    numbers.bitwise_xor_(shifted.bitwise_and_((1 << (32 - shift)) - 1))
