"""Patches of megatron-core for saving fsdp_dtensor checkpoints, with Muon and with Adam.

Patches for loading alone are in `loading`.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.tensor import DTensor

from megatron_muon.checkpoint import folders
from megatron_muon.checkpoint.content import plain, whole_name
from megatron_muon.checkpoint.dcp import SummedFiles
from megatron_muon.errors import SaveError, reason_of
from megatron_muon.megatron.chained import MuonChainedOptimizer
from megatron_muon.megatron.provenance import versions
from megatron_muon.megatron.scalar_state import initialize_scalar_state
from megatron_muon.megatron.upstream import (
    DistributedOptimizer,
    DistributedSignalHandler,
    checkpointing,
    get_attr_wrapped_model,
    installed,
    training,
)
from megatron_muon.megatron.upstream import fsdp_dtensor_checkpoint as handlers
from megatron_muon.patching import Patches
from megatron_muon.ranks import of_all_ranks, of_first_rank


def save_beside_and_rename(patches: Patches) -> None:
    """Write a checkpoint to another name, with checksums, and rename it when it is complete.

    0.19 writes to the final folder. A save that is cut off leaves a folder that looks like a
    checkpoint; one that repeats an iteration overwrites files of the latest checkpoint.
    """

    @patches.around(dcp, "save", takes=["state_dict", "storage_writer"])
    def save_beside(
        save: Callable[..., Any],
        state_dict: Any,
        *args: Any,
        storage_writer: Any = None,
        **kwargs: Any,
    ) -> Any:
        folder = Path(getattr(storage_writer, "path", "."))
        if not isinstance(storage_writer, FileSystemWriter) or folders.iteration_of(folder) is None:
            return save(state_dict, *args, storage_writer=storage_writer, **kwargs)
        of_first_rank(lambda: folders.begin(folder))
        storage_writer.reset(folder.with_name(folder.name + folders.UNFINISHED))
        storage_writer.fs = written = SummedFiles()
        result = save(state_dict, *args, storage_writer=storage_writer, **kwargs)
        sums = dict(itertools.chain(*(of_rank.items() for of_rank in of_all_ranks(written.sums))))
        of_first_rank(lambda: folders.finish(folder, sums))
        return result


def write_tracker_at_once(patches: Patches) -> None:
    """Write `latest_checkpointed_iteration.txt` so that it is always whole.

    0.19 opens it for writing in place. Killed between that and the write, the run leaves an empty
    file, at which the next one stops.
    """
    text = "maybe_msc.open(tracker_filename, 'w')"
    if text not in inspect.getsource(inspect.unwrap(checkpointing.save_checkpoint)):
        raise RuntimeError(
            f"megatron.training.checkpointing.save_checkpoint no longer has {text} in {versions()}"
        )
    client = checkpointing.maybe_msc

    class WithWholeTracker:
        def __getattr__(self, name: str) -> Any:
            return getattr(client, name)

        def open(self, path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            is_plain = client.open is open  # not in an object store
            if mode == "w" and is_plain and Path(path).name == folders.TRACKER:
                return folders.written_at_once(Path(path))
            return client.open(path, mode, *args, **kwargs)

    patches.replace(checkpointing, "maybe_msc", WithWholeTracker())


def explain_failed_saves(patches: Patches) -> None:
    """Report why a save failed, and the checkpoint to resume from."""

    @patches.around(training, "save_checkpoint")
    def save_checkpoint(
        save: Callable[..., None], iteration: int, *args: Any, **kwargs: Any
    ) -> None:
        try:
            save(iteration, *args, **kwargs)
        except (OSError, CheckpointException) as error:
            from megatron_muon.megatron.upstream import get_args

            save_dir = Path(get_args().save)
            failed = f"the checkpoint of iteration {iteration} could not be written to {save_dir}"
            hint = folders.resume_hint(save_dir)
            raise SaveError(f"{failed} ({reason_of(error)}); {hint}") from error


def have_main_weights_at_hand(patches: Patches) -> None:
    """Provide checkpoints with main weights that `--muon-offload-state all` keeps elsewhere.

    0.19 takes a model's weights from its parameters, which Megatron-FSDP makes show its main
    weights, and loads them in place.
    """

    @patches.around(checkpointing, "generate_state_dict")
    def generate_state_dict(generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        optimizer = kwargs["optimizer"] if "optimizer" in kwargs else args[2]
        is_trial = (kwargs.get("optim_sd_kwargs") or {}).get("is_loading", False)
        with _at_hand(optimizer, values=not is_trial):
            return generate(*args, **kwargs)

    @patches.around(training, "load_checkpoint")
    def load_checkpoint(
        load: Callable[..., Any], ddp_model: Any, optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        with _at_hand(optimizer, write=True):
            return load(ddp_model, optimizer, *args, **kwargs)


def _at_hand(optimizer: Any, **how: bool) -> contextlib.AbstractContextManager[None]:
    ours = isinstance(optimizer, MuonChainedOptimizer)
    return optimizer.main_weights_at_hand(**how) if ours else contextlib.nullcontext()


def remember_signals(patches: Patches) -> None:
    """Remember on every rank that a signal ended the run, for its exit status.

    With `--exit-signal-handler` 0.19 writes a checkpoint then and exits with 0, like a run that is
    complete.
    """

    @patches.around(DistributedSignalHandler, "signals_received")
    def signals_received(received: Callable[..., Any], self: Any) -> Any:
        everyone = received(self)
        self.any_received = any(everyone)
        return everyone


def keep_adam_state_alike(patches: Patches) -> None:
    """Create Adam's state under Megatron-FSDP at the start, on every rank, for empty shards too.

    torch's AdamW keeps no state for empty shards, and a save, which runs collectives key by key,
    then never returns; where it has state for them, its counter must advance with the others',
    since a checkpoint holds one for all. And 0.19 makes state before loading with an optimizer
    step, which leaves what the checkpoint lacks decayed by a step.
    """

    @patches.around(training, "get_megatron_optimizer")
    def get_megatron_optimizer(build: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        optimizer = build(*args, **kwargs)
        for member in getattr(optimizer, "chained_optimizers", [optimizer]):
            if not member.is_stub_optimizer and getattr(member, "init_state_fn", None) is not None:
                initialize_scalar_state(member)
        return optimizer

    @patches.around(DistributedOptimizer, "_init_optimizer_states_with_dummy_values")
    def init_optimizer_states_with_dummy_values(initialize: Callable[..., None], self: Any) -> None:
        groups = self.optimizer.param_groups
        parameters = itertools.chain(*(group["params"] for group in groups))
        if not all(parameter in self.optimizer.state for parameter in parameters):
            initialize(self)


def split_swiglu(patches: Patches) -> None:
    """Split fused projections, with their state in any optimizer, under `no_shard` too.

    Megatron's handlers split the slots `exp_avg` and `exp_avg_sq` of optimizer state and no others,
    but any weights. So every slot of the weights' shape is passed as weights. A slot of another
    shape, as NorMuon's second moment, stays whole beside the first part; a step counter belongs to
    all. When saving, the handler also looks up parameters by names with one `module.` too many
    (save_checkpoint passes it the model without the wrapper that its names include), so it gets a
    model that finds them at any depth. It copies host memory to the GPU, where offloaded momentum
    and main weights might not fit, and values loaded into the copy would be lost. And it makes
    halves as shards under `no_shard` too, where they have to be whole.
    """
    make = handlers.make_fsdp_dtensor

    def handle_fused(
        handle: Callable[..., Any], model: Any, model_state: Any, optimizer_state: Any
    ) -> Any:
        names = dict(model.named_parameters())
        with _whole_slices(names.values()) as replicated, Patches() as changes:
            made = partial(make, is_sharded_param=False) if replicated else make
            changes.replace(handlers, "make_fsdp_dtensor", partial(_made_in_place, made))
            model_state, _ = handle(_AnyDepth(model, names), model_state, None)
            if optimizer_state is None:
                return model_state, None
            if experts := getattr(get_attr_wrapped_model(model, "config"), "num_moe_experts", None):
                # as the optimizer's state counts them
                names = handlers.handle_experts_in_state_dict(names, experts)
            whole = _AnyDepth(model, names)
            shapes = {plain(name): parameter.shape for name, parameter in names.items()}
            state = _in_parts(
                optimizer_state["state"], shapes, lambda slot: handle(whole, slot, None)[0]
            )
        return model_state, {**optimizer_state, "state": state}

    for name in installed().SPLIT:
        patches.around(checkpointing, name)(handle_fused)


class _AnyDepth(torch.nn.Module):
    """A model whose parameters are found with any number of wrappers in their names."""

    def __init__(self, model: torch.nn.Module, names: dict[str, torch.nn.Parameter]) -> None:
        super().__init__()
        self.module = model
        self._by_name = {plain(name): parameter for name, parameter in names.items()}

    def get_parameter(self, target: str) -> torch.nn.Parameter:
        return self._by_name[plain(target)]


@contextlib.contextmanager
def _whole_slices(parameters: Iterable[Any]) -> Iterator[bool]:
    """Give replicas the slice that the handler needs, as shards have; yields if there are any."""
    of_fsdp = [p for p in parameters if hasattr(p, "megatron_fsdp_dist_index")]
    replicas = [p for p in of_fsdp if not hasattr(p, "megatron_fsdp_slice")]
    for parameter in replicas:
        parameter.megatron_fsdp_slice = slice(0, parameter._local_tensor.numel())
    try:
        yield bool(replicas)
    finally:
        for parameter in replicas:
            del parameter.megatron_fsdp_slice


def _made_in_place(
    make: Callable[..., Any], local_tensor: torch.Tensor, param: torch.Tensor, **kwargs: Any
) -> Any:
    """megatron-core's make_fsdp_dtensor around a local tensor that stays in its memory.

    DTensor.from_local copies host memory to the GPU; it leaves meta tensors alone.
    """
    made = make(local_tensor.to("meta"), param, **{**kwargs, "run_check": False})
    local_tensor = local_tensor.view(made._local_tensor.shape)
    for name, value in vars(made._local_tensor).items():
        setattr(local_tensor, name, value)  # the tensor's part of the whole, for the checkpoint
    return DTensor(local_tensor, made._spec, requires_grad=False)


def _in_parts(
    state: dict[str, dict[str, Any]],
    shapes: Mapping[str, torch.Size],
    split: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
) -> dict[str, dict[str, Any]]:
    """Optimizer state by parameter, with fused ones of these shapes as several.

    Parts that another handler has made are left alone.
    """
    made: dict[str, dict[str, Any]] = {}
    for slot in dict.fromkeys(itertools.chain(*state.values())):  # in one order on every rank
        elementwise = {}
        for name, slots in state.items():
            value = slots.get(slot)
            if isinstance(value, torch.Tensor) and value.shape == shapes.get(plain(name)):
                elementwise[name] = value
        for name, tensor in split(elementwise).items():
            made.setdefault(name, {})[slot] = tensor
    parts: dict[str, list[str]] = {}
    for name in made:
        parts.setdefault(whole_name(name, state), []).append(name)
    found: dict[str, dict[str, Any]] = {}
    for name, slots in state.items():
        first, *others = parts.get(name, [name])
        if first == name:
            found[name] = slots
            continue
        rest = {slot: value for slot, value in slots.items() if slot not in made[first]}
        counts = {slot: value for slot, value in rest.items() if not getattr(value, "ndim", 0)}
        found[first] = {**rest, **made[first]}
        found.update((other, {**counts, **made[other]}) for other in others)
    return found
