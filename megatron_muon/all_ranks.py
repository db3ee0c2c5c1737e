"""Values that all ranks share outside of a step, and work that the first rank does for all."""

# Annotations are no strings here: documentation tools do not find the type parameters of a generic
# function in them.

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron_muon.core.ranks import Alone, numbers_of_all_ranks, of_all_ranks, timeout_of_world
from megatron_muon.core.user_errors import UserError

REDUCE_SCATTER = "reduce_scatter_single"
if not hasattr(dist, REDUCE_SCATTER):  # before torch 2.13, which warns of the older name
    REDUCE_SCATTER = "reduce_scatter_tensor"


def is_first_rank() -> bool:
    """True on rank 0, and in a process without others."""
    if dist.is_initialized():
        return dist.get_rank() == 0
    return int(os.environ.get("RANK", "0")) == 0


def say(text: str) -> None:
    """Print on the first rank."""
    if is_first_rank():
        print(text, flush=True)


def of_first_rank[T](make: Callable[[], T]) -> T:
    """Return on every rank the value that rank 0 makes. Collective.

    Raises:
        UserError: As raised on rank 0.
        OSError: On every rank, for any other exception of rank 0.
    """
    made: list[Any] = [None, None]
    if is_first_rank():
        try:
            made[0] = make()
        except Exception as error:
            made[1] = error if isinstance(error, UserError) else OSError(f"rank 0: {error}")
    if dist.is_initialized():
        dist.broadcast_object_list(made, src=0)
    value, failure = made
    if failure is not None:
        raise failure
    return value  # type: ignore[no-any-return]


def of_any_rank(flags: Sequence[bool]) -> list[bool]:
    """Combine flags by "or" over all ranks. Collective."""
    if not dist.is_initialized():
        return list(flags)
    found = torch.tensor(flags, dtype=torch.uint8, device=c10d._get_object_coll_device())
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return [bool(flag) for flag in found.tolist()]


def of_all_ranks_if_any[T](value: T, group: dist.ProcessGroup | Alone | None = None) -> list[T]:
    """Return the value of each rank of a group, or an empty list if all are false. Collective.

    If all are false, only numbers travel.
    """
    if not any(found for (found,) in numbers_of_all_ranks([bool(value)], group)):
        return []
    return of_all_ranks(value, group)


def new_group_of(label: int, *, backend: str | None = None) -> dist.ProcessGroup:
    """Make a process group of the ranks that give the same label. Collective."""
    members = defaultdict[int, list[int]](list)
    for rank, (theirs,) in enumerate(numbers_of_all_ranks([label])):
        members[theirs].append(rank)
    made = dict[int, dist.ProcessGroup]()
    for each in sorted(members):  # in one order on all ranks
        made[each] = dist.new_group(members[each], timeout_of_world(), backend)
    return made[label]


def reduce_scatter_single(
    output: torch.Tensor, whole: torch.Tensor, op: Any, group: dist.ProcessGroup | None
) -> None:
    """Reduce a tensor and scatter equal parts of it. Collective."""
    getattr(dist, REDUCE_SCATTER)(output, whole, op=op, group=group)
