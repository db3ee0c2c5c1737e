"""Rules on whole matrices, and rules of one's own: the example of docs/design.md, one in the place
of the iteration.

On shards cautious weight decay, MuonHyperball and second moments are functional tests.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emerging_optimizers import orthogonalized_optimizers as eo

from megatron_muon import Muon
from megatron_muon.core.build import make_exchange
from megatron_muon.core.cost import Iteration
from megatron_muon.core.exchange import OWNER, Buffers
from megatron_muon.core.layout import Layout, Matrix, from_rectangles, row_sharded
from megatron_muon.core.optimizer import ShardedMuon
from megatron_muon.core.orthogonalize import Orthogonalizer
from megatron_muon.core.probe import SILENT
from megatron_muon.core.ranks import Alone
from megatron_muon.core.rules import RULES, make_rules
from megatron_muon.core.rules.hyperball import Hyperball
from megatron_muon.core.rules.plain import together
from megatron_muon.core.rules.rule import Held, Part, Rule, Step
from megatron_muon.core.rules.second_moments import MOMENT2
from megatron_muon.settings import choices_of
from tests.support.rows import orthogonalized
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


class CautiousMuon(eo.Muon):
    """emerging-optimizers' Muon with the paper's decay."""

    def _apply_weight_decay_inplace(self, *_args: Any) -> None:
        pass

    def pre_weight_update_fn_inplace(self, p: torch.Tensor, update: torch.Tensor) -> None:
        p.sub_(torch.where(update * p >= 0.0, p, 0.0), alpha=SETTINGS["lr"] * DECAY)


def run_both(optimizer: torch.optim.Optimizer, reference: torch.optim.Optimizer) -> float:
    """The largest difference of a weight after ten steps."""
    pairs = zip(train(optimizer, range(10)), train(reference, range(10)), strict=True)
    return max(float((p - q).abs().max()) for p, q in pairs)


def upstream(
    kind: type[eo.Muon],
    params: list[torch.nn.Parameter],
    decay: float,
) -> eo.Muon:
    settings = {name: SETTINGS[name] for name in ("lr", "momentum", "nesterov")}
    return kind(
        params,
        **settings,
        weight_decay=decay,
        weight_decay_method="decoupled",
        fp32_matmul_prec="highest",
    )


@pytest.mark.parametrize(
    ("kind", "decay", "variant"),
    [(CautiousMuon, DECAY, {"cautious": True}), (eo.MuonHyperball, 0.0, {"hyperball": True})],
)
def test_ten_updates_equal_the_papers_and_emerging_optimizers(
    kind: type[eo.Muon], decay: float, variant: dict[str, bool]
) -> None:
    """To the rounding of ten iterations of random matrices; plain Muon is far off, so the
    comparison can fail.
    """
    mine = parameters()
    norms = [p.detach().norm() for p in mine]
    optimizer = sharded(mine, weight_decay=decay, **variant)
    assert run_both(optimizer, upstream(kind, parameters(), decay)) < 1e-5
    for p, norm in zip(
        mine, norms if "hyperball" in variant else (), strict="hyperball" in variant
    ):
        torch.testing.assert_close(p.detach().norm(), norm, rtol=1e-6, atol=0.0)
    optimizer = sharded(parameters(), weight_decay=decay)
    assert run_both(optimizer, upstream(kind, parameters(), decay)) > 0.01


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
        weight.detach()[1:], torch.full((2, 4), 1.0 - SETTINGS["lr"] * DECAY)
    )


def test_each_expert_of_a_stack_has_a_sphere_of_its_own() -> None:
    stack = torch.nn.Parameter(
        torch.stack([torch.eye(3, 4), 5.0 * torch.eye(3, 4)]),
    )
    optimizer = on_spheres([stack])
    stack.grad = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))
    optimizer.step()
    norms = torch.linalg.vector_norm(stack.detach(), dim=(1, 2))
    torch.testing.assert_close(norms, torch.tensor([3.0**0.5, 5.0 * 3.0**0.5]))


SECOND_MOMENTS = tuple(name for name, rule in RULES.items() if rule.slots)


def test_every_second_moment_is_a_choice_of_the_flag() -> None:
    assert choices_of("adaptive_muon_moment2_method") == SECOND_MOMENTS


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

    def step(*, broken: bool) -> list[torch.Tensor]:
        for p, gradient in zip(mine, gradients(0), strict=True):
            p.grad = gradient.clone()
        if broken:
            mine[0].grad[2, 1] = torch.inf  # type: ignore[index]
        optimizer.step()
        return [
            torch.cat(
                [
                    p.detach().flatten(),
                    optimizer.state[p].get(MOMENT2, p[:0]).flatten(),
                ],
            )
            for p in mine
        ]

    before, after = step(broken=False), step(broken=True)
    assert torch.equal(after[0], before[0])
    assert not torch.equal(after[1], before[1])
    assert optimizer.skipped_updates() == {"a": 1}


def test_updates_take_the_place_of_gradients_and_nothing_else() -> None:
    """The step keeps them there until all shards' norms are known; further memory would be a shard
    for each matrix.
    """
    mine = parameters()
    optimizer = on_spheres(mine)
    train(optimizer, range(1))
    # 0.1 of it, looked ahead
    expected = orthogonalized(optimizer.exchange.orthogonalize, 0.19 * gradients(0)[0])
    torch.testing.assert_close(mine[0].grad, expected, rtol=0.0, atol=1e-5)
    assert not optimizer.rules[-1]._pairs  # type: ignore[attr-defined]


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


@pytest.mark.parametrize("seed", range(4))
def test_an_update_along_the_matrix_does_not_throw_it_far(seed: int) -> None:
    """What is left of ||w - lr * R * normalize(update)||^2 is rounding then: dividing by it made
    norms of 90,000 R.
    """
    weight = torch.nn.Parameter(torch.randn(64, 64, generator=torch.Generator().manual_seed(seed)))
    norm = float(weight.detach().norm())
    hyperball = on_spheres([weight], lr=0.99999).rules[-1]
    update = (weight.detach() + 1e-5).flatten()
    weight.grad = torch.empty_like(weight)
    hyperball.begin(Step([{"lr": 0.99999}], lambda slot: [], SILENT))
    with torch.no_grad():
        hyperball.after(
            Part(
                [0],
                [weight],
                [{}],
                update,
                [update.view(64, 64)],
                [weight.data],
            ),
        )
        hyperball.end()
    assert float(weight.detach().norm()) < 1.1 * norm


def test_of_replicas_one_sends() -> None:
    """A norm over the shards of all ranks counts each shard once."""
    layout = Layout(
        3,
        (
            from_rectangles(
                "w",
                (9, 4),
                [
                    (0, 5, 0, 4),
                    (5, 4, 0, 4),
                    (0, 5, 0, 4),
                ],
            ),
        ),
    )
    sent = []
    for rank in range(3):
        group: Any = SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: 3)
        sent.append(
            Hyperball(Held(layout, group, torch.device("cpu"), [1]), {})._sent.tolist(),
        )
    assert sent == [[1.0], [1.0], [0.0]]


def test_passes_share_a_cache() -> None:
    """Parts are consecutive, hold all, and no more than a cache takes where there is more than one
    tensor in them.
    """
    sizes = [2**19, 2**19, 1, 2**21, 5, 2**20 - 5, 1]
    tensors = [torch.empty(size, device="meta") for size in sizes]
    on_cpu = [SimpleNamespace(numel=tensor.numel, device=torch.device("cpu")) for tensor in tensors]
    parts = [(part.start, part.stop) for part in together(on_cpu)]  # type: ignore[arg-type]
    assert parts == [
        (0, 2),
        (2, 3),
        (3, 4),
        (4, 6),
        (6, 7),
    ]
    assert list(together([])) == []


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
        optimizer.rules = [
            *first,
            found["Clip"](first[0].held, {"bound": bound}),
            decay,
            descent,
        ]
        weights[bound] = train(optimizer, range(1))
    plain = train(sharded(parameters()), range(1))
    for old, none, some, all_of_it, muon in zip(
        parameters(), *weights.values(), plain, strict=True
    ):
        torch.testing.assert_close(none, old.detach() * (1.0 - 0.1 * 0.05))
        assert torch.equal(all_of_it, muon)
        assert float((some - none).abs().max()) == pytest.approx(0.1 * 0.01, rel=1e-3)


class Whitened(Rule):
    """A toy Shampoo: X -> L^(-1/2) X, where L, which lies with the block's owner, adds up X X^T
    over the steps.
    """

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
    layout = Layout(
        1,
        tuple(
            row_sharded(
                f"w{i}",
                shape,
                [shape[0]],
            )
            for i, shape in enumerate(shapes)
        ),
    )
    held = Held(layout, Alone(), CPU, [1] * len(weights))  # type: ignore[arg-type]
    rules = make_rules(("momentum", "descent"), held, {"nesterov": False})
    rules.insert(1, Whitened(held, {}))
    exchange = make_exchange(
        OWNER,
        layout,
        Alone(),
        Orthogonalizer(Iteration(precision="highest")),
        Buffers(CPU),  # type: ignore[arg-type]
        buffer_mb=None,
        wire="fp32",
        rules=rules,
        team_size=team_size,
    )
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
    for p, q in zip(
        train(optimizer, range(1, 3)),
        train(resumed, range(1, 3)),
        strict=True,
    ):
        assert torch.equal(p, q)


def test_a_rule_for_whole_blocks_has_no_teams() -> None:
    with pytest.raises(
        ValueError, match="muon_team_size 2 cannot be: Whitened works on whole matrices, which"
    ):
        whitening(parameters(), team_size="2")
