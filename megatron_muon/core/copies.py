"""Copies of rectangles between flat buffers, merged once so that a step makes few of them.

Neighbors of equal shape at equal distances, at both ends, are one strided copy with a further
dimension; what follows on without a gap is one run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import NamedTuple

from torch import Tensor

MAX_DIMS = 4
"""Dimensions of a merged copy: kernels for strided copies do well up to here."""

NOWHERE = -1
"""The target of copies without a far end, which `core.tiles` alone takes."""

Dims = tuple[tuple[int, int, int], ...]
"""For each dimension of a copy its elements, and its strides at source and target."""


class Copy(NamedTuple):
    """One copy of a rectangle from one flat buffer to another.

    Attributes:
        source, target: first elements.
        dims: of the rectangle.
    """

    source: int
    target: int
    dims: Dims

    @property
    def run(self) -> int:
        """Elements, if they are consecutive at both ends, or else 0."""
        (size, *strides), *others = self.dims
        return 0 if others or strides != [1, 1] else size

    def moved(self, source: int, target: int) -> Copy:
        """The same copy with both ends moved by so many elements."""
        return Copy(self.source + source, self.target + target, self.dims)


def merged(copies: Iterable[Copy]) -> list[Copy]:
    """The same elements in fewer copies, in any order. Sources, or targets, must not overlap."""
    found = _joined([_collapsed(copy) for copy in copies])
    while True:
        fewer = [_collapsed(copy) for copy in _stepped(found)]
        if len(fewer) == len(found):
            return fewer
        found = fewer


def _collapsed(copy: Copy) -> Copy:
    """Drop dimensions of one element, and join those without a gap between them at both ends."""
    dims: list[tuple[int, int, int]] = []
    for size, source, target in copy.dims:
        if dims and dims[-1][1:] == (
            size * source,
            size * target,
        ):
            dims[-1] = dims[-1][0] * size, source, target
        elif size > 1:
            dims.append((size, source, target))
    return copy._replace(
        dims=tuple(dims) or ((1, 1, 1),),
    )


def _joined(copies: Sequence[Copy]) -> list[Copy]:
    """Join runs that follow each other at both ends, whatever their lengths."""
    found: list[Copy] = []
    for copy in sorted(copies):
        if found and copy.run and found[-1].run:
            last = found[-1]
            if last.moved(last.run, last.run)[:2] == copy[:2]:
                copy = last._replace(dims=((last.run + copy.run, 1, 1),))
                found.pop()
        found.append(copy)
    return found


def _stepped(copies: Iterable[Copy]) -> list[Copy]:
    """Join copies of equal shape and strides at equal distances by a further dimension."""
    found: list[Copy] = []
    for copy in sorted(copies, key=itemgetter(2, 0, 1)):
        longer = _continued(found[-1], copy) if found else None
        if longer:
            found[-1] = longer
        else:
            found.append(
                copy._replace(
                    dims=((1, 0, 0), *copy.dims),
                ),
            )
    return found


def _continued(series: Copy, copy: Copy) -> Copy | None:
    """A series of equal copies, its first dimension, and the next one, if its distance is theirs."""
    (count, *steps), *dims = series.dims
    ahead = [copy.source - series.source, copy.target - series.target]
    if count == 1:
        steps = ahead
    if tuple(dims) != copy.dims or len(dims) == MAX_DIMS:
        return None
    # torch's strides are not negative
    if steps[1] < 0 or ahead != [count * steps[0], count * steps[1]]:
        return None
    return series._replace(
        dims=(
            (count + 1, steps[0], steps[1]),
            *dims,
        ),
    )


class Copies(NamedTuple):
    """Merged copies, as views for `torch._foreach_copy_`, which are made once."""

    targets: list[Tensor]
    sources: list[Tensor]

    @property
    def reversed(self) -> Copies:
        """The copies back."""
        return Copies(self.sources, self.targets)


def copies_between(
    copies: Iterable[Copy],
    source: Tensor,
    target: Tensor,
) -> Copies:
    """Copies between two flat tensors."""
    made = Copies([], [])
    for copy in merged(copies):
        shape, from_strides, to_strides = zip(*copy.dims, strict=True)
        start = source.storage_offset() + copy.source
        made.sources.append(source.as_strided(shape, from_strides, start))
        start = target.storage_offset() + copy.target
        made.targets.append(target.as_strided(shape, to_strides, start))
    return made
