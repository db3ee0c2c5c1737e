"""The order of a step's stages, stages that are left out, and tensors that a step makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_muon.core.build import sizes_of
from megatron_muon.core.cost import AUTO, Iteration
from megatron_muon.core.engine import Engine, run
from megatron_muon.core.layout import Layout
from megatron_muon.core.methods.newton_schulz import NewtonSchulz
from megatron_muon.core.passes import BY_RULE, DECOUPLED
from megatron_muon.core.plan import Plan
from megatron_muon.core.rules import RULES, make_rules
from megatron_muon.core.rules.held import Held
from megatron_muon.core.slices import Team
from megatron_muon.megatron.sharded_muon import ShardedMuon
from megatron_muon.ranks import Alone
from tests.support.cut_matrices import row_sharded
from tests.support.one_rank import CPU, muon_of, waves_of
from tests.support.rows import ByMatrix

ROWS, COLS = 64, 96
WAVES = 4


class Noted:
    """Stages that note when they are taken."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def send_rows(self, k: int) -> None:
        self.seen.append(f"rows {k}")

    def orthogonalize(self, k: int) -> None:
        self.seen.append(f"products {k}")

    def apply(self, k: int) -> None:
        self.seen.append(f"weights {k}")


def test_three_waves_are_under_way() -> None:
    noted = Noted()
    run(3, noted)
    assert noted.seen == [
        "rows 0",
        "rows 1",
        "products 0",
        "rows 2",
        "products 1",
        "weights 0",
        "products 2",
        "weights 1",
        "weights 2",
    ]


@pytest.mark.parametrize("waves", [0, 1, 2, 5])
def test_every_wave_takes_its_stages_once_and_in_order(waves: int) -> None:
    noted = Noted()
    run(waves, noted)
    assert len(noted.seen) == 3 * waves
    for k in range(waves):
        own = [each for each in noted.seen if each.endswith(f" {k}")]
        assert own == [f"rows {k}", f"products {k}", f"weights {k}"]


def two_ranks(*rules: str) -> Plan:
    """Matrices whose rows are on two ranks, each with an owner in turn, one to a wave."""
    matrices = []
    teams = []
    for number in range(WAVES):
        matrices.append(row_sharded(f"w{number}", (ROWS, COLS), [ROWS // 2] * 2))
        teams.append(Team((number % 2,), (1.0,)))
    method = NewtonSchulz(Iteration(precision="highest"), scaled=not rules)
    kinds = [RULES[name] for name in rules]
    sizes = sizes_of(method, AUTO, kinds, processor=True)
    waves = tuple((number,) for number in range(WAVES))
    layout = Layout(2, tuple(matrices))
    return Plan(layout, tuple(teams), waves, sizes, 2**22, ((), ()))


def arrived(received: torch.Tensor, *_: Any, **__: Any) -> Any:
    """An all-to-all of ones."""
    received.fill_(1.0)
    return mock.Mock()


@pytest.fixture(autouse=True)
def other_rank() -> Iterator[None]:
    """Rank 1 sends ones."""
    with mock.patch.object(dist, "all_to_all_single", arrived):
        yield


STAGES: dict[str, tuple[Callable[[Engine], Any], str]] = {
    "products without rows": (lambda e: e.orthogonalize(0), "no rows are under way"),
    "weights without products": (lambda e: (e.send_rows(0), e.apply(0)), "no updates are"),
    "rows twice": (lambda e: (e.send_rows(0), e.send_rows(0)), "rows were not waited for"),
    "products twice": (
        lambda e: (e.send_rows(0), e.orthogonalize(0), e.orthogonalize(0)),
        "no rows are under way",
    ),
    "weights twice": (lambda e: (e.step(), e.apply(0)), "no updates are under way"),
    "a step without weights": (
        lambda e: (setattr(e, "apply", lambda k: None), e.step()),
        "updates were not waited for",
    ),
}


@pytest.mark.parametrize("fault", STAGES)
def test_a_stage_that_is_left_out_or_taken_twice_is_an_error(fault: str) -> None:
    """Story: the loop of generators went on without the update."""
    passes = ByMatrix(lambda index: torch.ones(ROWS // 2, COLS))
    engine = Engine(waves_of(two_ranks(), 0), passes)
    act, message = STAGES[fault]
    with pytest.raises(RuntimeError, match=f"wave 0: {message}"):
        act(engine)


def test_a_step_does_not_wait_for_what_a_step_that_failed_has_left() -> None:
    passes = ByMatrix(lambda index: torch.ones(ROWS // 2, COLS))
    engine = Engine(waves_of(two_ranks(), 0), passes)
    engine.send_rows(0)
    engine.step()


class Made(TorchDispatchMode):
    """Notes the elements of tensors that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.operation = ""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_memory(one) for one in tree_leaves((args, kwargs)) if torch.is_tensor(one)}
        for one in tree_leaves(result):
            is_made = torch.is_tensor(one) and _memory(one) not in given
            if is_made and one.numel() > self.largest:
                self.largest = one.numel()
                self.operation = str(func)
        return result


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def muon_with(*rules: str) -> ShardedMuon:
    """The Muon of rank 0, with gradients."""
    plan = two_ranks(*rules)
    method: Any = plan.sizes.method
    shards = plan.layout.held(0)
    held: Any = Held(
        plan.layout,
        Alone(),  # type: ignore[arg-type]
        CPU,
        [shard.rectangle for shard in shards],
        [method.row_scales(matrix) for matrix in plan.layout.matrices],
    )
    made = make_rules(rules, held, {"beta2": 0.9, "eps": 1e-8})
    parameters = []
    for shard in shards:
        parameters.append(torch.nn.Parameter(torch.ones(shard.rows, shard.cols)))
        parameters[-1].grad = torch.randn(shard.rows, shard.cols)
    return muon_of(
        waves_of(plan, 0),
        parameters,
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
        rules=made,
        decay=BY_RULE if "cautious" in rules else DECOUPLED,
    )


@pytest.mark.parametrize("rules", [(), ("cautious",), ("adamuon",), ("normuon",)])
def test_a_step_makes_no_tensor_as_large_as_a_shard(rules: tuple[str, ...]) -> None:
    muon = muon_with(*rules)
    muon.step()
    with Made() as made:
        muon.step()
    assert made.largest < ROWS // 2 * COLS, made.operation


def test_a_tensor_as_large_as_a_shard_is_seen() -> None:
    """Negative control."""
    muon = muon_with()
    passes: Any = muon.part.engine.passes
    with mock.patch.object(passes, "drain", lambda wave: wave.lane.clone()), Made() as made:
        muon.step()
    assert made.largest >= ROWS // 2 * COLS
    assert made.operation == "aten.clone.default"
