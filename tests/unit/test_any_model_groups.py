"""Parameter groups of `megatron_muon.Muon`: order, decay, splits, and parameters that change under
the optimizer.
"""

from __future__ import annotations

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
from megatron_muon.core.user_errors import UserError
from tests.support.small_model import Model, give_gradients

TORCHS = {"lr": 0.02, "weight_decay": 0.0, "momentum": 0.95}


def backward(model: nn.Module) -> None:
    model(torch.arange(4)).backward()


def head_and_layers(model: Model) -> tuple[list[Any], list[Any]]:
    named = list(model.named_parameters())
    return [item for item in named if "layers" not in item[0]], [
        item for item in named if "layers" in item[0]
    ]


def test_groups_stay_in_the_order_given_and_parts_that_selection_makes_come_last() -> None:
    """AdamW's groups came after Muon's, so that schedules with a function for each group served the
    wrong ones.
    """
    rest, layers = head_and_layers(Model())
    weight0, bias0, weight1, bias1 = layers
    given = [
        {"params": rest, "optimizer": "adamw", "lr": 1.0, "name": "rest"},
        {"params": [weight0, bias0], "lr": 2.0, "weight_decay": 0.3},
        {"params": [bias1], "lr": 3.0, "initial_lr": 7.0},
        {"params": [weight1], "lr": 4.0},
    ]
    optimizer = megatron_muon.Muon(given)
    found = [
        (group["optimizer"], group["lr"], len(group["params"])) for group in optimizer.param_groups
    ]
    assert found == [
        ("adamw", 1.0, 7 - 2),
        ("muon", 2.0, 1),
        ("adamw", 3.0, 1),
        ("muon", 4.0, 1),
        ("adamw", 2.0, 1),
    ]
    assert [group.get("name") for group in optimizer.param_groups] == [
        "rest",
        None,
        None,
        None,
        None,
    ]
    assert [group.get("initial_lr") for group in optimizer.param_groups] == [
        None,
        None,
        7.0,
        None,
        None,
    ]
    functions = [lambda step, number=number: 0.1 * number for number in range(5)]
    torch.optim.lr_scheduler.LambdaLR(optimizer, functions)
    rates = [group["lr"] for group in optimizer.param_groups]
    assert rates == pytest.approx([0.0, 0.2, 0.2 * 7.0, 0.3 * 4.0, 0.4 * 2.0])


@pytest.mark.parametrize("asks", [False, True])
def test_vectors_decay_only_where_their_group_asks(asks: bool) -> None:
    """Norms and biases decayed by 0.1, unlike on the command line."""
    model = Model()
    groups = [{"params": list(model.named_parameters()), **({"weight_decay": 0.5} if asks else {})}]
    optimizer = megatron_muon.Muon(groups, lr=0.1, adamw_weight_decay=0.5)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in model.named_parameters():
        if p not in optimizer.selection.views:
            kept = 0.95 if asks or p.ndim > 1 else 1.0
            torch.testing.assert_close(p.detach(), before[name] * kept, msg=name)
    assert ("no weight decay" in optimizer.table()) is not asks


def test_the_table_has_a_line_for_each_kind_and_says_what_is_split() -> None:
    layers = nn.ModuleList(
        nn.ModuleDict(
            {
                "qkv": nn.Linear(8, 16),
                "norm": nn.LayerNorm(8),
                "up": nn.Linear(8, 24 if n else 8),
            }
        )
        for n in range(12)
    )
    model = nn.ModuleDict({"layers": layers, "lm_head": nn.Linear(8, 10)})
    optimizer = megatron_muon.Muon(
        model.named_parameters(), split={"qkv": (8, 4, 4)}, exclude=["layers.1.up"]
    )
    _, table = optimizer.table().split("\n\n")
    assert [re.sub(" +", " ", line) for line in table.splitlines()] == [
        "muon 12 16 x 8 layers.*.qkv.weight (blocks of 8, 2 x 4 rows)",
        "muon 1 8 x 8 layers.0.up.weight",
        "muon 10 24 x 8 layers.*.up.weight",
        "adamw 12 16 layers.*.qkv.bias (1D; no weight decay)",
        "adamw 12 8 layers.*.norm.weight (1D; no weight decay)",
        "adamw 12 8 layers.*.norm.bias (1D; no weight decay)",
        "adamw 1 8 layers.0.up.bias (1D; no weight decay)",
        "adamw 1 24 x 8 layers.1.up.weight (exclude)",
        "adamw 11 24 layers.*.up.bias (1D; no weight decay)",
        "adamw 1 10 x 8 lm_head.weight (output layer)",
        "adamw 1 10 lm_head.bias (1D; no weight decay)",
    ]
    assert optimizer.table(full=True).count("\n") == 4 + len(list(model.parameters())) - 1


ROWS = torch.arange(16)


@pytest.mark.parametrize(
    ("split", "blocks"),
    [
        (4, ROWS.split(4)),
        (np.int64(4), ROWS.split(4)),
        ((4,), ROWS.split(4)),
        ((6, 2), ROWS.split([6, 2, 6, 2])),
        ((8, 4, 4), ROWS.split([8, 4, 4])),
        ("interleaved", [ROWS[0::2], ROWS[1::2]]),
        (("interleaved",), [ROWS[0::2], ROWS[1::2]]),
        (
            ("interleaved", 4, 2, 2),
            [part.flatten() for part in ROWS.view(2, 8).split([4, 2, 2], dim=1)],
        ),
        ("whole", [ROWS]),
    ],
)
@pytest.mark.parametrize("shape", [(16, 8), (2, 3, 16, 8)])
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
    start, gradient = torch.randn(2, *shape, generator=torch.Generator().manual_seed(2))
    given: dict[str, Any] = {"lr": 0.1, "fp32_matmul_prec": "highest"}
    p = nn.Parameter(
        (start.mT if transposed else start).clone(memory_format=torch.contiguous_format)
    )
    p.grad = (gradient.mT if transposed else gradient).contiguous()
    more = {"stacks": ["w"]} if len(shape) > 2 else {}
    more |= {"transposed": ["w"]} if transposed else {}
    megatron_muon.Muon([("w", p)], split={"w": split}, **given, **more).step()
    found = (p.detach().mT if transposed else p.detach()).reshape(-1, 16, 8)
    for now, before, of_matrix in zip(
        found, start.view(-1, 16, 8), gradient.view(-1, 16, 8), strict=True
    ):
        for rows in blocks:
            alone = nn.Parameter(before[rows].clone())
            alone.grad = of_matrix[rows].clone()
            megatron_muon.Muon([("w", alone)], **given).step()
            torch.testing.assert_close(now[rows], alone.detach(), rtol=0.0, atol=1e-6)


def exchanged(optimizer: torch.optim.Optimizer, old: nn.Module, new: nn.Module) -> None:
    """As accelerate does before and after `fully_shard`."""
    names = {p: name for name, p in old.named_parameters()}
    for group in optimizer.param_groups:
        for place, p in enumerate(group["params"]):
            group["params"][place] = torch.empty(1)
            group["params"][place].was = names[p]
    for group in optimizer.param_groups:
        group["params"] = [new.get_parameter(p.was) for p in group["params"]]


@pytest.mark.parametrize("settings", [{}, {"momentum_dtype": "int8"}])
@pytest.mark.parametrize("through_state", [False, True])
def test_parameters_exchanged_in_groups_are_taken_up(
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
    exchanged(optimizer, old, new)
    if through_state:
        optimizer.load_state_dict(optimizer.state_dict())
    for _ in range(2):
        for model, each, schedule in (
            (new, optimizer, schedules[0]),
            (twin, other, schedules[1]),
        ):
            each.zero_grad()
            backward(model)
            each.step()
            schedule.step()
    assert called == [1, 1]
    assert optimizer.table() == other.table()
    assert all(map(torch.equal, new.parameters(), twin.parameters()))
    assert [group["lr"] for group in optimizer.param_groups] == [
        group["lr"] for group in other.param_groups
    ]
    exchanged(optimizer, new, twin)
    with pytest.raises(UserError, match="exchanged after steps, so their state would be lost"):
        optimizer.step()


def test_parameters_that_were_exchanged_leave_memory() -> None:
    """Frozen ones stayed: of a model that trains in a small part, all of it, unsharded on every
    rank.
    """
    old, new = Model(), Model()
    for model in (old, new):
        model.layers[0].requires_grad_(False)
    optimizer = megatron_muon.Muon(old.named_parameters())
    before, table = [weakref.ref(p) for p in old.parameters()], optimizer.table()
    exchanged(optimizer, old, new)
    backward(new)
    optimizer.step()
    del old, model
    gc.collect()
    assert [each() for each in before] == [None] * len(before)
    assert optimizer.table() == table


def halved(model: Model, _: Any) -> None:
    weight = model.layers[0].weight
    weight.data = weight.data[:4]


def turned(model: Model, _: Any) -> None:
    """As `model.to(memory_format=torch.channels_last)` does; steps moved a copy, and the weights
    stayed.
    """
    weight = model.conv.weight
    weight.data = weight.data.mT.contiguous().mT


CHANGES: dict[str, tuple[Callable[[Model, megatron_muon.Muon], Any], str]] = {
    "a group": (
        lambda _, optimizer: optimizer.add_param_group(
            {"params": [nn.Parameter(torch.ones(2, 2))]}
        ),
        "give it all parameters then",
    ),
    "into a group": (
        lambda _, optimizer: optimizer.param_groups[0]["params"].append(
            nn.Parameter(torch.ones(2, 2))
        ),
        "param_groups have 10 parameters, and had 9 when the optimizer was made",
    ),
    "rows": (
        halved,
        r"layers\.0\.weight was \(8, 6\) in torch.float32 on cpu when .* and is \(4, 6\)",
    ),
    "memory": (turned, r"^conv\.weight is not contiguous, strides .* leave it out of flatten="),
    "dtype": (
        lambda model, _: model.to(torch.bfloat16),
        r"conv\.weight was .* in torch.float32 on .* in torch.bfloat16",
    ),
}


@pytest.mark.parametrize("settings", [{}, {"offload": "cpu"}])
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_after_the_optimizer_was_made_is_refused(
    change: str, settings: dict[str, Any]
) -> None:
    model = Model()
    optimizer = megatron_muon.Muon(model.named_parameters(), flatten={"conv": True}, **settings)
    act, message = CHANGES[change]

    give_gradients(model.parameters())

    def change_and_step() -> None:
        act(model, optimizer)
        optimizer.step()

    with pytest.raises(UserError, match=message):
        change_and_step()


def test_an_optimizer_made_before_the_model_was_sharded_is_an_error_at_its_first_step() -> None:
    """`fully_shard` replaces parameters; there was a warning, and a loss that never moved."""
    model = Model()
    optimizer = megatron_muon.Muon(model.named_parameters())
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(p.detach().clone()))
    backward(model)
    with pytest.raises(
        UserError,
        match=r"^layers\.0\.weight has no gradient at the first step, and no other .*; if the",
    ):
        optimizer.step()


def test_what_is_unfrozen_later_is_an_error_and_what_was_made_before_freezing_trains() -> None:
    """It was never trained, without a word."""
    model = Model()
    model.layers[0].requires_grad_(False)
    optimizer = megatron_muon.Muon(model.named_parameters())
    backward(model)
    optimizer.step()
    model.layers[0].requires_grad_(True)
    with pytest.raises(
        UserError, match=r"^layers\.0\.weight was frozen when .*; make the optimizer while all that"
    ):
        optimizer.step()
    model.zero_grad()
    optimizer = megatron_muon.Muon(model.named_parameters())
    model.layers[0].requires_grad_(False)
    moved = []
    for frozen in (True, False):
        model.layers[0].requires_grad_(not frozen)
        before = model.layers[0].weight.detach().clone()
        backward(model)
        optimizer.step()
        moved.append(not torch.equal(before, model.layers[0].weight))
    assert moved == [False, True]


def test_a_compiled_step_is_left_as_it_is() -> None:
    """It ended in an error of torch.compile's, after half a minute. What calls a step may be
    compiled too.
    """
    after = []
    for wrapped in (lambda step: step, lambda step: torch.compile(step, backend="eager"), None):
        torch.manual_seed(0)
        model = Model()
        optimizer = megatron_muon.Muon(model.named_parameters(), lr=0.1)

        @torch.compile(backend="eager")
        def train(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()

        step = train if wrapped is None else wrapped(optimizer.step)
        for _ in range(2):
            optimizer.zero_grad()
            backward(model)
            step()
        after.append([p.detach().clone() for p in model.parameters()])
    for found in after[1:]:
        assert all(map(torch.equal, found, after[0]))


MEANT_ALIKE: list[dict[str, Any]] = [
    *({}, {"nesterov": False}, {"ns_steps": 6}, {"eps": 1e-6}, {"adjust_lr_fn": "match_rms_adamw"}),
    {"eps": 1e-7},  # torch's default
    {"ns_coefficients": (3.0, -3.2, 1.2), "ns_steps": 7},
]


@pytest.mark.parametrize("given", MEANT_ALIKE)
def test_a_state_of_torchs_muon_loads_where_it_means_the_same(given: dict[str, Any]) -> None:
    """Settings without effect were shown as the optimizer's."""
    p = nn.Parameter(torch.eye(4))
    before = torch.optim.Muon([p], **TORCHS, **given)
    p.grad = torch.ones(4, 4)
    before.step()
    optimizer = megatron_muon.Muon([p], lr=0.5, **given)
    keys = optimizer.param_groups[0].keys()
    optimizer.load_state_dict(before.state_dict())
    assert optimizer.param_groups[0].keys() == keys
    assert {name: optimizer.param_groups[0][name] for name in TORCHS} == TORCHS
    assert torch.equal(optimizer.state[p]["momentum_buffer"], before.state[p]["momentum_buffer"])
    optimizer.step()
    if given not in ({}, {"eps": 1e-7}):
        other = megatron_muon.Muon([p])
        name = next(iter(given))
        with pytest.raises(
            UserError, match=rf"^the state to load has {name}=.*; make this Muon with it"
        ):
            other.load_state_dict(before.state_dict())
        assert other.param_groups[0]["lr"] == 1e-3, "nothing is loaded"


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_state_of_another_optimizer_is_refused(kind: Any) -> None:
    """SGD's has momentum of the same name, which is a sum and not an average."""
    p = nn.Parameter(torch.eye(4))
    more = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    before = kind([p], lr=0.02, **more)
    p.grad = torch.ones(4, 4)
    before.step()
    with pytest.raises(
        UserError,
        match=r"is of another optimizer: its groups have .*foreach, .*, which Muon does not",
    ):
        megatron_muon.Muon([p]).load_state_dict(before.state_dict())


def test_a_setting_of_the_whole_optimizer_in_a_group_is_refused_at_the_step() -> None:
    """Story: `group["nesterov"] = False` changed nothing, without a word."""
    model = Model()
    optimizer = megatron_muon.Muon(model)
    give_gradients(model.parameters())
    for group in optimizer.param_groups:
        group["nesterov"] = True
    optimizer.step()
    optimizer.param_groups[0]["nesterov"] = False
    with pytest.raises(
        UserError, match=r"nesterov=False in parameter group 0 has no effect.*pass it to Muon"
    ):
        optimizer.step()
