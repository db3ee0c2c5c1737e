"""FSDP1, whose wrapper gives `Muon` flat parameters and shards of them: refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import megatron_muon
from megatron_muon.errors import UserError
from tests.support.frameworks import Net
from tests.support.pool import Pool


def wrapped(module: nn.Module, **options: Any) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(module, device_id=torch.device("cpu"), **options)


def refusals(rank: int, world_size: int) -> list[str]:
    """In a worker: the errors for models that FSDP1 has wrapped in whole or in part, after or
    before Muon was made.
    """
    part = Net()
    part.layers[0] = wrapped(part.layers[0])
    found = []
    for model in (wrapped(Net()), part, wrapped(Net(), use_orig_params=True)):
        with pytest.raises(UserError) as caught:
            megatron_muon.Muon(model)
        found.append(str(caught.value))
    before = Net()
    optimizer = megatron_muon.Muon(before.named_parameters())
    wrapped(before, use_orig_params=True)
    with pytest.raises(UserError) as caught:
        optimizer.step()
    return [*found, str(caught.value)]


def test_fsdp1_is_refused_by_name(ranks: Pool) -> None:
    """Story: flat parameters went to AdamW without a word if one matrix was elsewhere; else AdamW
    was recommended.
    """
    prefix = "_fsdp_wrapped_module."
    whole, part, original, later = ranks(2, refusals)[0]
    assert whole.startswith(f"{prefix}_flat_param is a FlatParameter of FSDP1; Muon needs whole")
    assert part.startswith(f"layers.0.{prefix}_flat_param is a FlatParameter of FSDP1; ")
    assert original.startswith(f"{prefix}embed_tokens.weight is a shard of FSDP1; ")
    assert "now; make the optimizer after the model is sharded" in later
