"""NorMuon's second moments where they are needed: whole, on the rank that orthogonalises a matrix.

They are a few numbers: one for each row of a tall matrix, one for each column of a wide one. Before the exchange every
rank gets all of them, by one all-reduce of a vector in which each number has one rank that does not send zero: a sum
that rounds nothing. The owner of a matrix advances its own; after the exchange they go round in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_muon.core.exchange.owner import Batch
from megatron_muon.core.layout import Layout
from megatron_muon.core.probe import SILENT, Probe


@dataclass(frozen=True)
class _Place:
    """Where the numbers of a matrix lie in the vector, and what they stand for.

    Attributes:
        start: the first of them.
        experts: matrices stacked in the parameter; 1 for a matrix.
        rows: of one of them.
        cols: of one of them.
    """

    start: int
    experts: int
    rows: int
    cols: int

    @property
    def by_row(self) -> bool:
        """Whether there is a number for each row; source: emerging-optimizers' AdaptiveMuon._init_group."""
        return self.rows >= self.cols

    @property
    def numel(self) -> int:
        """How many numbers there are."""
        return self.experts * (self.rows if self.by_row else self.cols)


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
        self._places: list[_Place] = []
        start = 0
        for matrix, count in zip(layout.matrices, experts, strict=True):
            place = _Place(start, count, matrix.shape[0] // count, matrix.shape[1])
            self._places.append(place)
            start += place.numel
        self._all = torch.zeros(start, device=device)
        self._shards = [None if replicated else matrix.shard_of(group.rank()) for matrix in layout.matrices]
        self._settings: Sequence[tuple[float, float]] = ()
        self._done: set[int] = set()

    def by_row(self, index: int) -> bool:
        """Whether the matrix with this index has a number for each row, and not for each column."""
        return self._places[index].by_row

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
        place, (beta2, eps) = self._places[index], self._settings[index]
        dim = -1 if place.by_row else -2
        moments = self._whole(index).view(place.experts, *((place.rows, 1) if place.by_row else (1, place.cols)))
        stack = update.float().reshape(place.experts, place.rows, place.cols)
        normalized = []
        for matrix, moment in zip(stack, moments, strict=True):
            moment.lerp_(matrix.square().mean(dim=dim, keepdim=True), finite * (1.0 - beta2))
            result = matrix * moment.clamp_min(eps).rsqrt_()
            norm = torch.linalg.vector_norm(result).clamp_min(eps)
            normalized.append(result * (torch.linalg.vector_norm(matrix) / norm))
        update.copy_(torch.cat(normalized).mul_(self._scales[index]))

    def spread(self, moments: Sequence[torch.Tensor]) -> None:
        """Write this rank's part of the new second moments back, after a step."""
        if not self._everywhere:
            for index in range(len(self._places)):
                if index not in self._done:
                    self._whole(index).zero_()
            self._sum()
        for index, moment in enumerate(moments):
            part = self._part(index, sending=False)
            if part is not None and moment.numel():
                moment.copy_(part.view(moment.shape))

    def _sum(self) -> None:
        if self._group.size() > 1 and self._all.numel():
            dist.all_reduce(self._all, group=self._group)

    def _whole(self, index: int) -> torch.Tensor:
        place = self._places[index]
        return self._all[place.start : place.start + place.numel]

    def _part(self, index: int, *, sending: bool) -> torch.Tensor | None:
        """This rank's numbers of a matrix; when sending, of those that several ranks hold only the first's."""
        place, shard, whole = self._places[index], self._shards[index], self._whole(index)
        if self._replicated:
            return whole
        if place.by_row:
            if shard is None or (sending and (shard.col_start or shard.rank != self._rank)):
                return None
            return whole[shard.row_start : shard.row_start + shard.rows]
        if place.experts > 1:  # experts lie whole on a rank
            if shard is None or (sending and shard.rank != self._rank):
                return None
            return whole.view(place.experts, -1)[
                shard.row_start // place.rows : (shard.row_start + shard.rows) // place.rows
            ].view(-1)
        if sending and (shard is None or shard.row_start or shard.rank != self._rank):
            return None
        first, count = self._columns[index]
        return whole[first : first + count]


class NormalizedBatch:
    """A batch of matrices whose updates are normalised once they are orthogonalised."""

    def __init__(
        self, batch: Batch, indices: Sequence[int], normalize: Callable[[int, torch.Tensor, torch.Tensor], None]
    ) -> None:
        self._batch = batch
        self._indices = tuple(indices)
        self._normalize = normalize

    def allocate(self, like: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
        """Room for each whole matrix."""
        return self._batch.allocate(like, dtype)

    def orthogonalize(self, probe: Probe = SILENT) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The normalised and scaled update of each matrix, in its place; which are finite."""
        updates, finite = self._batch.orthogonalize(probe)
        for index, update, is_finite in zip(self._indices, updates, finite, strict=True):
            self._normalize(index, update, is_finite)
        return updates, finite
