"""Process groups of some ranks, values that all ranks share, and work of the first rank for all.

A step uses none of it but the groups.
"""

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

from megatron_muon.errors import UserError

ALL_GATHER = "all_gather_single"
if not hasattr(dist, ALL_GATHER):  # before torch 2.13, which warns of the older name
    ALL_GATHER = "all_gather_into_tensor"
REDUCE_SCATTER = "reduce_scatter_single"
if not hasattr(dist, REDUCE_SCATTER):  # before torch 2.13, which warns of the older name
    REDUCE_SCATTER = "reduce_scatter_tensor"


class Alone:
    """Stands for the process group of a process that has none, or that is not to talk to others."""

    def size(self) -> int:
        """One rank."""
        return 1

    def rank(self) -> int:
        """The first."""
        return 0


def in_the_world(group: dist.ProcessGroup | Alone | None) -> list[int]:
    """The rank in the world of each rank of a group; None is all ranks."""
    if not dist.is_initialized():
        return [0]
    return [dist.get_rank()] if isinstance(group, Alone) else dist.get_process_group_ranks(group)


def nodes_of(group: dist.ProcessGroup) -> list[int]:
    """The node of each rank of a group, counted from 0, the same on every rank. Collective.

    torchrun numbers ranks node by node, `LOCAL_WORLD_SIZE` of them on each. Where nodes have
    unequal numbers, the first rank of a node stands for it, and where a launcher says nothing, the
    host's name.
    """
    each = int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    place = os.environ.get("LOCAL_RANK")
    if each and place is not None:
        label = dist.get_rank() - int(place)
    else:
        host = hashlib.sha256(socket.gethostname().encode())
        label = -int.from_bytes(host.digest()[:7])
    sizes, labels = zip(
        *numbers_of_all_ranks([each, label], group),
        strict=True,
    )
    if each and set(sizes) == {each}:
        ranks = dist.get_process_group_ranks(group)
        labels = tuple(rank // each for rank in ranks)
    nodes = list(dict.fromkeys(labels))
    return [nodes.index(label) for label in labels]


def of_all_ranks[T](
    value: T,
    group: dist.ProcessGroup | Alone | None = None,
) -> list[T]:
    """The value of each rank of a group, on every rank. Collective.

    In a process without others, a list of its value alone.
    """
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
    device = c10d._get_object_coll_device(group)
    mine = torch.tensor(numbers, dtype=torch.int64, device=device)
    everyone = mine.new_empty(dist.get_world_size(group) * len(numbers))
    all_gather_single(everyone, mine, group=group)
    found: list[list[int]] = everyone.view(-1, len(numbers)).tolist()
    return found


def all_gather_single(
    output: torch.Tensor,
    part: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    async_op: bool = False,
) -> Any:
    """Gather equal parts into one tensor. Collective.

    With `async_op` the result can be waited for.
    """
    return getattr(dist, ALL_GATHER)(output, part, group=group, async_op=async_op)


def timeout_of_world() -> timedelta | None:
    """Timeout of the default group, which torch does not pass on to others; None if not set."""
    default = c10d._get_default_group()
    for device in default._device_types:
        options = default._get_backend(device).options
        if options is not None:
            found: timedelta = options._timeout
            return found
    return None


def connect(
    groups: Iterable[dist.ProcessGroup],
    device: torch.device,
) -> None:
    """Have the backends for `device` connect all ranks of groups now. Collective over each group.

    NCCL connects a group in its first call, which torch forbids to be a `batch_isend_irecv` of some
    ranks alone. Groups that share ranks must come in an order that no two ranks can disagree about.
    """
    for group in groups:
        if group.size() > 1:
            dist.all_reduce(torch.zeros(1, device=device), group=group)


def group_among(
    ranks: Sequence[int],
    group: dist.ProcessGroup,
) -> dist.ProcessGroup:
    """Make a group of some ranks of `group`, in this order, with its backend. Collective over them.

    torch, 2.11 to 2.13 at least, names such a group by its ranks and by how many groups a rank is
    in already: ranks that are in unequal numbers of them would wait for each other for ever. Here
    the name has the number of groups of these very ranks, which all of them know. And a default
    group that is bound to a device would have its communicator split, which takes all ranks of the
    world; without it, torch connects the group in its first collective.
    """
    of_world = dist.get_process_group_ranks(group)
    members = [of_world[rank] for rank in ranks]
    described = hashlib.sha256(
        "_".join(map(str, members)).encode(),
    ).hexdigest()[:16]
    names = (f"megatron_muon_{described}_{number}" for number in itertools.count())
    taken = set(c10d._world.pg_names.values())
    name = next(name for name in names if name not in taken)
    default = c10d._get_default_group()
    hashed = c10d._hash_ranks_to_str
    device = default.bound_device_id
    c10d._hash_ranks_to_str = lambda ranks: name
    default.bound_device_id = None
    # torch 2.11 does not have it
    order: dict[str, Any] = {} if members == sorted(members) else {"sort_ranks": False}
    try:
        made: dist.ProcessGroup = dist.new_group(
            members,
            timeout_of_world(),
            dist.get_backend(group),
            use_local_synchronization=True,
            **order,
        )
    finally:
        c10d._hash_ranks_to_str = hashed
        default.bound_device_id = device
    found = c10d._world.pg_names[made]
    if found != name:
        raise RuntimeError(
            f"torch {torch.__version__} calls a group {found}, not {name}; use torch 2.13"
        )
    return made


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
