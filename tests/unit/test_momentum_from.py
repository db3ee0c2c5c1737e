"""`momentum_from`: training goes on from the state of another library's Muon as it would have
there.

Both iterate in fp32 and form products in another order: weights agree to 2e-6, and move by 0.02 a
step. With the other convention old momentum weighs ten times too much or too little.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import megatron_muon
from megatron_muon.errors import UserError
from tests.support.other_muons import OTHERS, Named
from tests.support.small_model import give_gradients

ATOL = 2e-6
STEPS = 4


def net() -> nn.Module:
    """Matrices of two shapes, one of them twice, and everything that AdamW takes."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"embed": nn.Embedding(5, 6), "norm": nn.LayerNorm(6)})
    model["layers"] = nn.ModuleList([nn.Linear(8, 6), nn.Linear(6, 8), nn.Linear(8, 6)])
    return model


def parts(model: nn.Module) -> tuple[Named, Named]:
    named = list(model.named_parameters())
    matrices = [(name, p) for name, p in named if p.ndim == 2 and "embed" not in name]
    return matrices, [(name, p) for name, p in named if p.ndim < 2 or "embed" in name]


def steps(model: nn.Module, optimizers: Any, first: int) -> None:
    for step in range(first, first + STEPS):
        give_gradients(model.parameters(), step)
        for optimizer in optimizers:
            optimizer.step()


def distance(model: nn.Module, other: nn.Module) -> float:
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max(float((p - q).abs().max()) for p, q in pairs)


def trained(kind: str) -> tuple[nn.Module, Any]:
    """A model after steps of another Muon, and its optimizers."""
    model = net()
    optimizers = OTHERS[kind].make(*parts(model))
    steps(model, optimizers, 0)
    return model, optimizers


def copied(kind: str, model: nn.Module, **settings: Any) -> tuple[nn.Module, megatron_muon.Muon]:
    """The model with this package's Muon."""
    ours = net()
    ours.load_state_dict(model.state_dict())
    given = {**OTHERS[kind].settings, **settings}
    return ours, megatron_muon.Muon(ours.named_parameters(), **given)


@pytest.mark.parametrize("kind", OTHERS)
def test_training_goes_on_as_in_the_other_optimizer(torch_in_fp32: None, kind: str) -> None:
    model, optimizers = trained(kind)
    ours, optimizer = copied(kind, model)
    afresh, of_zeros = copied(kind, model)
    given = [copy.deepcopy(each.state_dict()) for each in optimizers]
    state = megatron_muon.momentum_from(*given, convention=OTHERS[kind].convention)
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.02
    wrong, of_other = copied(kind, model)
    for group in [group for each in given for group in each["param_groups"]]:
        group.pop("ns_coefficients", None)
        group.pop("ns_method", None)
        group["mu"] = 0.0 if "mu" in group else 0.9  # a sum that is taken as an average
    of_other.load_state_dict(megatron_muon.momentum_from(*given, convention="sum"))
    for each, using in (
        (model, optimizers),
        (ours, [optimizer]),
        (afresh, [of_zeros]),
        (wrong, [of_other]),
    ):
        steps(each, using, STEPS)
    assert distance(model, ours) < ATOL
    assert distance(model, afresh) > 1e3 * ATOL
    assert distance(model, wrong) > 1e3 * ATOL


@pytest.mark.parametrize("is_flat", [False, True])
def test_state_may_be_keyed_by_names(torch_in_fp32: None, is_flat: bool) -> None:
    """Those of torch.distributed.checkpoint, and of DeepSpeed's whole tensors, without groups."""
    model, optimizers = trained("torch")
    options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
    given = [get_optimizer_state_dict(model, each, options=options) for each in optimizers]
    assert ("state" in given[0]) is not is_flat
    ours, optimizer = copied("torch", model)
    optimizer.load_state_dict(megatron_muon.momentum_from(*given, convention="ema"))
    names = {p: name for name, p in model.named_parameters()}
    whole = {names[p]: slots for each in optimizers for p, slots in each.state.items()}
    twin, without_groups = copied("torch", model)
    state = megatron_muon.momentum_from({"state": whole}, convention="ema")
    without_groups.load_state_dict(copy.deepcopy(state))
    steps(model, optimizers, STEPS)
    steps(ours, [optimizer], STEPS)
    steps(twin, [without_groups], STEPS)
    assert distance(model, ours) < ATOL
    assert distance(ours, twin) == 0.0


def test_ranks_that_each_have_some_momentum_are_taken_together() -> None:
    """As in DeepSpeed's distributed class; one of them alone is not enough."""
    model, [muon, _] = trained("torch, named")
    given = muon.state_dict()
    halves = []
    for keys in ({0}, {1, 2}):
        state = {key: slots for key, slots in given["state"].items() if key in keys}
        halves.append({**given, "state": state})
    _, optimizer = copied("torch", model)
    with pytest.warns(UserWarning, match=r"AdamW's state of 6 parameters starts at zero"):
        optimizer.load_state_dict(megatron_muon.momentum_from(*halves, convention="ema"))
    for name, p in optimizer.selection.choices.items():
        if not p.why:
            expected = muon.state[model.get_parameter(p.name)]["momentum_buffer"]
            assert torch.equal(optimizer.state[name]["momentum_buffer"], expected)
    missing = r"layers\.1\.weight is muon's here, and its state to load is missing"
    with pytest.raises(UserError, match=missing):
        optimizer.load_state_dict(megatron_muon.momentum_from(halves[0], convention="ema"))


@pytest.mark.parametrize("settings", [{"offload": "cpu"}, {"momentum_dtype": "bf16"}])
def test_momentum_is_taken_wherever_it_is_kept(settings: dict[str, Any]) -> None:
    model, optimizers = trained("dion")
    _, optimizer = copied("dion", model, **settings)
    state = megatron_muon.momentum_from(optimizers[0].state_dict(), convention="sum")
    optimizer.load_state_dict(state)
    for p, momentum in optimizer.momentum_state().items():
        name = optimizer.selection.choices[p].name
        expected = 0.1 * optimizers[0].state[model.get_parameter(name)]["momentum"]
        torch.testing.assert_close(momentum, expected, rtol=2**-7, atol=0.0)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("torch", {"convention": "mean"}, r"convention='mean'; choose 'ema' for buf = .* or 'sum'"),
    ("torch", {"convention": "sum"}, r"with 'ns_coefficients' is 'ema'; pass convention='ema'"),
    ("dion", {"convention": "ema"}, r"with 'algorithm' is 'sum'; pass convention='sum'"),
    ("deepspeed", {"convention": "sum"}, r"with 'ns_method' is 'ema'; pass convention='ema'"),
]


@pytest.mark.parametrize(("kind", "given", "message"), REFUSED)
def test_a_wrong_convention_is_refused(kind: str, given: dict[str, Any], message: str) -> None:
    _, optimizers = trained(kind)
    with pytest.raises(UserError, match=message):
        megatron_muon.momentum_from(optimizers[0].state_dict(), **given)


def test_flat_partitions_of_zero_are_refused() -> None:
    file = {"loss_scaler": 1.0, "zero_stage": 2, "base_optimizer_state": {"state": {}}}
    with pytest.raises(UserError, match=r"no state among .*zero_stage.*pass whole tensors"):
        megatron_muon.momentum_from(file, convention="ema")
    flat = {"state": {"layers.0.weight": {"momentum_buffer": torch.zeros(24)}}}
    _, optimizer = copied("torch", net(), matrices=["layers.0.weight"])
    with pytest.raises(UserError, match=r"shape \(24,\) for layers\.0\.weight, .*DeepSpeed's ZeRO"):
        optimizer.load_state_dict(megatron_muon.momentum_from(flat, convention="ema"))


def named(**slots: Any) -> dict[str, Any]:
    """A state dict of one matrix."""
    slots = {"momentum_buffer": torch.ones(6, 8), **slots}
    return {"state": {"layers.0.weight": {k: v for k, v in slots.items() if v is not None}}}


BOTH = named()
BOTH["state"]["layers.2.weight"] = BOTH["state"]["layers.0.weight"]


@pytest.mark.parametrize(
    ("given", "settings", "message"),
    [
        (named(variance_neuron=torch.ones(6, 1)), {}, r"is \['momentum_buffer', 'variance_neuron'"),
        (BOTH, {"exclude": ["layers.0"]}, r"layers\.0\.weight is adamw's here"),
        (named(), {}, r"layers\.2\.weight is muon's here, and its state to load is missing"),
        (named(momentum_buffer=torch.ones(8, 6)), {}, r"has shape \(8, 6\) for layers\.0\.weight"),
    ],
)
def test_state_of_other_parameters_is_refused_and_nothing_is_loaded(
    given: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    settings = {"matrices": ["layers.0", "layers.2"], **settings}
    _, optimizer = copied("torch", net(), **settings)
    with pytest.raises(UserError, match=message):
        optimizer.load_state_dict(megatron_muon.momentum_from(given, convention="ema"))
    assert not any(momentum.any() for momentum in optimizer.momentum_state().values())


def test_state_without_names_needs_equal_groups() -> None:
    """Parameters of one shape would be taken for one another."""
    _, optimizers = trained("torch")
    ours = net()
    matrices, others = parts(ours)
    groups = [{"params": matrices[:1]}, {"params": matrices[1:]}, {"params": others}]
    optimizer = megatron_muon.Muon(groups)
    given = [each.state_dict() for each in optimizers]
    state = megatron_muon.momentum_from(*given, convention="ema")
    expected = r"no names, and momentum_buffer for groups of \[3\] parameters, not \[1, 2\]"
    with pytest.raises(UserError, match=expected):
        optimizer.load_state_dict(state)
    for each, members in zip(given, (matrices, others), strict=True):
        each["param_groups"][0]["param_names"] = [name for name, _ in members]
    optimizer.load_state_dict(megatron_muon.momentum_from(*given, convention="ema"))
    del given[0]["state"][1]
    with pytest.raises(UserError, match=r"layers\.1\.weight is muon's here.*missing"):
        optimizer.load_state_dict(megatron_muon.momentum_from(*given, convention="ema"))


def test_a_sum_without_its_momentum_and_another_class_are_refused() -> None:
    with pytest.raises(UserError, match="a sum needs the momentum of its group"):
        megatron_muon.momentum_from(named(), convention="sum")
    state = megatron_muon.momentum_from(named(), convention="ema")
    with pytest.raises(UserError, match="soap cannot take the state of another Muon"):
        megatron_muon.Sharded("soap", net().named_parameters()).load_state_dict(state)
