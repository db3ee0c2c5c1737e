"""Collectives over gloo that are as late as NCCL's may be: what was not waited for is not there.

gloo carries a collective out beside the program, usually before anyone looks; NCCL promises nothing
before the wait. Within `delayed_collectives` an asynchronous collective is carried out when it is
waited for, and no earlier:

    issue   its output is filled with NaN, an operand written in place is put aside; nothing is sent
    wait    inputs are read, and outputs are written
    after   what was only sent is filled with NaN

The work keeps no buffer alive. So whoever reads a buffer too early reads NaN, and whoever changes
what is sent too early sends the change; a buffer that is freed before the wait, or written to
although it is being filled, and a collective that nobody waits for, are errors. Ranks that wait in
different orders, which NCCL allows, exchange the wrong values here.

The methods of ProcessGroup are replaced, so that no function of torch.distributed and no group is
left out; one that is not in the table below is refused. Collectives that are not asynchronous are
carried out as they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map_only

from megatron_muon.core import exchange

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


class DelayedError(AssertionError):
    """A collective under way was not treated as NCCL asks."""


@contextmanager
def delayed_collectives() -> Iterator[None]:
    """Delay the collectives of this process, one of the ranks.

    Raises:
        DelayedError: a collective was never waited for.
    """
    under_way: list[_Delayed] = []
    with ExitStack() as stack:
        for name in list(vars(dist.ProcessGroup)):
            method = getattr(dist.ProcessGroup, name)
            if name in _METHODS or "-> c10d::Work" in (getattr(method, "__doc__", None) or ""):
                stack.enter_context(
                    mock.patch.object(dist.ProcessGroup, name, _delayed(name, method, under_way))
                )
        # Messages of pairs alone: all ranks carry them out together, as the all-to-all that they
        # are.
        by_pairs = partial(dist.all_to_all_single, async_op=True)
        stack.enter_context(mock.patch.object(exchange, "exchange_pairs", by_pairs))
        yield
    if under_way:
        raise DelayedError(
            f"rank {dist.get_rank()} never waited for {', '.join(map(str, under_way))}"
        )


def _delayed(
    name: str, method: Callable[..., Any], under_way: list[_Delayed]
) -> Callable[..., Any]:
    """What takes the place of a method."""

    def issue(group: Any, *args: Any, **kwargs: Any) -> Any:
        if name not in _METHODS:
            raise NotImplementedError(
                f"delayed collectives do not know ProcessGroup.{name}: add it to {__name__}"
            )
        options = [given for given in (*args, *kwargs.values()) if hasattr(given, "asyncOp")]
        is_asynchronous = all(given.asyncOp for given in options)
        if _METHODS[name] == _NO_TENSORS or not is_asynchronous:
            return method(group, *args, **kwargs)
        return _Delayed(name, partial(method, group, **kwargs), args, under_way)

    return issue


class _Delayed:
    """Stands for the work of a collective, which `wait` carries out. It has nothing else that a
    work has.
    """

    def __init__(
        self, name: str, method: Callable[..., Any], args: Any, under_way: list[_Delayed]
    ) -> None:
        self._name, self._method, self._under_way = name, method, under_way
        self._in_place = _METHODS[name] == _IN_PLACE
        self._aside: list[torch.Tensor] = []
        self._args = self._hand_over(*args)
        under_way.append(self)

    def __str__(self) -> str:
        return self._name

    def wait(self, timeout: Any = None) -> bool:
        """Carry the collective out. Collective."""
        if self not in self._under_way:  # it has been waited for
            return True
        args = tree_map_only(_Buffer, self._tensor, self._args)
        written = tree_leaves(args[:1])
        if not all(_poisoned(tensor) for tensor in written):
            self._fail("a buffer that it fills was written to before the wait")
        for tensor, values in zip(written, self._aside, strict=False):
            tensor.copy_(values)
        self._method(*args).wait()
        if not self._in_place:
            for tensor in tree_leaves(args[1]):
                _poison(tensor)
        self._under_way.remove(self)
        return True

    def _hand_over(self, written: Any, *others: Any) -> tuple[Any, ...]:
        """The arguments without their buffers; what will be written is filled with NaN."""
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

            others = (tree_map_only(torch.Tensor, held, others[0]), *others[1:])
        for tensor in tensors:
            _poison(tensor)
        return tree_map_only(torch.Tensor, _Buffer, written), *others

    def _tensor(self, buffer: _Buffer) -> torch.Tensor:
        tensor = buffer.tensor()
        if tensor is None:
            self._fail("one of its buffers was freed before the wait")
        return tensor

    def _fail(self, what: str) -> Any:
        raise DelayedError(f"rank {dist.get_rank()} waits for {self}: {what}")


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
