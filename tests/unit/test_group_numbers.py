"""Numbers of parameter groups: whatever torch's optimizers take, wherever it is given."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import megatron_muon
from megatron_muon.errors import UserError
from megatron_muon.fsdp.read_numbers import read_group

Make = Callable[[float], Any]
KINDS: dict[str, Make] = {
    "fraction": Fraction,
    "numpy": np.float32,
    "array of one": lambda value: np.array([value]),
    "tensor": torch.tensor,
    "tensor of 1 x 1": lambda value: torch.tensor([[value]]),
    "bf16": lambda value: torch.tensor([value], dtype=torch.bfloat16),
    "fp64": lambda value: torch.tensor([value], dtype=torch.float64),
}
VARIANTS: list[dict[str, Any]] = [
    {"moment2_method": "adamuon", "beta2": 0.875, "moment2_eps": 2.0**-20},
    {"cautious_weight_decay": True, "offload": "cpu", "momentum_dtype": "int8"},
]


def trained(make: Make, place: str, **given: Any) -> list[torch.Tensor]:
    """A matrix and a vector after four steps, with numbers made by `make`, which all kinds have
    exactly; given at construction, in the groups, later, or loaded.
    """
    torch.manual_seed(0)
    matrix, vector = nn.Parameter(torch.randn(6, 8)), nn.Parameter(torch.randn(8))
    of_muon = {"lr": make(0.0625), "weight_decay": make(0.125), "momentum": make(0.875)}
    of_adamw = {
        "lr": make(0.0625),
        "weight_decay": make(0.125),
        "eps": make(2.0**-20),
    }
    of_adamw["betas"] = make(0.875), make(0.9375)
    groups: list[dict[str, Any]] = [
        {"params": [matrix], "optimizer": "muon"},
        {"params": [vector], "optimizer": "adamw", "decay_vectors": True},
    ]
    if place == "construction":
        given |= {f"adamw_{name}": value for name, value in of_adamw.items()} | of_muon
    elif place == "groups":
        groups = [{**groups[0], **of_muon}, {**groups[1], **of_adamw}]
    optimizer = megatron_muon.Muon(groups, **given)
    if place in ("later", "loaded"):
        state = copy.deepcopy(optimizer.state_dict())
        for group, numbers in zip(optimizer.param_groups, (of_muon, of_adamw), strict=True):
            group.update(numbers)
        if place == "loaded":
            state["param_groups"] = optimizer.state_dict()["param_groups"]
            optimizer = megatron_muon.Muon(groups, **given)
            optimizer.load_state_dict(state)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in range(4):
        torch.manual_seed(step)
        matrix.grad, vector.grad = torch.randn(6, 8), torch.randn(8)
        optimizer.step()
        schedule.step()
    return [matrix.detach(), vector.detach()]


@pytest.mark.parametrize("place", ["construction", "groups", "later", "loaded"])
@pytest.mark.parametrize(
    ("kind", "variant"),
    [*((kind, {}) for kind in KINDS), *(("array of one", variant) for variant in VARIANTS)],
)
def test_every_kind_of_number_trains_as_a_float(kind: str, variant: Any, place: str) -> None:
    """A learning rate of one element and one dimension was a RuntimeError in the step; a momentum,
    of any shape.
    """
    expected = trained(float, "construction", **variant)
    found = trained(KINDS[kind], place, **variant)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_hyperball_looks_at_the_value_of_a_tensor() -> None:
    """A decay of 0 in a tensor was refused, "weight decay 0 has no effect", and a rate above 1 was
    taken.
    """
    p = nn.Parameter(torch.eye(4))
    optimizer = megatron_muon.Muon(
        [p],
        lr=0.1,
        weight_decay=torch.tensor([0.0]),
        hyperball=True,
    )
    group = optimizer.param_groups[0]
    group["weight_decay"], group["lr"] = torch.tensor([0.0]), torch.tensor([0.1])
    p.grad = torch.ones(4, 4)
    optimizer.step()
    group["lr"].fill_(2.0)
    with pytest.raises(UserError, match=r"lr of .* 2 is not below 1"):
        optimizer.step()


WRONG: dict[str, Any] = {
    "two": torch.tensor([0.1, 0.2]),
    "complex": torch.tensor(1j),
    "text": "0.1",
    "flag": True,
    "infinite": np.float32(math.inf),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_not_one_finite_number_is_refused(wrong: str) -> None:
    """Two elements were a RuntimeError of torch, in the middle of a step."""
    value = WRONG[wrong]
    w = nn.Parameter(torch.eye(4))
    b = nn.Parameter(torch.zeros(4))
    with pytest.raises(UserError, match=r"^lr of parameter group 0 .* is not .*; choose"):
        megatron_muon.Muon([{"params": [w], "lr": value}])
    optimizer = megatron_muon.Muon([("w", w), ("b", b)])
    w.grad, b.grad = torch.ones(4, 4), torch.ones(4)
    of_muon, of_adamw = optimizer.param_groups
    for group, name in ((of_muon, "lr"), (of_muon, "momentum"), (of_adamw, "eps")):
        before = group[name]
        group[name] = value
        with pytest.raises(UserError, match=f"^{name} of a parameter .*; give one finite number"):
            optimizer.step()
        group[name] = before
    of_adamw["betas"] = (value, 0.9)
    with pytest.raises(UserError, match=r"^betas of a parameter group .*; give one finite number"):
        optimizer.step()
    assert torch.equal(w.detach(), torch.eye(4)), "nothing has moved"


def test_a_step_reads_a_tensor_on_the_device_where_it_is() -> None:
    """Its memory is part of a CUDA graph; tensors elsewhere, or of another dtype, are read by the
    host.
    """
    device = torch.device("cpu")
    group = {
        "lr": torch.tensor([0.5]),
        "weight_decay": torch.tensor(0.5, dtype=torch.float64),
        "momentum": np.ones(1),
    }
    read = read_group(group, group, device)
    assert read["lr"].shape == ()
    assert read["lr"].data_ptr() == group["lr"].data_ptr()
    assert (type(read["weight_decay"]), type(read["momentum"])) == (float, float)
    assert type(read_group(group, group, torch.device("cuda:0"))["lr"]) is float
