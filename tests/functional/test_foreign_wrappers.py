"""Wrappers that give `Muon` other parameters than the model's: FSDP1, which is refused, and
Megatron-FSDP.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn

import megatron_muon
from megatron_muon.core.user_errors import UserError
from tests.support import frameworks
from tests.support.frameworks import Net
from tests.support.pool import Pool


def refusals(rank: int, world_size: int) -> dict[str, str]:
    """In a worker: the errors for models that FSDP1 has wrapped in whole or in part, after or
    before Muon was made.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    found = {}

    def wrapped(module: nn.Module, **options: Any) -> Any:
        return FullyShardedDataParallel(module, device_id=torch.device("cpu"), **options)

    for keeps in (False, True):
        whole, part, before = wrapped(Net(), use_orig_params=keeps), Net(), Net()
        part.layers[0] = wrapped(part.layers[0], use_orig_params=keeps)
        for label, model in (("whole", whole), ("part", part)):
            for given in (model, model.named_parameters()):
                with pytest.raises(UserError) as caught:
                    megatron_muon.Muon(given)
                found[f"{label}, use_orig_params={keeps}"] = str(caught.value)
        flat = [(name, p) for name, p in part.named_parameters() if "_fsdp_wrapped_module" in name]
        rest = [
            (name, p) for name, p in part.named_parameters() if "_fsdp_wrapped_module" not in name
        ]
        groups = [{"params": rest}, {"params": flat, "optimizer": "adamw"}]
        assert megatron_muon.Muon(groups).selection.views, (
            "AdamW takes shards that a group gives it"
        )
    optimizer = megatron_muon.Muon(before.named_parameters())
    wrapped(before, use_orig_params=True)
    with pytest.raises(UserError) as caught:
        optimizer.step()
    found["wrapped later"] = str(caught.value)
    return found


def test_fsdp1_is_refused_by_name(ranks: Pool) -> None:
    """Story: flat parameters went to AdamW without a word if one matrix was elsewhere; else AdamW
    was recommended.
    """
    first, second = ranks(2, refusals)
    assert first == second
    rest = (
        "a FlatParameter of FSDP1 (FullyShardedDataParallel): Muon needs whole matrices; use"
        " fully_shard (FSDP2)"
    )
    prefix = "_fsdp_wrapped_module."
    assert first == {
        "whole, use_orig_params=False": f"{prefix}_flat_param is {rest}",
        "part, use_orig_params=False": f"layers.0.{prefix}_flat_param is {rest}",
        "whole, use_orig_params=True": f"{prefix}embed_tokens.weight is a shard of {rest}",
        "part, use_orig_params=True": f"layers.0.{prefix}0.weight is a shard of {rest}",
        "wrapped later": f"layers.0.0.weight is a shard of {rest}",
    }


def unsharded(rank: int, world_size: int) -> Any:
    """In a worker: weights of three steps under NO_SHARD, where matrices stay whole, and
    under DDP.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    found = []
    for kind in ("fsdp1", "ddp"):
        torch.manual_seed(0)
        model: Any = Net()
        if kind == "ddp":
            model = nn.parallel.DistributedDataParallel(model)
        else:
            options = {
                "sharding_strategy": ShardingStrategy.NO_SHARD,
                "device_id": torch.device("cpu"),
            }
            model = FullyShardedDataParallel(model, use_orig_params=True, **options)
        optimizer = megatron_muon.Muon(model, lr=0.02)
        for batch in frameworks.tokens(3):
            optimizer.zero_grad()
            model(batch).backward()
            optimizer.step()
        found.append([p.detach().clone() for p in model.parameters()])
    return found


@pytest.mark.wide
def test_fsdp1_that_keeps_matrices_whole_trains_as_ddp(ranks: Pool) -> None:
    for found, expected in ranks(2, unsharded):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


class Unnamed(nn.Module):
    """A model whose names do not show its embedding, output layer and fused weight."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(13, 8)
        self.mix = nn.MultiheadAttention(8, 2, batch_first=True)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(8, 12),
                nn.GELU(),
                nn.Linear(12, 8),
            )
            for _ in range(2)
        )
        self.read = nn.Linear(8, 13, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok(tokens)
        x = x + self.mix(x, x, x)[0]
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.cross_entropy(self.read(x).flatten(0, 1), tokens.flatten())


def resharded(rank: int, world_size: int) -> Any:
    """In a worker: the choice of a Muon on the model before and after Megatron-FSDP's
    `fully_shard`.
    """
    from torch.distributed.device_mesh import init_device_mesh

    library = importlib.import_module(frameworks.MEGATRON_FSDP)
    torch.manual_seed(0)
    model = Unnamed()
    optimizer = megatron_muon.Muon(model, lr=0.02)
    choices = [choice_of(optimizer)]
    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("dp", "tp"))
    units = {"fsdp_unit_modules": [nn.Sequential], "zero_dp_strategy": "optim_grads_params"}
    model, optimizer = library.fully_shard(
        model, optimizer, device_mesh=mesh, dp_shard_dim="dp", tp_dim="tp", **units
    )
    choices.append(choice_of(optimizer))
    for batch in frameworks.tokens(2):
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()
    return choices


def choice_of(optimizer: Any) -> Any:
    selection = optimizer.selection
    chosen = selection.choices.values()
    blocks = {each.name: len(each.split.parts) for each in chosen if each.split is not None}
    return (
        sorted(each.name for each in chosen if each.view is not None),
        blocks,
        sorted(each.why for each in chosen if each.why),
    )


def test_megatron_fsdp_keeps_what_modules_have_told(ranks: Pool) -> None:
    """Story: its `fully_shard` fills the optimizer anew from parameters alone, whose names do not
    say these things.
    """
    for before, after in ranks(2, resharded):
        assert before == after
        matrices, blocks, reasons = before
        assert matrices == sorted(
            ["mix.in_proj_weight", "mix.out_proj.weight"]
            + [f"layers.{layer}.{linear}.weight" for layer in (0, 1) for linear in (0, 2)]
        )
        assert blocks == {"mix.in_proj_weight": 3}
        assert reasons[-2:] == ["embedding", "output layer"]
