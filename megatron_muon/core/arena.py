"""The memory of a step: buffers that exist since construction, at places in one tensor.

Buffers that are never needed at the same moment share memory, so a step allocates nothing.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron_muon.core.memory import aligned


@dataclass(eq=False)
class Buffer:
    """Memory for `numel` elements, in use from moment `first` to moment `last` of a step, both included."""

    numel: int
    dtype: torch.dtype
    first: int
    last: int
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes that it takes, up to the next aligned place."""
        return aligned(self.numel * self.dtype.itemsize)


class Arena:
    """Buffers in one tensor, or in `scratch`, the memory of an arena that steps at another time, which then grows."""

    def __init__(self, device: torch.device, buffers: Sequence[Buffer], scratch: torch.Tensor | None = None) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8, device=device) if scratch is None else scratch
        self.nbytes = _find_places([buffer for buffer in buffers if buffer.numel])
        self.acquire()

    def acquire(self) -> None:
        """Have the memory, which `release` may have given back. Tensors stay what they are, without their values."""
        storage = self.memory.untyped_storage()
        if storage.nbytes() < self.nbytes:
            storage.resize_(self.nbytes)

    def release(self) -> None:
        """Give the memory back until it is acquired again; until then no tensor of it may be used."""
        self.memory.untyped_storage().resize_(0)

    def tensor(self, buffer: Buffer) -> torch.Tensor:
        """A buffer of the arena as a tensor `(numel,)`."""
        size = buffer.numel * buffer.dtype.itemsize
        return self.memory.as_strided((size,), (1,), buffer.offset).view(buffer.dtype)


_TRIES, _GOOD_ENOUGH = 100, 1.02
"""How often places are looked for, and the share of the least memory at which that ends."""


def _find_places(buffers: Sequence[Buffer]) -> int:
    """Set the offsets of buffers; the bytes that all take.

    Of several tries the best: the first takes buffers by how long they are needed, the others change that a little.
    """
    if not buffers:
        return 0
    chance, best = random.Random(0), dict[Buffer, int]()
    enough, taken = _GOOD_ENOUGH * _most_at_a_time(buffers), sum(buffer.nbytes for buffer in buffers) + 1
    for attempt in range(_TRIES):
        least = 0.7 if attempt else 1.0
        weights = [(chance.uniform(least, 1.0) * (buffer.last + 1 - buffer.first), buffer.nbytes) for buffer in buffers]
        offsets = _best_fit(buffers, weights)
        top = max(offset + buffer.nbytes for buffer, offset in offsets.items())
        if top < taken:
            best, taken = offsets, top
        if taken <= enough:
            break
    for buffer, offset in best.items():
        buffer.offset = offset
    return taken


def _most_at_a_time(buffers: Sequence[Buffer]) -> int:
    """Bytes that are in use at the moment when most are: no places take less."""
    begins = ((buffer.first, buffer.nbytes) for buffer in buffers)
    ends = ((buffer.last + 1, -buffer.nbytes) for buffer in buffers)
    return max(itertools.accumulate(size for _, size in sorted([*begins, *ends])), default=0)


class _Free(NamedTuple):
    """From moment `first` to before moment `end` memory is free from `offset` on."""

    offset: int
    first: int
    end: int


def _best_fit(buffers: Sequence[Buffer], weights: Sequence[tuple[float, int]]) -> dict[Buffer, int]:
    """Offsets: where memory is free lowest, the heaviest buffer that fits between its neighbours in time, else none.

    Source: https://arxiv.org/abs/1804.10001.
    """
    left = dict(zip(buffers, weights, strict=True))
    spans = [_Free(0, 0, max(buffer.last for buffer in buffers) + 1)]
    offsets = dict[Buffer, int]()
    while left:
        span = min(spans)
        place = spans.index(span)
        fitting = [buffer for buffer in left if span.first <= buffer.first and buffer.last < span.end]
        if fitting:
            buffer = max(fitting, key=left.__getitem__)
            offsets[buffer] = span.offset
            del left[buffer]
            after = buffer.last + 1
            parts = [
                span._replace(end=buffer.first),
                _Free(span.offset + buffer.nbytes, buffer.first, after),
                span._replace(first=after),
            ]
            spans[place : place + 1] = [part for part in parts if part.first < part.end]
        else:
            lower = min(other.offset for other in spans[max(place - 1, 0) : place + 2] if other is not span)
            spans[place] = span._replace(offset=lower)
        levels = [list(level) for _, level in itertools.groupby(spans, lambda each: each.offset)]
        spans = [level[0]._replace(end=level[-1].end) for level in levels]
    return offsets
