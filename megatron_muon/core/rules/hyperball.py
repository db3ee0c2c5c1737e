"""MuonHyperball: every matrix keeps its Frobenius norm R, which takes the place of decay.

    w <- R * normalize(w - lr * R * normalize(update)),  R = ||w||

Source: https://arxiv.org/abs/2606.16899, and emerging-optimizers 0.3, MuonHyperball.

In other words w <- shrink * (w - pace * update) with two numbers of each matrix, from norms and
inner product over all of its shards. So updates stay until the exchange is over, in the place of
the gradients, which the step has used up. One all-reduce of three numbers for each matrix follows,
and one pass over the weights.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import override

import torch
from torch import Tensor

from megatron_muon.core.group_numbers import acts, is_on_device
from megatron_muon.core.rules.held import Held
from megatron_muon.core.rules.rule import Groups, Options, Part, Rule, Step, Tensors
from megatron_muon.errors import SettingError

EPS = 1e-8
"""The least norm of an update that is divided by; the default of emerging-optimizers."""

SMALLEST = torch.finfo(torch.float32).tiny
"""The least norm of weights that is divided by.

With EPS a matrix of a smaller norm would shrink in every step.
"""

ROUNDING = 1e-6
"""If less than this share of ||w||^2 is left, it is rounding of the fp32 sums."""


class Hyperball(Rule):
    """Holds the updates of each wave, and moves the weights after the exchange. Without state."""

    moves_weights = True

    def __init__(self, held: Held, options: Options) -> None:
        super().__init__(held, options)
        count = len(held.layout.matrices)
        counted = [held.counts(index) for index in range(count)]
        on_device = functools.partial(
            torch.tensor,
            dtype=torch.int64,
            device=held.device,
        )
        self._counted = on_device(counted).float()
        self._sums = torch.zeros_like(self._counted).repeat(3, 1)
        self._indices = functools.cache(on_device)  # a step makes no tensor anew
        self._forget()

    def _forget(self) -> None:
        """Forget the matrices that wait for the end of a step, by index, with their sums."""
        self._gradients: Sequence[Tensor | None] = ()
        self._order: list[int] = []
        self._found: Tensors = []
        self._weights: Tensors = []
        self._updates: Tensors = []

    @override
    def check(
        self,
        groups: Groups,
        names: Sequence[str],
    ) -> None:
        for group, name in zip(groups, names, strict=True):
            lr = group["lr"]
            if not is_on_device(lr) and lr >= 1.0:
                raise SettingError(
                    f"lr of {name}",
                    float(lr),
                    "is not below 1: with MuonHyperball it is the size of a step relative to the"
                    " matrix",
                    "begin with 0.02",
                )
            decay = group["weight_decay"]
            if acts(decay):
                raise SettingError(
                    f"weight_decay of {name}",
                    float(decay),
                    "has no effect with MuonHyperball, which keeps the norm of every matrix",
                    "use 0",
                )

    @override
    def begin(self, step: Step) -> None:
        self._groups = step.groups
        self._gradients = step.gradients

    @override
    def after(self, part: Part) -> None:
        """Replace gradients by updates, zero if not finite, of matrices that have a gradient."""
        part.flat.nan_to_num_(
            nan=0.0,
            posinf=torch.inf,
            neginf=-torch.inf,
        )
        arrived: Tensors = []
        weights: Tensors = []
        updates: Tensors = []
        for place, index in enumerate(part.indices):
            gradient = self._gradients[index]
            if gradient is not None:
                arrived.append(part.rows[place])
                weights.append(part.state[place])
                updates.append(gradient)
                self._order.append(index)
        if arrived:
            torch._foreach_copy_(updates, arrived)
            self._found.append(_sums_of(weights, updates))
            self._weights += weights
            self._updates += updates

    @override
    def end(self) -> None:
        """Move the weights over the sphere along the updates. Collective."""
        order = self._indices(tuple(self._order))
        sums = self._sums.zero_()
        if self._found:
            found = torch.cat(self._found, dim=1)
            sums.index_copy_(1, order, found * self._counted[order])
        self._add_up(sums)
        shrink, pace = self._numbers(sums)
        of_weights = shrink[order].unbind()
        of_updates = (shrink * pace).neg_()[order].unbind()
        for place, weight in enumerate(self._weights):
            weight.mul_(of_weights[place])
            weight.addcmul_(self._updates[place], of_updates[place])
        self._forget()

    def _numbers(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        """For each matrix `shrink` and `pace` of w <- shrink * (w - pace * update).

        `sums` are ||w||^2, ||update||^2 and <w, update>; without an update, shrink is 1 and pace 0.
        """
        of_weight, of_update, product = sums
        radius = of_weight.sqrt()
        pace = radius / of_update.sqrt().clamp_min(EPS)
        start = 0
        for _, run in itertools.groupby(self._groups, key=id):
            members = list(run)
            end = start + len(members)
            pace[start:end] *= members[0]["lr"]
            start = end
        # the square of ||w - pace * update||
        moved = of_weight - 2.0 * pace * product + pace.square() * of_update
        moved = moved.maximum(ROUNDING * of_weight)
        shrink = radius / moved.sqrt().clamp_min(SMALLEST)
        is_still = of_update == 0.0
        shrink.masked_fill_(is_still, 1.0)
        pace.masked_fill_(is_still, 0.0)
        return shrink, pace

    @override
    def check_weights(
        self,
        weights: Sequence[Tensor],
        names: Sequence[str],
    ) -> None:
        """Raise a SettingError for matrices of zeros. Collective; waits for the device."""
        norms = torch.zeros_like(self._counted)
        for index, rows in enumerate(weights):
            norms[index] = torch.linalg.vector_norm(rows.float())
        self._add_up(norms)
        for name, norm in zip(names, norms.tolist(), strict=True):
            if norm == 0.0:
                raise SettingError(
                    "muon_hyperball",
                    True,
                    f"keeps the norm of every matrix, and {name} is zero: it would stay so",
                    "initialize it otherwise, or leave it to the scalar optimizer by"
                    " {muon_exclude}",
                )

    def _add_up(self, numbers: Tensor) -> None:
        if not self.held.replicated:
            self.held.add_up(numbers)


def _sums_of(weights: Tensors, updates: Tensors) -> Tensor:
    """||w||^2, ||u||^2 and <w, u> of each weight w and its update u, `(3, count)` fp32."""
    norms = torch._foreach_norm([*weights, *updates], dtype=torch.float32)
    squares = torch.stack(norms).square()
    products = []
    for weight, update in zip(weights, updates, strict=True):
        first = weight.reshape(-1).float()
        second = update.reshape(-1).float()
        products.append(torch.dot(first, second))
    return torch.cat([squares, torch.stack(products)]).view(3, -1)
