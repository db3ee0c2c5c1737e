"""The memory of a step: buffers that exist since construction, at places in one tensor.

Who needs a buffer says from which moment of the step to which; buffers that are never needed at the same moment share
memory. So a step allocates nothing, and what it takes is known before the first.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from megatron_muon.core.copies import Copy, Strided, merged
from megatron_muon.core.memory import aligned


@dataclass(eq=False)
class Buffer:
    """Memory for `numel` elements, in use from moment `first` to moment `last` of a step, both included.

    Attributes:
        offset: where it lies, in bytes, once it has a place; 0 of one without elements.
    """

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
    """Buffers in one tensor. Exchanges that step one after the other may share its memory by `scratch`.

    Args:
        device: of the tensor.
        scratch: memory of another arena, which grows where this one needs more.
    """

    def __init__(self, device: torch.device, scratch: torch.Tensor | None = None) -> None:
        self._buffers: list[Buffer] = []
        self._inner: list[tuple[Buffer, list[Buffer]]] = []
        self.memory = torch.empty(0, dtype=torch.uint8, device=device) if scratch is None else scratch
        self.nbytes = 0

    def add(self, buffer: Buffer) -> Buffer:
        """Take a buffer into the arena."""
        self._buffers.append(buffer)
        return buffer

    def add_in_turn(self, waves: Sequence[Sequence[Buffer]]) -> None:
        """Take buffers of waves of which one begins when the one before has ended, while nothing else begins or ends.

        They are placed wave by wave, within one buffer that all of these waves use in turn: that wastes nothing, and
        leaves fewer places to be found.
        """
        used = [buffer for wave in waves for buffer in wave if buffer.numel]
        if used:
            size = max(_find_places([buffer for buffer in wave if buffer.numel]) for wave in waves)
            first, last = min(buffer.first for buffer in used), max(buffer.last for buffer in used)
            self._inner.append((self.add(Buffer(size, torch.uint8, first, last)), used))

    def place(self) -> None:
        """Give every buffer its place."""
        self.nbytes = _find_places([buffer for buffer in self._buffers if buffer.numel])
        for outer, buffers in self._inner:
            for buffer in buffers:
                buffer.offset += outer.offset
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
        """The buffer as a tensor `(numel,)`, once it has a place."""
        size = buffer.numel * buffer.dtype.itemsize
        return self.memory.as_strided((size,), (1,), buffer.offset).view(buffer.dtype)


_STARTS, _SEARCHED, _GOOD_ENOUGH = 3, 300_000, 1.02
"""Orders from which places are searched, how long, and the share of the least memory at which a search ends."""


def _find_places(buffers: Sequence[Buffer]) -> int:
    """Set the offsets of buffers; the bytes that all take.

    One after the other gets the lowest place that is free. In which order decides what all take together; a search that
    moves the highest one, and some others, finds an order that wastes little, the same for the same buffers.
    """
    beside = [
        [place for place, other in enumerate(buffers) if other.first <= one.last and one.first <= other.last]
        for one in buffers
    ]
    sizes = [buffer.nbytes for buffer in buffers]
    least, chance = _most_at_a_time(buffers), random.Random(0)
    offsets, taken = dict[int, int](), sum(sizes) + 1
    for start in range(_STARTS):
        spread = [size * (chance.uniform(0.3, 1.0) if start else 1.0) for size in sizes]
        order = sorted(range(len(buffers)), key=lambda place: -spread[place])
        found = _search(sizes, order, beside, enough=_GOOD_ENOUGH * least, chance=chance)
        if found[1] < taken:
            offsets, taken = found
        if taken <= _GOOD_ENOUGH * least:
            break
    for place, buffer in enumerate(buffers):
        buffer.offset = offsets[place]
    return taken


def _search(
    sizes: Sequence[int], order: list[int], beside: Sequence[Sequence[int]], *, enough: float, chance: random.Random
) -> tuple[dict[int, int], int]:
    """The best places that are found from an order by moving the highest buffer in it, and some others."""
    offsets, taken = _place(sizes, order, beside)
    for _ in range(_SEARCHED // (len(sizes) + 100)):
        if taken <= enough:
            break
        other = order.copy()
        highest = max(order, key=lambda place: offsets[place] + sizes[place])
        for moved in [highest, *chance.sample(order, min(chance.randint(0, 2), len(order)))]:
            other.remove(moved)
            other.insert(chance.randrange(len(order)), moved)
        found, size = _place(sizes, other, beside)
        if size <= taken:
            order, offsets, taken = other, found, size
    return offsets, taken


def _most_at_a_time(buffers: Sequence[Buffer]) -> int:
    """Bytes that are in use at the moment when most are: no order of places takes less."""
    begins = ((buffer.first, buffer.nbytes) for buffer in buffers)
    ends = ((buffer.last + 1, -buffer.nbytes) for buffer in buffers)
    return max(itertools.accumulate(size for _, size in sorted([*begins, *ends])), default=0)


def _place(sizes: Sequence[int], order: Sequence[int], beside: Sequence[Sequence[int]]) -> tuple[dict[int, int], int]:
    """Offsets of buffers, and what all take.

    Args:
        sizes: their bytes.
        order: in which they get the lowest place that is free.
        beside: for each those that are in use while it is.
    """
    offsets: dict[int, int] = {}
    taken = 0
    for place in order:
        offset, size = 0, sizes[place]
        for start, end in sorted(
            (offsets[other], offsets[other] + sizes[other]) for other in beside[place] if other in offsets
        ):
            if offset + size <= start:
                break
            offset = max(offset, end)
        offsets[place] = offset
        taken = max(taken, offset + size)
    return offsets, taken


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
