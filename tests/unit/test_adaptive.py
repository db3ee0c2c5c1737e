"""Adaptive Muon's second moments on plain tensors; parity with emerging-optimizers is a functional test."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_muon.core.adaptive import MOMENT2, AdaMuon, NorMuon
from megatron_muon.core.blocks import whole
from megatron_muon.core.exchange.local import LocalExchange
from megatron_muon.core.layout import Layout, row_sharded
from megatron_muon.core.neurons import NeuronMoments
from megatron_muon.core.orthogonalize import Orthogonalizer

SHAPES = [(9, 4), (4, 9)]


def adaptive(method: str) -> Any:
    """An adaptive Muon on one rank, its matrices whole."""
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=seeded(0))) for shape in SHAPES]
    layout = Layout(1, tuple(row_sharded(f"w{i}", shape, [shape[0]]) for i, shape in enumerate(SHAPES)))
    orthogonalizer = Orthogonalizer(matmul_precision="highest", scaled=False)
    scales = [orthogonalizer.row_scales(shape, whole(shape[0])) for shape in SHAPES]
    group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    device = torch.device("cpu")
    neurons = NeuronMoments(
        layout, [1, 1], group, scales, columns=[(0, c) for _, c in SHAPES], replicated=False, everywhere=True,
        device=device,
    )  # fmt: skip

    def batches(indices: Sequence[int]) -> Any:
        shapes = [SHAPES[i] for i in indices]
        normalize = neurons.normalizer(indices) if method == "normuon" else None
        return orthogonalizer.batch(shapes, [whole(rows) for rows, _ in shapes], normalize)

    settings: dict[str, Any] = {"scales": scales} if method == "adamuon" else {"neurons": neurons}
    return (AdaMuon if method == "adamuon" else NorMuon)(
        [{"params": parameters}],
        LocalExchange(layout, group, batches, buffer_bytes=1 << 20, device=device),
        lr=0.1,
        momentum=0.9,
        nesterov=True,
        weight_decay=0.1,
        decoupled_weight_decay=True,
        names={p: f"w{i}" for i, p in enumerate(parameters)},
        beta2=0.95,
        eps=1e-8,
        **settings,
    )


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("method", ["adamuon", "normuon"])
def test_an_update_that_is_skipped_leaves_the_second_moment_alone(method: str) -> None:
    """Zeros stand in for it; averaged into the second moment they made the next update 1.6 times as large."""
    muon = adaptive(method)
    parameters = muon.param_groups[0]["params"]

    def step(*, broken: bool) -> list[torch.Tensor]:
        for index, parameter in enumerate(parameters):
            parameter.grad = torch.randn(parameter.shape, generator=seeded(index + 1))
        if broken:
            parameters[0].grad[2, 1] = torch.inf
        muon.step()
        return [muon.state[parameter][MOMENT2].clone() for parameter in parameters]

    before = step(broken=False)
    weights = parameters[0].detach().clone()
    after = step(broken=True)
    assert torch.equal(after[0], before[0])
    assert torch.equal(parameters[0], weights)
    assert not torch.equal(after[1], before[1])
    assert muon.skipped_updates() == {"w0": 1}
