"""`megatron_muon.Muon` in one process: lost momentum, state dicts, casts, sparse gradients, the
default dtype.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import megatron_muon
from megatron_muon.core.user_errors import UserError
from megatron_muon.errors import OffloadError
from tests.support.small_model import give_gradients

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "hyperball": {"hyperball": True, "weight_decay": 0.0},
    "normuon": {"moment2_method": "normuon"},
    "adamuon": {"moment2_method": "adamuon"},
    "cautious": {"cautious_weight_decay": True},
    "int8": {"momentum_dtype": "int8"},
    "host": {"offload": "cpu"},
}


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    net = nn.ModuleDict(
        {
            "embed": nn.Embedding(5, 16),
            "up": nn.Linear(16, 24),
            "down": nn.Linear(24, 16),
        }
    )
    return net.to(dtype)


def make(net: nn.Module, **settings: Any) -> megatron_muon.Muon:
    return megatron_muon.Muon(
        net.named_parameters(), **{"lr": 0.1, "fp32_matmul_prec": "highest", **settings}
    )


def values(net: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in net.parameters()]


# ------------------------------------------------------------------------------------------------
# momentum on disk


@pytest.fixture
def on_disk(tmp_path: Path) -> tuple[nn.Module, megatron_muon.Muon, Callable[[], None]]:
    """A model after a step with momentum on disk, and what makes the file lose its end ahead of
    what is read.
    """
    net = model()
    optimizer = make(net, offload="nvme", offload_dir=str(tmp_path))
    give_gradients(net.parameters())
    optimizer.step()

    def cut() -> None:
        optimizer.stores[0].read(0)  # what was read ahead is dropped
        os.ftruncate(optimizer.stores[0].disk.file._file.fileno(), 0)
        optimizer.stores[0]._read_ahead()

    return net, optimizer, cut


@pytest.mark.parametrize("reader", ["step", "state_dict", "momentum_state"])
def test_momentum_that_a_file_has_lost_is_an_error_for_whatever_reads_it(
    on_disk: Any, reader: str
) -> None:
    """Story: a step went on from zeros, and so did the next checkpoint, with correct checksums."""
    net, optimizer, cut = on_disk
    give_gradients(net.parameters(), 1)
    before = values(net)
    cut()
    lost = (
        r"rank 0 cannot read momentum in a file of .*; momentum of \w+\.weight is lost on this rank"
    )
    with pytest.raises(OffloadError, match=lost):
        getattr(optimizer, reader)()
    with pytest.raises(OffloadError, match="start again from a checkpoint"):
        optimizer.step()
    assert all(map(torch.equal, values(net), before))
    with pytest.raises(OffloadError):
        optimizer.state_dict()
    optimizer.close()


def test_a_closed_optimizer_says_so(on_disk: Any) -> None:
    _, optimizer, _ = on_disk
    state = optimizer.state_dict()
    optimizer.close()
    for use in (optimizer.step, optimizer.state_dict, lambda: optimizer.load_state_dict(state)):
        with pytest.raises(
            UserError,
            match=r"^this optimizer was closed, and its momentum with it; make another one$",
        ):
            use()


# ------------------------------------------------------------------------------------------------
# state dicts


def test_int8_momentum_of_a_matrix_without_gradient_keeps_its_bits() -> None:
    """It is decoded and encoded again, with other random bits, which change nothing."""
    net = model()
    optimizer = make(net, momentum_dtype="int8")
    give_gradients(net.parameters())
    optimizer.step()
    before = optimizer.stores[0].read(0)
    for step in range(1, 20):
        give_gradients(net.parameters(), step)
        net["up"].weight.grad = None if step % 2 else torch.full((24, 16), torch.nan)
        optimizer.step()
    assert torch.equal(optimizer.stores[0].read(0), before)


# ------------------------------------------------------------------------------------------------
# around a step


def trained(
    settings: dict[str, Any],
    *,
    autocast: bool = False,
    dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """Weights after three steps and a load, with a default dtype that is set once the model is
    there.
    """
    net = model()
    if dtype is not None:
        torch.set_default_dtype(dtype)
    optimizer = make(net, **settings)
    for step in range(3):
        give_gradients(net.parameters(), step)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    return values(net)


AROUND: dict[str, dict[str, Any]] = {
    "default dtype": {"dtype": torch.bfloat16},
    "autocast": {"autocast": True},
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("variant", VARIANTS)
def test_dtypes_set_around_a_step_change_no_bit(variant: str, around: str) -> None:
    """Story: with bf16 as default, as many scripts set it, two variants crashed and one was less
    exact; inside of autocast the iteration ran in bf16, whatever fp32_matmul_prec asked for.
    """
    expected = trained(VARIANTS[variant])
    try:
        found = trained(VARIANTS[variant], **AROUND[around])
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, found, expected))


def test_gradients_may_be_of_another_dtype_than_their_parameters() -> None:
    """Those of a stack ended in torch's RuntimeError."""
    start, gradient = torch.randn(2, 2, 6, 4, generator=torch.Generator().manual_seed(0))
    stack, *alone = (nn.Parameter(part.to(torch.bfloat16)) for part in (start, *start))
    for p, part in zip((stack, *alone), (gradient, *gradient), strict=True):
        p.grad_dtype, p.grad = torch.float32, part.clone()
    before = stack.detach().clone()
    named = [("experts.w", stack), ("a", alone[0]), ("b", alone[1])]
    megatron_muon.Muon(named, lr=0.1).step()
    torch.testing.assert_close(stack.detach(), torch.stack([p.detach() for p in alone]))
    assert not torch.equal(stack, before)


@pytest.mark.parametrize("matrices", [None, ["*"]])
def test_sparse_gradients_are_refused(matrices: Any) -> None:
    net = nn.ModuleDict()
    net["embed"] = nn.Embedding(5, 16, sparse=True)
    net["up"] = nn.Linear(16, 24)
    optimizer = make(net, matrices=matrices)
    net["up"](net["embed"](torch.tensor([1]))).sum().backward()
    with pytest.raises(
        UserError,
        match=r"^the gradient of embed.weight is sparse .*: make its module with sparse=F",
    ):
        optimizer.step()
