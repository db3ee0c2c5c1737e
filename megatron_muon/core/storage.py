"""Where a step finds momentum and weights of its shards: where they are, or in a store that stages them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch

from megatron_muon.core.exchange import RowPhases

Borrowed = Iterator[tuple[range, list[torch.Tensor]]]
"""Parts of a list of shards, one after the other: the places in the list, and their rows `(rows, cols)` fp32, to be
changed in place. When the next part is asked for, the one before goes back."""


class Storage:
    """Rows of shards where they are, fp32, such as weights: borrowed all at once; `of_shard` finds those of a shard."""

    def __init__(self, of_shard: Callable[[int], torch.Tensor]) -> None:
        self._of_shard = of_shard

    def borrow(self, indices: Sequence[int]) -> Borrowed:
        """The rows of these shards, in parts that fit where they are staged, in order."""
        if indices:
            yield range(len(indices)), [self._of_shard(index) for index in indices]

    def end_step(self) -> None:
        """Every shard has been borrowed once."""


class MomentumStore(Storage, ABC):
    """Keeps momentum, or other state, outside of the optimizer's; see `offload.store`.

    Attributes:
        rounds: whether momentum is rounded for storage, so that a count of steps has to be kept
            with it.
        steps: the count of the training's steps; stochastic rounding depends on it.
    """

    rounds: bool
    steps: int

    @abstractmethod
    def step(self, rows: RowPhases) -> AbstractContextManager[RowPhases]:
        """Around the exchange of a step: the phases that the exchange is to call, `rows` or what stands before them."""

    @abstractmethod
    def scratch(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Memory for fp32 tensors of so many elements, for as long as they are used."""

    @abstractmethod
    def read(self, index: int) -> torch.Tensor:
        """A copy `(rows, cols)` fp32 of a shard's momentum, between steps."""

    @abstractmethod
    def write(self, index: int, values: torch.Tensor) -> None:
        """Replace a shard's momentum by `values` `(rows, cols)` fp32, between steps."""
