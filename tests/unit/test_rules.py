"""Rules of one's own: the example of docs/design.md, and one that takes the place of the iteration."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_muon.core.build import make_exchange
from megatron_muon.core.cost import Iteration
from megatron_muon.core.exchange import OWNER, Buffers
from megatron_muon.core.layout import Layout, Matrix, row_sharded
from megatron_muon.core.optimizer import ShardedMuon
from megatron_muon.core.orthogonalize import Orthogonalizer
from megatron_muon.core.ranks import Alone
from megatron_muon.core.rules import make_rules
from megatron_muon.core.rules.rule import Held, Rule
from tests.unit.test_sharded_muon import gradients, parameters, sharded

CPU = torch.device("cpu")
DESIGN = Path(__file__).parents[2] / "docs" / "design.md"


def train(optimizer: ShardedMuon, steps: range) -> list[torch.Tensor]:
    """The weights after these steps."""
    weights = optimizer.param_groups[0]["params"]
    for step in steps:
        for p, gradient in zip(weights, gradients(step), strict=True):
            p.grad = gradient.clone()
        optimizer.step()
    return [p.detach().clone() for p in weights]


def test_the_example_of_the_design_is_a_rule_and_works() -> None:
    """It clips each element of the update: with a bound of 0 nothing but decay is left, with a large one it is Muon."""
    (code,) = re.findall(r"```python\n(.*?class Clip\(Rule\).*?)```", DESIGN.read_text("utf-8"), re.DOTALL)
    found: dict[str, Any] = {}
    exec(compile(code, str(DESIGN), "exec"), found)
    weights = {}
    for bound in (0.0, 0.01, 1e9):
        optimizer = sharded(parameters())
        *first, decay, descent = optimizer.rules
        optimizer.rules = [*first, found["Clip"](first[0].held, {"bound": bound}), decay, descent]
        weights[bound] = train(optimizer, range(1))
    plain = train(sharded(parameters()), range(1))
    for old, none, some, all_of_it, muon in zip(parameters(), *weights.values(), plain, strict=True):
        torch.testing.assert_close(none, old.detach() * (1.0 - 0.1 * 0.05))
        assert torch.equal(all_of_it, muon)
        assert float((some - none).abs().max()) == pytest.approx(0.1 * 0.01, rel=1e-3)


class Whitened(Rule):
    """A toy Shampoo: X -> L^(-1/2) X, where L, which lies with the block's owner, adds up X X^T over the steps."""

    def __init__(self, held: Held, options: Mapping[str, Any]) -> None:
        super().__init__(held, options)
        self._sums: dict[str, torch.Tensor] = {}

    def solve(self, stack: torch.Tensor, of: Any) -> torch.Tensor:
        for block, slot in zip(stack, of.slots, strict=True):
            name = f"{self.held.layout.matrices[slot.index].name}.{slot.block}"
            total = self._sums.setdefault(name, torch.zeros(len(block), len(block)))
            total += block @ block.mT
            values, vectors = torch.linalg.eigh(total)
            block.copy_(vectors @ (vectors.mT @ block / values.clamp_min(1e-6).sqrt().unsqueeze(1)))
        return torch.zeros(len(stack), 1, 1)

    def flops(self, matrix: Matrix) -> float:
        return 10.0 * min(matrix.shape) ** 3

    def owned_state(self) -> dict[str, torch.Tensor]:
        return dict(self._sums)

    def load_owned_state(self, state: Mapping[str, torch.Tensor]) -> None:
        self._sums = {name: total.clone() for name, total in state.items()}


def whitening(weights: list[torch.nn.Parameter], team_size: str = "auto") -> ShardedMuon:
    shapes = [(p.shape[0], p.shape[1]) for p in weights]
    layout = Layout(1, tuple(row_sharded(f"w{i}", shape, [shape[0]]) for i, shape in enumerate(shapes)))
    held = Held(layout, Alone(), CPU, [1] * len(weights))  # type: ignore[arg-type]
    rules = make_rules(("momentum", "descent"), held, {"nesterov": False})
    rules.insert(1, Whitened(held, {}))
    exchange = make_exchange(
        OWNER, layout, Alone(), Orthogonalizer(Iteration(precision="highest")), Buffers(CPU),  # type: ignore[arg-type]
        buffer_mb=None, wire="fp32", rules=rules, team_size=team_size,
    )  # fmt: skip
    assert exchange.plan is not None
    assert exchange.plan.loads == (sum(10.0 * min(p.shape) ** 3 for p in weights),)
    names = {p: f"w{i}" for i, p in enumerate(weights)}
    defaults = {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0}
    return ShardedMuon([{"params": weights}], exchange, rules, defaults=defaults, names=names)


def test_a_rule_takes_the_place_of_the_iteration_and_keeps_state_with_the_owner() -> None:
    """The first step is the orthogonal factor; going on from its state equals going on."""
    optimizer = whitening(parameters())
    stepped = train(optimizer, range(1))
    for new, old, gradient in zip(stepped, parameters(), gradients(0), strict=True):
        u, _, vh = torch.linalg.svd(gradient, full_matrices=False)
        torch.testing.assert_close(new, old.detach() - 0.1 * u @ vh, rtol=0.0, atol=1e-3)
    resumed = whitening([torch.nn.Parameter(weight) for weight in stepped])
    for mine_rule, rule in zip(optimizer.rules, resumed.rules, strict=True):
        rule.load_owned_state(mine_rule.owned_state())
    for p, q in zip(train(optimizer, range(1, 3)), train(resumed, range(1, 3)), strict=True):
        assert torch.equal(p, q)


def test_a_rule_for_whole_blocks_has_no_teams() -> None:
    with pytest.raises(ValueError, match="--muon-team-size 2: Whitened works on whole matrices, which"):
        whitening(parameters(), team_size="2")
