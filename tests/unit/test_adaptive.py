"""Adaptive Muon's second moments on plain tensors; parity with emerging-optimizers is a functional test."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_muon.core.build import local_exchange
from megatron_muon.core.cost import Iteration
from megatron_muon.core.exchange import Buffers
from megatron_muon.core.layout import Layout, row_sharded
from megatron_muon.core.memory import Memory
from megatron_muon.core.optimizer import ShardedMuon
from megatron_muon.core.orthogonalize import Orthogonalizer
from megatron_muon.core.rules import RULES, chosen_rules, make_rules
from megatron_muon.core.rules.rule import Held
from megatron_muon.core.rules.second_moments import MOMENT2
from megatron_muon.settings import choices_of

SHAPES = [(9, 4), (4, 9)]
SECOND_MOMENTS = tuple(name for name, rule in RULES.items() if rule.slots)


def adaptive(method: str) -> ShardedMuon:
    """An adaptive Muon on one rank, its matrices whole."""
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=seeded(0))) for shape in SHAPES]
    layout = Layout(1, tuple(row_sharded(f"w{i}", shape, [shape[0]]) for i, shape in enumerate(SHAPES)))
    orthogonalizer = Orthogonalizer(Iteration(precision="highest"), scaled=False)
    group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    cpu = torch.device("cpu")
    held = Held(layout, group, cpu, [1, 1], scales=[orthogonalizer.row_scales(one) for one in layout.matrices])
    options = {"nesterov": True, "beta2": 0.95, "eps": 1e-8}
    rules = make_rules(chosen_rules(moment2=method), replace(held, repeated=True), options)
    return ShardedMuon(
        [{"params": parameters}],
        local_exchange(layout, group, orthogonalizer, Buffers(cpu), rules, memory=Memory(4)),
        rules,
        defaults={"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
        names={p: f"w{i}" for i, p in enumerate(parameters)},
    )


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_every_second_moment_is_a_choice_of_the_flag() -> None:
    assert choices_of("adaptive_muon_moment2_method") == SECOND_MOMENTS


@pytest.mark.parametrize("method", SECOND_MOMENTS)
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
