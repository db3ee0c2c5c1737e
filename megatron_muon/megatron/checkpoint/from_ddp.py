"""Loads a torch_dist checkpoint of megatron-core's own Muon into a run under Megatron-FSDP.

The model's own `sharded_state_dict`, called with parameters on the meta device, tells where each
parameter is in the checkpoint. So any model, tensor- or expert-parallel size and pipeline that
wrote it will do.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_entries

from megatron_muon.checkpoint import content, folders
from megatron_muon.checkpoint.content import STEP, plain, setting
from megatron_muon.checkpoint.torch_dist import (
    COMMON,
    Rectangle,
    TorchDistPlanner,
    TorchDistReader,
    is_torch_dist,
    read_object,
)
from megatron_muon.errors import UserError
from megatron_muon.megatron.flags.named_optimizer import is_class
from megatron_muon.megatron.model.matrices import with_all_experts
from megatron_muon.megatron.upstream import (
    ShardedTensor,
    ShardedTensorFactory,
    nested_values,
    parallel_state,
)
from megatron_muon.ranks import say
from megatron_muon.settings import AUTO, OURS, UPSTREAM, MuonSettings, flag_of

_STATE = "optimizer.state."
_MAIN_WEIGHT = "fp32_param"
_SAME_GROUP = ("optimizer", "wd_mult", "lr_mult", "is_decoupled_lr")
_BEST_GROUP = ("max_lr", "min_lr", "is_expert_parallel")
_CHAINED = re.compile(r"^(chained_\d+\.)+")
"""A prefix of state that the layer-wise optimizer adds."""

_IN_BUCKETS = "optimizer.distributed."
_ALWAYS = ("args", "checkpoint_version", "iteration", "num_floating_point_operations_so_far")
_OBJECTS = (*_ALWAYS, "opt_param_scheduler")


def settle_matrices(args: Any) -> None:
    """Set --muon-matrices auto to the choice of the run that wrote the checkpoint of --load.

    It remains auto, which is ours, without a checkpoint that can be read. Ours keeps the flag among
    the checkpoint's arguments; megatron-core's own Muon has one choice.
    """
    if args.muon_matrices != AUTO or args.load is None or is_class(args.optimizer):
        return
    with contextlib.suppress(Exception):  # loading reports a damaged checkpoint
        iteration = args.ckpt_step or folders.latest(Path(args.load))
        assert iteration is not None
        folder = folders.iteration_folder(Path(args.load), iteration)
        if is_torch_dist(folder):
            is_upstream = read_object(folder, COMMON)["args"].optimizer == "muon"
        else:
            stored = content.read(folder, ["args"])["args"]
            is_upstream = getattr(stored, "muon_matrices", AUTO) == UPSTREAM
        args.muon_matrices = UPSTREAM if is_upstream else OURS


class TorchDistSource:
    """A torch_dist checkpoint, as the state that a run under Megatron-FSDP requests.

    Attributes:
        common: all that is no tensor.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.common: dict[str, Any] = read_object(folder, COMMON) or {}
        self._groups = list(_parameter_groups(self.common.get("optimizer", {})))
        self._reader: TorchDistReader | None = None
        self._settings: dict[str, dict[str, Any]] = {}  # of each parameter's stored group

    @property
    def is_release(self) -> bool:
        """True for weights that no run has trained."""
        return self.folder.name == "release"

    @property
    def step(self) -> float | None:
        """The scalar optimizer's count of steps; None without its state."""
        return next((float(group[STEP]) for group in self._groups if STEP in group), None)

    def entries(self, state: Mapping[str, Any], model: torch.nn.Module) -> dict[str, Any]:
        """The entries that it would have in the fsdp_dtensor format, of those that are requested.

        `state` is a preprocessed state dict.
        """
        located = _locate(model, self.common.get("content_metadata") or {})
        stored = content.read_entries(self.folder)
        keys = {_CHAINED.sub("", key): key for key in stored}
        rectangles: dict[str, list[Rectangle]] = {}
        sizes: dict[str, torch.Size] = {}
        optimizer = state.get("optimizer", {"state": {}, "param_to_group_meta": {}})
        if optimizer["state"] and any(key.startswith(_IN_BUCKETS) for key in keys):
            raise UserError(
                f"{self.folder} has state by bucket, which only the layout that wrote it can read;"
                " save it again with --dist-ckpt-optim-fully-reshardable, or use --no-load-optim"
            )
        for entry, name, slot, value in _wanted(state["model"], optimizer["state"]):
            parts = _parts(plain(name), located)
            if not parts:
                continue
            prefix = f"{_STATE}{slot}." if slot else f"{_STATE}{_MAIN_WEIGHT}."
            if not slot and prefix + parts[0].key not in keys:
                prefix = ""  # of an fp32 run
            rectangles[entry] = []
            sizes[entry] = value.shape
            for part in parts:
                key = keys.get(prefix + part.key, prefix + part.key)
                rectangles[entry].append(part.rectangle(key))
                size = getattr(stored.get(key), "size", part.whole)
                if size != part.whole:  # another model's
                    sizes[entry] = size[len(part.whole) - value.ndim :]
        self._reader = TorchDistReader(self.folder, rectangles, sizes)
        found: dict[str, Any] = dict(self._reader.read_metadata().state_dict_metadata)
        for name, slots in optimizer["state"].items():
            if STEP in slots and self.step is not None:
                found[f"{_STATE}{name}.{STEP}"] = BytesStorageMetadata()
        for name, meta in optimizer["param_to_group_meta"].items():
            self._settings[name] = self._settings_of(meta)
            for key in self._settings[name]:
                found[setting(name, key)] = BytesStorageMetadata()
        return found

    def load(self, state: dict[str, Any]) -> None:
        """Fill a state dict that `entries` can fill. Collective."""
        optimizer = state.get("optimizer", {"state": {}, "param_to_group_meta": {}})
        tensors = {}
        for name, slots in optimizer["state"].items():
            tensors[name] = {slot: value for slot, value in slots.items() if slot != STEP}
            if STEP in slots:
                slots[STEP].fill_(self.step)
        wanted = {"model": state["model"], "optimizer": {"state": tensors}}
        load_entries(wanted, storage_reader=self._reader, planner=TorchDistPlanner())
        for parameter, meta in optimizer["param_to_group_meta"].items():
            stored = self._settings[parameter]
            meta.update({name: stored[name] for name in meta})

    def load_objects(self, state: dict[str, Any]) -> None:
        """Take arguments, iteration, schedule and, if they fit, random numbers."""
        for name in _OBJECTS:
            if name in self.common and (name in state or name in _ALWAYS):
                state[name] = self.common[name]
        if state.get("rng_state"):
            found = self._random_numbers()
            state["rng_state"] = found or state["rng_state"]
            if found is None:
                say(
                    "megatron-muon: warning: the checkpoint has another tensor-parallel size, or no"
                    " random-number state; it starts anew"
                )

    def _random_numbers(self) -> dict[str, Any] | None:
        """The random-number state of this rank; None from another tensor-parallel size."""
        size = parallel_state.get_tensor_model_parallel_world_size()
        rank = parallel_state.get_tensor_model_parallel_rank()
        stages = self.common["args"].pipeline_model_parallel_size
        name = f"rng_state/shard_0.{rank}_{stages}.{size}"
        found = read_object(self.folder, name)
        return {f"(0, {rank})": found} if found else None

    def warn_of_other_settings(self, args: Any) -> None:
        """Print the settings of Muon that differ from those of the run that wrote it."""
        theirs = vars(self.common["args"])
        ours = set(MuonSettings.__dataclass_fields__)
        if args.tensor_model_parallel_size == theirs["tensor_model_parallel_size"] == 1:
            ours.add("muon_tp_mode")
        names = [name for name in theirs if name.startswith("muon_") and name not in ours]
        other = [name for name in names if getattr(args, name, theirs[name]) != theirs[name]]
        if other:
            shown = ", ".join(f"{flag_of(name)} {theirs[name]}" for name in other)
            say(
                f"megatron-muon: warning: the checkpoint's run had {shown}; this run has"
                f" {', '.join(str(getattr(args, name)) for name in other)}"
            )

    def _settings_of(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of the stored group that a run's group with these settings was."""

        def misses(group: Mapping[str, Any]) -> int:
            return sum(group.get(name) != meta.get(name) for name in _BEST_GROUP)

        same = []
        for group in self._groups:
            if all(group.get(name) == meta.get(name) for name in _SAME_GROUP):
                same.append(group)
        return min(same, key=misses, default={})


def _wanted(
    weights: Mapping[str, Any], state: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, str, str, Any]]:
    """Entry, parameter, slot (none for weights) and tensor of all but counters."""
    for name, value in weights.items():
        yield f"model.{name}", name, "", value
    for name, slots in state.items():
        for slot, value in slots.items():
            if slot != STEP:
                yield f"{_STATE}{name}.{slot}", name, slot, value


def _parameter_groups(optimizer: Mapping[Any, Any]) -> Iterator[dict[str, Any]]:
    """The parameter groups of a chain of optimizers, each with its count of steps if any."""
    if "param_groups" not in optimizer:
        for member in optimizer.values():
            if isinstance(member, Mapping):
                yield from _parameter_groups(member)
        return
    state = optimizer.get("state", {})
    count = {STEP: state["common_step"]} if "common_step" in state else {}
    for group in optimizer["param_groups"]:
        yield {**group, **count}


@dataclass(frozen=True)
class _Stored:
    """Rows of a parameter, from `start`, in the stored tensor `key` of the size `whole`."""

    key: str
    whole: torch.Size
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: tuple[int, ...]  # in the parameter, whole over tensor-parallel ranks
    start: int

    def rectangle(self, key: str) -> Rectangle:
        """These rows of the weights, or of state stored as `key`."""
        return Rectangle(key, self.offsets, self.sizes, self.place)


def _stored(tensor: ShardedTensor) -> _Stored:
    offsets = tuple(tensor.global_offset)
    row = tensor.data[0].numel() if tensor.data.numel() else 1
    return _Stored(
        key=tensor.key,
        whole=torch.Size(tensor.global_shape),
        offsets=offsets,
        sizes=tuple(tensor.local_shape),
        place=offsets[tensor.prepend_axis_num :],
        start=tensor.data.storage_offset() // row,
    )


def _locate(model: Any, metadata: Mapping[str, Any]) -> dict[str, list[_Stored]]:
    """Where this rank's parameters and buffers are, by names with experts of all ranks."""
    while isinstance(getattr(model, "module", None), torch.nn.Module):
        model = model.module
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    parts: dict[str, list[_Stored]] = {}
    with _on_meta(model):
        tensors = [*model.named_parameters(), *model.named_buffers()]
        names = {id(tensor): name for name, tensor in tensors}
        stored = model.sharded_state_dict(metadata={**metadata, "dp_cp_group": group})
        for entry in nested_values(stored):
            name = names.get(id(getattr(entry, "data", None)))
            if name is not None:
                made = entry.build() if isinstance(entry, ShardedTensorFactory) else [entry]
                parts[name] = [_stored(tensor) for tensor in nested_values(made)]
    numbered = with_all_experts({name: name for name in parts}, model.config)
    return {numbered[name]: located for name, located in parts.items()}


def _parts(name: str, located: Mapping[str, list[_Stored]]) -> list[_Stored]:
    """The parts of a requested tensor, which may be a gated projection's half."""
    parts = located.get(name, [])
    is_half = name not in located and name.endswith(("_w", "_v"))
    if not is_half and len(parts) < 2:
        return parts
    chosen = parts
    if is_half:
        parts = located.get(name[:-2], [])
        if len(parts) != 2:
            return []
        chosen = [replace(parts[name.endswith("_v")], start=0)]
    # a tensor-parallel rank has rows of each part
    rank = parts[0].place[0] // parts[0].sizes[0]
    rows = rank * sum(part.sizes[0] for part in chosen)
    return [replace(part, place=(rows + part.start, *part.place[1:])) for part in chosen]


@contextlib.contextmanager
def _on_meta(model: torch.nn.Module) -> Iterator[None]:
    """Parameters of a tensor-parallel rank's shapes, without storage, in the place of shards."""
    replaced = []
    made: dict[torch.Tensor, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if parameter not in made:
                shape = getattr(parameter, "orig_param", parameter).shape
                meta = torch.empty(shape, dtype=parameter.dtype, device="meta")
                made[parameter] = torch.nn.Parameter(meta, requires_grad=False)
            replaced.append((module, name, parameter))
    try:
        for module, name, parameter in replaced:
            module._parameters[name] = made[parameter]
        yield
    finally:
        for module, name, parameter in replaced:
            module._parameters[name] = parameter
