"""Parameters of other libraries that Muon cannot read: flat buffers, partitions and packed weights.

Each is recognized by its class or its attributes, without importing the library. Reading one as a
matrix, or leaving it to AdamW because it has one dimension, would train something else than the
user asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_muon.core.user_errors import UserError

_READABLE = {"DTensor", "FakeTensor", "FunctionalTensor", "WeightWithDynamicFloat8CastTensor"}
"""Subclasses that torch dispatches to, and whose elements are plain numbers; the last one is
torchao's, for training with float8 all-gathers."""

_PACKED_MODULES = {"Linear4bit", "Embedding4bit", "Linear8bitLt", "Embedding8bit"}
"""Modules of bitsandbytes; their weights are codes also if a wrapper has removed their class."""

_USE_FSDP2 = "Muon needs whole matrices; use fully_shard (FSDP2)"


class Foreign(NamedTuple):
    """A parameter of another library: its kind, the remedy, and whether AdamW can update it."""

    kind: str
    remedy: str
    is_elementwise: bool = False


def foreign(parameter: torch.Tensor, module: nn.Module | None = None) -> Foreign | None:
    """The kind of a parameter that Muon cannot read, if so. `module`: its owner, if known."""
    if nn.parameter.is_lazy(parameter):
        return Foreign("an uninitialised parameter", "run a forward pass first")
    return _sharded(parameter) or _packed(parameter, module) or _flattened(parameter, module)


def _sharded(parameter: Any) -> Foreign | None:
    classes = _class_names(parameter)
    if hasattr(parameter, "ds_id"):
        remedy = f"{_USE_FSDP2}, or DeepSpeed's own Muon"
        return Foreign("partitioned by DeepSpeed's ZeRO-3 (zero.Init)", remedy)
    if getattr(parameter, "_is_flat_param", False):
        return Foreign(
            "a FlatParameter of FSDP1 (FullyShardedDataParallel)", _USE_FSDP2, is_elementwise=True
        )
    if _is_fsdp1_shard(parameter):
        kind = "a shard of a FlatParameter of FSDP1 (FullyShardedDataParallel)"
        return Foreign(kind, _USE_FSDP2, is_elementwise=True)
    if classes & {"FlatParameter", "SsdFlatParameter"}:
        return Foreign("a FlatParameter of FairScale", _USE_FSDP2, is_elementwise=True)
    if getattr(parameter, "_is_sharded", False) and hasattr(parameter, "_orig_size"):
        return Foreign("a shard of FairScale's FSDP", _USE_FSDP2, is_elementwise=True)
    if getattr(parameter, "main_param_sharded", False) or _is_cut_from_matrix(parameter):
        remedy = (
            "Muon needs whole matrices; use Megatron-FSDP with"
            " megatron_muon.get_megatron_muon_optimizer"
        )
        return Foreign("a weight or shard of Megatron's DistributedOptimizer", remedy)
    return None


def _is_fsdp1_shard(parameter: Any) -> bool:
    """Whether a parameter is flattened by FSDP1, by `use_orig_params=True`.

    Source: torch.distributed.fsdp._common_utils.FSDP_FLATTENED.
    """
    if getattr(parameter, "_is_flat_param", False):
        return False
    return parameter.ndim == 1 and getattr(parameter, "_fsdp_flattened", False)


def _is_cut_from_matrix(parameter: Any) -> bool:
    """Whether a vector was cut from a matrix: a view, or a copy with Megatron's attributes."""
    if isinstance(parameter, DTensor) or parameter.ndim != 1:
        return False
    base = parameter._base
    is_view = base is not None and base.ndim > 1
    return is_view or getattr(parameter, "partition_dim", 0) > 0


def _packed(parameter: Any, module: nn.Module | None) -> Foreign | None:
    local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    remedy = "Muon needs plain numbers; freeze it (requires_grad_(False)) and train adapters"
    classes = _class_names(local)
    is_plain = any(getattr(each, "has_fp16_weights", False) for each in (local, module))
    in_module = parameter.ndim == 2 and bool(_PACKED_MODULES & _class_names(module))
    if (classes & {"Params4bit", "Int8Params"} or in_module) and not is_plain:
        shown = type(module if in_module else local).__name__
        return Foreign(f"a packed weight of bitsandbytes ({shown})", remedy)
    dispatches = type(local).__torch_dispatch__ != torch.Tensor.__torch_dispatch__
    if dispatches and not classes & _READABLE:
        library = type(local).__module__.partition(".")[0]
        return Foreign(f"a tensor subclass of {library} ({type(local).__name__})", remedy)
    return None


def _flattened(parameter: torch.Tensor, module: nn.Module | None) -> Foreign | None:
    is_weight = isinstance(module, nn.Linear | nn.Embedding) and module.weight is parameter
    if not is_weight or parameter.ndim != 1:
        return None
    kind = f"flattened to {tuple(parameter.shape)}, and the weight of a {type(module).__name__}"
    return Foreign(kind, _USE_FSDP2, is_elementwise=True)


def _class_names(instance: object) -> set[str]:
    return {each.__name__ for each in type(instance).__mro__}


def refuse_foreign(
    given: Iterable[tuple[str, torch.Tensor, bool]],
    modules: Mapping[str, nn.Module] | None = None,
) -> None:
    """Raise a UserError for the first parameter that Muon cannot read, with kind and remedy.

    `given` has names, parameters, and whether their group asks for AdamW, which can update flat
    shards; `modules` are those of the model by name. If FSDP1 keeps a matrix whole (NO_SHARD with
    `use_orig_params`), vectors are whole too.
    """
    given = list(given)
    matrices = [p for _, p, _ in given if p.ndim > 1]
    is_whole = any(getattr(p, "_fsdp_flattened", False) for p in matrices)
    for name, parameter, for_adamw in given:
        module = (modules or {}).get(name.rpartition(".")[0])
        if is_whole and _is_fsdp1_shard(parameter):
            found = _flattened(parameter, module)
        else:
            found = foreign(parameter, module)
        if found is not None and not (for_adamw and found.is_elementwise):
            raise UserError(f"{name} is {found.kind}: {found.remedy}")
