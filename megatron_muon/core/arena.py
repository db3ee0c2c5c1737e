"""The memory of a step: buffers that exist since construction, at places in one tensor, and copies between them.

Buffers that are never needed at the same moment share memory, so a step allocates nothing. Copies
of rectangles are merged once so that a step makes few of them: neighbours of equal shape at equal
distances, at both ends, are one strided copy with a further dimension; what follows on without a
gap is one run.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
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

    def __init__(
        self, device: torch.device, buffers: Sequence[Buffer], scratch: torch.Tensor | None = None
    ) -> None:
        self.memory = (
            torch.empty(0, dtype=torch.uint8, device=device) if scratch is None else scratch
        )
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

    Of several tries the best: the first takes buffers by how long they are needed, the others
    change that a little.
    """
    if not buffers:
        return 0
    chance, best = random.Random(0), dict[Buffer, int]()
    enough, taken = (
        _GOOD_ENOUGH * _most_at_a_time(buffers),
        sum(buffer.nbytes for buffer in buffers) + 1,
    )
    for attempt in range(_TRIES):
        least = 0.7 if attempt else 1.0
        weights = [
            (chance.uniform(least, 1.0) * (buffer.last + 1 - buffer.first), buffer.nbytes)
            for buffer in buffers
        ]
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
        fitting = [
            buffer for buffer in left if span.first <= buffer.first and buffer.last < span.end
        ]
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
            lower = min(
                other.offset for other in spans[max(place - 1, 0) : place + 2] if other is not span
            )
            spans[place] = span._replace(offset=lower)
        levels = [list(level) for _, level in itertools.groupby(spans, lambda each: each.offset)]
        spans = [level[0]._replace(end=level[-1].end) for level in levels]
    return offsets


MAX_DIMS = 4
"""Of a merged copy: kernels for strided copies do well up to here."""


class Strided(NamedTuple):
    """Where a rectangle lies in a flat buffer: its first element, and strides in elements."""

    offset: int
    strides: tuple[int, ...]


class Copy(NamedTuple):
    """One copy of `shape` elements from `source` in one buffer to `target` in another."""

    shape: tuple[int, ...]
    source: Strided
    target: Strided

    @property
    def is_run(self) -> bool:
        """Whether elements lie one after the other at both ends."""
        return len(self.shape) == 1 and self.source.strides == self.target.strides == (1,)


def merged(copies: Iterable[Copy]) -> list[Copy]:
    """The same elements copied by fewer copies. Targets must not overlap; the order of copies then has no meaning."""
    found = _joined([_collapsed(copy) for copy in copies])
    while True:
        fewer = [_collapsed(copy) for copy in _stepped(found)]
        if len(fewer) == len(found):
            return fewer
        found = fewer


def _collapsed(copy: Copy) -> Copy:
    """Without dimensions of one element, and with those joined that follow on without a gap at both ends."""
    dims: list[tuple[int, int, int]] = []
    for size, source, target in zip(
        copy.shape, copy.source.strides, copy.target.strides, strict=True
    ):
        if dims and dims[-1][1:] == (size * source, size * target):
            dims[-1] = (dims[-1][0] * size, source, target)
        elif size > 1:
            dims.append((size, source, target))
    shape, sources, targets = zip(*(dims or [(1, 1, 1)]), strict=True)
    return Copy(shape, Strided(copy.source.offset, sources), Strided(copy.target.offset, targets))


def _joined(copies: Sequence[Copy]) -> list[Copy]:
    """Runs that follow each other at both ends as one, whatever their lengths."""
    found: list[Copy] = []
    for copy in sorted(copies, key=lambda one: one.source.offset):
        if found and copy.is_run and found[-1].is_run:
            (length,), source, target = found[-1]
            if (
                copy.source.offset == source.offset + length
                and copy.target.offset == target.offset + length
            ):
                found[-1] = Copy((length + copy.shape[0],), source, target)
                continue
        found.append(copy)
    return found


def _stepped(copies: Sequence[Copy]) -> list[Copy]:
    """Copies of equal shape and strides, at equal distances at both ends, as one with a further dimension."""
    alike: dict[
        tuple[tuple[int, ...], ...],
        list[tuple[int, int]],
    ] = defaultdict(list)
    for copy in copies:
        alike[copy.shape, copy.source.strides, copy.target.strides].append(
            (copy.source.offset, copy.target.offset)
        )
    found: list[Copy] = []
    for (shape, sources, targets), unsorted in alike.items():
        offsets, first = sorted(unsorted), 0
        steps = [
            (
                after[0] - one[0],
                after[1] - one[1],
            )
            for one, after in itertools.pairwise(offsets)
        ]
        while first < len(offsets):
            last = first
            more: tuple[tuple[int, ...], ...] = ((), (), ())
            # torch's strides are not negative
            if len(shape) < MAX_DIMS and first < len(steps) and steps[first][1] > 0:
                while last < len(steps) and steps[last] == steps[first]:
                    last += 1
                more = (
                    (last - first + 1,),
                    (steps[first][0],),
                    (steps[first][1],),
                )
            source, target = offsets[first]
            found.append(
                Copy(
                    more[0] + shape,
                    Strided(source, more[1] + sources),
                    Strided(target, more[2] + targets),
                )
            )
            first = last + 1
    return found


class Copies:
    """Merged copies between two flat tensors, as views that are made once: calling it carries them out."""

    def __init__(self, copies: Iterable[Copy], source: torch.Tensor, target: torch.Tensor) -> None:
        self._sources: list[torch.Tensor] = []
        self._targets: list[torch.Tensor] = []
        for copy in merged(copies):
            self._sources.append(_view(source, copy.shape, copy.source))
            self._targets.append(_view(target, copy.shape, copy.target))

    def __call__(self) -> None:
        """Copy, with a cast where the two tensors have different dtypes."""
        if self._targets:
            torch._foreach_copy_(self._targets, self._sources)


def _view(flat: torch.Tensor, shape: tuple[int, ...], where: Strided) -> torch.Tensor:
    return flat.as_strided(shape, where.strides, flat.storage_offset() + where.offset)
