"""AdaMuon: each element of the update over the root of its second moment.

Source: https://arxiv.org/abs/2507.11005; of arithmetic, names and shapes emerging-optimizers 0.3, AdaptiveMuon, but
every block is scaled by its own shape. Each rank advances the second moment of its own rows when their update arrives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, override

import torch

from megatron_muon.core.rules.rule import Held, Part, Rule, Step

MOMENT2 = "moment2_buffer"
"""The second moment's slot, upstream's name."""


class AdaMuon(Rule):
    """The elementwise second moment, fp32, of the shape of this rank's rows; a skipped update leaves it alone."""

    slots = (MOMENT2,)
    unscaled = True

    def __init__(self, held: Held, options: Mapping[str, Any]) -> None:
        super().__init__(held, options)
        self.settings = {name: options[name] for name in ("beta2", "eps")}
        self._scales = [
            factors[shard.row_start : shard.row_start + shard.rows]
            for factors, shard in zip(held.scales, held.shards, strict=True)
        ]

    @override
    def begin(self, step: Step) -> None:
        self._moments = step.state(MOMENT2)

    @override
    def after(self, part: Part) -> None:
        for index, group, rows in zip(part.indices, part.groups, part.rows, strict=True):
            moment = self._moments[index]
            squares = rows * rows
            torch.where(squares.isnan(), moment, squares, out=squares)
            moment.lerp_(squares, 1.0 - group["beta2"])
            roots = torch.sqrt(moment, out=squares).add_(group["eps"])
            rows.div_(roots).mul_(self._scales[index])
            del squares, roots  # before the next
