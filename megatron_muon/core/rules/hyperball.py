"""MuonHyperball: every matrix keeps its Frobenius norm R, which takes the place of decay.

    w <- R * normalize(w - lr * R * normalize(update)),  R = ||w||

Source: https://arxiv.org/abs/2606.16899, and emerging-optimizers 0.3, MuonHyperball; each expert is
a matrix of its own.

In other words w <- shrink * (w - pace * update) with two numbers of each matrix, from norms and
inner product over all of its shards. So updates stay until the exchange is over, in the place of
the gradients, which the step has used up. One all-reduce of three numbers for each matrix follows,
and one pass over the weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, override

import torch
import torch.distributed as dist

from megatron_muon.core.rows import local_rows
from megatron_muon.core.rules.plain import acts, is_on_device, together, zero_nan
from megatron_muon.core.rules.rule import Held, Part, Rule, Step
from megatron_muon.core.user_errors import SettingError, UserError

EPS = 1e-8
"""The least norm of an update that is divided by; the default of emerging-optimizers."""

SMALLEST = torch.finfo(torch.float32).tiny
"""The least norm of weights that is divided by: EPS would shrink a matrix of a smaller norm with every step."""

ROUNDING = 1e-6
"""What fp32 sums leave of ||w||^2 where less than this is left is their rounding."""


class Hyperball(Rule):
    """Keeps norms: holds the updates of each wave, and moves the weights once the exchange is over. Without state."""

    def __init__(self, held: Held, options: Mapping[str, Any]) -> None:
        super().__init__(held, options)
        rank, replicated = held.group.rank(), held.replicated
        self._group = None if replicated or held.group.size() == 1 else held.group
        # the numbers of each matrix, one for each expert
        self._starts = [0, *itertools.accumulate(held.experts)]
        self._sums = torch.zeros(3, self._starts[-1], dtype=torch.float32, device=held.device)
        self._places: list[range] = []
        sent = torch.zeros(self._starts[-1], dtype=torch.float32)
        whole = zip(self._starts, held.layout.matrices, held.experts, held.shards, strict=False)
        for start, matrix, count, shard in whole:
            rows = matrix.shape[0] // count
            first, number = (
                (shard.row_start // rows, shard.rows // rows)
                if count > 1
                else (0, int(shard.numel > 0))
            )
            self._places.append(range(start + first, start + first + number))
            if shard.rank == rank or replicated:  # the first of those that hold it
                sent[start + first : start + first + number] = 1.0
        self._sent = sent.to(held.device)
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._found: list[torch.Tensor] = []
        self._order: list[int] = []
        self._on_device: dict[tuple[int, ...], torch.Tensor] = {}

    @override
    def check(self, groups: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
        for group, name in zip(groups, names, strict=True):
            if not is_on_device(group["lr"]) and group["lr"] >= 1.0:
                raise UserError(
                    f"the learning rate {group['lr']:g} of {name} is not below 1: with"
                    " MuonHyperball it is the size of a step relative to the matrix; begin with"
                    " 0.02"
                )
            if acts(group["weight_decay"]):
                raise UserError(
                    f"weight decay {group['weight_decay']:g} of {name} has no effect with"
                    " MuonHyperball, which keeps the norm that decay would shrink; use 0 for its"
                    " matrices"
                )

    @override
    def begin(self, step: Step) -> None:
        self._rates = [group["lr"] for group in step.groups]

    @override
    def after(self, part: Part) -> None:
        """Put the updates, zero where one is not finite, in the place of the gradients, where there are any."""
        zero_nan(part.flat)
        present = [
            place for place, parameter in enumerate(part.parameters) if parameter.grad is not None
        ]
        gradients = [local_rows(part.parameters[place].grad) for place in present]  # type: ignore[arg-type]
        weights, updates = (
            [tensors[place] for place in present] for tensors in (part.state, part.rows)
        )
        indices = [part.indices[place] for place in present]
        for some in together(weights):
            torch._foreach_copy_(gradients[some], updates[some])
            ours = [
                self._matrices(index, rows)
                for index, rows in zip(indices[some], weights[some], strict=True)
            ]
            theirs = [
                self._matrices(index, rows)
                for index, rows in zip(indices[some], gradients[some], strict=True)
            ]
            pairs = list(zip(itertools.chain(*ours), itertools.chain(*theirs), strict=True))
            norms = torch._foreach_norm(
                [one for pair in pairs for one in pair], dtype=torch.float32
            )
            products = torch.stack(
                [torch.dot(*(one.reshape(-1).float() for one in pair)) for pair in pairs]
            )
            self._found.append(
                torch.stack(
                    [*torch.stack(norms).square().view(-1, 2).unbind(1), products],
                )
            )
            self._pairs += pairs
            self._order += itertools.chain(*(self._places[index] for index in indices[some]))

    @override
    def end(self) -> None:
        """Move the weights, over the sphere, to where the updates lead. Collective."""
        order = self._index(tuple(self._order))
        sums = self._sums.zero_()
        if self._pairs:
            sums.index_copy_(1, order, torch.cat(self._found, dim=1) * self._sent[order])
        self._total(sums)
        shrink, pace = self._numbers(sums, self._rates)
        scales = zip(
            shrink[order].unbind(),
            (shrink * pace).neg_()[order].unbind(),
            strict=True,
        )
        for (weight, update), (of_weight, of_update) in zip(self._pairs, scales, strict=True):
            weight.mul_(of_weight).addcmul_(update, of_update)
        self._pairs, self._found, self._order = [], [], []

    def _numbers(
        self, sums: torch.Tensor, rates: Sequence[Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """For each matrix `shrink` and `pace` of w <- shrink * (w - pace * update), which keeps ||w||.

        `sums` are ||w||^2, ||update||^2 and <w, update>; without an update, shrink is 1 and pace 0.
        """
        radius = sums[0].sqrt()
        of_update, product = sums[1:]
        pace = radius / of_update.sqrt().clamp_min(EPS)
        start = 0
        for _, alike in itertools.groupby(
            rates, key=lambda rate: id(rate) if isinstance(rate, torch.Tensor) else rate
        ):
            rate, *others = alike
            end = start + 1 + len(others)
            pace[self._starts[start] : self._starts[end]] *= rate
            start = end
        # the square of ||w - pace * update||
        moved = sums[0] - 2.0 * pace * product + pace.square() * of_update
        shrink = radius / moved.maximum(ROUNDING * sums[0]).sqrt().clamp_min(SMALLEST)
        is_still = of_update == 0.0
        return shrink.masked_fill_(is_still, 1.0), pace.masked_fill_(is_still, 0.0)

    @override
    def check_weights(self, weights: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        """Refuse matrices that have no norm to keep. Collective; waits for the device."""
        largest = torch.zeros_like(self._sent)
        for index, rows in enumerate(weights):
            for place, values in zip(self._places[index], self._matrices(index, rows), strict=True):
                largest[place] = torch.linalg.vector_norm(values.float())
        self._total(largest)
        norms = largest.tolist()
        for index, name in enumerate(names):
            if 0.0 in norms[self._starts[index] : self._starts[index + 1]]:
                raise SettingError(
                    "muon_hyperball",
                    True,
                    f"keeps the norm of every matrix, and {name} is zero: it would stay so",
                    "initialize it otherwise, or leave it to the scalar optimizer by"
                    " {muon_exclude}",
                )

    def _matrices(self, index: int, rows: torch.Tensor) -> list[torch.Tensor]:
        """This rank's `rows` of a matrix, or of each matrix of a stack."""
        count = len(self._places[index])
        return list(rows.split(len(rows) // count)) if count else []

    def _total(self, numbers: torch.Tensor) -> None:
        if self._group is not None:
            dist.all_reduce(numbers, group=self._group)

    def _index(self, order: tuple[int, ...]) -> torch.Tensor:
        if order not in self._on_device:
            self._on_device[order] = torch.tensor(
                order, dtype=torch.int64, device=self._sums.device
            )
        return self._on_device[order]
