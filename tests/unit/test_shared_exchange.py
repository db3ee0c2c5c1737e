"""Sharing the work of replicas, rank by rank in one process: broadcasts are recorded and carried
out by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megatron_muon.core.cost import Iteration
from megatron_muon.core.engine import Engine
from megatron_muon.core.layout import Layout, Matrix, everywhere
from megatron_muon.core.plan import Plan, make_plan
from megatron_muon.core.probe import Probe
from megatron_muon.core.replicas import ToReplicas
from megatron_muon.core.slices import BlockSlice
from tests.support.buffers import sizes_of, smallest_bytes
from tests.support.one_rank import waves_of
from tests.support.owners import owners_of
from tests.support.rows import ByMatrix

Shapes = Sequence[tuple[int, int]]


def planned(shapes: Shapes, ranks: int, buffer_bytes: int | None = None) -> Plan:
    layout = Layout(
        ranks,
        tuple(
            Matrix(
                f"w{i}",
                shape,
                everywhere(shape, ranks),
            )
            for i, shape in enumerate(shapes)
        ),
    )
    costs = [float(rows * cols) for rows, cols in shapes]
    iteration = Iteration(precision="highest", steps=1)
    sizes = sizes_of(4, iteration, broadcast=True)
    return make_plan(layout, costs, buffer_bytes=buffer_bytes, sizes=sizes)


def step(
    plan: Plan,
    shapes: Shapes,
    rank: int,
) -> tuple[list[Any], list[int]]:
    """The broadcasts of a rank, `(owner, elements)`, and the matrices that it orthogonalised;
    checks its order.
    """
    owned = set[int]()
    under_way: list[int] = []
    posted: list[tuple[int, int]] = []

    class Noting(Probe):
        def orthogonalized(self, slots: Sequence[BlockSlice]) -> None:
            owned.update(slot.index for slot in slots)

    def broadcast(updates: torch.Tensor, *, group_src: int, **_: Any) -> Any:
        posted.append((group_src, updates.numel()))
        under_way.append(updates.numel())
        if group_src != rank:
            updates.zero_()
        return mock.Mock(wait=lambda: under_way.pop(0))

    def apply(index: int, update: torch.Tensor) -> None:
        assert not update.isnan().any()
        assert update.shape == shapes[index]
        assert bool(update.any()) is (owners_of(plan)[index] == rank)

    rows = ByMatrix(lambda index: torch.ones(shapes[index]), apply)
    waves = waves_of(plan, rank, ToReplicas)
    assert waves.memory.nbytes <= plan.buffer_bytes
    engine = Engine(waves, rows)
    engine.probe = Noting()
    with mock.patch.object(dist, "broadcast", broadcast):
        engine.step()
    assert sorted(rows.prepared) == sorted(rows.applied) == list(range(len(shapes)))
    assert not under_way
    return posted, sorted(owned)


@given(
    st.lists(
        st.tuples(st.integers(1, 6), st.integers(1, 6)),
        min_size=1,
        max_size=9,
    ),
    st.integers(1, 4),
    st.sampled_from([0, 1000, 2**20]),
)
def test_each_matrix_has_one_worker_and_reaches_all(shapes: Shapes, ranks: int, more: int) -> None:
    """Matrices of one row too, which the plan takes to lie whole on a rank; and all ranks post the
    same broadcasts.
    """
    plan = planned(shapes, ranks, smallest_bytes(lambda size: planned(shapes, ranks, size)) + more)
    seen = [step(plan, shapes, rank) for rank in range(ranks)]
    assert sorted(index for _, owned in seen for index in owned) == list(range(len(shapes)))
    assert all(posted == seen[0][0] for posted, _ in seen)
    elements = sum(size for _, size in seen[0][0])
    assert elements == (sum(rows * cols for rows, cols in shapes) if ranks > 1 else 0)
