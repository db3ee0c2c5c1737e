"""Cuts by arithmetic: what every rank holds, against what the frameworks give a rank that asks for
itself.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_muon.core.layout import (
    Layout,
    Matrix,
    RowSplit,
    as_shards,
    everywhere,
    from_rectangles,
)
from megatron_muon.core.layout import Shard as Held
from megatron_muon.fsdp import buckets as cuts
from megatron_muon.fsdp.buckets import PieceHolders, bucket_shards


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
    (rows, cols), (instances, parts) = part, grid
    start, piece = gap * cols, piece_rows * cols
    pieces = -(-(start + rows * cols) // piece)
    ranks = list(range(instances * pieces * parts))
    random.shuffle(ranks)
    places = np.array(ranks).reshape(instances, pieces, parts)
    shape = (
        (rows * parts, cols)
        if along == "rows"
        else (rows, cols * parts)
        if along == "columns"
        else part
    )
    whole = np.arange(shape[0] * shape[1]).reshape(shape)
    rectangles = [(0, 0, 0, 0)] * len(ranks)
    for instance, number, of_part in itertools.product(
        range(instances), range(pieces), range(parts)
    ):
        mine = (
            whole
            if shape == part
            else np.split(whole, parts, axis=int(along == "columns"))[of_part]
        )
        bucket = np.full(pieces * piece, -1)
        bucket[start : start + rows * cols] = mine.ravel()
        held = [
            element
            for element in bucket[number * piece : (number + 1) * piece].tolist()
            if element >= 0
        ]
        if held:
            row, col = divmod(held[0], shape[1])
            rectangles[places[instance, number, of_part]] = (row, len(held) // cols, col, cols)
    found = bucket_shards(start, piece, part, shape, PieceHolders(places))
    assert found == tuple(sorted(as_shards(rectangles), key=lambda shard: shard.rank))
    Layout(len(ranks), (Matrix("w", shape, found),))


@pytest.mark.parametrize(
    ("mesh", "kinds"),
    [
        ((3,), "F"),
        ((2, 3), "RF"),
        ((2, 3), "FF"),
        ((2, 2), "RR"),
    ],
)
def test_dbuffers_are_cut_as_they_say(
    mesh: tuple[int, ...], kinds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.distributed.fsdp.src.megatron_fsdp.experimental import dbuffer, placement

    placements = [{"F": placement.Flat, "R": placement.Replicate}[kind]() for kind in kinds]
    ranks = torch.arange(int(np.prod(mesh))).view(mesh)
    shapes = [(5, 4), (3, 6), (7, 2)]
    monkeypatch.setattr(
        cuts.dist, "get_process_group_ranks", lambda group: list(range(ranks.numel()))
    )
    buffers = {}
    for rank in range(ranks.numel()):
        place = [int(axis) for axis in (ranks == rank).nonzero()[0]]
        as_rank = SimpleNamespace(
            ndim=len(mesh),
            mesh=ranks,
            size=lambda axis=None: ranks.numel() if axis is None else mesh[axis],
            get_local_rank=place.__getitem__,
        )
        buffers[rank] = dbuffer.DBuffer(as_rank, placements, shapes, torch.float32, "meta")
    for number, shape in enumerate(shapes):
        shards = cuts.dbuffer_shards(buffers[0], number, shape, None)  # type: ignore[arg-type]
        Layout(ranks.numel(), (Matrix("w", shape, shards),))
        for rank, buffer in buffers.items():
            owned = buffer._get_owned_range(number)
            held = next((shard for shard in shards if rank in shard.holders), None)
            assert (held.numel if held else 0) == (owned.numel if owned else 0)
            assert not held or held.row_start * shape[1] == owned.tensor_relative_offset


def layout(**changes: Any) -> Layout:
    """A small layout, with some of it changed."""
    made = {
        "name": "w",
        "shape": (8, 4),
        "rectangles": [(0, 5, 0, 4), (5, 3, 0, 4)],
        "split": RowSplit(2, (3, 1)),
    }
    given = {**made, **changes}
    other = Matrix("v", (3, 3), everywhere((3, 3), 2))
    return Layout(2, (from_rectangles(*given.values()), other))


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "u"},
        {"split": RowSplit(1, (3, 5))},
        {"rectangles": [(0, 4, 0, 4), (4, 4, 0, 4)]},
        {"rectangles": [(5, 3, 0, 4), (0, 5, 0, 4)]},
        {"rectangles": [(0, 8, 0, 4), (0, 8, 0, 4)]},
    ],
)
def test_a_digest_is_of_all_that_is_in_a_layout(changes: dict[str, Any]) -> None:
    assert layout().digest() == layout().digest() < 2**63
    assert layout(**changes).digest() != layout().digest()


def test_matrices_that_share_their_shards_are_as_if_each_had_its_own() -> None:
    """Equal in digest and in what ranks hold, and a tuple that tiles one shape is not taken to tile
    another.
    """
    rectangles = [(0, 5, 0, 4), (5, 3, 0, 4)]
    own = tuple(from_rectangles(f"w{i}", (8, 4), rectangles) for i in range(3))
    shared = tuple(Matrix(matrix.name, matrix.shape, own[0].shards) for matrix in own)
    assert own[0].shards is not own[1].shards
    assert (Layout(2, own).digest(), Layout(2, own).held(1)) == (
        Layout(2, shared).digest(),
        Layout(2, shared).held(1),
    )
    with pytest.raises(ValueError, match="w3: no rank holds row 8, column 0"):
        Layout(2, (*shared, Matrix("w3", (9, 4), own[0].shards)))
    assert Layout(3, (*shared,)).held(2) == [Held(2, 0, 0, 0, 4)] * 3
