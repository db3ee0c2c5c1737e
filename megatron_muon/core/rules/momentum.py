"""Momentum, an exponential moving average, and Nesterov's look-ahead; what emerging-optimizers' Muon does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, override

import torch

from megatron_muon.core.rules.rule import Held, Part, Rule


class Momentum(Rule):
    """momentum <- lerp(momentum, gradient), which is orthogonalised; with `nesterov` mixed with the gradient again."""

    def __init__(self, held: Held, options: Mapping[str, Any]) -> None:
        super().__init__(held, options)
        self._nesterov = options["nesterov"]

    @override
    def before(self, part: Part) -> None:
        if part.failed is not None:  # their momentum is mixed with itself
            if part.flat_state is not None:
                torch.where(part.failed, part.flat_state, part.flat, out=part.flat)
            else:
                masks = part.failed.split([one.numel() for one in part.rows])
                for one, values, mask in zip(part.rows, part.state, masks, strict=True):
                    torch.where(mask.view(one.shape), values, one, out=one)
        for group, rows, momentum in part.by_group():
            share = group["momentum"]
            if len(rows) == 1 and self._nesterov:  # one tensor may be more than a launch of calls on lists takes
                momentum[0].lerp_(rows[0], 1.0 - share)
                rows[0].lerp_(momentum[0], share)
                continue
            torch._foreach_lerp_(momentum, rows, 1.0 - share)
            if self._nesterov:
                torch._foreach_lerp_(rows, momentum, share)
            else:
                torch._foreach_copy_(rows, momentum)
