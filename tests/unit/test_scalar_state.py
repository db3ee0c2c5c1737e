"""State of the scalar optimizers: there from the start, counted in step, and in pieces without a
change of bits.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_muon.megatron.scalar_state import ScalarState, initialize_scalar_state
from megatron_muon.offload.run import OffloadRun
from tests.support.fused_adam import FusedAdam

SHAPES = (
    (70, 40),
    (0, 8),
    (5000,),
    (3,),
    (0,),
)
"""Of 1,024 elements to a piece: three pieces, none, five, one, none; the last two are a group of
their own.
"""


class Weights:
    """Main weights where they are, and a model's in bf16."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        self.main = {parameter: parameter.clone().view(-1) for parameter in parameters}
        self.model = {parameter: parameter.bfloat16().view(-1) for parameter in parameters}

    def shard(self, parameter: torch.Tensor) -> torch.Tensor:
        return self.main[parameter]

    def keep(self, store: Any, parameters: Any, pieces: Any) -> None:
        self.store, self.pieces = store, pieces
        for number, piece in enumerate(pieces):
            record = store.read(number)
            record[0] = self.main[piece.parameter][piece.start : piece.stop]
            store.write(number, record)
        store.on_return = self.copy_to_model

    def copy_to_model(self, number: int, record: torch.Tensor) -> None:
        piece = self.pieces[number]
        self.model[piece.parameter][piece.start : piece.stop] = record[0]

    def read(self, parameter: torch.Tensor) -> torch.Tensor:
        numbers = [
            number for number, piece in enumerate(self.pieces) if piece.parameter is parameter
        ]
        return torch.cat([self.store.read(number)[0] for number in numbers])


def parameters() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def wrapped(kind: type[torch.optim.Optimizer], params: list[torch.Tensor]) -> Any:
    """An optimizer as megatron-core gives it, with groups of other rates."""

    def init_state(opt: Any, config: Any = None) -> None:
        for parameter in (parameter for group in opt.param_groups for parameter in group["params"]):
            if not opt.state[parameter]:
                opt.state[parameter] |= {
                    slot: torch.zeros_like(parameter) for slot in ("exp_avg", "exp_avg_sq")
                }

    groups = [
        {"params": params[:3], "lr": 0.01},
        {"params": params[3:], "lr": 0.02},
    ]
    return SimpleNamespace(optimizer=kind(groups, lr=0.01), config=None, init_state_fn=init_state)


def give_gradients(params: list[torch.Tensor], step: int) -> None:
    for number, parameter in enumerate(params):
        generator = torch.Generator().manual_seed(100 * step + number)
        parameter.grad = (
            torch.randn(parameter.shape, generator=generator) if parameter.numel() else None
        )


@pytest.mark.parametrize("kind", [torch.optim.AdamW, FusedAdam])
def test_pieces_are_stepped_as_whole_parameters_are(kind: type[torch.optim.Optimizer]) -> None:
    plain, pieced = parameters(), parameters()
    reference, other = wrapped(kind, plain), wrapped(kind, pieced)
    initialize_scalar_state(reference)
    weights: Any = Weights(pieced)
    names = {parameter: f"p{number}" for number, parameter in enumerate(pieced)}
    kept = ScalarState(other, weights, OffloadRun("cpu", "fp32", buffer_mb=0.01), names)
    assert [sum(piece.parameter is p for piece in weights.pieces) for p in pieced] == [
        3,
        0,
        5,
        1,
        0,
    ]
    for step in range(3):
        give_gradients(plain, step)
        give_gradients(pieced, step)
        with torch.no_grad():
            reference.optimizer.step()
        kept.step()
    slots = kept.state()
    for one, two in zip(plain, pieced, strict=True):
        if one.numel():
            assert torch.equal(weights.read(two), one.view(-1))
            assert torch.equal(weights.model[two], one.bfloat16().view(-1))
        for slot in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(slots[two][slot], reference.optimizer.state[one][slot])
        assert other.optimizer.state[two].get("step") == reference.optimizer.state[one].get("step")
        assert slots[two].keys().isdisjoint(other.optimizer.state[two])
    assert [group.get("step") for group in other.optimizer.param_groups] == [
        group.get("step") for group in reference.optimizer.param_groups
    ]

    kept.load(
        {
            two: {slot: torch.ones(two.shape) for slot in ("exp_avg", "exp_avg_sq")}
            for two in pieced[:1]
        }
    )
    assert kept.state()[pieced[0]]["exp_avg"].unique().tolist() == [1.0]
    assert torch.equal(
        kept.state()[pieced[2]]["exp_avg"],
        slots[pieced[2]]["exp_avg"],
    ), "it stays as it was"


def test_a_parameter_that_starts_fresh_gets_its_counter_back() -> None:
    """torch drops the state of parameters that a checkpoint lacks; the next step was a KeyError."""
    params = parameters()
    adam = wrapped(torch.optim.AdamW, params)
    weights: Any = Weights(params)
    names = {parameter: f"p{number}" for number, parameter in enumerate(params)}
    kept = ScalarState(adam, weights, OffloadRun("cpu", "fp32", buffer_mb=0.01), names)
    adam.optimizer.state.clear()
    kept.load({})
    give_gradients(params, 0)
    kept.step()
    assert [float(adam.optimizer.state[p]["step"]) for p in params] == [1.0] * len(params)


def test_empty_shards_are_stepped_over_in_step() -> None:
    """torch's AdamW counted no step for a shard without rows, whose rank may be the one that writes
    the counter.
    """
    full = torch.nn.Parameter(torch.ones(2, 3))
    empty = torch.nn.Parameter(torch.ones(0, 3))
    adam = torch.optim.AdamW([full, empty])
    for parameter in (full, empty):
        adam.state[parameter] |= {
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    initialize_scalar_state(without_state(adam))
    full.grad = torch.ones(2, 3)
    adam.step()
    assert [
        float(
            adam.state[parameter]["step"],
        )
        for parameter in (full, empty)
    ] == [1.0, 1.0]


def without_state(inner: torch.optim.Optimizer) -> Any:
    return SimpleNamespace(optimizer=inner, config=None, init_state_fn=lambda *_: None)


@pytest.mark.parametrize(
    ("capturable", "counter"),
    [
        (False, 0),
        (
            True,
            torch.zeros(1, dtype=torch.int),
        ),
    ],
)
def test_a_counter_in_the_group_is_there_to_be_loaded(capturable: bool, counter: Any) -> None:
    """It came with the first step: a resumed run did not ask the checkpoint for it, and counted
    from 0 again.
    """
    inner = FusedAdam([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    inner.capturable = capturable
    initialize_scalar_state(without_state(inner))
    assert inner.param_groups[0]["step"] == counter
    assert type(inner.param_groups[0]["step"]) is type(counter)
