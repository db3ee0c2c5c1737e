"""Newton-Schulz steps by matrix: what is asked, what it costs, what shares a stack, and what is
refused.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import megatron_muon
from megatron_muon.core.assignment import TeamRules
from megatron_muon.core.cost import STANDARD, Iteration
from megatron_muon.core.layout import Layout
from megatron_muon.core.methods.newton_schulz import NewtonSchulz
from megatron_muon.core.plan import make_plan
from megatron_muon.errors import UserError
from megatron_muon.megatron.flags import command_line as arguments
from megatron_muon.megatron.plan_figures import imbalance
from megatron_muon.patterns import values_of
from megatron_muon.settings import steps_for
from tests.support.buffers import sizes_of
from tests.support.cut_matrices import row_sharded
from tests.support.owners import owners_of

NAMES = ["layers.0.qkv.weight", "layers.0.fc1.weight", "layers.1.qkv.weight", "layers.1.fc1.weight"]
RUN = ["--optimizer", "muon", "--use-megatron-fsdp", "--transformer-impl", "local", "--mock-data"]
NO_SHARD = "--data-parallel-sharding-strategy no_shard"


def test_the_last_pattern_that_is_found_holds() -> None:
    asked = steps_for(SimpleNamespace(muon_ns_steps_for=["fc1=8", "layers.0=4", "fc1=3"]))
    assert list(asked.items()) == [
        ("layers.0", 4),
        ("fc1", 3),
    ], "of two alike the place of the last"
    assert values_of(NAMES, asked, argument="--muon-ns-steps-for") == {
        NAMES[0]: 4,
        NAMES[1]: 3,
        NAMES[3]: 3,
    }
    assert (
        values_of(
            NAMES,
            {"fc1": 3, "layers.0": 4},
            argument="--muon-ns-steps-for",
        )[NAMES[1]]
        == 4
    )
    assert steps_for(SimpleNamespace(muon_ns_steps_for=["a=b=2"])) == {"a=b": 2}


def test_a_pattern_that_finds_no_matrix_is_an_error() -> None:
    with pytest.raises(
        UserError, match=r"--muon-ns-steps-for fc3 matches none of Muon's 4 .*; did you mean fc1"
    ):
        values_of(NAMES, {"qkv": 3, "fc3": 4}, argument="--muon-ns-steps-for")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("fc1", "--muon-ns-steps-for 'fc1' is not PATTERN=N; for example, type linear_fc1=4"),
        ("=4", "'=4' is not PATTERN=N"),
        ("fc1=-4", "'fc1=-4' is not PATTERN=N"),
        ("fc1=0", "--muon-ns-steps-for fc1: 0 is out of range"),
        ("qkv=5 fc1=6", "fc1: 6 is not proven with --muon-coefficient-type quintic; choose"),
        ("fc1=10 --muon-ns gram", "--muon-ns gram is not stable in bf16 with 10 steps"),
        (f"fc1=4 {NO_SHARD}", "no_shard exchanges nothing, .*; use optim, .* --muon-share-repl"),
    ],
)
def test_what_cannot_be_is_refused(parser, argv: str, message: str) -> None:
    args = arguments.parse(parser, [*RUN, "--muon-ns-steps-for", *argv.split()])
    with pytest.raises(UserError, match=message):
        arguments.check_settings(args, device="cpu")


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_the_planner_spreads_work_by_steps_and_the_digest_has_them() -> None:
    """Four equal matrices on two ranks, one with eight steps: three of three and one of eight are
    even.
    """
    iteration = Iteration(method=STANDARD)
    rules = TeamRules(iteration.cost, [0, 0], size=1)

    def plan(*steps: int):
        cut = [row_sharded(name, (16, 16), (8, 8)) for name in NAMES]
        matrices = [replace(matrix, steps=n) for matrix, n in zip(cut, steps, strict=True)]
        layout = Layout(2, tuple(matrices))
        costs = [float(NewtonSchulz(iteration).flops(matrix)) for matrix in matrices]
        return layout, make_plan(layout, costs, sizes=sizes_of(4, iteration), rules=rules)

    layout, even = plan(0, 0, 0, 0)
    _, uneven = plan(8, 3, 3, 3)
    assert sorted(owners_of(even)) == [0, 0, 1, 1]
    assert owners_of(uneven).count(owners_of(uneven)[0]) == 1
    assert imbalance(uneven) == pytest.approx(9 / 8.5)
    other, named = plan(5, 0, 0, 0)
    assert named.digest() != even.digest()
    assert other.digest() != layout.digest()


def test_muon_for_any_model_takes_steps_by_name() -> None:
    """Against an optimizer for each matrix with as many steps for all; the last pattern holds."""
    shape, settings = (16, 10), {"lr": 0.02, "fp32_matmul_prec": "highest"}
    names = ["proj", "fc1", "fc2"]
    ours = [(name, nn.Parameter(randn(*shape, seed=0))) for name in names]
    theirs = [(name, nn.Parameter(randn(*shape, seed=0))) for name in names]
    optimizers = [megatron_muon.Muon(ours, ns_steps_for={"fc*": 3, "fc2": 8}, **settings)]
    for named, steps in zip(theirs, (5, 3, 8), strict=True):
        optimizers.append(megatron_muon.Muon([named], ns_steps=steps, **settings))
    for _, p in (*ours, *theirs):
        p.grad = randn(*shape, seed=1)
    for optimizer in optimizers:
        optimizer.step()
    for (_, mine), (_, other) in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0.0, atol=1e-7)
    with pytest.raises(UserError, match=r"ns_steps_for fc\*: 13 is not proven with ns_coeff"):
        megatron_muon.Muon(ours, ns_steps_for={"fc*": 13})
