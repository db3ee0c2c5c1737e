"""Stand-ins for a machine: a GPU for fake tensors, and process groups that only record.

A fake tensor needs no driver, but compute capability, streams and the symmetric kernel do. Process
groups are torch's, made by `init_process_group` and `new_group`, with a backend of their own:
torch's fake backend cannot report that a collective has been waited for.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, override
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from emerging_optimizers.orthogonalized_optimizers import muon_utils
from torch._subclasses.fake_tensor import FakeTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.rehearse.recorder import Call, Members, Recorder, Split
from megatron_muon import cpu
from megatron_muon.core import exchange, launches
from megatron_muon.core.methods import symmetric
from megatron_muon.patching import Patches
from megatron_muon.tools.plan.estimate import Hardware

DEVICE = torch.device("cuda", 0)
"""Where the tensors of a rank are."""
BACKEND = "rehearsal"
_current: list[Recorder] = []


@contextlib.contextmanager
def on(hardware: Hardware, recorder: Recorder) -> Iterator[None]:
    """Fake tensors on the machine's GPU, recorded; its nodes as torchrun names them.

    A Triton kernel needs real memory, so only the operations of its product are recorded.
    """
    assert not cpu.installed(), "the CPU stands in for the device that fake tensors are to be on"
    stream = mock.MagicMock()  # on a stream, enqueued work has happened
    stream.record_event.return_value = stream
    synchronized = partial(recorder.host_waits, "synchronize of a stream or an event")
    stream.synchronize.side_effect = synchronized

    def kernel(
        a: torch.Tensor, c: Any, out: torch.Tensor, *, alpha: float = 1.0, beta: float = 0.0
    ) -> None:
        assert a.dtype == out.dtype == torch.bfloat16
        assert a.is_contiguous()
        assert out.is_contiguous()
        assert c is None or c.is_contiguous()
        recorder.now.flops += len(a) ** 2 * a.shape[1]
        size = a.nbytes + out.nbytes + (0 if c is None else c.nbytes)
        recorder.count(1, size, is_product=True)

    def launch(
        kernel: str, programs: int, tensors: Any, constants: Any, nbytes: int, **_: Any
    ) -> None:
        if programs and recorder.is_in_step:
            recorder.count(1, nbytes)

    # `symmetric.products_on` distinguishes machines by it
    capability = (9, 0) if hardware.symmetric_kernel else (8, 0)
    stand_ins: dict[str, Any] = {
        "get_device_capability": lambda device=None: capability,
        "synchronize": lambda device=None: recorder.host_waits("torch.cuda.synchronize"),
        "Stream": lambda *_, **__: stream,
        "Event": lambda *_, **__: stream,
        "current_stream": lambda device=None: stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "set_device": lambda device: None,
    }
    nodes = mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": str(hardware.node_ranks)})
    with Patches() as patches, recorder, nodes:
        for name, value in stand_ins.items():
            patches.replace(torch.cuda, name, value)
        patches.replace(torch.Tensor, "pin_memory", lambda host: host)
        patches.replace(symmetric, "symmetric_kernel", kernel)
        patches.replace(launches, "launch", launch)
        patches.replace(muon_utils.triton_kernels, "HAS_TRITON_340", True)
        yield


@contextlib.contextmanager
def world(world_size: int, recorder: Recorder) -> Iterator[None]:
    """torch.distributed on the recorder's rank of `world_size`, with recorded collectives."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
    _current.append(recorder)
    with Patches() as patches:
        takes = ("object_list", "obj", "group")
        patches.replace(dist, "all_gather_object", _gather_own_object, takes=takes)
        all_to_all = partial(dist.all_to_all_single, async_op=True)
        patches.replace(exchange, "exchange_pairs", all_to_all)
        # torch puts one of its own before it, for every rank
        patches.replace(sys, "excepthook", sys.excepthook)
        rank = recorder.trace.rank
        dist.init_process_group(BACKEND, rank=rank, world_size=world_size, store=FakeStore())
        try:
            yield
        finally:
            dist.destroy_process_group()
            _current.pop()


def _create(options: Any, _: Any) -> RecordingGroup:
    ranks = options.global_ranks_in_group or range(options.group_size)
    return RecordingGroup(options.group_rank, ranks, _current[-1])


def _gather_own_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
    """Gathers objects, whose bytes torch cannot put into a tensor in fake mode."""
    object_list[:] = [obj] * len(object_list)


class RecordingGroup(dist.ProcessGroup):
    """A process group whose collectives are recorded.

    Host values, exchanged while optimizers are built, are answered as if all ranks had sent the
    same; tensors of the device are fake and stay unchanged.
    """

    def __init__(self, rank: int, ranks: Sequence[int], recorder: Recorder) -> None:
        super().__init__(rank, len(ranks))  # type: ignore[call-arg]  # torch lacks this overload
        groups = recorder.trace.groups
        self._index = len(groups)
        self._recorder = recorder
        number = sum(members.ranks == tuple(ranks) for members in groups)
        groups.append(Members(tuple(ranks), number))

    def getBackendName(self) -> str:  # noqa: N802
        """The name of the group's backend."""
        return BACKEND

    def _start(self, op: str, tensor: torch.Tensor, **details: Any) -> _Started:
        step = self._recorder.now
        if not self._recorder.is_in_step:
            return _Started(self._recorder, 0)
        dtype = str(tensor.dtype).removeprefix("torch.")
        step.events.append(Call(self._index, op, dtype, **details))
        return _Started(self._recorder, len(step.calls) - 1)

    @override
    def allreduce(self, tensors: Any, opts: Any = None) -> _Started:  # type: ignore[override]
        return self._start("all_reduce", tensors[0], nbytes=tensors[0].nbytes)

    @override
    def _allgather_base(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> _Started:
        if not isinstance(tensor, FakeTensor):
            output.view(self.size(), -1).copy_(tensor.view(1, -1))
        return self._start("all_gather", tensor, nbytes=tensor.nbytes)

    @override
    def alltoall_base(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_sizes: Any,
        input_sizes: Any,
        opts: Any = None,
    ) -> _Started:
        if not self._recorder.is_in_step:  # a step that is only timed
            return _Started(self._recorder, 0)
        sent = self._split(tensor, input_sizes)
        received = self._split(output, output_sizes)
        return self._start("all_to_all", tensor, sent=sent, received=received)

    # As torch 2.13 calls them.
    all_gather_single = _allgather_base  # type: ignore[assignment]
    all_to_all_single = alltoall_base  # type: ignore[assignment]

    def _split(self, tensor: torch.Tensor, counts: Sequence[int]) -> Split:
        equal = [len(tensor) // self.size()] * self.size()
        each = np.array(counts or equal, dtype=np.int64)
        if each.sum() != len(tensor):
            text = f"splits of an all-to-all add up to {each.sum()}, the buffer has {len(tensor)}"
            raise ValueError(text)
        return Split(each * tensor.itemsize)


class _Started(dist.Work):
    """A started collective, whose wait is recorded within its step."""

    def __init__(self, recorder: Recorder, number: int) -> None:
        super().__init__()
        self._recorder = recorder
        self._step = recorder.now
        self._number = number

    @override
    def wait(self, timeout: Any = None) -> bool:
        if self._recorder.is_in_step and self._recorder.now is self._step:
            self._step.events.append(self._number)
        return True
