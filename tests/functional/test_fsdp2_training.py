"""Training under the real FSDP2, with clipping and accumulation, equals the reference's.

Gradients follow the weights here, unlike in test_every_matrix.py, so rounding grows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from tests.support import every_matrix as support
from tests.support.every_matrix import MODELS, STEPS
from tests.support.pool import Pool
from tests.support.wide import wide_but

KEY_BIASES = ("c_attn.bias", "k_proj.bias")
"""Their gradient is rounding alone, which AdamW divides by its size."""

MIXTURES = ("qwen3-moe", "deepseek-v3", "llama4", "gpt-oss")
ATOL = 5e-6


def accumulate(module: Any, model: str, step: int) -> None:
    """The clipped gradients of two batches."""
    for half in range(2):
        module(**MODELS[model].batch(2 * step + half)).loss.backward()
    nn.utils.clip_grad_norm_(module.parameters(), 1.0)


def layers_of(module: nn.Module) -> nn.Module:
    for name, each in module.named_modules():
        if name.split(".")[-1] in ("layers", "h"):
            return each
    raise AssertionError("no layers")


def trained_under_fsdp(
    rank: int, world_size: int, *, models: Sequence[str], shape: tuple[int, ...], within: bool
) -> Any:
    """In a worker: complete weights after training; `within` shards experts by rows."""
    torch.set_num_threads(1)
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)

    def by_rows(p: torch.Tensor) -> Shard:
        """torchtitan's choice for fewer experts than ranks; FSDP2 needs equal parts then."""
        return Shard(
            int(p.ndim > 2 and p.shape[1] % shape[-1] == 0),
        )

    options: dict[str, Any] = {"mesh": mesh, "shard_placement_fn": by_rows if within else None}
    found = {}
    for model in models:
        module: Any = MODELS[model].build()
        for layer in layers_of(module):  # type: ignore[attr-defined]
            fully_shard(layer, **options)
        fully_shard(module, **options)
        optimizer = MODELS[model].muon(module.named_parameters())
        for step in range(STEPS):
            optimizer.zero_grad()
            accumulate(module, model, step)
            optimizer.step()
        weights = module.named_parameters()
        found[model] = {name: p.full_tensor().detach() for name, p in weights}
    return found if rank == 0 else None


@functools.cache
def trained_alone(model: str) -> dict[str, torch.Tensor]:
    """The same by the reference."""
    torch.set_num_threads(1)
    module: Any = MODELS[model].build()
    weights = {name: p.detach() for name, p in module.named_parameters()}
    whole = support.Whole(MODELS[model], weights, {})
    for step in range(STEPS):
        with torch.no_grad():
            for name, p in module.named_parameters():
                p.copy_(whole.weights[name])
        module.zero_grad()
        accumulate(module, model, step)
        gradients = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
        whole.step(gradients)
    return whole.weights


CASES = [
    (
        tuple(MODELS),
        shape,
        False,
    )
    for shape in ((3,), (2, 2))
]
CASES += [(MIXTURES, shape, True) for shape in ((4,), (2, 2))]
USUAL = (MIXTURES[:1], (2,), True)


@pytest.mark.parametrize(
    ("models", "shape", "within"),
    wide_but([USUAL], [USUAL, *CASES]),
)
def test_training_under_fsdp2_equals_training_in_one_process(
    ranks: Pool, models: tuple[str, ...], shape: tuple[int, ...], within: bool
) -> None:
    size = torch.Size(shape).numel()
    answers = ranks(size, trained_under_fsdp, models=models, shape=shape, within=within)
    for model in models:
        expected = trained_alone(model)
        found = answers[0][model]
        assert found.keys() == expected.keys()
        for name, weight in expected.items():
            if not name.endswith(KEY_BIASES):
                off = float((found[name] - weight).abs().max())
                assert off <= ATOL, f"{model} {name}: {off}"
