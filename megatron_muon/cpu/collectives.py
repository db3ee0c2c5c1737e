"""Makes Megatron-FSDP's collectives safe on gloo: one by one, and finished when the call returns.

Megatron-FSDP frees a bucket's storage as soon as the *stream order* allows it. On a GPU the collective and
the free are ordered on the device. With gloo a coalesced, asynchronous collective runs in a worker thread,
which may still be writing when the bucket's memory is given back: SIGSEGV or SIGABRT in about one run of
fifteen, more under load. The outer (HSDP) reductions and gathers are treated alike.

Only the module `param_and_grad_buffer` sees this; everyone else's collectives, asynchronous ones included,
are left alone. Gradient scaling that NCCL fuses into the reduction (a pre-multiplied sum, an average) is
carried out as a multiplication before, or a division after, a plain sum.
"""

import contextlib
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_muon.patching import Patches


class _Done:
    """The handle of a collective that has already finished."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    is_completed = wait


@dataclass(frozen=True)
class PremulSum:
    """Multiply by `factor`, then sum: gloo has no such reduction."""

    factor: Any


class _View(types.ModuleType):
    """A module with some of its attributes replaced; what is not given is the real thing."""

    def __init__(self, module: types.ModuleType, **replaced: Any) -> None:
        super().__init__(f"{module.__name__} (blocking collectives)")
        self._module = module
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _all_gather_into_tensor(*tensors: torch.Tensor, async_op: bool = False, **kwargs: Any) -> _Done | None:
    dist.all_gather_into_tensor(*tensors, **kwargs)
    return _Done() if async_op else None


def _all_reduce(
    tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> _Done | None:
    with _plain_sum(op, tensor, tensor, group) as plain_op:
        dist.all_reduce(tensor, op=plain_op, group=group)
    return _Done() if async_op else None


def _reduce_scatter_tensor(
    output: torch.Tensor, input: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> _Done | None:
    with _plain_sum(op, input, output, group) as plain_op:
        dist.reduce_scatter_tensor(output, input, op=plain_op, group=group)
    return _Done() if async_op else None


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
def _one_by_one(group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[_Done]:
    """Stands in for `torch.distributed._coalescing_manager`: each collective runs where it is written."""
    yield _Done()


def install(patches: Patches) -> None:
    """Give Megatron-FSDP's buffer module blocking collectives."""
    import megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer as buffers

    blocking = _View(
        dist,
        _make_nccl_premul_sum=PremulSum,
        all_gather_into_tensor=_all_gather_into_tensor,
        all_reduce=_all_reduce,
        reduce_scatter_tensor=_reduce_scatter_tensor,
    )
    patches.replace(buffers, "_coalescing_manager", _one_by_one, takes=("group", "device", "async_ops"))
    patches.replace(buffers, "torch", _View(torch, distributed=blocking))
