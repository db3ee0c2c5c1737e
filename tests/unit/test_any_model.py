"""`megatron_muon.Muon` in one process: equal to torch.optim's, and an optimizer as torch's are."""

from __future__ import annotations

import inspect
import math
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import _muon as torch_muon

import megatron_muon
from megatron_muon.core.user_errors import UserError
from megatron_muon.fsdp.options import EPS
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


@pytest.fixture
def torch_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.optim.Muon always iterates in bf16; its own source in fp32."""
    source = inspect.getsource(torch_muon._zeropower_via_newtonschulz)
    # up to torch 2.14, and from 2.15 on
    in_bf16 = r"grad\.bfloat16\(\)|grad\.to\(dtype=torch\.bfloat16, copy=True\)"
    source, replaced = re.subn(in_bf16, "grad.clone()", source)
    assert replaced == 1
    names = dict(vars(torch_muon))
    exec(source, names)
    monkeypatch.setattr(
        torch_muon, "_zeropower_via_newtonschulz", names["_zeropower_via_newtonschulz"]
    )


GIVEN: list[dict[str, Any]] = [
    {"adjust_lr_fn": adjust, "nesterov": nesterov, "weight_decay": decay, "ns": ns}
    for adjust in (None, "original", "match_rms_adamw")
    for nesterov in (True, False)
    for decay in (0.0, 0.1)
    for ns in ("standard", "gram")
]
GIVEN.append({"ns_coefficients": (3.0, -3.2, 1.2), "ns_steps": 7})


@pytest.mark.parametrize("given", GIVEN)
def test_ten_steps_are_those_of_torch_in_fp32(torch_in_fp32: None, given: dict[str, Any]) -> None:
    """Products are formed in another order: 1e-6 of weights of size 1 to 4, which move by 0.02 to
    0.2 a step.
    """
    of_torch = {name: value for name, value in given.items() if name != "ns"}
    expected = trained(torch.optim.Muon(matrices(), lr=0.02, **of_torch))
    found = trained(megatron_muon.Muon(matrices(), lr=0.02, fp32_matmul_prec="highest", **given))
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)


def test_ten_steps_are_those_of_torch_in_bf16() -> None:
    """As both come: bf16 rounds an update by up to 0.01 of its size, at other places in each."""
    start = matrices()
    expected = trained(torch.optim.Muon(matrices(), lr=0.02))
    found = trained(megatron_muon.Muon(matrices(), lr=0.02))
    for p, one, other in zip(start, found, expected, strict=True):
        moved = (other - p).norm()
        assert (one - other).norm() < 0.02 * moved


def test_defaults_are_those_of_torch_but_for_eps() -> None:
    ours = inspect.signature(megatron_muon.Muon).parameters
    others = {
        name: parameter.default
        for name, parameter in inspect.signature(torch.optim.Muon).parameters.items()
    }
    assert others.pop("eps") == EPS
    assert ours["eps"].default == 0.0
    assert {name: ours[name].default for name in others} == others


def test_eps_means_what_it_means_in_torch(torch_in_fp32: None) -> None:
    """Momentum far smaller than eps makes a small update."""
    updates = []
    for make, more in (
        (torch.optim.Muon, {}),
        (megatron_muon.Muon, {"fp32_matmul_prec": "highest"}),
    ):
        for size in (1e-10, 1e-4):
            p = nn.Parameter(torch.zeros(6, 8))
            p.grad = size * torch.eye(6, 8)
            make([p], lr=1.0, eps=1e-6, **more).step()
            updates.append(p.detach())
    torch.testing.assert_close(updates[:2], updates[2:], rtol=1e-5, atol=1e-9)
    assert updates[2].abs().max() < 0.1 < 0.5 < updates[3].abs().max()


def test_the_rest_is_torchs_adamw() -> None:
    model, twin = Model(), Model()
    twin.load_state_dict(model.state_dict())
    optimizer = megatron_muon.Muon(
        model.named_parameters(), lr=0.02, adamw_lr=1e-2, adamw_weight_decay=0.3
    )
    names = [name for name, p in model.named_parameters() if p not in optimizer.selection.views]
    rest = [p for name, p in twin.named_parameters() if name in names]
    vectors = {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0}
    adamw = torch.optim.AdamW(
        [{"params": [p for p in rest if p.ndim > 1]}, vectors],
        lr=1e-2,
        betas=(0.9, 0.95),
        weight_decay=0.3,
    )
    for step in range(5):
        for each, stepped in ((model, optimizer), (twin, adamw)):
            give_gradients(each.parameters(), step)
            stepped.step()
    assert names == [
        "scale",
        "embed_tokens.weight",
        "conv.weight",
        "conv.bias",
        "layers.0.bias",
        "layers.1.bias",
        "lm_head.weight",
    ]
    for name in names:
        torch.testing.assert_close(
            model.get_parameter(name), twin.get_parameter(name), rtol=0.0, atol=0.0
        )


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
    before = {p: p.detach().clone() for p in model.parameters()}
    state = {
        p: {slot: value.clone() for slot, value in optimizer.state[p].items()}
        for p in model.parameters()
    }
    give_gradients(model.parameters(), 1)
    for p in untouched:
        p.grad = None
    optimizer.step()
    for p in model.parameters():
        assert torch.equal(p, before[p]) is (p in untouched)
        for slot, value in optimizer.state[p].items():
            assert torch.equal(value, state[p][slot]) is (p in untouched), slot


def test_a_gradient_that_is_not_finite_changes_its_matrix_not_at_all() -> None:
    """Momentum would stay NaN for ever."""
    for settings in ({}, {"nesterov": False}, {"momentum_dtype": "bf16"}):
        p, other = nn.Parameter(torch.eye(4)), nn.Parameter(torch.eye(4))
        optimizer = megatron_muon.Muon([p, other], lr=0.1, **settings)
        p.grad = torch.full((4, 4), math.inf)
        other.grad = torch.ones(4, 4)
        optimizer.step()
        assert torch.equal(p, torch.eye(4))
        assert not torch.equal(other, torch.eye(4))
        assert optimizer.skipped_updates() == {"parameter 0": 1}
        p.grad = torch.ones(4, 4)
        optimizer.step()
        assert not torch.equal(p, torch.eye(4))
        assert p.isfinite().all()


def test_fp64_parameters_train_and_what_fp32_momentum_cannot_hold_is_skipped() -> None:
    p, other, bf16 = (
        nn.Parameter(torch.eye(4, dtype=dtype))
        for dtype in (torch.float64, torch.float64, torch.bfloat16)
    )
    optimizer = megatron_muon.Muon([p, other, bf16], lr=0.1)
    p.grad, other.grad, bf16.grad = (
        torch.ones_like(p),
        torch.full_like(other, 1e300),
        torch.ones_like(bf16),
    )
    optimizer.step()
    changed = [
        not torch.equal(
            each,
            torch.eye(4).to(each.dtype),
        )
        for each in (p, other, bf16)
    ]
    assert changed == [True, False, True]
    assert optimizer.skipped_updates() == {"parameter 1": 1}


def test_state_that_is_missing_or_frozen_later() -> None:
    """AdamW's state of a new head starts at zero; a layer frozen after construction keeps what it
    has.
    """
    model = Model()
    optimizer = megatron_muon.Muon(model.named_parameters())
    trained(optimizer, steps=2)
    saved = optimizer.state_dict()
    ordered = [p for group in optimizer.param_groups for p in group["params"]]
    position = next(place for place, p in enumerate(ordered) if p is model.lm_head.weight)
    del saved["state"][position], saved["state"][0]
    model.layers[0].weight.requires_grad_(False)
    momentum = optimizer.state[model.layers[0].weight]["momentum_buffer"].clone()
    optimizer.load_state_dict(saved)
    assert torch.equal(optimizer.state[model.layers[0].weight]["momentum_buffer"], momentum)
    assert not optimizer.state[model.lm_head.weight]["exp_avg"].any()
    trained(optimizer, steps=1)


KEPT: list[dict[str, Any]] = [
    *(
        {},
        {"momentum_dtype": "int8"},
        {"offload": "cpu"},
        {"moment2_method": "adamuon"},
        {"moment2_method": "normuon"},
    ),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", KEPT)
def test_state_dicts_go_on_as_if_nothing_had_happened(
    dtype: torch.dtype, settings: dict[str, Any]
) -> None:
    """Story: torch's own loading put momentum on the parameters' device, in their dtype, before a
    store took it.
    """

    def made() -> tuple[Model, megatron_muon.Muon]:
        torch.manual_seed(0)
        model = Model().to(dtype)
        return model, megatron_muon.Muon(model.named_parameters(), **settings)

    def steps(model: Model, optimizer: megatron_muon.Muon, numbers: range) -> None:
        for number in numbers:
            give_gradients(model.parameters(), number)
            optimizer.step()

    whole, optimizer = made()
    steps(whole, optimizer, range(6))
    first, optimizer = made()
    steps(first, optimizer, range(3))
    second, again = made()
    seen: list[set[str]] = []
    again.register_load_state_dict_pre_hook(
        lambda _, state: seen.append(set().union(*state["state"].values()))
    )
    second.load_state_dict(first.state_dict())
    again.load_state_dict(saved := optimizer.state_dict())
    assert seen == [{"step", "exp_avg", "exp_avg_sq"}], "torch casts these alone"
    for key, slots in again.state_dict()["state"].items():
        assert {slot: value.dtype for slot, value in slots.items()} == {
            slot: value.dtype for slot, value in saved["state"][key].items()
        }
    steps(second, again, range(3, 6))
    assert all(map(torch.equal, whole.parameters(), second.parameters()))
    beside = "adamuon" if settings.get("moment2_method") == "normuon" else "normuon"
    other = megatron_muon.Muon(second.named_parameters(), moment2_method=beside)
    with pytest.raises(
        UserError, match=r"has (no|\(8, [16]\)) moment2_buffer of layers\.0\.weight"
    ):
        other.load_state_dict(optimizer.state_dict())


def test_a_matrix_of_zeros_is_named_in_the_first_step() -> None:
    """When the optimizer is made weights may not be there yet."""
    model = Model()
    optimizer = megatron_muon.Muon(model.named_parameters(), weight_decay=0.0, hyperball=True)
    name, zero = next(
        (n, p) for n, p in model.named_parameters() if "momentum_buffer" in optimizer.state[p]
    )
    with torch.no_grad():
        zero.zero_()
    give_gradients(model.parameters())
    with pytest.raises(
        UserError, match=f"^hyperball keeps the norm .*, and {name} is zero: .* by exclude"
    ):
        optimizer.step()


def test_a_grad_scaler_is_refused_before_the_step_and_a_disabled_one_is_not() -> None:
    """Lightning asks for the same attribute where there is no scaler, and clips if it is not
    True.
    """
    model = Model()
    optimizer = megatron_muon.Muon(model.named_parameters(), lr=0.1)
    give_gradients(list(model.parameters()), 1)
    before = [p.detach().clone() for p in model.parameters()]
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(
        UserError,
        match=r"^GradScaler is for fp16, which Muon does not support: .*; train in bf16 .*$",
    ):
        scaler.step(optimizer)
    assert all(map(torch.equal, model.parameters(), before))
    assert optimizer._step_supports_amp_scaling is False
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)
    assert not any(map(torch.equal, model.parameters(), before))
