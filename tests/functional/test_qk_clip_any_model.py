"""QKClip on ranks: weights and logits are those of one process that takes all micro-batches.

The start and the micro-batches are the same, so what differs is the rounding of gradients. Models
with biases have SGD: the gradients of key biases are zero but for rounding, or nearly so, and AdamW
would make steps of that.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import megatron_muon
from megatron_muon.errors import UserError
from tests.support import frameworks
from tests.support.pool import Pool
from tests.support.small_transformers import batch_of, model_of

STEPS, BATCHES, THRESHOLD = 3, 4, 2.0
LAYOUTS = ("rows", "columns", "hsdp", "ddp")
MODELS = ("biases", "latent", "fused")


def sharded(model: Any, layout: str) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    if layout == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    shape = (2, 1) if layout == "hsdp" else (2,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    options: dict[str, Any] = {}
    if layout == "columns":  # where FSDP2 takes them, which must be even
        options["shard_placement_fn"] = lambda p: (
            Shard(p.ndim - 1) if p.shape[-1] % 2 == 0 else None
        )
    for layer in model.transformer.h if hasattr(model, "transformer") else model.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def trained(
    model: nn.Module,
    batches: range,
    *,
    muon: bool,
    **options: Any,
) -> Any:
    """The largest logit of each step, and whole weights in the end; this rank takes `batches` of
    each step.
    """
    parameters = dict(model.named_parameters())
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if muon:
        optimizer = megatron_muon.Muon(
            model.named_parameters(), lr=1e-3, fp32_matmul_prec="highest"
        )
    clip, logits = megatron_muon.QKClip(model, **{"threshold": THRESHOLD, **options}), []
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in batches:
            batch = batch_of(BATCHES * step + number)
            (model(**batch, use_cache=False).loss / len(batches)).backward()
        optimizer.step()
        logits.append(float(clip.step()))
    weights = {n.removeprefix("module."): frameworks.full(p) for n, p in parameters.items()}
    return logits, {name: weight.clone() for name, weight in weights.items()}


def on_ranks(rank: int, world_size: int) -> Any:
    """In a worker: every layout and model."""
    mine = range(rank, BATCHES, world_size)
    found = {}
    for layout in LAYOUTS:
        for name in MODELS:
            model = sharded(model_of(name), layout)
            found[layout, name] = trained(model, mine, muon=name == "latent")
    return found


def test_ranks_clip_as_one_process_does(ranks: Pool) -> None:
    """Each rank sees other micro-batches, and cuts of rows fall within heads; without a clip
    weights are far away.
    """
    every = range(BATCHES)
    alone = {name: trained(model_of(name), every, muon=name == "latent") for name in MODELS}
    for of_rank in ranks(2, on_ranks):
        for case, (logits, weights) in of_rank.items():
            expected_logits, expected = alone[case[1]]
            assert logits == pytest.approx(expected_logits, rel=1e-5), case
            for name, value in expected.items():
                assert torch.allclose(weights[name], value, rtol=0, atol=2e-6), (case, name)
    without = trained(model_of("latent"), every, muon=True, threshold=1e6)[1]
    expected = alone["latent"][1]
    differences = [(without[name] - expected[name]).abs().max() for name in expected]
    assert max(differences) > 0.1


def in_a_group(rank: int, world_size: int) -> Any:
    """In a worker: plain weights that no other rank has, as in a pipeline."""
    groups = [dist.new_group([each]) for each in range(world_size)]
    mine = range(rank, BATCHES, world_size)
    return trained(model_of("biases"), mine, muon=False, process_group=groups[rank])


def test_a_process_group_keeps_logits_of_other_ranks_away(ranks: Pool) -> None:
    for rank, (logits, _) in enumerate(ranks(2, in_a_group)):
        expected, _ = trained(model_of("biases"), range(rank, BATCHES, 2), muon=False)
        assert logits == pytest.approx(expected, rel=1e-5)


def refusal(rank: int, world_size: int) -> str:
    """In a worker: the error for Megatron-FSDP as a library."""
    with pytest.raises(UserError) as refused:
        megatron_muon.QKClip(frameworks.megatron_fsdp().model)
    return str(refused.value)


def test_megatron_fsdp_as_a_library_is_refused(ranks: Pool) -> None:
    """Its weights were scaled where the next step overwrites them: no logit shrank, and nothing was
    said.
    """
    (message,) = ranks(1, refusal)
    assert message.startswith(
        "QKClip does not know where Megatron-FSDP has its weights; use FSDP2, or --qk-clip"
    )
