"""A backend of torch.distributed that carries nothing and records everything: the process groups of a rehearsal.

torch's own fake backend has no way to tell that a collective has been waited for. Groups are torch's: made by
`init_process_group` and `new_group`, seen by whatever asks torch.distributed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, override

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_muon.core import collectives
from megatron_muon.patching import Patches
from megatron_muon.tools.rehearse.recorder import Call, Members, Recorder, Split

BACKEND = "rehearsal"
_current: list[Recorder] = []


class _Started(dist.Work):
    """A collective that is recorded as waited for where it is."""

    def __init__(self, recorder: Recorder, call: int | None) -> None:
        super().__init__()
        self._recorder, self._call = recorder, call

    @override
    def wait(self, timeout: Any = None) -> bool:
        self._recorder.wait(self._call)
        return True


class RecordingGroup(dist.ProcessGroup):
    """A process group whose collectives are recorded.

    Values of the host, exchanged while optimizers are made, are answered as if all ranks had sent the same; tensors of
    the device are fake, and left alone.
    """

    def __init__(self, rank: int, ranks: Sequence[int], recorder: Recorder) -> None:
        super().__init__(rank, len(ranks))  # type: ignore[call-arg]  # an overload that torch does not annotate
        groups = recorder.trace.groups
        groups.append(Members(tuple(ranks), sum(members.ranks == tuple(ranks) for members in groups)))
        self._index, self._recorder = len(groups) - 1, recorder

    def getBackendName(self) -> str:  # noqa: N802
        """What torch.distributed calls the group's backend."""
        return BACKEND

    def _start(self, op: str, tensor: torch.Tensor, **details: Any) -> _Started:
        call = Call(self._index, op, str(tensor.dtype).removeprefix("torch."), **details)
        return _Started(self._recorder, self._recorder.call(call))

    @override
    def allreduce(self, tensors: Any, opts: Any = None) -> _Started:  # type: ignore[override]
        return self._start("all_reduce", tensors[0], nbytes=tensors[0].nbytes)

    @override
    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> _Started:
        if not isinstance(tensor, FakeTensor):
            output.view(self.size(), -1).copy_(tensor.view(1, -1))
        return self._start("all_gather", tensor, nbytes=tensor.nbytes)

    @override
    def alltoall_base(
        self, output: torch.Tensor, tensor: torch.Tensor, output_sizes: Any, input_sizes: Any, opts: Any = None
    ) -> _Started:
        sent, received = self._split(tensor, input_sizes), self._split(output, output_sizes)
        return self._start("all_to_all", tensor, sent=sent, received=received)

    # As torch 2.13 calls them.
    all_gather_single = _allgather_base  # type: ignore[assignment]
    all_to_all_single = alltoall_base  # type: ignore[assignment]

    def _split(self, tensor: torch.Tensor, counts: Sequence[int]) -> Split:
        each = np.array(counts or [len(tensor) // self.size()] * self.size(), dtype=np.int64)
        if each.sum() != len(tensor):
            raise ValueError(f"splits of an all-to-all add up to {each.sum()}, the buffer has {len(tensor)}")
        (peers,) = each.nonzero()
        return Split(peers, each[peers] * tensor.itemsize)


def _create(options: Any, _: Any) -> RecordingGroup:
    ranks = options.global_ranks_in_group or range(options.group_size)
    return RecordingGroup(options.group_rank, ranks, _current[-1])


@contextlib.contextmanager
def world(world_size: int, recorder: Recorder) -> Iterator[None]:
    """torch.distributed as the recorder's rank of `world_size` has it, its collectives recorded."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
    _current.append(recorder)
    with Patches() as patches:
        patches.replace(dist, "all_gather_object", _all_say_the_same, takes=("object_list", "obj", "group"))
        patches.replace(collectives, "exchange_pairs", partial(dist.all_to_all_single, async_op=True))
        patches.replace(sys, "excepthook", sys.excepthook)  # torch puts one of its own before it, for every rank
        dist.init_process_group(BACKEND, rank=recorder.trace.rank, world_size=world_size, store=FakeStore())
        try:
            yield
        finally:
            dist.destroy_process_group()
            _current.pop()


def _all_say_the_same(object_list: list[Any], obj: Any, group: Any = None) -> None:
    """For objects, whose bytes torch cannot put into a tensor in its fake mode."""
    object_list[:] = [obj] * len(object_list)
