"""Merged copies do what copying rectangle by rectangle does."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_muon.core.copies import MAX_DIMS, Copy, copies_between, merged


@st.composite
def rectangles(draw: st.DrawFn) -> tuple[list[Copy], int, int]:
    """Copies of some rectangles, one after the other in a source, to places in a target that they
    share with nothing.

    At the target a rectangle lies as it is, or transposed, and its rows may be longer than it.
    """
    sides = st.integers(1, 3)
    shapes = draw(st.lists(st.tuples(sides, sides), min_size=1, max_size=9))
    order = draw(st.permutations(range(len(shapes))))
    targets: dict[int, tuple[int, tuple[int, int]]] = {}
    end = 0
    for place in order:
        (rows, cols), more = shapes[place], draw(st.integers(0, 2))
        transposed = draw(st.booleans())
        strides = (1, rows + more) if transposed else (cols + more, 1)
        targets[place] = end, strides
        end += (cols if transposed else rows) * max(strides) + draw(st.integers(0, 2))
    copies, start = [], 0
    for place, (rows, cols) in enumerate(shapes):
        start += draw(st.integers(0, 1)) * draw(st.integers(0, 3))
        target, (row, col) = targets[place]
        copies.append(Copy(start, target, ((rows, cols, row), (cols, 1, col))))
        start += rows * cols
    return copies, start, end


@given(rectangles())
def test_merged_copies_copy_every_rectangle(drawn: tuple[list[Copy], int, int]) -> None:
    copies, source_size, target_size = drawn
    source = torch.arange(1.0, source_size + 1)
    expected, found = torch.zeros(target_size), torch.zeros(target_size)
    for start, end, dims in copies:
        shape, from_strides, to_strides = zip(*dims, strict=True)
        expected.as_strided(shape, to_strides, end).copy_(
            source.as_strided(shape, from_strides, start)
        )
    torch._foreach_copy_(*copies_between(copies, source, found))
    assert torch.equal(found, expected)
    assert len(merged(copies)) <= len(copies)
    assert all(len(copy.dims) <= MAX_DIMS for copy in merged(copies))


def test_equal_rectangles_at_equal_distances_are_one_copy() -> None:
    """Query rows of 8 layers with 4 groups each, as an owner puts them together; another distance
    splits them.
    """
    copies = []
    for layer, group in itertools.product(range(8), range(4)):
        source = layer * 90 + group * 20
        target = layer * 60 + group * 15
        copies.append(Copy(source, target, ((3, 5, 5), (5, 1, 1))))
    (one,) = merged(copies)
    assert one.dims == ((8, 90, 60), (4, 20, 15), (15, 1, 1))
    moved = copies[-1]._replace(target=1000)
    assert len(merged([*copies[:-1], moved])) == 3
