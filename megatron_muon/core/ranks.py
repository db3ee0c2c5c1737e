"""What ranks tell each other outside of a step, and what one of them does or says for all."""

# Annotations are no strings here: documentation tools do not find the type parameters of a generic function in them.

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_object_coll_device

from megatron_muon.core.errors import UserError


class Alone:
    """Stands for the process group of a process that has none, or that is not to talk to others."""

    def size(self) -> int:
        """One rank."""
        return 1

    def rank(self) -> int:
        """The first."""
        return 0


def nodes_of(group: dist.ProcessGroup) -> list[int]:
    """The node of each rank of a group, as torchrun numbers ranks: `LOCAL_WORLD_SIZE` of them on each."""
    each = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    return [rank // each for rank in dist.get_process_group_ranks(group)]


def is_first_rank() -> bool:
    """Whether this is rank 0, or a process without others."""
    return not dist.is_initialized() or dist.get_rank() == 0


def say(text: str) -> None:
    """Print on the first rank."""
    if is_first_rank():
        print(text, flush=True)


def of_all_ranks[T](value: T, group: dist.ProcessGroup | Alone | None = None) -> list[T]:
    """The value of each rank of a group, on every rank; this one's alone in a process without others. Collective."""
    if not dist.is_initialized() or isinstance(group, Alone):
        return [value]
    everyone: list[T] = [value] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group=group)
    return everyone


def numbers_of_all_ranks(numbers: Sequence[int], group: dist.ProcessGroup | Alone | None = None) -> list[list[int]]:
    """The int64 numbers of each rank of a group, on every rank, in one collective of a tensor.

    Construction asks all ranks this way: eight bytes a number and rank, where objects are pickled. Collective.
    """
    if not dist.is_initialized() or isinstance(group, Alone):
        return [list(numbers)]
    mine = torch.tensor(numbers, dtype=torch.int64, device=_get_object_coll_device(group))
    everyone = mine.new_empty(dist.get_world_size(group) * len(numbers))
    dist.all_gather_into_tensor(everyone, mine, group=group)
    found: list[list[int]] = everyone.view(-1, len(numbers)).tolist()
    return found


def new_group_of(label: int, *, backend: str | None = None, timeout: timedelta | None = None) -> dist.ProcessGroup:
    """A process group of the ranks that give the same label. Collective over all ranks.

    Every rank makes the groups of all labels, in one order, as torch.distributed.new_group wants it.
    """
    members = defaultdict[int, list[int]](list)
    for rank, (theirs,) in enumerate(numbers_of_all_ranks([label])):
        members[theirs].append(rank)
    made = {each: dist.new_group(members[each], backend=backend, timeout=timeout) for each in sorted(members)}
    group: dist.ProcessGroup = made[label]
    return group


def of_first_rank[T](make: Callable[[], T]) -> T:
    """What rank 0 makes, on every rank; a UserError that it raised, too, and as an OSError any other. Collective."""
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
