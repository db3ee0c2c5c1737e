"""Collectives over gloo that are as late as NCCL's may be: what was not waited for is not there.

gloo carries a collective out beside the program, usually before anyone looks; NCCL promises nothing
before the wait. Within `delayed_collectives` an asynchronous collective is carried out when it is
waited for, and no earlier:

    issue   its output is filled with NaN, an operand written in place is put aside; nothing is sent
    wait    ranks compare their collectives; then inputs are read, and outputs are written
    after   what was only sent is filled with NaN

A rank sleeps at random, seeded, before both. The work keeps no buffer alive. So whoever reads a
buffer too early reads NaN, and whoever changes what is sent too early sends the change; a buffer
that is freed before the wait, or written to although it is being filled, and a collective that
nobody waits for, are errors. Ranks that wait in different orders, which NCCL allows, would wait for
each other here: they get an error that names two of them.

The methods of ProcessGroup are replaced, so that no function of torch.distributed and no group is
left out; one that is not in the table below is refused. Collectives that are not asynchronous are
delayed and compared, no more.
"""

from __future__ import annotations

import datetime
import random
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map_only

from megatron_muon.core import collectives

_IN_PLACE, _OUT_AND_IN, _NO_TENSORS = "in place", "out and in", "no tensors"
_METHODS = {
    **dict.fromkeys(("allreduce", "broadcast", "reduce"), _IN_PLACE),
    **dict.fromkeys(
        ("allgather", "_allgather_base", "all_gather_single", "gather", "scatter"),
        _OUT_AND_IN,
    ),
    **dict.fromkeys(("alltoall", "alltoall_base", "all_to_all_single"), _OUT_AND_IN),
    **dict.fromkeys(
        ("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single"), _OUT_AND_IN
    ),
    "barrier": _NO_TENSORS,
}
"""ProcessGroup's collectives, by what their first arguments are; some names are of newer versions
of torch alone.
"""

_LONGEST_S = 0.01
_PATIENCE_S = 30.0
_TEXT_BYTES = 160


class DelayedError(AssertionError):
    """A collective under way was not treated as NCCL asks."""


@contextmanager
def delayed_collectives(seed: int, *, patience_s: float = _PATIENCE_S) -> Iterator[None]:
    """Delay the collectives of this process, one of the ranks.

    Args:
        seed: of the delays; each rank has its own.
        patience_s: how long a rank waits for the others of a group before it says where they are.

    Raises:
        DelayedError: a collective was never waited for.
    """
    delays = _Delays(seed, patience_s)
    with ExitStack() as stack:
        for name in list(vars(dist.ProcessGroup)):
            method = getattr(dist.ProcessGroup, name)
            if name in _METHODS or "-> c10d::Work" in (getattr(method, "__doc__", None) or ""):
                stack.enter_context(
                    mock.patch.object(dist.ProcessGroup, name, _replacement(name, method, delays))
                )
        # Messages of pairs alone: all ranks carry them out together, as the all-to-all that they
        # are.
        by_pairs = partial(dist.all_to_all_single, async_op=True)
        stack.enter_context(mock.patch.object(collectives, "exchange_pairs", by_pairs))
        yield
    if delays.under_way:
        raise DelayedError(
            f"rank {delays.rank} never waited for {', '.join(map(str, delays.under_way))}"
        )


class _Delays:
    """What the collectives of this process share."""

    def __init__(self, seed: int, patience_s: float) -> None:
        self.rank = dist.get_rank()
        self.patience = datetime.timedelta(seconds=patience_s)
        self.chance = random.Random(f"{seed} {self.rank}")
        self.issued = Counter[str]()
        self.under_way: list[_Delayed] = []
        self.all_gather = dist.ProcessGroup.allgather

    def sleep(self) -> None:
        """Mostly short, now and then long."""
        time.sleep(_LONGEST_S * self.chance.random() ** 8)


def _replacement(name: str, method: Callable[..., Any], delays: _Delays) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(
            f"delayed collectives do not know ProcessGroup.{name}: add it to {__name__}"
        )

    def issue(group: Any, *args: Any, **kwargs: Any) -> _Delayed:
        delays.sleep()
        return _Delayed(name, method, delays, group, args, kwargs)

    return issue if name in _METHODS else refuse


class _Delayed:
    """Stands for the work of a collective, which `wait` carries out. It has nothing else that a
    work has.
    """

    def __init__(
        self,
        name: str,
        method: Callable[..., Any],
        delays: _Delays,
        group: Any,
        args: Any,
        kwargs: Any,
    ) -> None:
        delays.issued[group.group_name] += 1
        self._text = (
            f"{name} {delays.issued[group.group_name]} of ranks"
            f" {dist.get_process_group_ranks(group)}"
        )
        self._method, self._delays, self._group = method, delays, group
        self._args, self._kwargs = args, kwargs
        options = [given for given in (*args, *kwargs.values()) if hasattr(given, "asyncOp")]
        self._asynchronous = _METHODS[name] != _NO_TENSORS and all(
            given.asyncOp for given in options
        )
        self._in_place = _METHODS[name] == _IN_PLACE
        self._aside: list[torch.Tensor] = []
        if self._asynchronous:
            self._hand_over()
        delays.under_way.append(self)

    def __str__(self) -> str:
        return self._text

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Carry the collective out. Collective."""
        if self not in self._delays.under_way:  # it has been waited for
            return True
        args = tree_map_only(_Buffer, self._tensor, self._args)
        written = tree_leaves(args[:1])
        if self._asynchronous and not all(_poisoned(tensor) for tensor in written):
            self._fail("a buffer that it fills was written to before the wait")
        for tensor, values in zip(written, self._aside, strict=False):
            tensor.copy_(values)
        self._delays.sleep()
        self._meet()
        self._method(self._group, *args, **self._kwargs).wait()
        if self._asynchronous and not self._in_place:
            for tensor in tree_leaves(args[1]):
                _poison(tensor)
        self._delays.under_way.remove(self)
        return True

    def _hand_over(self) -> None:
        """Keep no buffer, and fill with NaN what will be written."""
        written, *others = self._args
        tensors = tree_leaves(written)
        if self._in_place:
            self._aside = [tensor.clone() for tensor in tensors]
        else:
            spans = [_span(tensor) for tensor in tensors]

            # an in-place all-gather sends a part of what it writes
            def held(tensor: torch.Tensor) -> Any:
                first, end = _span(tensor)
                overlaps = any(start < end and first < stop for start, stop in spans)
                return tensor.clone() if overlaps else _Buffer(tensor)

            others[0] = tree_map_only(torch.Tensor, held, others[0])
        for tensor in tensors:
            _poison(tensor)
        self._args = (tree_map_only(torch.Tensor, _Buffer, written), *others)

    def _tensor(self, buffer: _Buffer) -> torch.Tensor:
        tensor = buffer.tensor()
        return (
            self._fail("one of its buffers was freed before the wait") if tensor is None else tensor
        )

    def _fail(self, what: str) -> Any:
        raise DelayedError(f"rank {self._delays.rank} waits for {self}: {what}")

    def _meet(self) -> None:
        """Wait until every rank of the group carries out this collective."""
        mine = torch.frombuffer(
            bytearray(self._text.encode().ljust(_TEXT_BYTES)), dtype=torch.uint8
        )
        everyone = [torch.empty_like(mine) for _ in range(self._group.size())]
        options = dist.distributed_c10d.AllgatherOptions()
        options.timeout = self._delays.patience
        try:
            self._delays.all_gather(self._group, [everyone], [mine], options).wait()
        except RuntimeError:
            self._fail("not all of them wait for it")
        for rank, text in zip(dist.get_process_group_ranks(self._group), everyone, strict=True):
            if (theirs := bytes(text.tolist()).decode().strip()) != self._text:
                self._fail(f"rank {rank} waits for {theirs}; all ranks must wait in one order")


class _Buffer:
    """A tensor whose memory belongs to the program alone."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = weakref.ref(tensor.untyped_storage())
        self._form = (tensor.storage_offset(), tensor.size(), tensor.stride())
        self._dtype = tensor.dtype

    def tensor(self) -> torch.Tensor | None:
        """None where the memory was freed."""
        storage = self._storage()
        return (
            None
            if storage is None
            else torch.empty(0, dtype=self._dtype).set_(storage, *self._form)
        )


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The first address and the one behind the last, of contiguous memory."""
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


def _poison(tensor: torch.Tensor) -> None:
    """NaN in every floating dtype, -1 in the signed ones."""
    _bytes(tensor).fill_(0xFF)


def _poisoned(tensor: torch.Tensor) -> bool:
    return bool((_bytes(tensor) == 0xFF).all())
