"""NorMuon's second moments where they are needed: whole, on the rank that orthogonalises a matrix.

They are a few numbers: one for each row of a tall matrix, one for each column of a wide one. Before the exchange every
rank gets all of them, by one all-reduce of a vector in which each number has one rank that does not send zero: a sum
that rounds nothing. The owner of a matrix advances its own; after the exchange they go round in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_muon.core.batch import Normalize
from megatron_muon.core.layout import Layout


class NeuronMoments:
    """Collects, applies and spreads the second moments of a group's matrices.

    Args:
        layout: who holds which rows; the same on every rank.
        experts: how many matrices each of the layout's matrices stacks.
        group: the process group of the layout.
        scales: for each matrix its factors `(rows, 1)` fp32, applied last.
        columns: of each matrix, the first column that this rank's shards have and their number, for empty ones too.
        replicated: every rank holds whole matrices and all their numbers.
        everywhere: every rank normalises every matrix, so that nothing is left to spread.
        device: where the rows lie.
    """

    def __init__(
        self,
        layout: Layout,
        experts: Sequence[int],
        group: dist.ProcessGroup,
        scales: Sequence[torch.Tensor],
        *,
        columns: Sequence[tuple[int, int]],
        replicated: bool,
        everywhere: bool,
        device: torch.device,
    ) -> None:
        self._group = group
        self._rank = group.rank()
        self._scales = scales
        self._columns = columns
        self._replicated = replicated
        self._everywhere = everywhere
        counts = zip(layout.matrices, experts, strict=True)
        self._stacks = [(count, matrix.shape[0] // count, matrix.shape[1]) for matrix, count in counts]
        sizes = [count * (rows if rows >= cols else cols) for count, rows, cols in self._stacks]
        self._all = torch.zeros(sum(sizes), device=device)
        self._whole: tuple[torch.Tensor, ...] = self._all.split(sizes)  # the numbers of each matrix: views
        self._shards = [None if replicated else matrix.shard_of(group.rank()) for matrix in layout.matrices]
        self._settings: Sequence[tuple[float, float]] = ()
        self._done: set[int] = set()

    def by_row(self, index: int) -> bool:
        """Whether the matrix with this index has a number for each row, and not for each column.

        Source: emerging-optimizers' AdaptiveMuon._init_group.
        """
        _, rows, cols = self._stacks[index]
        return rows >= cols

    def collect(self, moments: Sequence[torch.Tensor], settings: Sequence[tuple[float, float]]) -> None:
        """Get all numbers, before a step.

        Args:
            moments: this rank's part of each matrix's second moment, `(rows, 1)` or `(matrices, cols)`, fp32.
            settings: beta2 and eps of each matrix.
        """
        self._settings = settings
        self._done.clear()
        self._all.zero_()
        for index, moment in enumerate(moments):
            part = self._part(index, sending=True)
            if part is not None:
                part.copy_(moment.reshape(-1))
        if not self._replicated:
            self._sum()

    def normalize(self, index: int, update: torch.Tensor, finite: torch.Tensor) -> None:
        """Advance a matrix's second moment by its update and normalise and scale the update, in place.

        Source: emerging-optimizers' AdaptiveMuon._apply_moment2_normalization and _match_frobenius_norm.

        Args:
            index: the matrix.
            update: its whole unscaled update `(rows, cols)`, zero where it is not finite.
            finite: whether it is, a bool; if not, the second moment stays as it is.
        """
        assert index not in self._done
        self._done.add(index)
        beta2, eps = self._settings[index]
        dim = -1 if self.by_row(index) else -2
        stack = update.float().reshape(self._stacks[index])
        moments = self._whole[index].view(len(stack), -1).unsqueeze(dim)
        normalized = []
        for matrix, moment in zip(stack, moments, strict=True):
            moment.lerp_(matrix.square().mean(dim=dim, keepdim=True), finite * (1.0 - beta2))
            result = matrix * moment.clamp_min(eps).rsqrt_()
            norm = torch.linalg.vector_norm(result).clamp_min(eps)
            normalized.append(result * (torch.linalg.vector_norm(matrix) / norm))
        update.copy_(torch.cat(normalized).mul_(self._scales[index]))

    def normalizer(self, indices: Sequence[int]) -> Normalize:
        """`normalize` for a batch of the matrices with these indices."""
        return lambda place, update, finite: self.normalize(indices[place], update, finite)

    def spread(self, moments: Sequence[torch.Tensor]) -> None:
        """Write this rank's part of the new second moments back, after a step."""
        if not self._everywhere:
            for index, whole in enumerate(self._whole):
                if index not in self._done:
                    whole.zero_()
            self._sum()
        for index, moment in enumerate(moments):
            part = self._part(index, sending=False)
            if part is not None and moment.numel():
                moment.copy_(part.view(moment.shape))

    def _sum(self) -> None:
        if self._group.size() > 1 and self._all.numel():
            dist.all_reduce(self._all, group=self._group)

    def _part(self, index: int, *, sending: bool) -> torch.Tensor | None:
        """This rank's numbers of a matrix; when sending, of those that several ranks hold only the first's."""
        (experts, rows, _), shard, whole = self._stacks[index], self._shards[index], self._whole[index]
        if self._replicated:
            return whole
        if self.by_row(index):
            if shard is None or (sending and (shard.col_start or shard.rank != self._rank)):
                return None
            return whole[shard.row_start : shard.row_start + shard.rows]
        if experts > 1:  # experts lie whole on a rank
            if shard is None or (sending and shard.rank != self._rank):
                return None
            first, last = shard.row_start // rows, (shard.row_start + shard.rows) // rows
            return whole.view(experts, -1)[first:last].view(-1)
        if sending and (shard is None or shard.row_start or shard.rank != self._rank):
            return None
        first, count = self._columns[index]
        return whole[first : first + count]
