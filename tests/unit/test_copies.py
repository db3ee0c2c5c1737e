"""Merged copies do what copying rectangle by rectangle does, and buffers in use at one time do not
overlap.
"""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_muon.core.arena import MAX_DIMS, Arena, Buffer, Copies, Copy, Strided, merged


@st.composite
def rectangles(draw: st.DrawFn) -> tuple[list[Copy], int, int]:
    """Copies of some rectangles, one after the other in a source, to places in a target that they
    share with nothing.

    At the target a rectangle lies as it is, or transposed, and its rows may be longer than it.
    """
    sides = st.integers(1, 3)
    shapes = draw(st.lists(st.tuples(sides, sides), min_size=1, max_size=9))
    order = draw(st.permutations(range(len(shapes))))
    targets, end = {}, 0
    for place in order:
        (rows, cols), more = shapes[place], draw(st.integers(0, 2))
        transposed = draw(st.booleans())
        strides = (1, rows + more) if transposed else (cols + more, 1)
        targets[place] = Strided(end, strides)
        end += (cols if transposed else rows) * max(strides) + draw(st.integers(0, 2))
    copies, start = [], 0
    for place, (rows, cols) in enumerate(shapes):
        start += draw(st.integers(0, 1)) * draw(st.integers(0, 3))
        copies.append(
            Copy((rows, cols), Strided(start, (cols, 1)), targets[place]),
        )
        start += rows * cols
    return copies, start, end


@given(rectangles())
def test_merged_copies_copy_every_rectangle(drawn: tuple[list[Copy], int, int]) -> None:
    copies, source_size, target_size = drawn
    source = torch.arange(1.0, source_size + 1)
    expected, found = torch.zeros(target_size), torch.zeros(target_size)
    for shape, start, end in copies:
        expected.as_strided(shape, end.strides, end.offset).copy_(
            source.as_strided(shape, start.strides, start.offset)
        )
    Copies(copies, source, found)()
    assert torch.equal(found, expected)
    assert len(merged(copies)) <= len(copies)
    assert all(len(copy.shape) <= MAX_DIMS for copy in merged(copies))


def test_equal_rectangles_at_equal_distances_are_one_copy() -> None:
    """Query rows of 8 layers with 4 groups each, as an owner puts them together; another distance
    splits them.
    """
    copies = []
    for layer, group in itertools.product(range(8), range(4)):
        source = Strided(layer * 90 + group * 20, (5, 1))
        target = Strided(layer * 60 + group * 15, (5, 1))
        copies.append(Copy((3, 5), source, target))
    (one,) = merged(copies)
    assert one.shape == (8, 4, 15)
    assert one.source.strides == (90, 20, 1)
    assert one.target.strides == (60, 15, 1)
    moved = copies[-1]._replace(target=Strided(1000, (5, 1)))
    assert len(merged([*copies[:-1], moved])) == 3


MOMENTS = st.lists(
    st.integers(0, 12),
    min_size=2,
    max_size=2,
).map(sorted)


@given(
    st.lists(st.tuples(st.integers(0, 3000), MOMENTS), max_size=30),
)
def test_buffers_that_are_in_use_at_one_time_do_not_overlap(
    wanted: list[tuple[int, list[int]]],
) -> None:
    buffers = [Buffer(size, torch.float32, *moments) for size, moments in wanted]
    arena = Arena(torch.device("cpu"), buffers)
    assert arena.memory.untyped_storage().nbytes() >= arena.nbytes
    for moment in range(13):
        end = 0
        used = [each for each in buffers if each.numel and each.first <= moment <= each.last]
        for buffer in sorted(used, key=lambda each: each.offset):
            assert end <= buffer.offset
            end = buffer.offset + buffer.nbytes
        assert end <= arena.nbytes
    for buffer in buffers:
        assert arena.tensor(buffer).shape == (buffer.numel,)
    assert arena.nbytes <= sum(buffer.nbytes for buffer in buffers)
