"""Patches for megatron-core on the CPU, besides devices: above all, safe collectives on gloo.

Megatron-FSDP frees a bucket's storage as soon as the *stream order* allows it. With gloo a
coalesced, asynchronous collective runs in a worker thread, which may still be writing when the
bucket's memory is given back: SIGSEGV or SIGABRT in about one run of fifteen. So they run one by
one, and are finished when the call returns. Only the module `param_and_grad_buffer` sees this.
Gradient scaling that NCCL fuses into the reduction (a pre-multiplied sum, an average) is a
multiplication before, or a division after, a plain sum. Nothing here touches numerics.
"""

import contextlib
import copy
import importlib.util
import logging
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from megatron_muon.patching import Patches
from megatron_muon.ranks import all_gather_single, reduce_scatter_single


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
    """A module with some of its attributes replaced."""

    def __init__(self, module: types.ModuleType, **replaced: Any) -> None:
        super().__init__(module.__name__)
        self._module = module
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _all_gather_into_tensor(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: Any = None,
    async_op: bool = False,
) -> _Done | None:
    all_gather_single(output_tensor, input_tensor, group)
    return _Done() if async_op else None


def _all_reduce(
    tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> _Done | None:
    with _plain_sum(op, tensor, tensor, group) as plain_op:
        dist.all_reduce(tensor, op=plain_op, group=group)
    return _Done() if async_op else None


def _reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> _Done | None:
    with _plain_sum(op, input, output, group) as plain_op:
        reduce_scatter_single(output, input, plain_op, group)
    return _Done() if async_op else None


@contextlib.contextmanager
def _plain_sum(op: Any, source: torch.Tensor, result: torch.Tensor, group: Any) -> Iterator[Any]:
    """Yields a reduction that gloo has, with scaling before or after it."""
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
    """Replaces `torch.distributed._coalescing_manager`: each collective runs at its call."""
    yield _Done()


MEGATRON_FSDP = ("megatron.core.distributed.fsdp.src.megatron_fsdp", "megatron_fsdp")
"""The two modules of one library: in megatron-core's wheel, and in a package of its own."""


def install(patches: Patches) -> None:
    """Patch collectives, token counts of experts, norms, data loaders and the checkpoint worker.

    Functions that megatron-core decorates with `torch.compile` while it is imported run uncompiled
    here anyway (`devices`), so they are not decorated: torch's compiler takes more than a second to
    load.
    """
    patches.replace(torch, "compile", _leave_uncompiled)
    from megatron.core.dist_checkpointing.strategies import async_utils
    from megatron.core.tensor_parallel import random as tensor_parallel_random
    from megatron.core.transformer.moe import token_dispatcher
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from torch.utils.data import dataloader

    blocking = _View(
        dist,
        _make_nccl_premul_sum=PremulSum,
        all_gather_into_tensor=_all_gather_into_tensor,
        all_reduce=_all_reduce,
        reduce_scatter_tensor=_reduce_scatter_tensor,
    )
    for library in (name for name in MEGATRON_FSDP if importlib.util.find_spec(name)):
        buffers = importlib.import_module(f"{library}.param_and_grad_buffer")
        patches.replace(
            buffers, "_coalescing_manager", _one_by_one, takes=("group", "device", "async_ops")
        )
        patches.replace(buffers, "torch", _View(torch, distributed=blocking))

    moves = patches.around(token_dispatcher, "maybe_move_tensor_to_cpu", takes=("as_numpy",))
    moves(_move_as_numpy)
    patches.around(WrappedTorchNorm, "__new__", takes=("config",))(_make_norm)
    patches.around(dataloader._BaseDataLoaderIter, "__init__", takes=("loader",))(_init_iterator)
    patches.replace(async_utils.PersistentAsyncCaller, "_get_process", _refuse_worker)
    generators = logging.getLogger(tensor_parallel_random.__name__)
    # its one warning, on every matrix drawn: the CPU's generator stands in for the GPU's
    patches.replace(generators, "disabled", True)


def _leave_uncompiled(model: Any = None, **_: Any) -> Any:
    """`torch.compile`, also as a decorator with arguments."""
    return (lambda decorated: decorated) if model is None else model


def _move_as_numpy(
    move: Any, tensor: Any, as_numpy: bool = False, record_stream: bool = False
) -> Any:
    """Convert token counts to numbers, as megatron-core does for tensors on a GPU alone."""
    result = move(tensor, as_numpy, record_stream)
    return result.numpy() if as_numpy and isinstance(result, torch.Tensor) else result


def _make_norm(make: Any, cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
    """Allow torch's norms, which megatron-core refuses with sequence parallelism.

    Without Apex and Transformer Engine there are no others. They lack only the mark by which
    Megatron sums the gradients of their weights over tensor-parallel ranks.
    """
    alone = copy.copy(config)
    alone.sequence_parallel = False
    norm = make(cls, alone, *args, **kwargs)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm


def _init_iterator(init: Any, iterator: Any, loader: Any) -> None:
    """Keep the generator's state: an iterator draws a seed for its workers from it.

    Here dropout uses the same generator. A resumed run makes its iterators after restoring the
    state, so every dropout after that would differ from the uninterrupted run's. Megatron requests
    pinned memory, and torch would warn that there is none.
    """
    loader.pin_memory = False
    state = torch.get_rng_state()
    init(iterator, loader)
    torch.set_rng_state(state)


def _refuse_worker(*args: Any, **kwargs: Any) -> NoReturn:
    # The worker is a fresh process, where nothing is installed: it divides by its zero CUDA devices
    # and dies. Were it to live, it would share the optimizer's tensors: copying to the host hands
    # back the same tensor on the CPU.
    raise RuntimeError("--use-persistent-ckpt-worker does not work on the CPU; leave it out")
