"""Parameter groups of `megatron_muon.Muon`, splits, and parameters that change under it."""

from __future__ import annotations

import copy
import gc
import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import megatron_muon
from megatron_muon.errors import UserError
from tests.support.small_model import Model, give_gradients


def backward(model: nn.Module) -> None:
    model(torch.arange(4)).backward()


def test_groups_stay_in_the_order_given_and_parts_that_selection_makes_come_last() -> None:
    """AdamW's groups came after Muon's, so that schedules with a function for each group served the
    wrong ones.
    """
    named = list(Model().named_parameters())
    rest = [item for item in named if "layers" not in item[0]]
    weight0, bias0, weight1, bias1 = [item for item in named if "layers" in item[0]]
    given = [
        {"params": rest, "optimizer": "adamw", "lr": 1.0, "name": "rest"},
        {"params": [weight0, bias0], "lr": 2.0, "weight_decay": 0.3},
        {"params": [bias1], "lr": 3.0, "initial_lr": 7.0},
        {"params": [weight1], "lr": 4.0},
    ]
    optimizer = megatron_muon.Muon(given)
    kinds = [group["optimizer"] for group in optimizer.param_groups]
    assert kinds == ["adamw", "muon", "adamw", "muon", "adamw"]
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 2.0, 3.0, 4.0, 2.0]
    assert [len(group["params"]) for group in optimizer.param_groups] == [5, 1, 1, 1, 1]
    assert optimizer.param_groups[0]["name"] == "rest"
    assert optimizer.param_groups[2]["initial_lr"] == 7.0


@pytest.mark.parametrize("asks", [False, True])
def test_vectors_decay_only_where_their_group_asks(asks: bool) -> None:
    """Norms and biases decayed by 0.1, unlike on the command line."""
    model = Model()
    group: dict[str, Any] = {"params": list(model.named_parameters())}
    if asks:
        group["weight_decay"] = 0.5
    optimizer = megatron_muon.Muon([group], lr=0.1, adamw_weight_decay=0.5)
    before = copy.deepcopy(list(model.parameters()))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for p, was in zip(model.parameters(), before, strict=True):
        if p not in optimizer.selection.matrices:
            kept = 0.95 if asks or p.ndim > 1 else 1.0
            torch.testing.assert_close(p, was * kept)
    assert ("no weight decay" in optimizer.table()) is not asks


def test_the_table_has_a_line_for_each_kind_and_says_what_is_split() -> None:
    layers = nn.ModuleList()
    for number in range(12):
        layers.append(nn.ModuleDict())
        layers[-1]["qkv"] = nn.Linear(8, 16)
        layers[-1]["up"] = nn.Linear(8, 24 if number else 8, bias=False)
    model = nn.ModuleDict(
        {"layers": layers, "lm_head": nn.Linear(8, 10, bias=False)},
    )
    optimizer = megatron_muon.Muon(
        model.named_parameters(), split={"qkv": (8, 4, 4)}, exclude=["layers.1.up"]
    )
    _, table = optimizer.table().split("\n\n")
    assert [re.sub(" +", " ", line) for line in table.splitlines()] == [
        "muon 12 16 x 8 layers.*.qkv.weight (blocks of 8, 2 x 4 rows)",
        "muon 1 8 x 8 layers.0.up.weight",
        "muon 10 24 x 8 layers.*.up.weight",
        "adamw 12 16 layers.*.qkv.bias (1D; no weight decay)",
        "adamw 1 24 x 8 layers.1.up.weight (exclude)",
        "adamw 1 10 x 8 lm_head.weight (output layer)",
    ]
    assert (
        optimizer.table(full=True).count("\n")
        == 4
        + len(
            list(model.parameters()),
        )
        - 1
    )


ROWS = torch.arange(16)
PAIRS = ROWS.view(2, 8)
BLOCKS: list[tuple[Any, Sequence[torch.Tensor]]] = [
    (np.int64(4), ROWS.split(4)),
    ((6, 2), ROWS.split([6, 2, 6, 2])),
    ("interleaved", [ROWS[0::2], ROWS[1::2]]),
    (
        ("interleaved", 6, 2),
        [PAIRS[:, :6].flatten(), PAIRS[:, 6:].flatten()],
    ),
    ("whole", [ROWS]),
]


@pytest.mark.parametrize(("split", "blocks"), BLOCKS)
@pytest.mark.parametrize(
    "shape",
    [(16, 8), (2, 3, 16, 8)],
)
@pytest.mark.parametrize("transposed", [False, True])
def test_blocks_of_a_matrix_or_of_each_in_a_stack_step_as_separate_matrices(
    split: Any,
    blocks: Sequence[torch.Tensor],
    shape: tuple[int, ...],
    transposed: bool,
) -> None:
    """Story: halves of `[g0, u0, g1, u1, ...]` mixed gate and up, and a number split nothing; it
    repeats to fill the rows.
    """
    generator = torch.Generator().manual_seed(2)
    start = torch.randn(shape, generator=generator)
    gradient = torch.randn(shape, generator=generator)
    given: dict[str, Any] = {"lr": 0.1, "fp32_matmul_prec": "highest"}
    more: dict[str, Any] = {"split": {"w": split}}
    p = nn.Parameter(start.clone())
    p.grad = gradient
    if transposed:
        more["transposed"] = ["w"]
        p = nn.Parameter(start.mT.contiguous())
        p.grad = gradient.mT.contiguous()
    if len(shape) > 2:
        more["stacks"] = ["w"]
    megatron_muon.Muon([("w", p)], **given, **more).step()
    found = p.detach().mT if transposed else p.detach()
    stacks = [tensor.reshape(-1, 16, 8) for tensor in (found, start, gradient)]
    for now, before, of_matrix in zip(*stacks, strict=True):
        for rows in blocks:
            alone = nn.Parameter(before[rows].clone())
            alone.grad = of_matrix[rows].clone()
            megatron_muon.Muon([("w", alone)], **given).step()
            torch.testing.assert_close(now[rows], alone.detach(), rtol=0.0, atol=1e-6)


def exchange(optimizer: torch.optim.Optimizer, old: nn.Module, new: nn.Module) -> None:
    """Replace parameters as accelerate does before and after `fully_shard`."""
    names = {p: name for name, p in old.named_parameters()}
    for group in optimizer.param_groups:
        for place, p in enumerate(group["params"]):
            group["params"][place] = torch.empty(1)
            group["params"][place].was = names[p]
    for group in optimizer.param_groups:
        group["params"] = [new.get_parameter(p.was) for p in group["params"]]


@pytest.mark.parametrize("settings", [{}, {"momentum_dtype": "int8"}])
@pytest.mark.parametrize("through_state", [False, True])
def test_parameters_exchanged_before_the_first_step_are_taken_up(
    settings: dict[str, Any], through_state: bool
) -> None:
    """As accelerate exchanges them; the step ended in KeyError: 'exp_avg'. Schedules and hooks go
    on.
    """
    torch.manual_seed(0)
    old, new, twin = Model(), Model(), Model()
    twin.load_state_dict(new.state_dict())
    settings = {"lr": 0.1, "split": {"layers.0": 4}, "exclude": ["layers.1"], **settings}
    optimizer = megatron_muon.Muon(old.named_parameters(), **settings)
    other = megatron_muon.Muon(twin.named_parameters(), **settings)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (optimizer, other)]
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    exchange(optimizer, old, new)
    if through_state:
        optimizer.load_state_dict(optimizer.state_dict())
    for step in range(2):
        for model, each in ((new, optimizer), (twin, other)):
            give_gradients(model.parameters(), step)
            each.step()
        for schedule in schedules:
            schedule.step()
    assert called == [1, 1]
    assert optimizer.table() == other.table()
    assert all(map(torch.equal, new.parameters(), twin.parameters()))
    exchange(optimizer, new, twin)
    with pytest.raises(UserError, match="have other parameters than when"):
        optimizer.step()


def test_parameters_that_were_exchanged_leave_memory() -> None:
    """Frozen ones stayed: of a model that trains in a small part, all of it, unsharded on every
    rank.
    """
    old, new = Model(), Model()
    for model in (old, new):
        model.layers[0].requires_grad_(False)
    optimizer = megatron_muon.Muon(old.named_parameters())
    before = [weakref.ref(p) for p in old.parameters()]
    exchange(optimizer, old, new)
    backward(new)
    optimizer.step()
    del old, model
    gc.collect()
    assert [each() for each in before] == [None] * len(before)


def turn(model: Model) -> None:
    """As `model.to(memory_format=torch.channels_last)` does; steps moved a copy, and the weights
    stayed.
    """
    weight = model.conv.weight
    weight.data = weight.data.mT.contiguous().mT


OTHER = r"have other parameters .*; make it of all parameters, after the model is sharded"
CHANGES: dict[str, tuple[Callable[[Model, megatron_muon.Muon], Any], str]] = {
    "a group": (
        lambda _, optimizer: optimizer.add_param_group({"params": [torch.ones(2, 2)]}),
        OTHER,
    ),
    "flat buffers, as of ZeRO": (
        lambda _, optimizer: optimizer.param_groups[0].update(params=[torch.ones(100)]),
        OTHER,
    ),
    "memory": (
        lambda model, _: turn(model),
        r"^conv\.weight is not contiguous, strides .* leave it out of flatten=",
    ),
    "dtype": (
        lambda model, _: model.to(torch.bfloat16),
        r"conv\.weight was .*torch.float32.* when .* and is .*torch.bfloat16",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_after_the_optimizer_was_made_are_refused(change: str) -> None:
    model = Model()
    optimizer = megatron_muon.Muon(model.named_parameters(), flatten={"conv": True})
    act, message = CHANGES[change]
    give_gradients(model.parameters())
    act(model, optimizer)
    with pytest.raises(UserError, match=message):
        optimizer.step()


def test_a_first_step_without_gradients_is_refused() -> None:
    """Story: `fully_shard` replaces parameters, and the loss never moved; Megatron's DDP has its
    gradients in main_grad.
    """
    optimizer = megatron_muon.Muon(Model().named_parameters())
    backward(Model())
    with pytest.raises(UserError, match=r"^no parameter has a gradient .* at the first step; call"):
        optimizer.step()


def test_unfrozen_later_is_an_error_and_frozen_later_stays() -> None:
    """It was never trained, without a word."""
    model = Model()
    model.layers[0].requires_grad_(False)
    optimizer = megatron_muon.Muon(model.named_parameters())
    backward(model)
    optimizer.step()
    model.layers[0].requires_grad_(True)
    with pytest.raises(UserError, match=r"^layers\.0\.weight was frozen when .*; make the"):
        optimizer.step()
    model.zero_grad()
    optimizer = megatron_muon.Muon(model.named_parameters())
    weight = model.layers[0].weight
    for is_frozen in (True, False):
        weight.requires_grad_(not is_frozen)
        before = weight.detach().clone()
        backward(model)
        optimizer.step()
        assert torch.equal(before, weight) is is_frozen


def test_a_compiled_step_is_left_as_it_is() -> None:
    """It ended in an error of torch.compile's, after half a minute."""
    after = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        model = Model()
        optimizer = megatron_muon.Muon(model.named_parameters(), lr=0.1)
        step = torch.compile(optimizer.step, backend="eager") if is_compiled else optimizer.step
        for _ in range(2):
            optimizer.zero_grad()
            backward(model)
            step()
        after.append(list(model.parameters()))
    assert all(map(torch.equal, *after))
