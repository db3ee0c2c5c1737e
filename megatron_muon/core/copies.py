"""Copies of rectangles between flat buffers, merged once so that a step makes few of them.

Neighbours of equal shape at equal distances, at both ends, are one strided copy with a further dimension; what follows
on without a gap is one run. `arena.Copies` carries them out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

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
    shape: list[int] = []
    sources: list[int] = []
    targets: list[int] = []
    for size, source, target in zip(copy.shape, copy.source.strides, copy.target.strides, strict=True):
        if size == 1:
            continue
        if shape and sources[-1] == size * source and targets[-1] == size * target:
            shape[-1] *= size
            sources[-1], targets[-1] = source, target
        else:
            shape.append(size)
            sources.append(source)
            targets.append(target)
    if not shape:
        shape, sources, targets = [1], [1], [1]
    return Copy(tuple(shape), Strided(copy.source.offset, tuple(sources)), Strided(copy.target.offset, tuple(targets)))


def _joined(copies: Sequence[Copy]) -> list[Copy]:
    """Runs that follow each other at both ends as one, whatever their lengths."""
    found: list[Copy] = []
    for copy in sorted(copies, key=lambda one: one.source.offset):
        if found and copy.is_run and found[-1].is_run:
            (length,), source, target = found[-1]
            if copy.source.offset == source.offset + length and copy.target.offset == target.offset + length:
                found[-1] = Copy((length + copy.shape[0],), source, target)
                continue
        found.append(copy)
    return found


def _stepped(copies: Sequence[Copy]) -> list[Copy]:
    """Copies of equal shape and strides, at equal distances at both ends, as one with a further dimension."""
    alike: dict[tuple[tuple[int, ...], ...], list[Copy]] = defaultdict(list)
    for copy in copies:
        alike[copy.shape, copy.source.strides, copy.target.strides].append(copy)
    found: list[Copy] = []
    for (shape, sources, targets), group in alike.items():
        if len(shape) == MAX_DIMS:
            found += group
            continue
        offsets = sorted((copy.source.offset, copy.target.offset) for copy in group)
        first = 0
        while first < len(offsets):
            count, step = 1, (0, 0)
            if first + 1 < len(offsets):
                step = _distance(offsets[first], offsets[first + 1])
            if step[1] > 0:  # torch's strides are not negative
                while (
                    first + count < len(offsets) and _distance(*offsets[first + count - 1 : first + count + 1]) == step
                ):
                    count += 1
            (source, target), more = offsets[first], int(count > 1)
            found.append(
                Copy(
                    (count,) * more + shape,
                    Strided(source, (step[0],) * more + sources),
                    Strided(target, (step[1],) * more + targets),
                )
            )
            first += count
    return found


def _distance(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return other[0] - one[0], other[1] - one[1]
