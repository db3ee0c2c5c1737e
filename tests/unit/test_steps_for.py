"""Newton-Schulz steps by matrix: what is asked, what it costs, what shares a stack, and what is
refused.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emerging_optimizers import utils as eo_utils
from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz
from torch import nn

import megatron_muon
from megatron_muon.core.assignment import TeamRules
from megatron_muon.core.build import exchange_by
from megatron_muon.core.cost import GRAM, STANDARD, Iteration
from megatron_muon.core.exchange import LOCAL, Buffers
from megatron_muon.core.layout import Layout, Matrix, everywhere, row_sharded
from megatron_muon.core.memory import Memory, stacks
from megatron_muon.core.orthogonalize import Orthogonalizer
from megatron_muon.core.plan import make_plan
from megatron_muon.core.probe import SILENT
from megatron_muon.errors import UserError
from megatron_muon.megatron.flags import command_line as arguments
from megatron_muon.patterns import steps_of
from megatron_muon.settings import steps_for
from tests.support.rows import ByMatrix

NAMES = ["layers.0.qkv.weight", "layers.0.fc1.weight", "layers.1.qkv.weight", "layers.1.fc1.weight"]
RUN = ("--optimizer", "muon", "--use-megatron-fsdp", "--transformer-impl", "local", "--mock-data")
NO_SHARD = ("--data-parallel-sharding-strategy", "no_shard")


def test_the_last_pattern_that_is_found_holds() -> None:
    asked = steps_for(SimpleNamespace(muon_ns_steps_for=["fc1=8", "layers.0=4", "fc1=3"]))
    assert list(asked.items()) == [
        ("layers.0", 4),
        ("fc1", 3),
    ], "of two alike the place of the last"
    assert steps_of(NAMES, asked, argument="--muon-ns-steps-for") == {
        NAMES[0]: 4,
        NAMES[1]: 3,
        NAMES[3]: 3,
    }
    assert steps_of(NAMES, {"fc1": 3, "layers.0": 4}, argument="--muon-ns-steps-for")[NAMES[1]] == 4
    assert steps_for(SimpleNamespace(muon_ns_steps_for=["a=b=2"])) == {"a=b": 2}


def test_a_pattern_that_finds_no_matrix_is_an_error() -> None:
    with pytest.raises(
        UserError, match=r"--muon-ns-steps-for fc3 matches none of Muon's 4 .*; did you mean fc1"
    ):
        steps_of(NAMES, {"qkv": 3, "fc3": 4}, argument="--muon-ns-steps-for")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("fc1",), "--muon-ns-steps-for 'fc1' is not PATTERN=N; type for instance linear_fc1=4"),
        (("fc1=two",), "'fc1=two' is not PATTERN=N"),
        (("=4",), "'=4' is not PATTERN=N"),
        (("fc1=-4",), "'fc1=-4' is not PATTERN=N"),
        (("fc1=0",), "--muon-ns-steps-for fc1: 0 is out of range"),
        (
            ("qkv=5", "fc1=6"),
            "--muon-ns-steps-for fc1: 6 is not proven with --muon-coefficient-type quintic; choose",
        ),
        (("fc1=10", "--muon-ns", "gram"), "--muon-ns gram is not stable in bf16 with 10 steps"),
        (
            ("fc1=4", *NO_SHARD),
            "no_shard exchanges nothing, .*; use optim, .* --muon-share-replicated",
        ),
    ],
)
def test_what_cannot_be_is_refused(parser, argv: tuple[str, ...], message: str) -> None:
    args = arguments.parse(parser, [*RUN, "--muon-ns-steps-for", *argv])
    with pytest.raises(UserError, match=message):
        arguments.check_settings(args, device="cpu")


@pytest.mark.parametrize(
    "more",
    [(), (*NO_SHARD, "--muon-share-replicated"), (*NO_SHARD, "--optimizer", "adaptive_muon")],
)
def test_this_packages_own_muon_has_steps_by_matrix(parser, more: tuple[str, ...]) -> None:
    args = arguments.parse(parser, [*RUN, "--muon-ns-steps-for", "qkv=8", "fc1=4", *more])
    arguments.check_settings(args, device="cpu")


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("method", [STANDARD, GRAM])
def test_blocks_with_other_steps_have_a_stack_of_their_own(method: str) -> None:
    """Each update is that of emerging-optimizers with its steps, to fp32's rounding, and of no
    other number.
    """
    matrices = [
        Matrix(name, (12, 20), steps=steps)
        for name, steps in zip("abcd", (0, 3, 8, 3), strict=True)
    ]
    orthogonalizer = Orthogonalizer(
        Iteration(precision="highest", method=method), scale_mode="shape_scaling"
    )
    layout = Layout(1, tuple(replace(one, shards=everywhere(one.shape, 1)) for one in matrices))
    group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    exchange = exchange_by(
        LOCAL, layout, group, orthogonalizer, Buffers(torch.device("cpu")), parts=[range(4)]
    )
    assert sorted(len(of.slots) for wave in exchange._waves for of in wave.route.stacks) == [
        1,
        1,
        2,
    ]
    updates: dict[int, torch.Tensor] = {}
    exchange.run(ByMatrix(lambda seed: randn(12, 20, seed=seed), updates.__setitem__), SILENT)
    for seed, (update, matrix) in enumerate(
        zip([updates[i] for i in range(4)], matrices, strict=True)
    ):
        with eo_utils.fp32_matmul_precision("highest"):
            by_steps = {
                n: newton_schulz(randn(12, 20, seed=seed), steps=n, coefficient_type="quintic")
                for n in (3, 5, 8)
            }
        torch.testing.assert_close(update, by_steps.pop(matrix.steps or 5), rtol=0.0, atol=2e-5)
        assert all((update - other).abs().max() > 1e-3 for other in by_steps.values())


def test_costs_and_memory_are_of_a_matrixs_own_steps() -> None:
    iteration = Iteration(method=STANDARD)
    orthogonalizer = Orthogonalizer(iteration)
    five, ten = Matrix("w", (64, 256)), Matrix("w", (64, 256), steps=10)
    assert orthogonalizer.flops(ten) == 2 * orthogonalizer.flops(five)
    for team in (1, 2):
        assert iteration.cost(64, 256, team, 10) == replace(iteration, steps=10).cost(64, 256, team)
    one = Matrix("w", (64, 256), steps=1)
    assert stacks(one.blocks, None, 1).keys().isdisjoint(stacks(five.blocks, None))
    gram = Iteration(method="auto", precision="medium")
    assert gram.method_for(64, 512) == GRAM
    assert gram.with_steps(10).method_for(64, 512) == STANDARD, "not proven with ten steps in bf16"


def test_the_planner_spreads_work_by_steps_and_the_digest_has_them() -> None:
    """Four equal matrices on two ranks, one with eight steps: three of three and one of eight are
    even.
    """
    iteration = Iteration(method=STANDARD)
    rules = TeamRules(iteration.cost, [0, 0], size=1)

    def plan(*steps: int):
        layout = Layout(
            2,
            tuple(
                row_sharded(
                    f"w{i}",
                    (16, 16),
                    (8, 8),
                )
                for i in range(4)
            ),
        )
        matrices = tuple(
            replace(matrix, steps=n) for matrix, n in zip(layout.matrices, steps, strict=True)
        )
        layout = replace(layout, matrices=matrices)
        costs = [float(Orthogonalizer(iteration).flops(matrix)) for matrix in matrices]
        return layout, make_plan(layout, costs, memory=Memory(4, iteration), rules=rules)

    layout, even = plan(0, 0, 0, 0)
    _, uneven = plan(8, 3, 3, 3)
    assert sorted(even.owners) == [0, 0, 1, 1]
    assert uneven.owners.count(uneven.owners[0]) == 1
    assert uneven.imbalance == pytest.approx(9 / 8.5)
    other, named = plan(5, 0, 0, 0)
    assert named.digest() != even.digest()
    assert other.digest() != layout.digest()


def test_muon_for_any_model_takes_steps_by_name() -> None:
    """Against an optimizer for each matrix with as many steps for all; the last pattern holds."""

    def model() -> nn.ModuleDict:
        torch.manual_seed(0)
        return nn.ModuleDict(
            {name: nn.Linear(10, 16, bias=False) for name in ("proj", "fc1", "fc2")}
        )

    settings = {"lr": 0.02, "fp32_matmul_prec": "highest"}
    ours, theirs = model(), model()
    optimizer = megatron_muon.Muon(
        ours.named_parameters(), ns_steps_for={"fc*": 3, "fc2": 8}, **settings
    )
    alone = [
        megatron_muon.Muon([(name, p)], ns_steps=steps, **settings)
        for (name, p), steps in zip(theirs.named_parameters(), (5, 3, 8), strict=True)
    ]
    for seed, (mine, other) in enumerate(
        zip(ours.parameters(), theirs.parameters(), strict=True),
    ):
        mine.grad = randn(16, 10, seed=seed)
        other.grad = mine.grad.clone()
    for each in (optimizer, *alone):
        each.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0.0, atol=1e-7)
    with pytest.raises(
        UserError, match=r"ns_steps_for fc\*: 13 is not proven with ns_coefficients simple"
    ):
        megatron_muon.Muon(model().named_parameters(), ns_steps_for={"fc*": 13})
    with pytest.raises(UserError, match="ns_steps_for fc3 matches none of Muon's 3 matrices"):
        megatron_muon.Muon(model().named_parameters(), ns_steps_for={"fc3": 4})
