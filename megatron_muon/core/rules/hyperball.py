"""MuonHyperball: every matrix keeps its Frobenius norm R, which takes the place of decay.

    w <- R * normalize(w - lr * R * normalize(update)),  R = ||w||

Source: https://arxiv.org/abs/2606.16899, and emerging-optimizers 0.3, MuonHyperball.

In other words w <- shrink * (w - pace * update) with two numbers of each matrix, from norms and
inner product over all of its shards. So updates stay until the exchange is over, in the place of
the gradients, which the step has used up. One all-reduce of three numbers for each matrix follows,
and one pass over the weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, override

import torch
from torch import Tensor

from megatron_muon.core.group_numbers import acts, is_on_device
from megatron_muon.core.rules.held import Held
from megatron_muon.core.rules.rule import Groups, Options, Rule
from megatron_muon.errors import SettingError

if TYPE_CHECKING:
    from megatron_muon.core.rows import HeldRows, Rows

EPS = 1e-8
"""The least norm of an update that is divided by; the default of emerging-optimizers."""

SMALLEST = torch.finfo(torch.float32).tiny
"""The least norm of weights that is divided by.

With EPS a matrix of a smaller norm would shrink in every step.
"""

ROUNDING = 1e-6
"""If less than this share of ||w||^2 is left, it is rounding of the fp32 sums."""


class Hyperball(Rule):
    """Holds the updates of each wave, and moves the weights after the exchange. Without state.

    Attributes:
        sums: ||w||^2, ||update||^2 and <w, update> of each matrix, `(3, matrices)` fp32.
        move: moves weights that this rule does not hold, by two factors of each matrix.
    """

    moves_weights = True

    def __init__(self, held: Held, options: Options) -> None:
        super().__init__(held, options)
        self.move: Callable[[Tensor, Tensor], None] | None = None
        # ||w||^2, ||u||^2 and <w, u> of each weight and its update; zeros without a gradient
        self.sums = torch.zeros(
            3,
            len(held.layout.matrices),
            dtype=torch.float32,
            device=held.device,
        )
        self._entries = [row.unbind() for row in self.sums]
        self._waiting: dict[int, tuple[Tensor, Tensor]] = {}  # weight and update

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
    def begin(self, step: Rows) -> None:
        super().begin(step)
        self.sums.zero_()

    @override
    def after(self, part: HeldRows) -> None:
        """Replace gradients by updates, zero if not finite, of matrices that have a gradient."""
        part.flat.nan_to_num_(
            nan=0.0,
            posinf=torch.inf,
            neginf=-torch.inf,
        )
        updates = []
        arrived = []
        counted = []
        for index, rows, weight in zip(part.indices, part.rows, part.state, strict=True):
            update = self.step.gradients[index]
            if update is None:
                continue
            updates.append(update)
            arrived.append(rows)
            self._waiting[index] = weight, update
            if self.held.counts(index):
                counted.append(index)
        if updates:
            torch._foreach_copy_(updates, arrived)
        if counted:
            self._measure(counted)

    @override
    def end(self) -> None:
        """Move the weights over the sphere along the updates. Collective."""
        self.held.add_up(self.sums, alike=self.held.replicated)
        shrink, pace = self._numbers()
        of_updates = (shrink * pace).neg_()
        if self.move is not None:
            self.move(shrink, of_updates)
        if not self._waiting:
            return
        factors, paces = shrink.unbind(), of_updates.unbind()
        for index, (weight, update) in self._waiting.items():
            weight.mul_(factors[index])
            weight.addcmul_(update, paces[index])
        self._waiting.clear()

    def _measure(self, indices: Sequence[int]) -> None:
        """Write ||w||^2, ||u||^2 and <w, u> of these weights and updates."""
        weights, updates = zip(*map(self._waiting.__getitem__, indices), strict=True)
        products = []
        for weight, update in zip(weights, updates, strict=True):
            flat = update.reshape(-1).float()
            products.append(torch.dot(weight.reshape(-1).float(), flat))
        norms = torch._foreach_norm([*weights, *updates], dtype=torch.float32)
        torch._foreach_mul_(norms, norms)
        entries = [row[index] for row in self._entries for index in indices]
        torch._foreach_copy_(entries, [*norms, *products])

    def _numbers(self) -> tuple[Tensor, Tensor]:
        """For each matrix `shrink` and `pace` of w <- shrink * (w - pace * update).

        Without an update, shrink is 1 and pace 0.
        """
        of_weight, of_update, product = self.sums
        radius = of_weight.sqrt()
        pace = radius / of_update.sqrt().clamp_min(EPS)
        start = 0
        for _, run in itertools.groupby(self.step.groups, key=id):
            alike = list(run)
            end = start + len(alike)
            pace[start:end] *= alike[0]["lr"]
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
        norms = torch.zeros_like(self.sums[0])
        for index, rows in enumerate(weights):
            norms[index] = torch.linalg.vector_norm(rows.float())
        self.held.add_up(norms, alike=self.held.replicated)
        for name, norm in zip(names, norms.tolist(), strict=True):
            if norm == 0.0:
                raise SettingError(
                    "muon_hyperball",
                    True,
                    f"keeps the norm of every matrix, and {name} is zero: it would stay so",
                    "initialize it otherwise, or leave it to the scalar optimizer by"
                    " {muon_exclude}",
                )
