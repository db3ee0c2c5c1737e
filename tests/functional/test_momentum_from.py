"""`momentum_from` under FSDP2: whole and sharded state of another Muon goes into shards.

Every rank trains the other optimizer on the whole model and goes on in it; weights under FSDP2 are
those, to the tolerance of `test_momentum_from` in tests/unit.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

import megatron_muon
from tests.support import frameworks
from tests.support.other_muons import OTHERS
from tests.support.pool import Pool

ATOL = 5e-6
STEPS = 3


def step(model: Any, optimizers: Any, batch: torch.Tensor) -> None:
    model.zero_grad()
    model(batch).backward()
    for optimizer in optimizers:
        optimizer.step()


def placed(state: dict[str, Any], model: Any, how: str) -> None:
    """Shard tensors of state as their parameters are, or replicate them."""
    parameters = dict(model.named_parameters())
    for name, slots in state["state"].items():
        p = parameters[name]
        placements = p.placements if how == "sharded" else [Replicate()]
        for slot, value in slots.items():
            if value.ndim:
                slots[slot] = distribute_tensor(value, p.device_mesh, placements)


def distances(rank: int, world_size: int, *, how: str) -> tuple[float, float]:
    """In a worker: how far weights are from the other optimizer's, with its state and afresh."""
    other = OTHERS["dion"]
    torch.manual_seed(0)
    model = frameworks.Net()
    of_muon = ("layers", "narrow", "back")
    named = list(model.named_parameters())
    matrices = [(name, p) for name, p in named if p.ndim == 2 and name.startswith(of_muon)]
    optimizers = other.make(matrices, [each for each in named if each not in matrices])
    batches = frameworks.tokens(2 * STEPS)
    for batch in batches[:STEPS]:
        step(model, optimizers, batch)
    weights = copy.deepcopy(model.state_dict())
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizers[0]))
    for batch in batches[STEPS:]:
        step(model, optimizers, batch)
    found = []
    for takes in (True, False):
        settings = {**other.settings, "adamw_betas": (0.9, 0.95)}
        training = frameworks.fsdp2(**settings)
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(training.model, copy.deepcopy(weights), options=options)
        if takes:
            if how != "whole":
                placed(state, training.model, how)
            converted = megatron_muon.momentum_from(state, convention="sum")
            training.optimizer.load_state_dict(converted)
            for slots in training.optimizer.state.values():
                sharded = [value for slot, value in slots.items() if slot != "step"]
                assert all(isinstance(value, DTensor) for value in sharded)
        for batch in batches[STEPS:]:
            training.step(batch)
        after = training.weights()
        far = [float((after[name] - p.detach()).abs().max()) for name, p in named]
        found.append(max(far))
    return found[0], found[1]


@pytest.mark.parametrize(
    ("how", "world_size"), [("whole", 2), ("sharded", 2), ("replicated", 2), ("whole", 3)]
)
def test_training_goes_on_in_shards_as_in_the_other_optimizer(
    ranks: Pool, how: str, world_size: int
) -> None:
    """On three ranks some hold no row of a matrix."""
    for with_state, afresh in ranks(world_size, distances, how=how):
        assert with_state < ATOL
        assert afresh > 1e3 * ATOL
