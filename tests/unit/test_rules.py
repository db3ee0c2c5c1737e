"""Rules on whole matrices, and the rule that docs/design.md shows.

On shards cautious weight decay, MuonHyperball and second moments are functional tests.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_muon import Muon
from megatron_muon.core.build import make_exchange
from megatron_muon.core.exchange import OWNER, Buffers
from megatron_muon.core.layout import Layout, row_sharded
from megatron_muon.core.optimizer import ShardedMuon
from megatron_muon.core.orthogonalize import Orthogonalizer
from megatron_muon.core.probe import SILENT
from megatron_muon.core.ranks import Alone
from megatron_muon.core.rules import RULES, make_rules
from megatron_muon.core.rules.rule import Held, Part, Step
from megatron_muon.core.rules.second_moments import MOMENT2
from tests.unit.test_sharded_muon import CPU, SETTINGS, gradients, parameters, sharded

DESIGN = Path(__file__).parents[2] / "docs" / "design.md"
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
    """A Muon that keeps norms; a 3D parameter is a stack of matrices."""
    return sharded(params, hyperball=True, **{"weight_decay": 0.0, **changes})


def test_an_update_of_zero_lets_weights_decay() -> None:
    """The paper's inequality is not strict: rows that get no gradient decay as they do without
    caution.
    """
    (weight,) = mine = [torch.nn.Parameter(torch.ones(3, 4))]
    optimizer = sharded(mine, weight_decay=DECAY, cautious=True, momentum=0.0)
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
    optimizer = on_spheres([stack])
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
        ({"weight_decay": 0.2}, "weight decay 0.2 of matrix0 has no effect with MuonHyperball"),
        ({"lr": 1.0}, "the learning rate 1 of matrix0 is not below 1: .* begin with 0.02"),
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
    optimizer.check_weights()
    with torch.no_grad():
        mine[1].zero_()
    with pytest.raises(ValueError, match=r"matrix1 is zero: .* muon_exclude"):
        optimizer.check_weights()


def test_an_update_along_the_matrix_does_not_throw_it_far() -> None:
    """What is left of ||w - lr * R * normalize(update)||^2 is rounding then: dividing by it made
    norms of 90,000 R.
    """
    weight = torch.nn.Parameter(
        torch.randn(64, 64, generator=torch.Generator().manual_seed(0)),
    )
    norm = float(weight.detach().norm())
    hyperball = on_spheres([weight], lr=0.99999).rules[-1]
    update = (weight.detach() + 1e-5).flatten()
    weight.grad = torch.empty_like(weight)
    hyperball.begin(Step([{"lr": 0.99999}], lambda slot: [], SILENT))
    rows = [update.view(64, 64)]
    part = Part(
        [0],
        [weight],
        [{}],
        update,
        rows,
        [weight.data],
    )
    with torch.no_grad():
        hyperball.after(part)
        hyperball.end()
    assert float(weight.detach().norm()) < 1.1 * norm


def test_the_example_of_the_design_is_a_rule_and_works() -> None:
    """It clips each element of the update: with a bound of 0 nothing but decay is left, with a
    large one it is Muon.
    """
    (code,) = re.findall(
        r"```python\n(.*?class Clip\(Rule\).*?)```", DESIGN.read_text("utf-8"), re.DOTALL
    )
    found: dict[str, Any] = {}
    exec(compile(code, str(DESIGN), "exec"), found)
    weights = {}
    for bound in (0.0, 0.01, 1e9):
        optimizer = sharded(parameters())
        *first, decay, descent = optimizer.rules
        clip = found["Clip"](first[0].held, {"bound": bound})
        optimizer.rules = [*first, clip, decay, descent]
        weights[bound] = train(optimizer, range(1))
    plain = train(sharded(parameters()), range(1))
    for old, none, some, all_of_it, muon in zip(
        parameters(), *weights.values(), plain, strict=True
    ):
        torch.testing.assert_close(none, old.detach() * (1.0 - 0.1 * 0.05))
        assert torch.equal(all_of_it, muon)
        assert float(
            (some - none).abs().max(),
        ) == pytest.approx(0.1 * 0.01, rel=1e-3)


def test_a_rule_for_whole_updates_has_no_teams() -> None:
    layout = Layout(1, (row_sharded("w", (4, 4), [4]),))
    held: Any = Held(layout, Alone(), CPU, [1])  # type: ignore[arg-type]
    settings: dict[str, Any] = {"buffer_mb": None, "wire": "fp32", "team_size": "2"}
    settings["rules"] = make_rules(["normuon"], held, {"beta2": 0.9, "eps": 1e-8})
    with pytest.raises(ValueError, match="muon_team_size 2 cannot be: NorMuon works on whole"):
        make_exchange(OWNER, layout, held.group, Orthogonalizer(), Buffers(CPU), **settings)
