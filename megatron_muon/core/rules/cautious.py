"""Cautious weight decay: weights shrink only where the update shrinks them already.

w <- w - lr * (update + weight_decay * [update * w >= 0] * w), element by element.

Source: https://arxiv.org/abs/2510.12402.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, override

import torch
from torch import Tensor

from megatron_muon.core.group_numbers import acts
from megatron_muon.core.rules.rule import Rule

if TYPE_CHECKING:
    from megatron_muon.core.rows import HeldRows


class CautiousDecay(Rule):
    """Decays weights where the update is known; takes the place of decoupled decay."""

    scratch = True

    @override
    def after(self, part: HeldRows) -> None:
        memory = part.scratch_like(part.flat)
        flats = memory.split([rows.numel() for rows in part.rows])
        products = []
        for rows, weights, flat in zip(part.rows, part.state, flats, strict=True):
            product = flat.view(rows.shape)
            torch.mul(weights, rows, out=product)
            products.append(product)
        memory.ge_(0.0)  # now 1.0 where weights decay, or 0.0
        for group, masks, decayed in replace(part, rows=products).by_group():
            factor = -group["weight_decay"] * group["lr"]
            if not acts(group["weight_decay"]):
                continue
            if isinstance(factor, Tensor):
                torch._foreach_mul_(masks, factor)
                factor = 1.0
            torch._foreach_addcmul_(decayed, decayed, masks, value=factor)


def aligned(weights: Tensor, updates: Tensor) -> Tensor:
    """The elements that decay: those that the update brings nearer to zero, or leaves; bool."""
    return weights * updates >= 0.0
