"""The content of a checkpoint: weights, optimizer state by parameter, and what a run would miss.

Works on the index that torch's distributed checkpointing writes (`.metadata`). Names are those of
the checkpoint: `optimizer.state.<parameter>.<slot>`, with the two halves of a SwiGLU projection as
parameters ending in `_w` and `_v`; megatron-core 0.20 also splits latent attention's fused down
projection.
"""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from megatron_muon.checkpoint.dcp import Planner, Reader
from megatron_muon.core.methods.method import UPDATES
from megatron_muon.core.rows import MOMENTUM
from megatron_muon.core.rules.second_moments import MOMENT2

_STATE = "optimizer.state."
_META = "optimizer.param_to_group_meta."
_WEIGHTS = "model."
_HALVES = ("_w", "_v")
_PARTS = (
    (r"_[wv]$", ""),
    (r"\.linear_(q|kv)_down_proj\.", ".linear_qkv_down_proj."),
    (r"\.input_layernorm\.", ".self_attention.linear_qkv_down_proj.layer_norm_"),
)
"""Patterns of names of parts, and the names of the fused parameters that have them."""

STEP = "step"
"""Adam's count of steps: a slot of each parameter's state, or a setting of its group."""


def read_entries(folder: Path) -> dict[str, Any]:
    """Every entry of a checkpoint: its name, and torch's description of it."""
    return dict(Reader(folder).read_metadata().state_dict_metadata)


def read(folder: Path, names: Iterable[str] | None = None) -> dict[str, Any]:
    """Read whole tensors, and objects such as `args`, in one process, whatever layout wrote them.

    Entries that are not in the checkpoint are left out; `names` are all by default.
    """
    entries = read_entries(folder)
    state: dict[str, Any] = {}
    for name in entries if names is None else names:
        entry = entries.get(name)
        if entry is not None:
            state[name] = None
        if isinstance(entry, TensorStorageMetadata):
            state[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as intended
        try:
            load(state, storage_reader=Reader(folder), planner=Planner(), no_dist=True)
        except CheckpointException as failure:
            raise next(iter(failure.failures.values()))[0] from None
    return state


def objects(entries: Mapping[str, Any]) -> list[str]:
    """The names of the entries that are not tensors."""
    return [name for name, entry in entries.items() if not isinstance(entry, TensorStorageMetadata)]


def setting(parameter: str, name: str) -> str:
    """The entry of a setting of a parameter's group."""
    return f"{_META}{parameter}.{name}"


def plain(name: str) -> str:
    """A parameter's name without the prefix `module.` of each of a model's wrappers."""
    return re.sub(r"^(module\.)+", "", name)


def whole_name(parameter: str, known: Container[str]) -> str:
    """The known parameter that `parameter` is, or is a part of."""
    names = (re.sub(part, fused, parameter) for part, fused in _PARTS)
    return next((name for name in names if name in known), parameter)


def optimizer_slots(entries: Iterable[str]) -> dict[str, frozenset[str]]:
    """The slots that a checkpoint holds for each parameter."""
    found = defaultdict[str, set[str]](set)
    for name in entries:
        if name.startswith(_STATE):
            parameter, slot = name.removeprefix(_STATE).rsplit(".", 1)
            found[parameter].add(slot)
    return {parameter: frozenset(slots) for parameter, slots in found.items()}


def some(names: Iterable[str], shown: int = 5) -> str:
    """The first of these names in order, and the number of the others."""
    ordered = sorted(names)
    more = f" and {len(ordered) - shown} more" if len(ordered) > shown else ""
    return ", ".join(ordered[:shown]) + more


def weight_names(entries: Iterable[str]) -> list[str]:
    """The entries of the model's tensors."""
    return [name for name in entries if name.startswith(_WEIGHTS)]


def optimized(entries: Iterable[str]) -> set[str]:
    """Parameters with optimizer settings in a checkpoint; a SwiGLU projection is one of them."""
    settings = [name.removeprefix(_META) for name in entries if name.startswith(_META)]
    return {name.rsplit(".", 1)[0] for name in settings}


def optimizer_of(slots: frozenset[str]) -> str:
    """The optimizer that keeps such slots; classes of matrices go by their slots."""
    if UPDATES in slots:
        return "+".join(sorted(slots))
    if MOMENTUM in slots:
        return "adaptive_muon" if MOMENT2 in slots else "muon"
    if "exp_avg_sq" in slots:
        return "adam"
    return "lion" if "exp_avg" in slots else "+".join(sorted(slots))


def compare(
    wanted: Mapping[str, Mapping[str, Any]], entries: Mapping[str, Any]
) -> tuple[set[str], set[str]]:
    """Optimizer state of `wanted`, slots by parameter, that a checkpoint cannot fill.

    Returns names `<parameter>.<slot>`: state that another optimizer kept when the checkpoint was
    written, and state that should be there. Includes all slots of a parameter, because half a state
    is useless.
    """
    replaced, absent = set[str](), set[str]()
    slots = optimizer_slots(entries)
    for parameter, state in wanted.items():
        held = slots.get(parameter, frozenset())
        if not held:
            held = _held_otherwise(parameter, slots)
        before, now = optimizer_of(held), optimizer_of(frozenset(state))
        names = {f"{parameter}.{slot}" for slot in state}
        is_here = state.keys() <= slots.get(parameter, frozenset())
        if is_here and (before, now) != ("adam", "lion"):
            if other_shapes(f"{_STATE}{parameter}.", state, entries):  # another second moment
                replaced |= names
        elif held and before != now:
            replaced |= names
        else:
            absent |= names
    return replaced, absent


def _held_otherwise(parameter: str, slots: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """Slots of a parameter's half or whole, as another optimizer's state may have it."""
    other = parameter[:-2] if parameter.endswith(_HALVES) else parameter + _HALVES[0]
    return slots.get(other, frozenset())


def laid_out_by_rank(wanted: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Parameters with state whose order depends on the tensor parallel size, both halves of each.

    A SwiGLU's weight and momentum are stored as gate and up. A second moment with one number for
    each of their rows is stored as it is: gate and up of one tensor-parallel rank after the other.
    """
    found = set()
    for parameter, state in wanted.items():
        moment = state.get(MOMENT2)
        if not parameter.endswith("_w") or moment is None:
            continue
        if moment.shape != state[MOMENTUM].shape:
            found |= {parameter, parameter[:-2] + "_v"}
    return found & wanted.keys()


def other_shapes(
    prefix: str,
    wanted: Mapping[str, Any],
    entries: Mapping[str, Any],
) -> set[str]:
    """Tensors with another shape in a checkpoint, where `prefix` precedes names; a line each."""
    found = set()
    for name, tensor in wanted.items():
        stored = getattr(entries.get(prefix + name), "size", None)
        if stored is None or not isinstance(tensor, torch.Tensor) or stored == tensor.shape:
            continue
        theirs = f"{plain(name)} is {tuple(stored)} in the checkpoint"
        found.add(f"{theirs} and {tuple(tensor.shape)} in this model")
    return found


def without_fresh(
    optimizer: Mapping[str, Any],
    fresh: set[str],
    entries: Mapping[str, Any],
    *,
    keep: Iterable[str] = (),
) -> dict[str, Any]:
    """The part of an optimizer's state dict to request from a checkpoint.

    Leaves out the parameters `fresh`, the settings `keep`, and settings that the checkpoint lacks
    or that belong to the layout: they stay as the run has them.
    """
    afresh = {whole_name(name, optimizer["param_to_group_meta"]) for name in fresh}
    left_out = {"is_expert_parallel", *keep}
    # lists and dicts are stored item by item
    stored = set(entries) | {name.rpartition(".")[0] for name in entries}
    metas = {}
    for parameter, meta in optimizer["param_to_group_meta"].items():
        if parameter not in afresh:
            kept = [name for name in meta if setting(parameter, name) in stored]
            metas[parameter] = {name: meta[name] for name in kept if name not in left_out}
    state = {name: slots for name, slots in optimizer["state"].items() if name not in fresh}
    return {**optimizer, "state": state, "param_to_group_meta": metas}
