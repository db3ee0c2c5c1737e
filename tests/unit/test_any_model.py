"""`megatron_muon.Muon` in one process: equal to torch.optim's, and an optimizer as torch's are."""

from __future__ import annotations

import copy
import inspect
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import _muon as torch_muon

import megatron_muon
from megatron_muon.core.errors import UserError
from tests.support.small_model import Model

SHAPES = [(24, 40), (40, 24), (16, 16), (1, 7), (5, 1)]


def trained(optimizer: torch.optim.Optimizer, steps: int = 10) -> list[torch.Tensor]:
    """The parameters of an optimizer after steps with gradients from a seed."""
    generator = torch.Generator().manual_seed(7)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for _ in range(steps):
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()
    return [p.detach().clone() for p in parameters]


def matrices() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


@pytest.fixture
def torch_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.optim.Muon always iterates in bf16; its own source in fp32."""
    source = inspect.getsource(torch_muon._zeropower_via_newtonschulz)
    in_bf16 = r"grad\.bfloat16\(\)|grad\.to\(dtype=torch\.bfloat16, copy=True\)"  # up to torch 2.14, and from 2.15 on
    source, replaced = re.subn(in_bf16, "grad.clone()", source)
    assert replaced == 1
    names = dict(vars(torch_muon))
    exec(source, names)
    monkeypatch.setattr(torch_muon, "_zeropower_via_newtonschulz", names["_zeropower_via_newtonschulz"])


@pytest.mark.parametrize("adjust_lr_fn", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("ns", ["standard", "gram"])
def test_ten_steps_are_those_of_torch_in_fp32(
    torch_in_fp32: None, adjust_lr_fn: str | None, nesterov: bool, weight_decay: float, ns: str
) -> None:
    """Products are formed in another order: 1e-6 of weights of size 1 to 4, which move by 0.02 to 0.2 a step."""
    given = {"lr": 0.02, "adjust_lr_fn": adjust_lr_fn, "nesterov": nesterov, "weight_decay": weight_decay}
    expected = trained(torch.optim.Muon(matrices(), **given))
    found = trained(megatron_muon.Muon(matrices(), **given, fp32_matmul_prec="highest", ns=ns))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)


def test_ten_steps_are_those_of_torch_in_bf16() -> None:
    """As both come: bf16 rounds an update by up to 0.01 of its size, at other places in each."""
    start = matrices()
    expected = trained(torch.optim.Muon(matrices(), lr=0.02))
    found = trained(megatron_muon.Muon(matrices(), lr=0.02))
    for p, one, other in zip(start, found, expected, strict=True):
        moved = (other - p).norm()
        assert (one - other).norm() < 0.02 * moved


def test_defaults_are_those_of_torch() -> None:
    ours = inspect.signature(megatron_muon.Muon).parameters
    for name, parameter in inspect.signature(torch.optim.Muon).parameters.items():
        assert ours[name].default == parameter.default, name


def test_eps_means_what_it_means_in_torch(torch_in_fp32: None) -> None:
    """Momentum far smaller than eps makes a small update."""
    updates = []
    for make in (torch.optim.Muon, megatron_muon.Muon):
        for size in (1e-10, 1e-4):
            p = nn.Parameter(torch.zeros(6, 8))
            more = {"fp32_matmul_prec": "highest"} if make is megatron_muon.Muon else {}
            optimizer = make([p], lr=1.0, eps=1e-6, **more)
            p.grad = size * torch.eye(6, 8)
            optimizer.step()
            updates.append(p.detach().clone())
    for one, other in zip(updates[:2], updates[2:], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-9)
    assert updates[2].abs().max() < 0.1 < 0.5 < updates[3].abs().max()


def test_coefficients_of_ones_own(torch_in_fp32: None) -> None:
    coefficients = (3.0, -3.2, 1.2)
    given = {"lr": 0.02, "ns_coefficients": coefficients, "ns_steps": 7}
    expected = trained(torch.optim.Muon(matrices(), **given))
    found = trained(megatron_muon.Muon(matrices(), **given, fp32_matmul_prec="highest"))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)
    for bad in ((2.0, 0.0, 0.0), (-3.4445, 4.775, -2.0315)):
        with pytest.raises(UserError, match="singular values between"):
            megatron_muon.Muon(matrices(), ns_coefficients=bad)


def test_the_rest_is_torchs_adamw() -> None:
    model, twin = Model(), Model()
    twin.load_state_dict(model.state_dict())
    optimizer = megatron_muon.Muon(model.named_parameters(), lr=0.02, adamw_lr=1e-2, adamw_weight_decay=0.3)
    names = [name for name, p in model.named_parameters() if p in optimizer.selection.why]
    rest = [p for name, p in twin.named_parameters() if name in names]
    vectors = {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0}
    adamw = torch.optim.AdamW(
        [{"params": [p for p in rest if p.ndim > 1]}, vectors], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.3
    )
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        for p, other in zip(model.parameters(), twin.parameters(), strict=True):
            p.grad = torch.randn(p.shape, generator=generator)
            other.grad = p.grad.clone()
        optimizer.step()
        adamw.step()
    assert names == ["scale", "embed_tokens.weight", "conv.weight", "conv.bias", "layers.0.bias", "layers.1.bias",
                     "lm_head.weight"]  # fmt: skip
    for name in names:
        torch.testing.assert_close(model.get_parameter(name), twin.get_parameter(name), rtol=0.0, atol=0.0)


def test_groups_keep_their_settings() -> None:
    model = Model()
    head = {"params": [("head", model.lm_head.weight)], "optimizer": "muon", "lr": 0.5}
    rest = {"params": [item for item in model.named_parameters() if item[0] != "lm_head.weight"], "weight_decay": 0.7}
    optimizer = megatron_muon.Muon([head, rest], lr=0.02, adamw_lr=1e-3, weight_decay=0.1)
    found = [
        (group["optimizer"], len(group["params"]), group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
    ]
    assert found == [("muon", 1, 0.5, 0.1), ("muon", 2, 0.02, 0.7), ("adamw", 6, 1e-3, 0.7)]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    model(torch.arange(4)).backward()
    optimizer.step()
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.01, 5e-4]


def test_it_is_an_optimizer_as_torchs_are() -> None:
    """Closures, hooks, clipping, schedulers that change momentum, learning rates that are tensors."""
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
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    untouched = {model.layers[0].weight, model.lm_head.weight}
    before = {p: p.detach().clone() for p in model.parameters()}
    state = {p: {slot: value.clone() for slot, value in optimizer.state[p].items()} for p in model.parameters()}
    for p in model.parameters():
        p.grad = None if p in untouched else 2 * torch.ones_like(p)
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
        p.grad, other.grad = torch.full((4, 4), math.inf), torch.ones(4, 4)
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
        nn.Parameter(torch.eye(4, dtype=dtype)) for dtype in (torch.float64, torch.float64, torch.bfloat16)
    )
    optimizer = megatron_muon.Muon([p, other, bf16], lr=0.1)
    p.grad, other.grad, bf16.grad = torch.ones_like(p), torch.full_like(other, 1e300), torch.ones_like(bf16)
    optimizer.step()
    changed = [not torch.equal(each, torch.eye(4, dtype=each.dtype)) for each in (p, other, bf16)]
    assert changed == [True, False, True]
    assert optimizer.skipped_updates() == {"parameter 1": 1}


def test_state_that_is_missing_or_frozen_later() -> None:
    """AdamW's state of a new head starts at zero; a layer frozen after construction keeps what it has."""
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


def test_a_state_of_torchs_muon_goes_on() -> None:
    """Its groups lack keys of ours."""
    before = torch.optim.Muon(matrices(), lr=0.02)
    trained(before, steps=2)
    optimizer = megatron_muon.Muon(matrices(), lr=0.5)
    optimizer.load_state_dict(before.state_dict())
    trained(optimizer, steps=1)
    assert optimizer.param_groups[0]["lr"] == 0.02


def test_copying_is_refused() -> None:
    with pytest.raises(TypeError, match="make another one and give it the state_dict"):
        copy.deepcopy(megatron_muon.Muon(matrices()))


def test_frozen_parameters_have_no_state() -> None:
    model = Model()
    model.layers[0].requires_grad_(False)
    optimizer = megatron_muon.Muon(model.named_parameters())
    assert model.layers[0].weight not in optimizer.state
    assert optimizer.selection.frozen == [model.layers[0].weight, model.layers[0].bias]
    assert re.search(r"^frozen +2$", optimizer.table(), re.MULTILINE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", [{}, {"momentum_dtype": "int8"}, {"moment2_method": "adamuon"}])
def test_state_dicts_go_on_as_if_nothing_had_happened(dtype: torch.dtype, settings: dict[str, Any]) -> None:
    """Also of bf16 parameters, whose momentum torch's own loading would round to bf16."""

    def made() -> tuple[Model, megatron_muon.Muon]:
        torch.manual_seed(0)
        model = Model().to(dtype)
        return model, megatron_muon.Muon(model.named_parameters(), **settings)

    def steps(model: Model, optimizer: megatron_muon.Muon, numbers: range) -> None:
        for number in numbers:
            generator = torch.Generator().manual_seed(number)
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator).to(dtype)
            optimizer.step()

    whole, optimizer = made()
    steps(whole, optimizer, range(6))
    first, optimizer = made()
    steps(first, optimizer, range(3))
    second, again = made()
    second.load_state_dict(first.state_dict())
    again.load_state_dict(optimizer.state_dict())
    steps(second, again, range(3, 6))
    for name, p in whole.named_parameters():
        assert torch.equal(p, second.get_parameter(name)), name
    other = megatron_muon.Muon(second.named_parameters(), moment2_method="normuon")
    with pytest.raises(UserError, match=r"has (no|\(8, 6\)) moment2_buffer of layers\.0\.weight"):
        other.load_state_dict(optimizer.state_dict())


def test_parameters_cannot_be_added_or_moved_later() -> None:
    model = Model()
    optimizer = megatron_muon.Muon(model.named_parameters())
    with pytest.raises(UserError, match="give it all parameters then"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})
    weight = model.layers[0].weight
    weight.data = weight.data[:4]
    with pytest.raises(
        UserError, match=r"layers\.0\.weight was \(8, 6\) in torch.float32 on cpu when the optimizer was made"
    ):
        optimizer.step()


def test_momentum_on_disk_in_one_process(tmp_path: Path) -> None:
    """Without torch.distributed; the updates are the same, and the files have no names."""
    elsewhere = megatron_muon.Muon(matrices(), offload="nvme", offload_dir=str(tmp_path))
    for one, other in zip(trained(elsewhere), trained(megatron_muon.Muon(matrices())), strict=True):
        assert torch.equal(one, other)
    assert elsewhere.store.bytes["disk"] > 0
    assert list(tmp_path.iterdir()) == []


def test_measured_steps() -> None:
    optimizer = megatron_muon.Muon(matrices(), metrics_interval=5)
    trained(optimizer, steps=4)
    assert optimizer.metrics.latest is None
    trained(optimizer, steps=1)
    measured = optimizer.metrics.latest
    assert measured.step == 5
    assert 0.0 < measured.values["orthogonality_error"] < 2.0
    assert measured.values["update_rms"] > 0.0


def test_norms_are_kept_and_the_rest_may_decay() -> None:
    """Unlike on the command line, where both have one rate of decay."""
    model = Model()
    optimizer = megatron_muon.Muon(
        model.named_parameters(), lr=0.02, weight_decay=0.0, adamw_weight_decay=0.1, hyperball=True
    )
    matrices = [p for p in model.parameters() if "momentum_buffer" in optimizer.state[p]]
    before = [(p.detach().clone(), p.detach().norm()) for p in matrices]
    trained(optimizer)
    for p, (start, norm) in zip(matrices, before, strict=True):
        torch.testing.assert_close(p.detach().norm(), norm, rtol=2e-6, atol=0.0)
        assert (p.detach() - start).norm() > 0.01 * norm


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "weight decay 0.1 of .* has no effect with MuonHyperball"),
        ({"weight_decay": 0.0, "moment2_method": "normuon"}, "hyperball=True is not supported with moment2_method"),
        ({"weight_decay": 0.0, "cautious_weight_decay": True}, "cautious_weight_decay=True has no effect with hyper"),
    ],
)
def test_what_does_not_go_with_norms_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        megatron_muon.Muon(matrices(), hyperball=True, **given)


def test_a_matrix_of_zeros_is_named_in_the_first_step() -> None:
    """When the optimizer is made weights may not be there yet."""
    model = Model()
    optimizer = megatron_muon.Muon(model.named_parameters(), weight_decay=0.0, hyperball=True)
    name, zero = next((n, p) for n, p in model.named_parameters() if "momentum_buffer" in optimizer.state[p])
    with torch.no_grad():
        zero.zero_()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(UserError, match=f"^hyperball keeps the norm .*, and {name} is zero: .* by exclude"):
        optimizer.step()
