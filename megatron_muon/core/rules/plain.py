"""Plain Muon: momentum, weight decay in three ways, and the step along the update, the last rule but with Hyperball.

Momentum is an exponential moving average with Nesterov's look-ahead, as in emerging-optimizers'
Muon.

Source of cautious decay: https://arxiv.org/abs/2510.12402, w <- w - lr * (update + weight_decay *
[update * w >= 0] * w), element by element.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, override

import torch

from megatron_muon.core.memory import TOGETHER
from megatron_muon.core.rows import local_rows
from megatron_muon.core.rules.rule import Held, Part, Rule

Number = float | torch.Tensor
"""Of a parameter group; a tensor of one number, fp32 on the device, where a step is to be captured in a CUDA graph."""


class Momentum(Rule):
    """momentum <- lerp(momentum, gradient), which is orthogonalised; with `nesterov` mixed with the gradient again."""

    def __init__(self, held: Held, options: Mapping[str, Any]) -> None:
        super().__init__(held, options)
        self._nesterov = options["nesterov"]

    @override
    def before(self, part: Part) -> None:
        if part.failed is not None:  # their momentum is mixed with itself
            self._keep(part, part.failed)
        for group, rows, momentum in part.by_group():
            share = group["momentum"]
            # one tensor may be more than a launch of calls on lists takes
            if len(rows) == 1 and self._nesterov:
                momentum[0].lerp_(rows[0], 1.0 - share)
                rows[0].lerp_(momentum[0], share)
                continue
            torch._foreach_lerp_(momentum, rows, 1.0 - share)
            if self._nesterov:
                torch._foreach_lerp_(rows, momentum, share)
            else:
                torch._foreach_copy_(rows, momentum)

    @staticmethod
    def _keep(part: Part, failed: torch.Tensor) -> None:
        """Put the momentum of matrices that fail in the place of their rows; one pass over neighbours of one size.

        A mask of elements would cost more than the iteration: `repeat_interleave` gives a whole
        matrix to one warp.
        """
        if part.flat_state is None:
            for rows, momentum, flag in zip(part.rows, part.state, failed.unbind(), strict=True):
                torch.where(flag, momentum, rows, out=rows)
            return
        start, first = 0, 0
        for numel, alike in itertools.groupby(one.numel() for one in part.rows):
            count = len(list(alike))
            end = start + count * numel
            rows, momentum = (
                flat[start:end].view(count, numel) for flat in (part.flat, part.flat_state)
            )
            torch.where(failed[first : first + count, None], momentum, rows, out=rows)
            start, first = end, first + count


class CoupledDecay(Rule):
    """Adds the decay to the gradient, before momentum."""

    @override
    def before(self, part: Part) -> None:
        for parameter, group, rows in zip(part.parameters, part.groups, part.rows, strict=True):
            if acts(group["weight_decay"]):
                _add_scaled(
                    [rows],
                    [local_rows(parameter).to(rows.device, rows.dtype)],
                    group["weight_decay"],
                )


class Decay(Rule):
    """Shrinks the weights, AdamW's way: adds the decay to the update, so that both are rounded once."""

    @override
    def after(self, part: Part) -> None:
        for group, rows, weights in part.by_group():
            if acts(group["weight_decay"]):
                _add_scaled(rows, weights, group["weight_decay"])


class CautiousDecay(Rule):
    """Shrinks only what the update shrinks already."""

    @override
    def after(self, part: Part) -> None:
        for group, rows, weights in part.by_group():
            if acts(group["weight_decay"]):
                _decay_aligned(weights, rows, -group["weight_decay"] * group["lr"])


class Descent(Rule):
    """weight <- weight - lr * update; an update that is not finite leaves its matrix as it is."""

    @override
    def after(self, part: Part) -> None:
        zero_nan(part.flat)
        for group, rows, weights in part.by_group():
            _add_scaled(weights, rows, -group["lr"])


def aligned(weights: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    """Which elements decay: those that subtracting the update brings nearer to zero, or leaves alone; bool."""
    return weights * updates >= 0.0


def is_on_device(number: Number) -> bool:
    """Whether reading it would wait for a device."""
    return isinstance(number, torch.Tensor) and number.device.type != "cpu"


def acts(decay: Number) -> bool:
    """Whether weights decay; on a device any decay counts."""
    return is_on_device(decay) or bool(decay != 0.0)


def _add_scaled(tensors: list[torch.Tensor], others: list[torch.Tensor], factor: Number) -> None:
    """Add `factor` times the others, in place; with a tensor the products are rounded first."""
    if not isinstance(factor, torch.Tensor):
        torch._foreach_add_(tensors, others, alpha=factor)
        return
    for part in together(tensors):
        torch._foreach_add_(tensors[part], torch._foreach_mul(others[part], factor))


def _decay_aligned(
    weights: list[torch.Tensor], updates: list[torch.Tensor], factor: Number
) -> None:
    """Add `factor`, minus decay times learning rate, of their weight to elements that are `aligned`, in place."""
    for part in together(weights):
        products = torch._foreach_mul(weights[part], updates[part])
        for product in products:
            product.ge_(0.0)  # now 1.0 or 0.0
        if isinstance(factor, torch.Tensor):
            torch._foreach_mul_(products, factor)
            factor = 1.0
        torch._foreach_addcmul_(weights[part], weights[part], products, value=factor)


def together(tensors: Sequence[torch.Tensor]) -> Iterator[slice]:
    """Consecutive `tensors` that take several passes together, so that each pass finds them in the cache."""
    first, elements = 0, 0
    for place, tensor in enumerate(tensors):
        if (
            elements
            and elements + tensor.numel()
            > TOGETHER["cpu" if tensor.device.type == "cpu" else "cuda"]
        ):
            yield slice(first, place)
            first, elements = place, 0
        elements += tensor.numel()
    if tensors:
        yield slice(first, len(tensors))


def zero_nan(tensor: torch.Tensor) -> None:
    """Put zeros where it is NaN, in place."""
    tensor.nan_to_num_(nan=0.0, posinf=math.inf, neginf=-math.inf)
