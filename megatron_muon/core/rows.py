"""This rank's rows of every matrix: gradients, momentum and weights, as a step reads and writes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_muon.core.build import Waves
from megatron_muon.core.wave import Chunk

MOMENTUM = "momentum_buffer"
"""The momentum's slot of the optimizer state, upstream's name."""

STEPS = "rounding_steps"
"""A parameter group's count of steps, where momentum is rounded for storage."""


Borrowed = Iterator[tuple[range, list[Tensor]]]
"""Parts of a list of shards, one after the other: positions in the list, and rows `(rows, cols)`
fp32, to be changed in place. When the next part is requested, the one before goes back."""


@dataclass(frozen=True)
class HeldRows:
    """Consecutive matrices of a wave, of which this rank has rows.

    Attributes:
        flat: their rows, fp32, one matrix after the other: gradients before the exchange, then
            updates, NaN in all elements of one that is not finite.
        rows: views of `flat`, `(rows, cols)` each.
        state: momentum before the exchange, weights after it, `(rows, cols)` each.
        flat_state: all of `state`, in the order of `flat`, if it is contiguous.
        scratch: fp32 memory as large as `flat` for a rule to overwrite; None allocates.
    """

    indices: Sequence[int]
    groups: Sequence[dict[str, Any]]
    flat: Tensor
    rows: list[Tensor]
    state: list[Tensor]
    flat_state: Tensor | None = None
    scratch: Tensor | None = None

    def by_group(self) -> Iterator[tuple[dict[str, Any], list[Tensor], list[Tensor]]]:
        """Each parameter group with rows and state of its matrices, as one flat pair if it can."""
        places: dict[int, list[int]] = {}
        for place, group in enumerate(self.groups):
            places.setdefault(id(group), []).append(place)
        if len(places) == 1 and self.flat_state is not None:
            yield self.groups[0], [self.flat], [self.flat_state]
            return
        for chosen in places.values():
            rows = [self.rows[place] for place in chosen]
            state = [self.state[place] for place in chosen]
            yield self.groups[chosen[0]], rows, state

    def scratch_like(self, rows: Tensor) -> Tensor:
        """Memory of the shape of `rows`, fp32, to overwrite until the next call."""
        if self.scratch is None:
            return torch.empty_like(rows)
        return self.scratch[: rows.numel()].view(rows.shape)


class InOrder:
    """Rows are prepared in the order of the step's stream."""

    def begin(self) -> None:
        """Begin a step."""

    def end(self) -> None:
        """End a step."""

    def prepare(self, chunk: Chunk) -> AbstractContextManager[None]:
        """Around the preparation of a chunk's rows."""
        return nullcontext()

    def packed(self, chunk: Chunk) -> None:
        """All that reads `chunk.prepared` has been enqueued."""


class Storage:
    """Rows where they are, fp32, borrowed all at once; `of_shard` finds those of a shard.

    Attributes:
        beside: prepares rows, on a stream of its own if there is one.
        format: `kernels.FP32`, `BF16` or `INT8`.
    """

    beside = InOrder()
    format = 0

    def __init__(self, of_shard: Callable[[int], Tensor]) -> None:
        self._of_shard = of_shard

    def read(self, index: int) -> Tensor:
        """The rows of a shard, between steps."""
        return self._of_shard(index)

    def borrow(self, indices: Sequence[int]) -> Borrowed:
        """The rows of these shards, in parts that fit where they are staged, in order."""
        if indices:
            yield range(len(indices)), [self._of_shard(index) for index in indices]

    def end_step(self) -> None:
        """Every shard has been borrowed once."""

    def addresses(self, index: int) -> tuple[int, int]:
        """Of a shard's elements, and of their scales."""
        return self._of_shard(index).data_ptr(), 0

    def seeds(self, index: int) -> tuple[int, int, int, int]:
        """Of the noise of rows and of columns in this step; first row and column of the shard.

        For formats that are rounded with noise; fp32, as here, is not.
        """
        raise NotImplementedError


class Rows:
    """This rank's rows, by matrix.

    Args:
        names: of all matrices, for messages.
        waves: of the step, whose chunks have the shards.
        weights: gives the rows `(rows, cols)` of a matrix that its parameter holds.
        outside: weights that parameters do not hold.
        momentum: rows of momentum, fp32, that are kept in another order than a chunk's.
        store: keeps momentum instead.
        skip_missing: a matrix that some rank has no gradient for, or one that is not finite, keeps
            weights and state on every rank, instead of being an error. Costs one all-reduce of a
            number for each matrix in a step.

    Attributes:
        has_momentum: rows have momentum, in `state` of the `HeldRows` before the exchange.
        kept_weights, kept_momentum: where they are between steps.
        groups, gradients: each matrix's parameter group with its numbers, and rows of its gradient,
            None where there is none; to be set before a step.
        state: gives the rows of a rule's slot, by matrix.
        replicas: gives the number of ranks that hold the same rows of a matrix, where this one does.
        failed: NaN for each matrix that no rank updates, 0 for others; None for no such one.
    """

    def __init__(
        self,
        names: Sequence[str],
        waves: Waves,
        weights: Callable[[int], Tensor],
        *,
        outside: Storage | None = None,
        momentum: Mapping[int, Tensor] | None = None,
        store: Storage | None = None,
        skip_missing: bool = False,
    ) -> None:
        self.names = names
        self.weights = weights
        self.groups: Sequence[dict[str, Any]] = ()
        self.gradients: Sequence[Tensor | None] = ()
        self.state: Callable[[str], list[Tensor]] = lambda slot: []
        self.momentum = dict(momentum or {})
        self.kept_weights = outside or Storage(weights)
        self.has_momentum = waves.method.takes_momentum
        of_shard = self.momentum.__getitem__
        self.kept_momentum = store or Storage(
            of_shard if self.has_momentum else lambda index: torch.empty(0)
        )
        self.beside = self.kept_momentum.beside
        self._group = waves.transport.group
        self._device = waves.memory.tensor.device
        self._skip_missing = skip_missing
        self.failed: Tensor | None = None
        self.held: list[int] = []
        replicas: dict[int, int] = {}
        chunks = waves.chunks
        for chunk in chunks:
            self.held += chunk.indices
            for held in chunk.rows:
                replicas[held.of] = len(held.shard.holders)
            if store is None and self.has_momentum:
                self._make_momentum(chunk)
        self.replicas = replicas.__getitem__
        assert len(set(self.held)) == len(self.held), "a shard is in two waves"
        self.order = torch.tensor(
            self.held,
            dtype=torch.int64,
            device=self._device,
        )
        self._skipped = self.order.new_zeros(len(self.names), dtype=torch.int32)
        self.first_elements = self.order.new_zeros(len(self.held), dtype=torch.float32)
        sizes = [len(chunk.indices) for chunk in chunks]
        parts = self.first_elements.split(sizes)
        for chunk, part in zip(chunks, parts, strict=True):
            chunk.first_elements = part

    def _make_momentum(self, chunk: Chunk) -> None:
        """Make momentum, one flat tensor for a chunk, where it is not given."""
        rows = [held for held in chunk.rows if held.of not in self.momentum]
        sizes = [held.shard.numel for held in rows]
        flat = torch.zeros(
            sum(sizes),
            dtype=torch.float32,
            device=self._device,
        )
        if len(rows) == len(chunk.rows):
            chunk.momentum = flat
        for held, part in zip(rows, flat.split(sizes), strict=True):
            self.momentum[held.of] = part.view(held.shard.rows, held.shard.cols)

    def find_failed(self, mark: Callable[[Tensor], None] | None = None) -> None:
        """Find matrices whose gradient is missing or not finite on some rank. Collective.

        `mark` makes the numbers of this rank's such matrices NaN, `(matrices,)` fp32, in the place of
        torch operations.

        Momentum advances before rows travel, so a rank that knew only its own gradients would
        advance the momentum of a matrix that another rank cannot update.

        Raises:
            RuntimeError: a shard with rows has no gradient, and missing ones are not skipped.
        """
        self.failed = None
        if not self._skip_missing:
            missing = [index for index in self.held if self.gradients[index] is None]
            if missing:
                raise RuntimeError(
                    f"{self.names[min(missing)]} has no gradient at the optimizer step; was"
                    " finish_grad_sync() called?"
                )
            return
        failed = torch.zeros_like(self._skipped, dtype=torch.float32)
        (mark or self._mark_failed)(failed)
        if self._group.size() > 1:
            dist.all_reduce(failed, group=self._group)
        # where nothing waits for a device to tell
        if self._device.type != "cpu" or failed.isnan().any():
            self.failed = failed

    def _mark_failed(self, failed: Tensor) -> None:
        """Make the numbers of matrices NaN whose gradient is missing here, or not finite."""
        missing = [index for index in self.held if self.gradients[index] is None]
        absent = set(missing)
        ready = [index for index in self.held if index not in absent]
        if ready:
            gradients: Any = [self.gradients[index] for index in ready]
            # the largest magnitudes: a sum of finite numbers may overflow
            norms = torch.stack(torch._foreach_norm(gradients, ord=math.inf))
            norms = norms.to(self._device, torch.float32)
            at = self.order
            if missing:
                at = torch.tensor(ready, device=self._device)
            failed.index_add_(0, at, norms - norms)  # NaN where it is not finite
        if missing:
            failed[missing] = torch.nan

    def with_momentum(self, chunk: Chunk) -> Iterator[tuple[range, HeldRows]]:
        """Gradients of a chunk, in its prepared rows, with momentum; in parts that fit its staging.

        Rows of a matrix without a gradient keep their values.
        """
        views = []
        gradients = []
        for view, index in zip(chunk.prepared_rows, chunk.indices, strict=True):
            gradient = self.gradients[index]
            if gradient is not None:
                views.append(view)
                gradients.append(gradient)
        if views:
            torch._foreach_copy_(views, gradients)
        for places, momentum in self.kept_momentum.borrow(chunk.indices):
            part = chunk.cut(places)
            rows = part.prepared_rows
            yield places, self._part(part, part.prepared, rows, momentum, part.momentum)

    def with_weights(self, chunk: Chunk) -> Iterator[HeldRows]:
        """Updates of a chunk with their weights, likewise; they go where the weights are.

        Keeps the first element of each for `end`.
        """
        torch.index_select(
            chunk.updates,
            0,
            chunk.firsts,
            out=chunk.first_elements,
        )
        for places, weights in self.kept_weights.borrow(chunk.indices):
            part = chunk.cut(places)
            flat, rows = part.updates, part.updated_rows
            if flat.device != weights[0].device:
                flat = flat.to(weights[0].device)
                rows = part.views(flat)
            yield self._part(part, flat, rows, weights)

    def _part(
        self,
        chunk: Chunk,
        flat: Tensor,
        rows: list[Tensor],
        state: list[Tensor],
        flat_state: Tensor | None = None,
    ) -> HeldRows:
        """The matrices of a chunk, as rules see them."""
        groups = [self.groups[index] for index in chunk.indices]
        scratch = chunk.spare
        if flat.device != chunk.updates.device:
            scratch = None
        return HeldRows(
            chunk.indices,
            groups,
            flat,
            rows,
            state,
            flat_state,
            scratch,
        )

    def end(self) -> None:
        """Count skipped updates, on the device."""
        self._skipped.index_add_(
            0,
            self.order,
            self.first_elements.isnan().int(),
        )

    def end_step(self) -> None:
        """Tell storages that every shard has been borrowed once; forget gradients."""
        self.gradients = ()  # so that their memory can be freed
        self.kept_momentum.end_step()
        self.kept_weights.end_step()

    def skipped_updates(self) -> dict[str, int]:
        """Updates skipped since the last call, by matrix, where this rank has rows.

        Waits for the device.
        """
        counts = self._skipped.tolist()
        self._skipped.zero_()
        return {self.names[index]: count for index, count in enumerate(counts) if count}
