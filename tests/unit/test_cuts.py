"""Cuts by arithmetic: what every rank holds, against what the frameworks give a rank that asks for
itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_muon.core.layout import Layout, Matrix, RowSplit, everywhere
from megatron_muon.core.layout import Shard as Held
from megatron_muon.tools.plan.planned_cuts import PieceHolders, bucket_shards
from tests.support.cut_matrices import as_shards, from_rectangles


@given(
    st.tuples(st.integers(1, 9), st.integers(1, 4)),
    st.integers(0, 12),
    st.integers(1, 12),
    st.tuples(st.integers(1, 2), st.integers(1, 3)),
    st.sampled_from(["rows", "columns", "not cut"]),
    st.randoms(use_true_random=False),
)
def test_every_rank_gets_its_rows_of_a_bucket(
    part: tuple[int, int],
    gap: int,
    piece_rows: int,
    grid: tuple[int, int],
    along: str,
    random: Any,
) -> None:
    """Against a bucket of marked elements that is cut as Megatron-FSDP does: instances alike, parts
    side by side.
    """
    rows, cols = part
    instances, parts = grid
    start, piece = gap * cols, piece_rows * cols
    pieces = -(-(start + rows * cols) // piece)
    ranks = list(range(instances * pieces * parts))
    random.shuffle(ranks)
    places = np.array(ranks).reshape(instances, pieces, parts)
    shapes = {
        "rows": (rows * parts, cols),
        "columns": (rows, cols * parts),
        "not cut": part,
    }
    shape = shapes[along]
    whole = np.arange(shape[0] * shape[1]).reshape(shape)
    cut = [whole] * parts
    if shape != part:
        cut = np.split(whole, parts, axis=int(along == "columns"))
    rectangles = [(0, 0, 0, 0)] * len(ranks)
    for place in np.ndindex(places.shape):
        _, number, of_part = place
        bucket = np.full(pieces * piece, -1)
        bucket[start : start + rows * cols] = cut[of_part].ravel()
        mine = bucket[number * piece : (number + 1) * piece]
        held = mine[mine >= 0].tolist()
        if held:
            row, col = divmod(held[0], shape[1])
            rectangles[places[place]] = (row, len(held) // cols, col, cols)
    found = bucket_shards(start, piece, part, shape, PieceHolders(places))
    assert found == tuple(sorted(as_shards(rectangles), key=lambda shard: shard.rank))
    Layout(len(ranks), (Matrix("w", shape, found),))


HALVES = [(0, 5, 0, 4), (5, 3, 0, 4)]


BLOCKS = RowSplit(2, (3, 1))


def digest(
    name: str = "w",
    shards: Sequence[Any] = HALVES,
    split: RowSplit = BLOCKS,
) -> int:
    first = from_rectangles(name, (8, 4), shards, split)
    second = Matrix("v", (3, 3), everywhere((3, 3), 2))
    return Layout(2, (first, second)).digest()


def test_a_digest_is_of_all_that_is_in_a_layout() -> None:
    digests = [
        digest(),
        digest(name="u"),
        digest(split=RowSplit(1, (3, 5))),
        digest(
            shards=[(0, 4, 0, 4), (4, 4, 0, 4)],
        ),
        digest(shards=HALVES[::-1]),
        digest(shards=[(0, 8, 0, 4)] * 2),
    ]
    assert len(set(digests)) == len(digests)
    assert digest() == digests[0] < 2**63


def test_matrices_that_share_their_shards_are_as_if_each_had_its_own() -> None:
    """Equal in digest and in what ranks hold, and a tuple that tiles one shape is not taken to tile
    another.
    """
    own = tuple(from_rectangles(f"w{i}", (8, 4), HALVES) for i in range(3))
    shared = tuple(Matrix(matrix.name, matrix.shape, own[0].shards) for matrix in own)
    assert own[0].shards is not own[1].shards
    assert Layout(2, own).digest() == Layout(2, shared).digest()
    assert Layout(2, own).held(1) == Layout(2, shared).held(1)
    with pytest.raises(ValueError, match=r"w3: .* row 8, column 0"):
        Layout(
            2,
            (*shared, Matrix("w3", (9, 4), own[0].shards)),
        )
    assert Layout(3, shared).held(2) == [Held(2, 0, 0, 0, 4)] * 3
