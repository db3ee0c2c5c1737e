"""Parameters of other libraries, made as their sources make them: `Muon` refuses them by what they
are, or leaves them.

Where a library is installed, its own parameters stand for the imitation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.optimizer.optimizer import copy_optimizer_param_metadata
from torch import nn

import megatron_muon
from megatron_muon.core.user_errors import UserError
from tests.support.small_model import Model, give_gradients


def partitioned(*shape: int) -> nn.Parameter:
    """As DeepSpeed's zero.Init leaves a parameter: empty, with its shape in attributes
    (partition_parameters.py).
    """
    parameter: Any = nn.Parameter(torch.empty(0))
    parameter.ds_id, parameter.ds_shape, parameter.ds_numel = 0, torch.Size(shape), 48
    parameter.ds_tensor = torch.zeros(24)
    return parameter


class FlatParameter(nn.Parameter):
    """FairScale's (flatten_params_wrapper.py), of a list of parameters."""

    def __new__(cls, params: list[torch.Tensor], requires_grad: bool = True) -> FlatParameter:
        return super().__new__(
            cls, torch.cat([p.detach().flatten() for p in params]), requires_grad
        )

    def __init__(self, params: list[torch.Tensor], requires_grad: bool = True) -> None:
        self._param_numels = [p.numel() for p in params]
        self._param_shapes = [p.size() for p in params]


def unflattened_shard() -> nn.Parameter:
    """As FairScale's FSDP with flatten_parameters=False leaves a weight."""
    parameter: Any = nn.Parameter(torch.ones(24))
    parameter._is_sharded, parameter._orig_size = True, torch.Size((8, 6))
    return parameter


def of_megatron(*, dim: int = 1) -> Any:
    """A weight with megatron-core's own attributes."""
    weight = nn.Parameter(torch.ones(8, 6))
    tensor_parallel.set_tensor_model_parallel_attributes(weight, True, dim, 1)
    return weight


def main_shard() -> torch.Tensor:
    """The fp32 shard of a bf16 weight that DistributedOptimizer gives the inner optimizer
    (distrib_optimizer.py).
    """
    weight = of_megatron()
    shard = weight.detach().view(-1)[12:36].clone().float().requires_grad_()
    tensor_parallel.copy_tensor_model_parallel_attributes(shard, weight)
    copy_optimizer_param_metadata(shard, weight)
    return shard


def view_of_shard() -> torch.Tensor:
    """The shard of an fp32 weight, a view of its elements."""
    return of_megatron(dim=0).view(-1)[12:36]


def sharded_elsewhere() -> torch.Tensor:
    weight = of_megatron()
    weight.main_param, weight.main_param_sharded = torch.ones(24), True
    return weight


class Params4bit(nn.Parameter):
    """bitsandbytes' (nn/modules.py): two codes a byte, in bf16 storage where FSDP is to shard
    it.
    """

    def __new__(cls, data: torch.Tensor, requires_grad: bool = False) -> Params4bit:
        return torch.Tensor._make_subclass(cls, data, requires_grad)


class Int8Params(nn.Parameter):
    """bitsandbytes', whose data may be a plain weight."""

    def __new__(
        cls, data: torch.Tensor, requires_grad: bool = True, has_fp16_weights: bool = False
    ) -> Int8Params:
        parameter = torch.Tensor._make_subclass(cls, data, requires_grad)
        parameter.has_fp16_weights = has_fp16_weights
        return parameter


class Quantised(torch.Tensor):
    """A wrapper subclass that torch dispatches to, as torchao's are."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Quantised:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.ops.aten.detach.default:
            return Quantised(args[0].codes, args[0].scale)
        raise NotImplementedError(func)


def quantised(*, requires_grad: bool = True) -> nn.Parameter:
    codes = torch.ones(8, 6, dtype=torch.int8)
    return nn.Parameter(Quantised(codes, torch.ones(8)), requires_grad)


FOREIGN: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "ZeRO-3": (
        lambda: partitioned(8, 6),
        "partitioned by DeepSpeed's ZeRO-3 (zero.Init): .*; use fully_shard (FSDP2), or",
    ),
    "FairScale": (
        lambda: FlatParameter([torch.ones(8, 6)]),
        "a FlatParameter of FairScale: .*; use fully_shard (FSDP2)",
    ),
    "FairScale, unflattened": (unflattened_shard, "a shard of FairScale's FSDP"),
    "Megatron's main shard": (
        main_shard,
        "a weight or shard of Megatron's DistributedOptimizer: .*get_megatron_muon_opt",
    ),
    "Megatron's fp32 shard": (
        view_of_shard,
        "a weight or shard of Megatron's DistributedOptimizer",
    ),
    "Megatron's weight": (
        sharded_elsewhere,
        "a weight or shard of Megatron's DistributedOptimizer",
    ),
    "4 bits": (
        lambda: Params4bit(torch.ones(24, 1, dtype=torch.bfloat16), requires_grad=True),
        "a packed weight of bitsandbytes (Params4bit): .* freeze it",
    ),
    "8 bits": (
        lambda: Int8Params(torch.ones(8, 6)),
        "a packed weight of bitsandbytes (Int8Params)",
    ),
    "quantised": (
        quantised,
        "a tensor subclass of test_foreign_parameters (Quantised): .* freeze it",
    ),
    "lazy": (
        lambda: nn.LazyLinear(6).weight,
        "an uninitialised parameter: run a forward pass first",
    ),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_parameter_of_another_library_is_refused_by_what_it_is(kind: str) -> None:
    """Story: vectors and empty tensors went to AdamW without a word, packed codes to
    Newton-Schulz.
    """
    make, message = FOREIGN[kind]
    with pytest.raises(
        UserError, match="^layers.7.weight is " + message.replace("(", r"\(").replace(")", r"\)")
    ):
        megatron_muon.Muon([*Model().named_parameters(), ("layers.7.weight", make())])


@pytest.mark.parametrize("make", [lambda: FlatParameter([torch.ones(8, 6)]), unflattened_shard])
def test_flat_shards_train_with_adamw_where_their_group_says_so(make: Any) -> None:
    model, flat = Model(), make()
    groups = [
        {"params": list(model.named_parameters())},
        {"params": [("flat", flat)], "optimizer": "adamw"},
    ]
    optimizer = megatron_muon.Muon(groups, lr=0.1)
    give_gradients([flat])
    model(torch.arange(4)).backward()
    expected = nn.Parameter(flat.detach().clone())
    give_gradients([expected])
    torch.optim.AdamW([expected], lr=0.1, betas=(0.9, 0.95), weight_decay=0.0).step()
    optimizer.step()
    torch.testing.assert_close(flat.detach(), expected.detach(), rtol=0, atol=1e-6)


def test_8_bit_modules_with_plain_weights_train() -> None:
    """`has_fp16_weights`: bitsandbytes' default for training."""
    plain = Int8Params(torch.ones(8, 6), has_fp16_weights=True)
    selection = megatron_muon.Muon([("layers.0.weight", plain)]).selection
    assert list(selection.views) == [plain]


def test_flat_buffers_put_into_param_groups_are_named() -> None:
    """As DeepSpeed's ZeRO-1 and 2, and Megatron's DistributedOptimizer, do with an optimizer that
    they are given.
    """
    optimizer = megatron_muon.Muon(Model().named_parameters())
    optimizer.param_groups[:] = [
        {**optimizer.param_groups[0], "params": [torch.ones(100, requires_grad=True)]}
    ]
    with pytest.raises(
        UserError, match=r"param_groups have 1 parameters, and had 9 .*; use fully_shard \(FSDP2\)"
    ):
        optimizer.step()
    optimizer = megatron_muon.Muon([("layers.0.weight", nn.Parameter(torch.ones(8, 6)))])
    optimizer.param_groups[0]["params"] = [torch.ones(24, requires_grad=True)]
    with pytest.raises(
        UserError,
        match=r"^layers.0.weight is \(24,\) in param_groups, and was \(8, 6\); Muon needs whole",
    ):
        optimizer.step()


def test_gradients_that_megatrons_ddp_keeps_elsewhere_are_named() -> None:
    model = Model()
    optimizer = megatron_muon.Muon(model.named_parameters())
    for p in model.parameters():
        p.main_grad = torch.ones_like(p)  # type: ignore[attr-defined]
    with pytest.raises(
        UserError, match=r"^\S+ has its gradient in main_grad, .*; use Megatron-FSDP with"
    ):
        optimizer.step()
