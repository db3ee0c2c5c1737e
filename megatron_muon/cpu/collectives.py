"""Makes Megatron-FSDP's collectives safe on gloo: one by one, and finished when the call returns.

Megatron-FSDP frees a bucket's storage as soon as the *stream order* allows it. On a GPU the collective and
the free are ordered on the device. With gloo a coalesced, asynchronous collective runs in a worker thread,
which may still be writing when the bucket's memory is given back: SIGSEGV or SIGABRT in about one run of
fifteen, more under load. The outer (HSDP) reductions and gathers are treated alike.

Only the module `param_and_grad_buffer` sees this; everyone else's collectives, asynchronous ones included,
are left alone. Gradient scaling that NCCL fuses into the reduction (a pre-multiplied sum, an average) is
carried out as a multiplication before, or a division after, a plain sum.

Needed with megatron-core 0.19.x.
"""

import contextlib
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_muon.patching import Patches


class Done:
    """The handle of a collective that has already finished."""

    def wait(self, timeout: Any = None) -> bool:
        """Returns at once."""
        return True

    def is_completed(self) -> bool:
        """True."""
        return True


@dataclass(frozen=True)
class PremulSum:
    """Multiply by `factor`, then sum: gloo has no such reduction."""

    factor: Any


class BlockingDistributed(types.ModuleType):
    """`torch.distributed` as Megatron-FSDP's buffers see it; what is not defined here is the real thing."""

    def __init__(self) -> None:
        super().__init__("torch.distributed (blocking)")

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    @staticmethod
    def _make_nccl_premul_sum(factor: Any) -> PremulSum:
        return PremulSum(factor)

    @staticmethod
    def all_gather_into_tensor(
        output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Done | None:
        """`torch.distributed.all_gather_into_tensor`, finished on return."""
        dist.all_gather_into_tensor(output_tensor, input_tensor, group=group)
        return Done() if async_op else None

    @staticmethod
    def all_reduce(
        tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Done | None:
        """`torch.distributed.all_reduce`, finished on return."""
        with _plain_sum(op, tensor, tensor, group) as plain_op:
            dist.all_reduce(tensor, op=plain_op, group=group)
        return Done() if async_op else None

    @staticmethod
    def reduce_scatter_tensor(
        output: torch.Tensor,
        input: torch.Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Done | None:
        """`torch.distributed.reduce_scatter_tensor`, finished on return."""
        with _plain_sum(op, input, output, group) as plain_op:
            dist.reduce_scatter_tensor(output, input, op=plain_op, group=group)
        return Done() if async_op else None


class _Torch(types.ModuleType):
    """`torch`, but with `BlockingDistributed` for `torch.distributed`."""

    def __init__(self) -> None:
        super().__init__("torch (blocking collectives)")
        self.distributed = BlockingDistributed()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextlib.contextmanager
def _plain_sum(op: Any, source: torch.Tensor, result: torch.Tensor, group: Any) -> Iterator[Any]:
    """Yields a reduction that gloo knows, and does before and after it what that reduction leaves out."""
    if isinstance(op, PremulSum):
        source.mul_(op.factor)  # in place: megatron-core's own unfused branch does the same
        yield dist.ReduceOp.SUM
    elif op == dist.ReduceOp.AVG:
        yield dist.ReduceOp.SUM
        result.div_(dist.get_world_size(group))
    else:
        yield op


@contextlib.contextmanager
def one_by_one(group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[Done]:
    """Stands in for `torch.distributed._coalescing_manager`: each collective runs where it is written."""
    yield Done()


def install(patches: Patches) -> None:
    """Gives Megatron-FSDP's buffer module blocking collectives."""
    import megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer as buffers

    patches.replace(buffers, "_coalescing_manager", one_by_one, takes=("group", "device", "async_ops"))
    patches.replace(buffers, "torch", _Torch())
