"""`megatron_muon.Muon` in one process: equal to torch.optim's, and an optimizer as torch's are."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import nn

import megatron_muon
from megatron_muon.errors import UserError
from tests.support.small_model import Model, give_gradients

SHAPES = [
    (24, 40),
    (40, 24),
    (16, 16),
    (1, 7),
    (5, 1),
]


def trained(optimizer: torch.optim.Optimizer, steps: int = 10) -> list[torch.Tensor]:
    """The parameters of an optimizer after steps with random gradients."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(steps):
        give_gradients(parameters, step)
        optimizer.step()
    return [p.detach().clone() for p in parameters]


def matrices() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


GIVEN: list[dict[str, Any]] = [
    {"ns": "standard"},
    {"ns": "gram"},
    {"adjust_lr_fn": "original", "nesterov": False},
    {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0},
    {"ns_coefficients": (3.0, -3.2, 1.2), "ns_steps": 7},
    {"eps": 100.0},
]


@pytest.mark.parametrize("given", GIVEN)
def test_ten_steps_are_those_of_torch_in_fp32(torch_in_fp32: None, given: dict[str, Any]) -> None:
    """Products are formed in another order: 1e-6 of weights of size 1 to 4, which move by 0.02 to
    0.2 a step.
    """
    of_torch = {name: value for name, value in given.items() if name != "ns"}
    expected = trained(torch.optim.Muon(matrices(), lr=0.02, **of_torch))
    found = trained(megatron_muon.Muon(matrices(), lr=0.02, fp32_matmul_prec="highest", **given))
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)


def test_defaults_are_those_of_torch_but_for_eps() -> None:
    ours = inspect.signature(megatron_muon.Muon).parameters
    for name, parameter in inspect.signature(torch.optim.Muon).parameters.items():
        expected = 0.0 if name == "eps" else parameter.default
        assert ours[name].default == expected


def test_the_rest_is_torchs_adamw() -> None:
    model, twin = Model(), Model()
    twin.load_state_dict(model.state_dict())
    optimizer = megatron_muon.Muon(
        model.named_parameters(), lr=0.02, adamw_lr=1e-2, adamw_weight_decay=0.3
    )
    names = [name for name, p in model.named_parameters() if p not in optimizer.selection.matrices]
    assert len(names) == 7
    rest = [twin.get_parameter(name) for name in names]
    groups = [
        {"params": [p for p in rest if p.ndim > 1]},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.3)
    for step in range(5):
        give_gradients(model.parameters(), step)
        give_gradients(twin.parameters(), step)
        optimizer.step()
        adamw.step()
    for name in names:
        assert torch.equal(model.get_parameter(name), twin.get_parameter(name))


def test_it_is_an_optimizer_as_torchs_are() -> None:
    """Closures, hooks, clipping, schedulers that change momentum, learning rates that are
    tensors.
    """
    model = Model()
    optimizer = megatron_muon.Muon(model.named_parameters(), lr=torch.tensor(0.02))
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.arange(4))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return loss

    first = optimizer.step(closure)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=10)
    assert optimizer.step(closure) < first
    schedule.step()
    assert called == ["before", "after"] * 2
    assert "lr: " in repr(optimizer)


def test_a_parameter_without_gradient_is_passed_over() -> None:
    """As in torch.optim: no decay, no momentum, no count; and the others go on."""
    model = Model()
    optimizer = megatron_muon.Muon(model.named_parameters(), lr=0.1, moment2_method="normuon")
    give_gradients(model.parameters())
    optimizer.step()
    untouched = {model.layers[0].weight, model.lm_head.weight}
    before = copy.deepcopy(list(model.parameters()))
    state = copy.deepcopy([optimizer.state[p] for p in model.parameters()])
    give_gradients(model.parameters(), 1)
    for p in untouched:
        p.grad = None
    optimizer.step()
    for p, weights, slots in zip(model.parameters(), before, state, strict=True):
        assert torch.equal(p, weights) is (p in untouched)
        for slot, value in optimizer.state[p].items():
            assert torch.equal(value, slots[slot]) is (p in untouched), slot


def test_state_that_is_missing_or_frozen_later() -> None:
    """AdamW's state of a new head starts at zero; a layer frozen after construction keeps what it
    has.
    """
    model = Model()
    optimizer = megatron_muon.Muon(model.named_parameters())
    trained(optimizer, steps=2)
    saved = optimizer.state_dict()
    ordered = [p for group in optimizer.param_groups for p in group["params"]]
    position = [p is model.lm_head.weight for p in ordered].index(True)
    del saved["state"][position], saved["state"][0]
    model.layers[0].weight.requires_grad_(False)
    momentum = optimizer.state[model.layers[0].weight]["momentum_buffer"].clone()
    optimizer.load_state_dict(saved)
    assert torch.equal(optimizer.state[model.layers[0].weight]["momentum_buffer"], momentum)
    assert not optimizer.state[model.lm_head.weight]["exp_avg"].any()
    trained(optimizer, steps=1)


KEPT: dict[str, dict[str, Any]] = {
    "plain": {},
    "int8": {"momentum_dtype": "int8"},
    "host": {"offload": "cpu"},
    "adamuon": {"moment2_method": "adamuon"},
    "normuon": {"moment2_method": "normuon"},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KEPT)
def test_state_dicts_go_on_as_if_nothing_had_happened(dtype: torch.dtype, kind: str) -> None:
    """Story: torch's own loading put momentum on the parameters' device, in their dtype, before a
    store took it.
    """
    settings = KEPT[kind]

    def made() -> tuple[Model, megatron_muon.Muon]:
        torch.manual_seed(0)
        model = Model().to(dtype)
        return model, megatron_muon.Muon(model.named_parameters(), **settings)

    def steps(model: Model, optimizer: megatron_muon.Muon, numbers: range) -> None:
        for number in numbers:
            give_gradients(model.parameters(), number)
            optimizer.step()

    whole, uninterrupted = made()
    steps(whole, uninterrupted, range(6))
    first, optimizer = made()
    steps(first, optimizer, range(3))
    saved = optimizer.state_dict()
    second, again = made()
    second.load_state_dict(first.state_dict())
    again.load_state_dict(saved)
    for key, slots in again.state_dict()["state"].items():
        for slot, value in slots.items():
            assert value.dtype == saved["state"][key][slot].dtype
    steps(second, again, range(3, 6))
    assert all(map(torch.equal, whole.parameters(), second.parameters()))
    different = "adamuon" if kind == "normuon" else "normuon"
    other = megatron_muon.Muon(second.named_parameters(), moment2_method=different)
    missing = r"has (no|\(8, [16]\)) moment2_buffer of layers\.0\.weight"
    with pytest.raises(UserError, match=missing):
        other.load_state_dict(saved)


@pytest.mark.parametrize(
    "kind",
    [torch.optim.SGD, torch.optim.AdamW, torch.optim.Muon],
)
def test_a_state_of_another_optimizer_is_refused(kind: Any) -> None:
    """SGD's has momentum of the same name, which is a sum and not an average."""
    p = nn.Parameter(torch.eye(4))
    state = kind([p], lr=0.02).state_dict()
    with pytest.raises(UserError, match="is another optimizer's"):
        megatron_muon.Muon([p]).load_state_dict(state)


def test_a_matrix_of_zeros_is_named_in_the_first_step() -> None:
    """When the optimizer is made weights may not be there yet."""
    model = Model()
    optimizer = megatron_muon.Muon(model.named_parameters(), weight_decay=0.0, hyperball=True)
    with torch.no_grad():
        model.layers[0].weight.zero_()
    give_gradients(model.parameters())
    expected = r"^hyperball keeps the norm .*, and layers\.0\.weight is zero: .* by exclude"
    with pytest.raises(UserError, match=expected):
        optimizer.step()


def test_a_grad_scaler_is_refused_before_the_step_and_a_disabled_one_is_not() -> None:
    """Lightning reads the same attribute without a scaler, and clips unless it is True."""
    model = Model()
    optimizer = megatron_muon.Muon(model.named_parameters(), lr=0.1)
    give_gradients(list(model.parameters()), 1)
    before = [p.detach().clone() for p in model.parameters()]
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(UserError, match=r"^GradScaler is for fp16, which Muon does not support"):
        scaler.step(optimizer)
    assert all(map(torch.equal, model.parameters(), before))
    assert optimizer._step_supports_amp_scaling is False
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)
    assert not any(map(torch.equal, model.parameters(), before))
