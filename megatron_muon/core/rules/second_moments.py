"""Second moments of the update, unscaled: AdaMuon's of each element, NorMuon's of each neuron.

Sources: https://arxiv.org/abs/2507.11005, https://arxiv.org/abs/2510.05491; arithmetic, names and
shapes are those of emerging-optimizers 0.3, AdaptiveMuon, except that every block is scaled by its
own shape.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, override

import torch
from torch import Tensor

from megatron_muon.core.rules.held import Held
from megatron_muon.core.rules.rule import Options, Rule, Tensors
from megatron_muon.shards import neuron_moment

if TYPE_CHECKING:
    from megatron_muon.core.rows import HeldRows, Rows

MOMENT2 = "moment2_buffer"
"""The second moment's slot, upstream's name."""


class SecondMoment(Rule):
    """Divides updates by the root of their second moment, which a skipped update leaves alone.

    Attributes:
        row_scales: factors of each shard's rows, `(rows, 1)` fp32.
    """

    slots = (MOMENT2,)
    numbers = ("beta2", "eps")
    unscaled = True

    def __init__(self, held: Held, options: Options) -> None:
        super().__init__(held, options)
        self.row_scales: Tensors = []
        for scales, shard in zip(held.scales, held.shards, strict=bool(held.scales)):
            self.row_scales.append(scales.narrow(0, shard.row_start, shard.rows))

    @override
    def begin(self, step: Rows) -> None:
        super().begin(step)
        self.moments = step.state(MOMENT2)


class AdaMuon(SecondMoment):
    """One second moment for each element, fp32, with the rows.

    A rank advances it when the update of its rows arrives.
    """

    scratch = True

    @override
    def after(self, part: HeldRows) -> None:
        for index, group, rows in zip(part.indices, part.groups, part.rows, strict=True):
            moment = self.moments[index]
            squares = part.scratch_like(rows)
            torch.mul(rows, rows, out=squares)
            is_skipped = squares[:1, :1].isnan()  # then all elements are NaN
            torch.where(is_skipped, moment, squares, out=squares)
            moment.lerp_(squares, 1.0 - group["beta2"])
            roots = torch.sqrt(moment, out=squares)
            roots.add_(group["eps"])
            rows.div_(roots)
            rows.mul_(self.row_scales[index])


class NorMuon(SecondMoment):
    """One second moment for each neuron, advanced by the rank that orthogonalizes the matrix.

    Neurons are the rows of a matrix with at least as many rows as columns, whose moment `(rows, 1)`
    is sharded as the rows are; those of a wider one are its columns, and every rank has the moment
    `(1, cols)`. Before the exchange every rank gets the numbers of all neurons, by one all-reduce
    in which each number comes from one rank and zeros from the others: a sum that rounds nothing.
    After the exchange they return the same way.

    Attributes:
        moments_of_neurons: of all matrices, before and after the exchange, and what kernels
            multiply updates with, `(3, neurons)` fp32.
        starts: the first neuron of each matrix.
    """

    def __init__(self, held: Held, options: Options) -> None:
        super().__init__(held, options)
        shapes = [matrix.shape for matrix in held.layout.matrices]
        # neurons are rows or columns; source: emerging-optimizers' AdaptiveMuon._init_group
        self._averaged = [int(rows >= cols) for rows, cols in shapes]
        sizes = [max(shape) for shape in shapes]
        # before and after the exchange
        self.moments_of_neurons = torch.zeros(
            3,
            sum(sizes),
            dtype=torch.float32,
            device=held.device,
        )
        self.starts = [0, *itertools.accumulate(sizes)]
        self._flat_before, self._flat_after, _ = self.moments_of_neurons
        self._before = self._flat_before.split(sizes)
        self._after = self._flat_after.split(sizes)
        # of neurons of which this rank holds parts
        self._sent: dict[int, Tensor] = {}
        self._flat_moments: Tensors = []
        self._received: Tensors = []
        for index, averaged in enumerate(self._averaged):
            row, rows, col, cols = held.rectangles[index]
            start, size, other = col, cols, row
            if averaged == 1:
                start, size, other = row, rows, col
            self._received.append(self._after[index].narrow(0, start, size))
            # ranks that hold other parts of the same neurons have the same numbers
            if other == 0 and held.counts(index):
                self._sent[index] = self._before[index].narrow(0, start, size)

    def is_by_columns(self, index: int) -> bool:
        """Neurons of a matrix are its columns."""
        return self._averaged[index] == 0

    @override
    def zeros(
        self,
        index: int,
        parameter: Tensor,
    ) -> Tensor:
        averaged = parameter.ndim - 2 + self._averaged[index]
        return neuron_moment(parameter, averaged, over_tp=self.held.over_tp)

    @override
    def begin(self, step: Rows) -> None:
        super().begin(step)
        self.moments_of_neurons[:2].zero_()
        if not self._flat_moments:
            self._flat_moments = [moment.view(-1) for moment in self.moments]
        if self._sent:
            own = [self._flat_moments[index] for index in self._sent]
            torch._foreach_copy_(list(self._sent.values()), own)
        self.held.add_up(self._flat_before, alike=self.held.replicated)

    def normalize(
        self,
        index: int,
        update: Tensor,
        finite: Tensor,
        squares: Tensor,
    ) -> None:
        """Advance a matrix's second moment; normalize and scale its update `(rows, cols)` fp32.

        If the update is not `finite` it becomes NaN, and the second moment stays. Source:
        emerging-optimizers'
        AdaptiveMuon._apply_moment2_normalization and _match_frobenius_norm.
        """
        group = self.step.groups[index]
        eps = group["eps"]
        averaged = self._averaged[index]
        moment = self._after[index]
        update.masked_fill_(~finite, 0.0)
        torch.mul(update, update, out=squares)
        means = squares.mean(averaged)
        share = finite.float() * (1.0 - group["beta2"])
        torch.lerp(
            self._before[index],
            means,
            share,
            out=moment,
        )
        norm = torch.linalg.vector_norm(update)
        update.mul_(moment.unsqueeze(averaged).clamp_min(eps).rsqrt_())
        norm_now = torch.linalg.vector_norm(update)
        ratio = norm / norm_now.clamp_min(eps)
        update.mul_(ratio.masked_fill_(~finite, math.nan))
        update.mul_(self.held.scales[index])

    @override
    def end(self) -> None:
        self.held.add_up(self._flat_after, alike=self.held.repeated)
        torch._foreach_copy_(self._flat_moments, self._received)
