"""MuonHyperball on ZeRO-sharded matrices: every matrix keeps its Frobenius norm R, which takes the place of decay.

    w <- R * normalize(w - lr * R * normalize(update)),  R = ||w||

Source: https://arxiv.org/abs/2606.16899, and emerging-optimizers 0.3, MuonHyperball, whose norms are those of whole
parameters, as here; each expert of a stack is a matrix of its own.

In other words w <- shrink * (w - pace * update) with two numbers of each matrix, which follow from ||w||, ||update||
and their inner product over all of its shards. So a rank's rows of the updates stay until the exchange is over. They
take the place of the gradients, which the step has used up by then: no further memory. One all-reduce of three numbers
for each matrix follows, and one pass over the weights. Nothing is kept between steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_muon.core.decay import together
from megatron_muon.core.errors import UserError
from megatron_muon.core.layout import Layout

EPS = 1e-8
"""The least norm that is divided by; the default of emerging-optimizers."""

ROUNDING = 1e-6
"""What fp32 sums leave of ||w||^2 where less than this is left is their rounding."""


class Hyperball:
    """What keeps norms in a step: `hold` for the updates of each wave, then `apply` once. Without state.

    Args:
        layout: who holds which rows of the matrices; the same on every rank.
        group: the process group of the layout.
        experts: how many matrices each of the layout's matrices stacks.
        device: where the weights lie.
        replicated: every rank holds whole matrices, so it needs no numbers of others.
    """

    def __init__(
        self,
        layout: Layout,
        group: dist.ProcessGroup,
        experts: Sequence[int],
        *,
        device: torch.device,
        replicated: bool = False,
    ) -> None:
        rank = group.rank()
        self._group = None if replicated or group.size() == 1 else group
        self._rows = [matrix.shape[0] // count for matrix, count in zip(layout.matrices, experts, strict=True)]
        self._starts = [0, *itertools.accumulate(experts)]  # the numbers of each matrix, one for each expert
        self._sums = torch.zeros(3, self._starts[-1], dtype=torch.float32, device=device)
        self._places: list[range] = []
        sent = torch.zeros(self._starts[-1], dtype=torch.float32)
        for start, rows, count, shard in zip(self._starts, self._rows, experts, layout.held(rank), strict=False):
            first, held = (shard.row_start // rows, shard.rows // rows) if count > 1 else (0, int(shard.numel > 0))
            self._places.append(range(start + first, start + first + held))
            if shard.rank == rank or replicated:  # the first of those that hold it
                sent[start + first : start + first + held] = 1.0
        self._sent = sent.to(device)
        self._held: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._found: list[torch.Tensor] = []
        self._order: list[int] = []
        self._on_device: dict[tuple[int, ...], torch.Tensor] = {}

    def hold(
        self,
        indices: Sequence[int],
        weights: list[torch.Tensor],
        gradients: list[torch.Tensor],
        updates: list[torch.Tensor],
    ) -> None:
        """Put this rank's rows of updates, zero where one is not finite, in the place of the gradients.

        Args:
            indices: the matrices.
            weights: this rank's rows of each, `(rows, cols)`.
            gradients: of the same shape and dtype.
            updates: of the same shape, of any floating dtype.
        """
        for part in together(weights):
            torch._foreach_copy_(gradients[part], updates[part])
            ours = [self._matrices(index, rows) for index, rows in zip(indices[part], weights[part], strict=True)]
            theirs = [self._matrices(index, rows) for index, rows in zip(indices[part], gradients[part], strict=True)]
            pairs = list(zip(itertools.chain(*ours), itertools.chain(*theirs), strict=True))
            norms = torch._foreach_norm([one for pair in pairs for one in pair], dtype=torch.float32)
            products = torch.stack([_product(weight, update) for weight, update in pairs])
            self._found.append(torch.stack([*torch.stack(norms).square().view(-1, 2).unbind(1), products]))
            self._held += pairs
            self._order += itertools.chain(*(self._places[index] for index in indices[part]))

    def apply(self, rates: Sequence[float]) -> None:
        """Move the weights, over the sphere, to where the held updates lead. Collective.

        Args:
            rates: the learning rate of each matrix.
        """
        order = self._index(tuple(self._order))
        sums = self._sums.zero_()
        if self._held:
            sums.index_copy_(1, order, torch.cat(self._found, dim=1) * self._sent[order])
        self._total(sums)
        shrink, pace = self._numbers(sums, rates)
        scales = zip(shrink[order].unbind(), (shrink * pace).neg_()[order].unbind(), strict=True)
        for (weight, update), (of_weight, of_update) in zip(self._held, scales, strict=True):
            weight.mul_(of_weight).addcmul_(update, of_update)
        self._held, self._found, self._order = [], [], []

    def _numbers(self, sums: torch.Tensor, rates: Sequence[float]) -> tuple[torch.Tensor, torch.Tensor]:
        """For each matrix `shrink` and `pace`, of w <- shrink * (w - pace * update); 1 and 0 without an update."""
        radius, (of_update, product) = sums[0].sqrt(), sums[1:]
        pace = radius / of_update.sqrt().clamp_min(EPS)
        start = 0
        for rate, alike in itertools.groupby(rates):
            end = start + len(list(alike))
            pace[self._starts[start] : self._starts[end]] *= rate
            start = end
        moved = sums[0] - 2.0 * pace * product + pace.square() * of_update  # the square of ||w - pace * update||
        shrink = radius / moved.maximum(ROUNDING * sums[0]).sqrt().clamp_min(EPS)
        is_still = of_update == 0.0
        return shrink.masked_fill_(is_still, 1.0), pace.masked_fill_(is_still, 0.0)

    def refuse_zeros(self, weights: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        """Refuse matrices that have no norm to keep. Collective; waits for the device.

        Args:
            weights: this rank's rows of each matrix.
            names: of the matrices.

        Raises:
            UserError: names the first.
        """
        largest = torch.zeros_like(self._sent)
        for index, rows in enumerate(weights):
            for place, values in zip(self._places[index], self._matrices(index, rows), strict=True):
                largest[place] = torch.linalg.vector_norm(values.float())
        self._total(largest)
        norms = largest.tolist()
        for index, name in enumerate(names):
            if 0.0 in norms[self._starts[index] : self._starts[index + 1]]:
                raise UserError(
                    f"--muon-hyperball keeps the norm of every matrix, and {name} is zero: it would stay so; "
                    "initialize it otherwise, or leave it to the scalar optimizer by --muon-exclude"
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
            self._on_device[order] = torch.tensor(order, dtype=torch.int64, device=self._sums.device)
        return self._on_device[order]


def _product(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The inner product, fp32."""
    return torch.dot(one.reshape(-1).float(), other.reshape(-1).float())
