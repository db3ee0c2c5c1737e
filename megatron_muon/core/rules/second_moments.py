"""Second moments of the update, unscaled: AdaMuon's of each element, NorMuon's of each neuron.

Sources: https://arxiv.org/abs/2507.11005, https://arxiv.org/abs/2510.05491; of arithmetic, names
and shapes emerging-optimizers 0.3, AdaptiveMuon. But every block is scaled by its own shape, and
experts are matrices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, override

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from megatron_muon.core.rules.rule import Held, Part, Rule, Step

MOMENT2 = "moment2_buffer"
"""The second moment's slot, upstream's name."""


class AdaMuon(Rule):
    """Each element of the update over the root of its second moment, which a skipped update leaves alone.

    The moment is fp32, of the shape of this rank's rows; a rank advances it when their update
    arrives.
    """

    slots = (MOMENT2,)
    unscaled = True

    def __init__(self, held: Held, options: Mapping[str, Any]) -> None:
        super().__init__(held, options)
        self.settings = {name: options[name] for name in ("beta2", "eps")}
        whole = zip(held.scales, held.shards, strict=True)
        self._scales = [
            factors[shard.row_start : shard.row_start + shard.rows] for factors, shard in whole
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


class NorMuon(Rule):
    """Each neuron's update over the root of its second moment, which the rank that orthogonalises a matrix advances.

    Moment and norm are those of the whole parameter. A matrix with at least as many rows as columns
    has one number for each row, `(rows, 1)`, sharded as the rows are, a wider one for each column,
    `(1, cols)`, on every rank. Before the exchange every rank gets all numbers, by one all-reduce
    in which each number has one rank that does not send zero: a sum that rounds nothing. After it
    they go round once more.
    """

    slots = (MOMENT2,)
    unscaled = True

    def __init__(self, held: Held, options: Mapping[str, Any]) -> None:
        super().__init__(held, options)
        self.settings = {name: options[name] for name in ("beta2", "eps")}
        self._rank = held.group.rank()
        counts = zip(held.layout.matrices, held.experts, strict=True)
        self._stacks = [
            (count, matrix.shape[0] // count, matrix.shape[1]) for matrix, count in counts
        ]
        # A number for each row, or each column; source: emerging-optimizers'
        # AdaptiveMuon._init_group.
        self._by_row = [rows >= cols for _, rows, cols in self._stacks]
        sizes = [count * max(rows, cols) for count, rows, cols in self._stacks]
        self._all = torch.zeros(sum(sizes), dtype=torch.float32, device=held.device)
        # the numbers of each matrix: views
        self._whole: tuple[torch.Tensor, ...] = self._all.split(sizes)
        self._shards = [matrix.shard_of(self._rank) for matrix in held.layout.matrices]
        self._rectangles = held.rectangles or [
            (s.row_start, s.rows, s.col_start, s.cols) for s in held.shards
        ]
        self._done: set[int] = set()

    @override
    def zeros(self, slot: str, index: int, parameter: torch.Tensor) -> torch.Tensor:
        return neuron_moment(parameter, by_row=self._by_row[index], over_tp=self.held.over_tp)

    @override
    def begin(self, step: Step) -> None:
        self._groups, self._moments = step.groups, step.state(MOMENT2)
        self._done.clear()
        self._all.zero_()
        for index, moment in enumerate(self._moments):
            part = self._part(index, sending=True)
            if part is not None:
                part.copy_(moment.reshape(-1))
        if not self.held.replicated:
            self._sum()

    def normalize(self, index: int, update: torch.Tensor, finite: torch.Tensor) -> None:
        """Advance a matrix's second moment by its whole unscaled update `(rows, cols)` fp32, normalise and scale that.

        Where it is not `finite` the second moment stays. Source: emerging-optimizers'
        AdaptiveMuon._apply_moment2_normalization and _match_frobenius_norm.
        """
        assert index not in self._done
        self._done.add(index)
        beta2, eps = self._groups[index]["beta2"], self._groups[index]["eps"]
        dim = -1 if self._by_row[index] else -2
        experts, rows, _ = self._stacks[index]
        moments = self._whole[index].view(experts, -1).unsqueeze(dim)
        update.masked_fill_(~finite, 0.0)
        for matrix, moment, scale in zip(
            update.split(rows), moments, self.held.scales[index].split(rows), strict=True
        ):
            moment.lerp_(
                matrix.square().mean(dim=dim, keepdim=True), finite.float() * (1.0 - beta2)
            )
            before = torch.linalg.vector_norm(matrix)
            matrix.mul_(moment.clamp_min(eps).rsqrt_())
            matrix.mul_(before / torch.linalg.vector_norm(matrix).clamp_min(eps))
            matrix.mul_(scale)

    @override
    def end(self) -> None:
        if not self.held.repeated:
            for index, whole in enumerate(self._whole):
                if index not in self._done:
                    whole.zero_()
            self._sum()
        for index, moment in enumerate(self._moments):
            part = self._part(index, sending=False)
            if part is not None and moment.numel():
                moment.copy_(part.view(moment.shape))

    def _sum(self) -> None:
        if self.held.group.size() > 1 and self._all.numel():
            dist.all_reduce(self._all, group=self.held.group)

    def _part(self, index: int, *, sending: bool) -> torch.Tensor | None:
        """This rank's slice of a matrix's numbers; None if it has none.

        When sending, also None unless this rank is the first that holds them.
        """
        experts, rows, _ = self._stacks[index]
        shard = self._shards[index]
        whole = self._whole[index]
        if self.held.replicated:
            return whole
        by_row = self._by_row[index]
        if sending:
            if shard is None or shard.rank != self._rank:  # the first holder sends for its replicas
                return None
            start = shard.col_start if by_row else shard.row_start % rows
            if start > 0:
                return None
        if by_row or experts == 1:
            row, count, col, cols = self._rectangles[index]
            return whole[row : row + count] if by_row else whole[col : col + cols]
        if shard is None:
            return None
        # experts lie whole on a rank
        first, last = shard.row_start // rows, (shard.row_start + shard.rows) // rows
        return whole.view(experts, -1)[first:last].view(-1)


def neuron_moment(parameter: torch.Tensor, *, by_row: bool, over_tp: bool) -> torch.Tensor:
    """Zeros for one number for each row (or column) of `parameter`, fp32, a DTensor as `parameter` is.

    Ranks that shard the dimension averaged over hold the same numbers; so do tensor-parallel ranks
    with `over_tp`, whose parts are matrices of their own otherwise.
    """
    gone = parameter.ndim - 1 if by_row else parameter.ndim - 2

    def without(shape: Sequence[int], size: int = 1) -> torch.Size:
        return torch.Size((*shape[:gone], size, *shape[gone + 1 :]))

    if not isinstance(parameter, DTensor):
        return parameter.new_zeros(without(parameter.shape), dtype=torch.float32)
    mesh, size, placements = parameter.device_mesh, 1, list(parameter.placements)
    names = mesh.mesh_dim_names or ("",) * len(placements)
    for place, placement in enumerate(placements):
        if getattr(placement, "dim", None) == gone:  # a Shard or _StridedShard
            if "tp" in names[place] and not over_tp:
                size *= mesh.size(place)
            else:
                placements[place] = Replicate()
    local = parameter._local_tensor.new_zeros(
        without(parameter._local_tensor.shape), dtype=torch.float32
    )
    shape = without(parameter.shape, size)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
