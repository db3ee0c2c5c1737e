"""Tensors that state dicts hand out: they own their storage, and lie in the memory that a step
works on.
"""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import megatron_muon
from tests.support.small_model import Model, give_gradients
from tests.unit.test_sharded_muon import parameters, sharded

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "normuon": {"moment2_method": "normuon"},
    "host": {"offload": "cpu"},
    "int8": {"momentum_dtype": "int8"},
}


def bytes_saved(value: Any) -> int:
    torch.save(value, file := io.BytesIO())
    return len(file.getvalue())


def trained(**settings: Any) -> tuple[nn.Module, megatron_muon.Muon]:
    torch.manual_seed(0)
    net = nn.ModuleDict()
    for name in ("up", "gate", "down"):
        net[name] = nn.Linear(64, 64, bias=False)
    net.register_parameter("experts", nn.Parameter(torch.randn(4, 32, 64)))
    optimizer = megatron_muon.Muon(net.named_parameters(), lr=0.1, **settings)
    for p in net.parameters():
        p.grad = torch.randn(p.shape)
    optimizer.step()
    return net, optimizer


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_tensor_takes_the_bytes_of_its_elements(kind: str) -> None:
    """Story: each was a view of a wave's flat momentum, and one of them alone took all of it into
    the file.
    """
    _, optimizer = trained(**KINDS[kind])
    state = optimizer.state_dict()["state"]
    for slot in (slot for slots in state.values() for slot in slots.values()):
        assert slot.untyped_storage().nbytes() == slot.nbytes
        assert bytes_saved(slot) < slot.nbytes + 2_000
        assert len(pickle.dumps(slot)) < slot.nbytes + 2_000


def test_state_is_in_the_memory_of_the_step() -> None:
    """Momentum set to zero in place is zero in the step; so it is where a copy has kept other
    values.
    """
    net, optimizer = trained()
    kept = copy.deepcopy(optimizer.state_dict())
    for slots in optimizer.state.values():
        slots["momentum_buffer"].zero_()
    other = copy.deepcopy(net)
    fresh = megatron_muon.Muon(other.named_parameters(), lr=0.1)
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        q.grad = p.grad.clone()
    optimizer.step()
    fresh.step()
    assert all(map(torch.equal, net.parameters(), other.parameters()))
    assert all(slots["momentum_buffer"].any() for slots in kept["state"].values())


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickle.dumps])
def test_an_optimizer_itself_cannot_be_copied(duplicate: Any) -> None:
    """torch's `__getstate__` would leave out the plan and the process groups, and the copy fail in
    its first step.
    """
    _, optimizer = trained()
    for one in (optimizer, sharded(parameters())):
        with pytest.raises(
            TypeError,
            match="cannot be copied or pickled; make another one and give it the state_dict",
        ):
            duplicate(one)


def test_a_state_that_two_optimizers_have_loaded_is_not_shared() -> None:
    """Story: the one that a state came from went on with the moments of the one that had loaded it,
    as torch's do.
    """
    nets = [Model(), Model()]
    optimizers = [megatron_muon.Muon(net, lr=0.02) for net in nets]
    give_gradients(nets[0].parameters())
    optimizers[0].step()
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    before = copy.deepcopy(optimizers[0].state_dict()["state"])
    give_gradients(nets[1].parameters(), 1)
    optimizers[1].step()
    after = optimizers[0].state_dict()["state"]
    for key, slots in before.items():
        assert all(torch.equal(slots[slot], after[key][slot]) for slot in slots)
