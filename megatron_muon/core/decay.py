"""Cautious weight decay: only what the update shrinks already decays.

Source: https://arxiv.org/abs/2510.12402, w <- w - lr * (update + weight_decay * [update * w >= 0] * w), element by
element. emerging-optimizers 0.3 has no such method.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from megatron_muon.core.memory import TOGETHER


def aligned(weights: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    """Which elements decay: those that subtracting the update brings nearer to zero, or leaves alone; bool."""
    return weights * updates >= 0.0


def decay_aligned(weights: list[torch.Tensor], updates: list[torch.Tensor], factor: float) -> None:
    """Add `factor` times their weight to the elements that are `aligned`, in place; where the update is NaN none are.

    Args:
        weights: rows of matrices, `(rows, cols)` each.
        updates: what will be subtracted from them, times the learning rate.
        factor: minus decay rate times learning rate.
    """
    for part in together(weights):
        products = torch._foreach_mul(weights[part], updates[part])
        for product in products:
            product.ge_(0.0)  # now 1.0 or 0.0
        torch._foreach_addcmul_(weights[part], weights[part], products, value=factor)


def together(tensors: Sequence[torch.Tensor]) -> Iterator[slice]:
    """Consecutive `tensors` that take several passes together, so that each pass finds them in the cache."""
    first, elements = 0, 0
    for place, tensor in enumerate(tensors):
        if elements and elements + tensor.numel() > TOGETHER["cpu" if tensor.device.type == "cpu" else "cuda"]:
            yield slice(first, place)
            first, elements = place, 0
        elements += tensor.numel()
    if tensors:
        yield slice(first, len(tensors))
