"""What megatron-core itself needs in order to run on the CPU, beside devices and collectives.

Token counts as numbers for collectives, norms that know sequence parallelism, random numbers that resume where they
stopped, and no saving in the background, which would write what training is changing meanwhile. None of it touches
numerics. Needed with megatron-core 0.19.x.
"""

import copy
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from megatron_muon.patching import Patches


def install(patches: Patches) -> None:
    """Patches the mixture-of-experts token counts, torch's norms, the data loaders and the checkpoint worker."""
    from megatron.core.dist_checkpointing.strategies import async_utils
    from megatron.core.transformer.moe import moe_utils, token_dispatcher
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from torch.utils.data import dataloader

    for module in (moe_utils, token_dispatcher):  # the second imports it by name
        patches.wrap(module, "maybe_move_tensor_to_cpu", _as_numpy_here_too, takes=("tensor", "as_numpy"))

    patches.wrap(WrappedTorchNorm, "__new__", _norm_over_sequence, takes=("config",))
    patches.wrap(dataloader._BaseDataLoaderIter, "__init__", _leaving_random_numbers_alone, takes=("loader",))
    patches.replace(async_utils.PersistentAsyncCaller, "_get_process", _refuse_worker)


def _as_numpy_here_too(move: Callable[..., Any]) -> Callable[..., Any]:
    """The all-to-all dispatcher wants token counts as numbers, but converts only tensors that are on a GPU."""

    def moved(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        result = move(tensor, as_numpy, record_stream)
        return result.numpy() if as_numpy and isinstance(result, torch.Tensor) else result

    return moved


def _norm_over_sequence(make: Callable[..., Any]) -> Callable[..., Any]:
    """torch's norms, the only ones without Apex and Transformer Engine, are refused with sequence parallelism.

    All they lack is the mark by which Megatron sums the gradients of their weights over tensor-parallel ranks.
    """

    def new(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        alone = copy.copy(config)
        alone.sequence_parallel = False
        norm = make(cls, alone, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    return new


def _leaving_random_numbers_alone(init: Callable[..., None]) -> Callable[..., None]:
    """A loader's iterator draws a seed for its workers from the CPU's generator, which here is dropout's too.

    A resumed run makes its iterators after the generator's state was restored, so every dropout after it would differ
    from the uninterrupted run's.
    """

    def made(self: Any, loader: Any) -> None:
        state = torch.get_rng_state()
        init(self, loader)
        torch.set_rng_state(state)

    return made


def _refuse_worker(*args: Any, **kwargs: Any) -> NoReturn:
    # The worker is a fresh process, where nothing is installed: it divides by its zero CUDA devices and
    # dies. Were it to live, it would share the optimizer's tensors rather than copies of them: copying to
    # the host, which makes the snapshot on a GPU, hands back the same tensor on the CPU.
    raise RuntimeError(
        "--use-persistent-ckpt-worker does not work on the CPU: leave it and --async-save out, and checkpoints "
        "are written before training goes on."
    )
