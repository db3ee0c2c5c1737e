"""Sharing the work of replicas, rank by rank in one process: broadcasts are recorded and carried out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_muon.core.cost import Iteration
from megatron_muon.core.exchange import OwnerExchange, SharedExchange
from megatron_muon.core.exchange import shared as module
from megatron_muon.core.layout import Layout, replicated
from megatron_muon.core.memory import Memory
from megatron_muon.core.orthogonalize import Orthogonalizer
from megatron_muon.core.plan import Plan, make_plan
from megatron_muon.core.probe import SILENT
from tests.unit.buffers import smallest_bytes

Shapes = Sequence[tuple[int, int]]


@dataclass
class Group:
    """What the exchange asks of a process group."""

    ranks: int
    mine: int

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return self.mine


def planned(shapes: Shapes, ranks: int, buffer_bytes: int | None = None) -> Plan:
    layout = Layout(ranks, tuple(replicated(f"w{i}", shape, ranks) for i, shape in enumerate(shapes)))
    costs = [float(rows * cols) for rows, cols in shapes]
    return make_plan(layout, costs, buffer_bytes=buffer_bytes, memory=Memory(4))


def step(plan: Plan, shapes: Shapes, rank: int, kind: Any = SharedExchange) -> tuple[list[tuple[int, int]], list[int]]:
    """The broadcasts of a rank, `(owner, elements)`, and the matrices that it orthogonalised; checks its order."""
    orthogonalizer = Orthogonalizer(Iteration(precision="highest", steps=1))
    owned: list[int] = []
    prepared: list[int] = []
    finalized: list[int] = []
    under_way: list[int] = []
    posted: list[tuple[int, int]] = []

    def batches(indices: Sequence[int]) -> Any:
        owned.extend(indices)
        return orthogonalizer.batch([plan.layout.matrices[i] for i in indices])

    def broadcast(updates: torch.Tensor, *, group_src: int, **_: Any) -> Any:
        posted.append((group_src, updates.numel()))
        under_way.append(updates.numel())
        if group_src != rank:
            updates.zero_()
        assert len(under_way) == 1 or sum(under_way) * 4 <= plan.wave_bytes
        return mock.Mock(wait=lambda: under_way.pop(0))

    def prepare(indices: Sequence[int]) -> list[torch.Tensor]:
        prepared.extend(indices)
        return [torch.ones(shapes[i]) for i in indices]

    def finalize(indices: Sequence[int], updates: Sequence[torch.Tensor], finite: torch.Tensor) -> None:
        assert finite.tolist() == [True] * len(indices)
        assert set(indices) <= set(prepared)
        finalized.extend(indices)
        for index, update in zip(indices, updates, strict=True):
            assert update.shape == shapes[index]
            assert bool(update.any()) is (plan.owners[index] == rank)

    exchange = kind(plan, Group(plan.layout.world_size, rank), batches, device=torch.device("cpu"))
    with mock.patch.object(module.dist, "broadcast", broadcast):
        exchange.run(SimpleNamespace(prepare=prepare, finalize=finalize), SILENT)
    assert sorted(prepared) == sorted(finalized) == list(range(len(shapes)))
    assert not under_way
    return posted, owned


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=9),
    st.integers(1, 4),
    st.sampled_from([0, 1000, 2**20]),
)
def test_each_matrix_has_one_worker_and_reaches_all(shapes: Shapes, ranks: int, more: int) -> None:
    """Matrices of one row too, which the plan takes to lie whole on a rank; and all ranks post the same broadcasts."""
    plan = planned(shapes, ranks, smallest_bytes(lambda size: planned(shapes, ranks, size)) + more)
    seen = [step(plan, shapes, rank) for rank in range(ranks)]
    assert sorted(index for _, owned in seen for index in owned) == list(range(len(shapes)))
    assert all(posted == seen[0][0] for posted, _ in seen)
    elements = sum(size for _, size in seen[0][0])
    assert elements == (sum(rows * cols for rows, cols in shapes) if ranks > 1 else 0)


@pytest.mark.parametrize("kind", [SharedExchange, OwnerExchange])
def test_one_rank_alone_exchanges_nothing(kind: Any) -> None:
    """Its plan has no waves."""
    shapes = [(4, 3), (1, 5), (2, 2)]
    assert step(planned(shapes, 1), shapes, 0, kind) == ([], [0, 1, 2])


def test_a_plan_for_other_ranks_is_refused() -> None:
    plan = planned([(2, 2)], 2)
    with pytest.raises(ValueError, match="the layout is for 2 ranks, the process group has 3"):
        SharedExchange(plan, Group(3, 0), mock.Mock(), device=torch.device("cpu"))
