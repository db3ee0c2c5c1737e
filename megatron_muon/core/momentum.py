"""Where a step finds momentum and weights of its shards: where they are kept, or in a store that stages them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from megatron_muon.core.exchange import RowPhases


class Lender:
    """Rows of shards, fp32, such as momentum as the optimizer's state: lent to a step all at once, where they are.

    Args:
        of_shard: finds the rows of a shard. They are looked up in every step, because loading a checkpoint replaces an
            optimizer's state.

    Attributes:
        staged: what is lent is taken away again, so it must not be kept.
    """

    staged = False

    def __init__(self, of_shard: Callable[[int], torch.Tensor]) -> None:
        self._of_shard = of_shard

    def step(self, rows: RowPhases) -> AbstractContextManager[RowPhases]:
        """Around the exchange of a step: the phases that the exchange is to call, `rows` or what stands before them."""
        return nullcontext(rows)

    def parts(self, indices: Sequence[int]) -> Iterator[list[int]]:
        """`indices` in parts that can be lent at once, in order."""
        yield list(indices)

    def lend(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """Rows `(rows, cols)` fp32 of each shard, to be changed in place."""
        return [self._of_shard(index) for index in indices]

    def take_back(self, indices: Sequence[int]) -> None:
        """What was lent last has its new value."""

    def end_step(self) -> None:
        """Every shard has been taken back once."""


class MomentumStore(Lender, ABC):
    """Keeps momentum outside of the optimizer's state, and lends it part by part; see `offload.store`."""

    @property
    @abstractmethod
    def rounds(self) -> bool:
        """Whether momentum is rounded for storage, so that a count of steps has to be kept with it."""

    @abstractmethod
    def scratch(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Room for fp32 tensors of so many elements, for as long as they are used."""

    @abstractmethod
    def read(self, index: int) -> torch.Tensor:
        """A copy `(rows, cols)` fp32 of a shard's momentum, between steps."""

    @abstractmethod
    def write(self, index: int, values: torch.Tensor) -> None:
        """Replace a shard's momentum by `values` `(rows, cols)` fp32, between steps."""

    @abstractmethod
    def set_step_count(self, steps: int) -> None:
        """The training has taken `steps` steps; stochastic rounding depends on it."""
