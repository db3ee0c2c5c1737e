"""Rules on whole matrices; test_engine_page.py has the rule that docs/engine.md shows.

On shards cautious weight decay, MuonHyperball and second moments are functional tests.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_muon import Muon
from megatron_muon.core.build import OWNER, StepOptions, make_waves
from megatron_muon.core.layout import Layout
from megatron_muon.core.methods.newton_schulz import NewtonSchulz
from megatron_muon.core.rows import HeldRows
from megatron_muon.core.rules import RULES, make_rules
from megatron_muon.core.rules.held import Held
from megatron_muon.core.rules.second_moments import MOMENT2
from megatron_muon.megatron.sharded_muon import ShardedMuon
from megatron_muon.ranks import Alone
from tests.support.cut_matrices import row_sharded
from tests.unit.test_sharded_muon import CPU, SETTINGS, gradients, parameters, sharded

DECAY = 0.4


def train(optimizer: torch.optim.Optimizer, steps: range) -> list[torch.Tensor]:
    """The weights after these steps."""
    weights = optimizer.param_groups[0]["params"]
    for step in steps:
        for p, gradient in zip(weights, gradients(step), strict=True):
            p.grad = gradient.clone()
        optimizer.step()
    return [p.detach().clone() for p in weights]


def on_spheres(params: list[torch.nn.Parameter], **changes: Any) -> ShardedMuon:
    """A Muon that keeps norms."""
    return sharded(params, ("hyperball",), **{"weight_decay": 0.0, **changes})


def test_an_update_of_zero_lets_weights_decay() -> None:
    """The paper's inequality is not strict: rows that get no gradient decay as they do without
    caution.
    """
    (weight,) = mine = [torch.nn.Parameter(torch.ones(3, 4))]
    optimizer = sharded(mine, ("cautious",), weight_decay=DECAY, momentum=0.0)
    weight.grad = torch.zeros(3, 4)
    weight.grad[0, 0] = -1.0
    optimizer.step()
    assert weight[0, 0] > 1.0
    torch.testing.assert_close(
        weight.detach()[1:],
        torch.full(
            (2, 4),
            1.0 - SETTINGS["lr"] * DECAY,
        ),
    )


def test_each_expert_of_a_stack_has_a_sphere_of_its_own() -> None:
    matrix = torch.eye(3, 4)
    stack = torch.nn.Parameter(torch.stack([matrix, 5.0 * matrix]))
    optimizer = Muon([("experts.w", stack)], lr=0.1, hyperball=True, weight_decay=0.0)
    stack.grad = torch.randn(
        2,
        3,
        4,
        generator=torch.Generator().manual_seed(1),
    )
    optimizer.step()
    norms = torch.linalg.vector_norm(stack.detach(), dim=(1, 2))
    torch.testing.assert_close(norms, torch.tensor([3.0**0.5, 5.0 * 3.0**0.5]))


SECOND_MOMENTS = tuple(name for name, rule in RULES.items() if rule.slots)


@pytest.mark.parametrize(
    "variant",
    [
        {"cautious_weight_decay": True, "weight_decay": DECAY},
        {"hyperball": True, "weight_decay": 0.0},
        *({"moment2_method": method} for method in SECOND_MOMENTS),
    ],
)
def test_an_update_that_is_skipped_leaves_weights_and_second_moments_alone(
    variant: dict[str, Any],
) -> None:
    """To the last bit: not even a norm is restored.

    Zeros stand in for the update; averaged into the second moment they made the next one 1.6 times
    as large.
    """
    mine = parameters()
    optimizer = Muon(zip("abc", mine, strict=True), lr=0.1, fp32_matmul_prec="highest", **variant)

    def step(*, broken: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        for p, gradient in zip(mine, gradients(0), strict=True):
            p.grad = gradient.clone()
        if broken:
            mine[0].grad[2, 1] = torch.inf  # type: ignore[index]
        optimizer.step()
        state = [optimizer.state[p] for p in mine]
        moments = [slots[MOMENT2].clone() for slots in state if MOMENT2 in slots]
        return [p.detach().clone() for p in mine], moments

    for before, after in zip(step(broken=False), step(broken=True), strict=True):
        if before:
            assert torch.equal(after[0], before[0])
            assert not torch.equal(after[1], before[1])
    assert optimizer.skipped_updates() == {"a": 1}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"weight_decay": 0.2}, "weight_decay of matrix0 0.2 has no effect with MuonHyperball"),
        ({"lr": 1.0}, "lr of matrix0 1 is not below 1: .* begin with 0.02"),
    ],
)
def test_rates_without_a_meaning_are_refused_at_the_start_and_when_a_schedule_brings_them(
    changed: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        on_spheres(parameters(), **changed)
    optimizer = on_spheres(parameters())
    optimizer.param_groups[0].update(changed)
    with pytest.raises(ValueError, match=message):
        optimizer.step()


def test_a_matrix_of_zeros_has_no_sphere() -> None:
    mine = parameters()
    optimizer = on_spheres(mine)
    optimizer.part.check_weights()
    with torch.no_grad():
        mine[1].zero_()
    with pytest.raises(ValueError, match=r"matrix1 is zero: .* muon_exclude"):
        optimizer.part.check_weights()


def test_an_update_along_the_matrix_does_not_throw_it_far() -> None:
    """What is left of ||w - lr * R * normalize(update)||^2 is rounding then: dividing by it made
    norms of 90,000 R.
    """
    weight = torch.nn.Parameter(
        torch.randn(64, 64, generator=torch.Generator().manual_seed(0)),
    )
    norm = float(weight.detach().norm())
    hyperball = on_spheres([weight], lr=0.99999).part.rules[-1]
    update = (weight.detach() + 1e-5).flatten()
    weight.grad = torch.empty_like(weight)
    hyperball.begin(SimpleNamespace(groups=[{"lr": 0.99999}], gradients=[weight.grad]))
    rows = [update.view(64, 64)]
    part = HeldRows([0], [{}], update, rows, [weight.data])
    with torch.no_grad():
        hyperball.after(part)
        hyperball.end()
    assert float(weight.detach().norm()) < 1.1 * norm


def test_a_rule_for_whole_updates_has_no_teams() -> None:
    layout = Layout(1, (row_sharded("w", (4, 4), [4]),))
    held: Any = Held(layout, Alone(), CPU, [(0, 4, 0, 4)])  # type: ignore[arg-type]
    rules = make_rules(["normuon"], held, {"beta2": 0.9, "eps": 1e-8})
    options = StepOptions(CPU, team_size="2")
    with pytest.raises(ValueError, match="muon_team_size 2 cannot be: NorMuon works on whole"):
        make_waves(OWNER, layout, held.group, NewtonSchulz(), options, rules)
