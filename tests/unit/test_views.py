"""Who holds which rectangle of which matrix, and what it reads there, for every placement, shape
and way of reading.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.distributed.tensor import _utils as of_dtensors
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _StridedShard

from megatron_muon.core.layout import Layout, Matrix
from megatron_muon.matrices.views import View
from megatron_muon.tools.plan.planned_cuts import placed_shards
from tests.support.placements import part_of


@st.composite
def placements(draw: Any, mesh: tuple[int, ...], dims: int) -> list[Placement]:
    """Any of Shard and Replicate; before others of the same dimension _StridedShard, as FSDP makes
    it beside these.
    """
    found: list[Placement] = []
    strided = set[int]()
    for axis in reversed(range(len(mesh))):
        dim = draw(st.integers(-1, dims - 1))
        later = [
            size
            for size, cut in zip(mesh[axis + 1 :], found, strict=True)
            if getattr(cut, "dim", None) == dim
        ]
        if dim < 0 or dim in strided:
            found.insert(0, Replicate())
        elif later and draw(st.booleans()):
            strided.add(dim)
            found.insert(0, _StridedShard(dim, split_factor=math.prod(later)))
        else:
            found.insert(0, Shard(dim))
    return found


@given(
    st.lists(st.integers(1, 7), min_size=2, max_size=4),
    st.lists(
        st.integers(1, 4),
        min_size=1,
        max_size=3,
    ).map(tuple),
    st.booleans(),
    st.booleans(),
    st.randoms(use_true_random=False),
    st.data(),
)
def test_every_rank_has_its_elements_of_every_matrix(
    sizes: list[int],
    mesh: tuple[int, ...],
    flat: bool,
    transposed: bool,
    random: Any,
    data: Any,
) -> None:
    """Marked elements that torch.chunk cuts, one axis of the mesh after the other.

    Where EP or TP cuts unevenly and FSDP then leaves a rank without rows, torch gives some ranks
    another size than FSDP does, in its checkpoints too; Muon refuses that (`layout_of`).
    """
    shape, flat = tuple(sizes), len(sizes) == 4 or (flat and len(sizes) == 3)
    view = View(shape, flat=flat, transposed=transposed)
    whole = torch.arange(math.prod(shape)).view(shape)
    marked = list(whole) if view.is_stack else [whole.reshape(len(whole), -1)]
    marked = [matrix.T for matrix in marked] if transposed else marked
    assert {tuple(matrix.shape) for matrix in marked} == {view.matrix}
    cuts = data.draw(placements(mesh, 1 if flat else len(shape)))
    order = list(range(math.prod(mesh)))
    random.shuffle(order)
    ranks = np.array(order).reshape(mesh)
    parts = {place: part_of(whole, mesh, place, cuts) for place in np.ndindex(mesh)}
    of_torch = of_dtensors._compute_local_shape_and_global_offset
    assume(
        all(
            math.prod(of_torch(shape, mesh, place, cuts)[0]) == part.numel()
            for place, part in parts.items()
        )
    )
    shards = placed_shards(view, ranks, cuts)
    Layout(
        ranks.size,
        tuple(
            Matrix(
                str(number),
                view.matrix,
                of,
            )
            for number, of in enumerate(shards)
        ),
    )
    for place, local in parts.items():
        rank = int(ranks[place])
        read = iter(view.tensors(local) if local.numel() else [])
        held = list[int]()
        for matrix, of in zip(marked, shards, strict=True):
            for shard in (shard for shard in of if rank in shard.holders):
                rows, cols = (
                    slice(shard.row_start, shard.row_start + shard.rows),
                    slice(shard.col_start, None),
                )
                mine = matrix[rows, cols][:, : shard.cols]
                assert torch.equal(next(read), mine)
                held += mine.flatten().tolist()
        assert sorted(held) == sorted(local.flatten().tolist())
        assert next(read, None) is None
