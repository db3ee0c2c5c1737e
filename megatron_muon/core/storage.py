"""Storage of momentum and weights: where they are computed with, or a store that stages them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from megatron_muon.core.wave import Chunk

Borrowed = Iterator[tuple[range, list[Tensor]]]
"""Parts of a list of shards, one after the other: positions in the list, and rows `(rows, cols)`
fp32, to be changed in place. When the next part is requested, the one before goes back."""


class Storage:
    """Rows where they are, fp32, borrowed all at once; `of_shard` finds those of a shard."""

    def __init__(self, of_shard: Callable[[int], Tensor]) -> None:
        self._of_shard = of_shard

    def borrow(self, indices: Sequence[int]) -> Borrowed:
        """The rows of these shards, in parts that fit where they are staged, in order."""
        if indices:
            yield range(len(indices)), [self._of_shard(index) for index in indices]

    def end_step(self) -> None:
        """Every shard has been borrowed once."""


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


class MomentumStore(Storage, ABC):
    """Keeps momentum, or other state, outside of the optimizer's; see `offload.store`.

    Attributes:
        rounds: momentum is rounded for storage, so a count of steps is kept with it.
        steps: the count of the training's steps; stochastic rounding depends on it.
        beside: prepares rows, on a stream of its own if there is one.
    """

    rounds: bool
    steps: int
    beside: InOrder

    @abstractmethod
    def scratch(self, sizes: Sequence[int]) -> list[Tensor]:
        """Memory for fp32 tensors of so many elements, for as long as they are used."""

    @abstractmethod
    def read(self, index: int) -> Tensor:
        """A copy `(rows, cols)` fp32 of a shard's momentum, between steps."""

    @abstractmethod
    def write(
        self,
        index: int,
        values: Tensor,
    ) -> None:
        """Replace a shard's momentum by `values` `(rows, cols)` fp32, between steps."""
