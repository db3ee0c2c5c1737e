"""What ranks tell each other outside of a step, and what one of them does or says for all."""

# Annotations are no strings here: documentation tools do not find the type parameters of a generic
# function in them.

import hashlib
import itertools
import os
import socket
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron_muon.core.user_errors import UserError

ALL_GATHER, REDUCE_SCATTER = "all_gather_single", "reduce_scatter_single"
if not hasattr(dist, ALL_GATHER):  # before torch 2.13, which warns of the older names
    ALL_GATHER, REDUCE_SCATTER = "all_gather_into_tensor", "reduce_scatter_tensor"


class Alone:
    """Stands for the process group of a process that has none, or that is not to talk to others."""

    def size(self) -> int:
        """One rank."""
        return 1

    def rank(self) -> int:
        """The first."""
        return 0


def nodes_of(group: dist.ProcessGroup) -> list[int]:
    """The node of each rank of a group, counted from 0, the same on every rank. Collective.

    torchrun numbers ranks node by node, `LOCAL_WORLD_SIZE` of them on each. Where nodes have
    unequal numbers, the first rank of a node stands for it, and where a launcher says nothing, the
    host's name.
    """
    each, place = (os.environ.get(name) for name in ("LOCAL_WORLD_SIZE", "LOCAL_RANK"))
    if each is None or place is None:
        label = -int.from_bytes(hashlib.sha256(socket.gethostname().encode()).digest()[:7])
    else:
        label = dist.get_rank() - int(place)
    found = numbers_of_all_ranks([int(each or 0), label], group)
    sizes = {size for size, _ in found}
    labels = [label for _, label in found]
    if len(sizes) == 1 and (size := sizes.pop()):
        labels = [rank // size for rank in dist.get_process_group_ranks(group)]
    numbers = {label: number for number, label in enumerate(dict.fromkeys(labels))}
    return [numbers[label] for label in labels]


def is_first_rank() -> bool:
    """Whether this is rank 0, or a process without others."""
    return (dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))) == 0


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


def numbers_of_all_ranks(
    numbers: Sequence[int], group: dist.ProcessGroup | Alone | None = None
) -> list[list[int]]:
    """The int64 numbers of each rank of a group, on every rank, in one collective of a tensor."""
    if not dist.is_initialized() or isinstance(group, Alone):
        return [list(numbers)]
    mine = torch.tensor(numbers, dtype=torch.int64, device=c10d._get_object_coll_device(group))
    everyone = mine.new_empty(dist.get_world_size(group) * len(numbers))
    all_gather_single(everyone, mine, group=group)
    found: list[list[int]] = everyone.view(-1, len(numbers)).tolist()
    return found


def of_any_rank(flags: Sequence[bool]) -> list[bool]:
    """Which of these flags are set on some rank, on a device that the process group can reduce on. Collective."""
    if not dist.is_initialized():
        return list(flags)
    found = torch.tensor(flags, dtype=torch.uint8, device=c10d._get_object_coll_device())
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return [bool(flag) for flag in found.tolist()]


def of_all_ranks_if_any[T](value: T, group: dist.ProcessGroup | Alone | None = None) -> list[T]:
    """The value of each rank of a group, on every rank; an empty list where all are empty. Collective, cheap then."""
    if not any(found for (found,) in numbers_of_all_ranks([bool(value)], group)):
        return []
    return of_all_ranks(value, group)


def all_gather_single(
    output: torch.Tensor,
    part: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    async_op: bool = False,
) -> Any:
    """Gathers equal parts into one tensor. Collective; what it gives back can be waited for with `async_op`."""
    return getattr(dist, ALL_GATHER)(output, part, group=group, async_op=async_op)


def reduce_scatter_single(
    output: torch.Tensor, whole: torch.Tensor, op: Any, group: dist.ProcessGroup | None
) -> None:
    """Reduces a tensor and scatters equal parts of it. Collective."""
    getattr(dist, REDUCE_SCATTER)(output, whole, op=op, group=group)


def _timeout() -> timedelta | None:
    """How long collectives of the default group wait, which torch does not hand on to others; None where none says."""
    default = c10d._get_default_group()
    options = [default._get_backend(device).options for device in default._device_types]
    return next((found._timeout for found in options if found is not None), None)


def connect(groups: Iterable[dist.ProcessGroup], device: torch.device) -> None:
    """Have the backends for `device` connect groups now, with all of their ranks. Collective over each of them.

    NCCL connects a group in its first call, which torch forbids to be a `batch_isend_irecv` of some
    ranks alone. Groups that share ranks must come in an order that no two ranks can disagree about.
    """
    for group in groups:
        if group.size() > 1:
            dist.all_reduce(torch.zeros(1, device=device), group=group)


def new_group_of(label: int, *, backend: str | None = None) -> dist.ProcessGroup:
    """A process group of the ranks that give the same label, made in one order on all ranks. Collective."""
    members = defaultdict[int, list[int]](list)
    for rank, (theirs,) in enumerate(numbers_of_all_ranks([label])):
        members[theirs].append(rank)
    made = {each: dist.new_group(members[each], _timeout(), backend) for each in sorted(members)}
    group: dist.ProcessGroup = made[label]
    return group


def group_among(ranks: Sequence[int], group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A process group of some ranks of `group`, in this order, with its backend. Collective over them alone.

    torch, 2.11 to 2.13 at least, names such a group by its ranks and by how many groups a rank is
    in already: ranks that are in unequal numbers of them would wait for each other for ever. Here
    the name has the number of groups of these very ranks, which all of them know. And a default
    group that is bound to a device would have its communicator split, which takes all ranks of the
    world; without it, torch connects the group in its first collective.
    """
    of_world = dist.get_process_group_ranks(group)
    members = [of_world[rank] for rank in ranks]
    described = hashlib.sha256("_".join(map(str, members)).encode()).hexdigest()[:16]
    names = (f"megatron_muon_{described}_{number}" for number in itertools.count())
    taken = set(c10d._world.pg_names.values())
    name = next(name for name in names if name not in taken)
    default = c10d._get_default_group()
    hashed, device = c10d._hash_ranks_to_str, default.bound_device_id
    c10d._hash_ranks_to_str, default.bound_device_id = lambda ranks: name, None
    # torch 2.11 does not have it
    order: dict[str, Any] = {} if members == sorted(members) else {"sort_ranks": False}
    try:
        made: dist.ProcessGroup = dist.new_group(
            members, _timeout(), dist.get_backend(group), use_local_synchronization=True, **order
        )
    finally:
        c10d._hash_ranks_to_str, default.bound_device_id = hashed, device
    if (found := c10d._world.pg_names[made]) != name:
        raise RuntimeError(
            f"torch {torch.__version__} calls a group {found}, not {name}; use torch 2.13"
        )
    return made


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
