"""The staging ring: what it gives out never overlaps, and an empty ring always has room."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_muon.offload.files import PAGE, in_pages
from megatron_muon.offload.ring import Piece, Ring

CPU = torch.device("cpu")
PAGES = 12


def ring() -> Ring:
    return Ring(PAGES * PAGE, device=CPU)


# Each number takes so many bytes if positive, and otherwise gives back the piece of that place.
@given(st.lists(st.integers(-8, PAGES * PAGE), max_size=60))
def test_pieces_never_overlap_and_an_empty_ring_has_room(schedule: list[int]) -> None:
    staging, taken = ring(), []
    for number in schedule:
        if number > 0:
            piece = staging.take(number)
            if piece is None:
                assert taken, "an empty ring refused"
                continue
            assert piece.memory.numel() == in_pages(number)
            assert piece.memory.data_ptr() % PAGE == 0
            assert 0 <= piece.start <= piece.start + in_pages(number) <= staging.size
            for other in taken:
                assert piece.start + piece.memory.numel() <= other.start or other.start + other.memory.numel() <= (
                    piece.start
                )
            taken.append(piece)
        elif taken:
            staging.give_back(taken.pop(number % len(taken)))
    for piece in taken:
        staging.give_back(piece)
    whole = staging.take(staging.size)
    assert whole is not None
    assert whole.start == 0


@given(st.lists(st.integers(1, 4), min_size=1, max_size=40))
def test_in_order_a_third_of_it_is_always_to_be_had(pages: list[int]) -> None:
    """What the store relies on: pieces up to a third, given back in the order in which they were taken."""
    staging, taken = ring(), []
    for size in pages:
        while sum(piece.memory.numel() for piece in taken) + size * PAGE > PAGES * PAGE // 3:
            staging.give_back(taken.pop(0))
        piece = staging.take(size * PAGE)
        assert piece is not None
        taken.append(piece)


def take(staging: Ring, pages: int) -> Piece:
    piece = staging.take(pages * PAGE)
    assert piece is not None
    return piece


def test_what_was_taken_last_can_be_taken_again() -> None:
    """Records that were read too early are given back while an older one is still in use."""
    staging = ring()
    first, *others = (take(staging, 3) for _ in range(4))
    assert staging.take(PAGE) is None
    for piece in others:
        staging.give_back(piece)
    assert take(staging, 9).start == first.start + 3 * PAGE


@pytest.mark.parametrize("size", [1, PAGE, PAGE + 1])
def test_memory_is_zero_and_whole_pages(size: int) -> None:
    staging = Ring(size, device=CPU)
    assert staging.size == in_pages(size)
    assert not staging.memory.any()
    assert staging.take(in_pages(size) + 1) is None
