"""What one rank does for all, with its failure raised on every rank, and what all ranks tell each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from megatron_muon.errors import UserError


def of_all_ranks[T](value: T) -> list[T]:
    """The value of each rank, on every rank; this one's alone in a process without others."""
    if not dist.is_initialized():
        return [value]
    everyone: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def of_first_rank[T](make: Callable[[], T]) -> T:
    """What rank 0 makes, on every rank; every rank raises the UserError that it raises there."""
    made: list[Any] = [None, None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            made[0] = make()
        except UserError as error:
            made[1] = str(error)
    if dist.is_initialized():
        dist.broadcast_object_list(made, src=0)
    value, refusal = made
    if refusal is not None:
        raise UserError(refusal)
    return value  # type: ignore[no-any-return]


def on_first_rank(act: Callable[[], object]) -> None:
    """Do something on rank 0; every rank raises what it raises there."""
    failure: list[str | None] = [None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            act()
        except Exception as error:
            failure = [f"rank 0: {error}"]
    if dist.is_initialized():
        dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise OSError(failure[0])
