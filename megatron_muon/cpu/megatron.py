"""What megatron-core itself needs in order to run on the CPU, beside devices and collectives.

Token counts as numbers for collectives, norms that know sequence parallelism, random numbers that resume where they
stopped, and no saving in the background, which would write what training is changing meanwhile. None of it touches
numerics.
"""

import copy
from typing import Any, NoReturn

import torch

from megatron_muon.patching import Patches


def install(patches: Patches) -> None:
    """Patch the mixture-of-experts token counts, torch's norms, the data loaders and the checkpoint worker."""
    from megatron.core.dist_checkpointing.strategies import async_utils
    from megatron.core.transformer.moe import moe_utils, token_dispatcher
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from torch.utils.data import dataloader

    for module in (moe_utils, token_dispatcher):  # the second imports it by name
        patches.around(module, "maybe_move_tensor_to_cpu", takes=("tensor", "as_numpy"))(_move_as_numpy)
    patches.around(WrappedTorchNorm, "__new__", takes=("config",))(_make_norm)
    patches.around(dataloader._BaseDataLoaderIter, "__init__", takes=("loader",))(_init_iterator)
    patches.replace(async_utils.PersistentAsyncCaller, "_get_process", _refuse_worker)


def _move_as_numpy(move: Any, tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """The all-to-all dispatcher wants token counts as numbers, but converts only tensors that are on a GPU."""
    result = move(tensor, as_numpy, record_stream)
    return result.numpy() if as_numpy and isinstance(result, torch.Tensor) else result


def _make_norm(make: Any, cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
    """torch's norms, the only ones without Apex and Transformer Engine, are refused with sequence parallelism.

    All they lack is the mark by which Megatron sums the gradients of their weights over tensor-parallel ranks.
    """
    alone = copy.copy(config)
    alone.sequence_parallel = False
    norm = make(cls, alone, *args, **kwargs)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm


def _init_iterator(init: Any, iterator: Any, loader: Any) -> None:
    """A loader's iterator draws a seed for its workers from the CPU's generator, which here is dropout's too.

    A resumed run makes its iterators after the generator's state was restored, so every dropout after it would differ
    from the uninterrupted run's.
    """
    state = torch.get_rng_state()
    init(iterator, loader)
    torch.set_rng_state(state)


def _refuse_worker(*args: Any, **kwargs: Any) -> NoReturn:
    # The worker is a fresh process, where nothing is installed: it divides by its zero CUDA devices and
    # dies. Were it to live, it would share the optimizer's tensors rather than copies of them: copying to
    # the host, which makes the snapshot on a GPU, hands back the same tensor on the CPU.
    raise RuntimeError(
        "--use-persistent-ckpt-worker does not work on the CPU: leave it and --async-save out, and checkpoints "
        "are written before training goes on."
    )
