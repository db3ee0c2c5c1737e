"""The patch of megatron-core that lets fsdp_dtensor checkpoints hold a SwiGLU's gate and up projection apart."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import megatron.core.transformer.fsdp_dtensor_checkpoint as handlers
import megatron.training.checkpointing as checkpointing
import torch
from megatron.core.utils import get_attr_wrapped_model
from torch.distributed.tensor import DTensor

from megatron_muon.checkpoint.content import plain
from megatron_muon.patching import Patches, versions


def split_swiglu(patches: Patches) -> None:
    """Split the fused projection, with its state in any optimizer, under `no_shard` too.

    0.19's handler splits the slots `exp_avg` and `exp_avg_sq` of optimizer state and no others; weights it splits
    whatever they are. So every slot of the weights' shape is shown to it as weights are. What has another shape, as
    NorMuon's second moment, stays whole beside the gate; a step counter belongs to both halves. The handler also looks
    parameters up by names with one `module.` too many when saving (save_checkpoint passes it the model without the
    wrapper that its names count on), so it is shown a model that finds them at any depth. It copies host memory to the
    GPU, where offloaded momentum and main weights might not fit, and what is loaded into the copy would be lost. And it
    makes halves as shards, under `no_shard` too, where they are to be whole.
    """
    make = handlers.make_fsdp_dtensor
    for name in ("is_sharded_param", "run_check"):
        if name not in inspect.signature(make).parameters:
            raise RuntimeError(f"cannot patch the SwiGLU handler: make_fsdp_dtensor takes no {name} in {versions()}")

    @patches.around(
        checkpointing, "handle_swiglu_in_state_dict", takes=["model", "model_state_dict", "optimizer_state_dict"]
    )
    def handle_swiglu(handle: Callable[..., Any], model: Any, model_state: Any, optimizer_state: Any) -> Any:
        names = dict(model.named_parameters())
        with _whole_slices(names.values()) as replicated, Patches() as changes:
            made = partial(make, is_sharded_param=False) if replicated else make
            changes.replace(handlers, "make_fsdp_dtensor", partial(_made_in_place, made))
            model_state, _ = handle(_AnyDepth(model, names), model_state, None)
            if optimizer_state is None:
                return model_state, None
            if experts := getattr(get_attr_wrapped_model(model, "config"), "num_moe_experts", None):
                names = handlers.handle_experts_in_state_dict(names, experts)  # as the optimizer's state counts them
            whole = _AnyDepth(model, names)
            state = _with_halves(optimizer_state["state"], whole, lambda slot: handle(whole, slot, None)[0])
        return model_state, {**optimizer_state, "state": state}


class _AnyDepth(torch.nn.Module):
    """A model whose parameters are found whatever wrappers their names count."""

    def __init__(self, model: torch.nn.Module, names: dict[str, torch.nn.Parameter]) -> None:
        super().__init__()
        self.module = model
        self._by_name = {plain(name): parameter for name, parameter in names.items()}

    def get_parameter(self, target: str) -> torch.nn.Parameter:
        return self._by_name[plain(target)]


@contextlib.contextmanager
def _whole_slices(parameters: Iterable[Any]) -> Iterator[bool]:
    """Whether there are replicas; they get the slice by which the handler cuts, which Megatron-FSDP sets on shards."""
    of_fsdp = [parameter for parameter in parameters if hasattr(parameter, "megatron_fsdp_dist_index")]
    replicas = [parameter for parameter in of_fsdp if not hasattr(parameter, "megatron_fsdp_slice")]
    for parameter in replicas:
        parameter.megatron_fsdp_slice = slice(0, parameter._local_tensor.numel())
    try:
        yield bool(replicas)
    finally:
        for parameter in replicas:
            del parameter.megatron_fsdp_slice


def _made_in_place(make: Callable[..., Any], local_tensor: torch.Tensor, param: torch.Tensor, **kwargs: Any) -> Any:
    """megatron-core's make_fsdp_dtensor around a local tensor that stays where it is, in host memory or on the GPU.

    DTensor.from_local copies host memory to the GPU, and leaves alone only what has no memory.
    """
    made = make(local_tensor.to("meta"), param, **{**kwargs, "run_check": False})
    local_tensor = local_tensor.view(made._local_tensor.shape)
    for name, value in vars(made._local_tensor).items():
        setattr(local_tensor, name, value)  # what tells the checkpoint which part of the whole this is
    return DTensor(local_tensor, made._spec, requires_grad=False)


def _with_halves(
    state: dict[str, dict[str, Any]],
    model: torch.nn.Module,
    split: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
) -> dict[str, dict[str, Any]]:
    """Optimizer state, slots by parameter, in which fused projections are two parameters, ending in `_w` and `_v`."""
    made: dict[str, dict[str, Any]] = {}
    for slot in dict.fromkeys(slot for slots in state.values() for slot in slots):  # in one order on every rank
        elementwise = {
            name: slots[slot]
            for name, slots in state.items()
            if getattr(slots.get(slot), "shape", None) == model.get_parameter(name).shape
        }
        for name, tensor in split(elementwise).items():
            made.setdefault(name, {})[slot] = tensor
    halved: dict[str, dict[str, Any]] = {}
    for name, slots in state.items():
        if gate := made.get(f"{name}_w"):
            others = {slot: value for slot, value in slots.items() if slot not in gate}
            counts = {slot: value for slot, value in others.items() if not getattr(value, "ndim", 0)}
            halved |= {f"{name}_w": {**others, **gate}, f"{name}_v": {**counts, **made[f"{name}_v"]}}
        else:
            halved[name] = slots
    return halved
