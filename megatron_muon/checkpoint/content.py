"""What a checkpoint holds: weights, each parameter's optimizer state, and what of a run's state is missing in it.

Works on the index that torch's distributed checkpointing writes (`.metadata`). Names are those of
the checkpoint: `optimizer.state.<parameter>.<slot>`, with the two halves of a SwiGLU projection as
parameters ending in `_w` and `_v`.
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
from megatron_muon.core.optimizer import MOMENTUM
from megatron_muon.core.rules.second_moments import MOMENT2

_STATE = "optimizer.state."
_META = "optimizer.param_to_group_meta."
_WEIGHTS = "model."
_HALVES = ("_w", "_v")

STEP = "step"
"""Adam's count of steps: a slot of each parameter's state, or a setting of its group."""


def read_entries(folder: Path) -> dict[str, Any]:
    """Every entry of a checkpoint: its name, and torch's description of it."""
    return dict(Reader(folder).read_metadata().state_dict_metadata)


def read(folder: Path, names: Iterable[str] | None = None) -> dict[str, Any]:
    """Those of the entries `names` that a checkpoint holds, all by default: whole tensors, and objects such as `args`.

    In one process, whatever layout wrote them.
    """
    entries = read_entries(folder)
    state: dict[str, Any] = dict.fromkeys(
        entries if names is None else filter(entries.__contains__, names)
    )
    for name in state:
        if isinstance(entry := entries[name], TensorStorageMetadata):
            state[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as meant
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


def wrappers(parameters: Iterable[str]) -> str:
    """The prefix that a model's wrappers put in front of names: there is one more in bf16 than in fp32."""
    first = next(iter(parameters), "")
    return first.removesuffix(plain(first))


def whole_name(parameter: str, known: Container[str]) -> str:
    """The known parameter that `parameter` is, or is a half of."""
    return parameter[:-2] if parameter.endswith(_HALVES) and parameter[:-2] in known else parameter


def step_counts(folder: Path) -> dict[str, int]:
    """Adam's count of steps of each parameter by its plain name, in whichever form a checkpoint holds it."""
    entries = read_entries(folder)
    known = optimized(entries)
    matches = [
        re.fullmatch(rf"{section}(.*)\.{STEP}", name)
        for section in (_META, _STATE)
        for name in entries
    ]
    found = {match[0]: whole_name(match[1], known) for match in matches if match}
    return {plain(found[name]): int(count) for name, count in read(folder, found).items()}


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
    """The parameters whose optimizer's settings a checkpoint holds; a SwiGLU projection is one of them."""
    return {
        name.removeprefix(_META).rsplit(".", 1)[0] for name in entries if name.startswith(_META)
    }


def optimizer_of(slots: frozenset[str]) -> str:
    """The optimizer that keeps such slots."""
    if MOMENTUM in slots:
        return "adaptive_muon" if MOMENT2 in slots else "muon"
    if "exp_avg_sq" in slots:
        return "adam"
    return "lion" if "exp_avg" in slots else "+".join(sorted(slots))


def compare(
    wanted: Mapping[str, Mapping[str, Any]], entries: Mapping[str, Any]
) -> tuple[set[str], set[str]]:
    """What of the optimizer state `wanted`, slots by parameter, a checkpoint lacks, or has in another size.

    Names `<parameter>.<slot>`: what another optimizer kept when the checkpoint was written, and
    what should be there. All slots of a parameter are named, because half a state is none.
    """
    replaced, absent = set[str](), set[str]()
    slots, known = optimizer_slots(entries), optimized(entries)
    for parameter, state in wanted.items():
        held = slots.get(parameter, frozenset())
        whole = whole_name(parameter, known)
        if STEP in state and setting(whole, STEP) in entries:
            held |= {STEP}
        kinds = (optimizer_of(held), optimizer_of(frozenset(state)))
        # Lion's groups have none
        damaged = kinds == ("lion", "adam") and setting(whole, "eps") in entries
        if state.keys() <= held and kinds != ("adam", "lion"):
            if not other_shapes(f"{_STATE}{parameter}.", state, entries):
                continue
            lost = replaced  # as by another kind of second moment
        else:
            lost = replaced if held and kinds[0] != kinds[1] and not damaged else absent
        lost.update(f"{parameter}.{slot}" for slot in state)
    return replaced, absent


def laid_out_by_rank(wanted: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Parameters with state whose order depends on the tensor parallel size, both halves of each.

    A SwiGLU's weight and momentum are stored as gate and up. A second moment with one number for
    each of their rows is stored as it is: gate and up of one tensor-parallel rank after the other.
    """
    found = set()
    for parameter, state in wanted.items():
        moment = state.get(MOMENT2)
        if (
            parameter.endswith("_w")
            and moment is not None
            and moment.shape != state[MOMENTUM].shape
        ):
            found |= {parameter, parameter[:-2] + "_v"} & wanted.keys()
    return found


def other_shapes(prefix: str, wanted: Mapping[str, Any], entries: Mapping[str, Any]) -> set[str]:
    """Tensors of a run whose whole shape differs in a checkpoint, where `prefix` precedes names; a line each."""
    found = set()
    for name, tensor in wanted.items():
        stored = getattr(entries.get(prefix + name), "size", None)
        if (
            isinstance(tensor, torch.Tensor)
            and stored is not None
            and tuple(stored) != tuple(tensor.shape)
        ):
            found.add(
                f"{plain(name)} is {tuple(stored)} in the checkpoint and {tuple(tensor.shape)} in"
                " this model"
            )
    return found


def without_fresh(
    optimizer: Mapping[str, Any],
    fresh: set[str],
    entries: Mapping[str, Any],
    *,
    keep: Iterable[str] = (),
) -> dict[str, Any]:
    """The part of an optimizer's state dict to ask a checkpoint for: without parameters that start afresh.

    Settings of a parameter's group that the checkpoint does not hold, or that belong to another
    optimizer, stay as the run has them; so does what is the layout's and not the training's, and
    the settings named in `keep`.
    """
    afresh = fresh | {name[:-2] for name in fresh if name.endswith(_HALVES)}
    left_out = {"is_expert_parallel", *keep}

    def held(name: str, value: Any) -> bool:  # lists and dicts are stored item by item
        return name in entries or (
            isinstance(value, (list, dict)) and any(e.startswith(f"{name}.") for e in entries)
        )

    metas = {
        parameter: {
            k: v for k, v in meta.items() if k not in left_out and held(setting(parameter, k), v)
        }
        for parameter, meta in optimizer["param_to_group_meta"].items()
        if parameter not in afresh
    }
    state = {name: slots for name, slots in optimizer["state"].items() if name not in fresh}
    return {**optimizer, "state": state, "param_to_group_meta": metas}


def renamed(optimizer: Mapping[str, Any], before: str, after: str) -> dict[str, Any]:
    """An optimizer's state dict with its parameters under other wrappers."""
    changed = dict(optimizer)
    for part in ("state", "param_to_group_meta"):
        changed[part] = {
            after + name.removeprefix(before): value for name, value in optimizer[part].items()
        }
    return changed
