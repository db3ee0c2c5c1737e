"""Copies of rectangles between flat buffers, merged once so that a step makes few of them.

Neighbours of equal shape at equal distances, at both ends, are one strided copy with a further dimension; what follows
on without a gap is one run.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

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
    for size, source, target in zip(copy.shape, copy.source.strides, copy.target.strides, strict=True):
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
            if copy.source.offset == source.offset + length and copy.target.offset == target.offset + length:
                found[-1] = Copy((length + copy.shape[0],), source, target)
                continue
        found.append(copy)
    return found


def _stepped(copies: Sequence[Copy]) -> list[Copy]:
    """Copies of equal shape and strides, at equal distances at both ends, as one with a further dimension."""
    alike: dict[tuple[tuple[int, ...], ...], list[tuple[int, int]]] = defaultdict(list)
    for copy in copies:
        alike[copy.shape, copy.source.strides, copy.target.strides].append((copy.source.offset, copy.target.offset))
    found: list[Copy] = []
    for (shape, sources, targets), unsorted in alike.items():
        offsets, first = sorted(unsorted), 0
        steps = [(after[0] - one[0], after[1] - one[1]) for one, after in itertools.pairwise(offsets)]
        while first < len(offsets):
            last = first
            more: tuple[tuple[int, ...], ...] = ((), (), ())
            if len(shape) < MAX_DIMS and first < len(steps) and steps[first][1] > 0:  # torch's strides are not negative
                while last < len(steps) and steps[last] == steps[first]:
                    last += 1
                more = ((last - first + 1,), (steps[first][0],), (steps[first][1],))
            source, target = offsets[first]
            found.append(Copy(more[0] + shape, Strided(source, more[1] + sources), Strided(target, more[2] + targets)))
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
