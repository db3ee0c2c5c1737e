"""Loads a torch_dist checkpoint of megatron-core's own Muon into a run under Megatron-FSDP.

The model's own `sharded_state_dict`, called with parameters on the meta device, tells where each
parameter is in the checkpoint. So any model, tensor- or expert-parallel size and pipeline that
wrote it will do.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_entries
from torch.func import functional_call

from megatron_muon.checkpoint import content, folders
from megatron_muon.checkpoint.content import STEP, plain, setting
from megatron_muon.checkpoint.torch_dist import (
    COMMON,
    Part,
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
from megatron_muon.ranks import of_any_rank, say
from megatron_muon.settings import AUTO, OURS, UPSTREAM, MuonSettings, flag_of

type State = dict[str, Any]
"""A state dict, or a part of it."""

_OF_OPTIMIZER = "optimizer."
_STATE = "optimizer.state."
_MAIN = "fp32_param"
_MAIN_WEIGHTS = f"{_STATE}{_MAIN}."
_NO_STATE: State = {"state": {}, "param_to_group_meta": {}}
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
        left_over: weights that no rank has requested.

    Raises:
        UserError: it is older than megatron-core 0.17, or of another program.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.common: State = read_object(folder, COMMON)
        if self.common is None:
            raise UserError(
                f"{folder} is of a megatron-core before 0.17, with common.pt; load and save it with"
                " that of 0.17 to 0.19 first"
            )
        if lost := [name for name in ("args", "iteration") if name not in self.common]:
            raise UserError(
                f"{folder} has no {' and no '.join(lost)}, so it is not of a run of Megatron-LM;"
                " load and save it there first"
            )
        self.left_over: list[str] = []
        self._groups = list(_parameter_groups(self.common.get("optimizer", {})))
        self._reader: TorchDistReader | None = None
        self._settings: dict[str, State] = {}  # of each parameter's stored group

    @property
    def is_release(self) -> bool:
        """True for weights that no run has trained."""
        return self.folder.name == "release"

    @property
    def step(self) -> float | None:
        """The scalar optimizer's count of steps; None without its state."""
        return next((float(group[STEP]) for group in self._groups if STEP in group), None)

    def entries(self, state: State, model: torch.nn.Module) -> State:
        """The entries that it would have in the fsdp_dtensor format, of those that are requested.

        `state` is a preprocessed state dict. Collective.
        """
        optimizer = state.get("optimizer", _NO_STATE)
        located = _locate(model, self.common.get("content_metadata") or {})
        reader = self._reader = TorchDistReader(self.folder)
        keys = {_CHAINED.sub("", key): key for key in reader.stored}
        if optimizer["state"] and any(key.startswith(_IN_BUCKETS) for key in keys):
            raise UserError(
                f"{self.folder} has state by bucket, which only the layout that wrote it can read;"
                " save it again with --dist-ckpt-optim-fully-reshardable, or use --no-load-optim"
            )

        def stored(name: str, prefix: str) -> list[Part]:
            parts = _parts(plain(name), located)
            return [replace(part, key=keys.get(prefix + part.key, "")) for part in parts]

        def present(entry: str, name: str, tensor: torch.Tensor, prefix: str) -> None:
            reader.present(entry, stored(name, prefix), tensor.shape)

        for name, weight in state["model"].items():
            for prefix in ("", _MAIN_WEIGHTS):  # the last that the checkpoint has counts
                present(f"model.{name}", name, weight, prefix)
        found: State = {}
        kinds = {key.removeprefix(_STATE).split(".")[0] for key in keys if key.startswith(_STATE)}
        kinds.discard(_MAIN)
        for name, slots in optimizer["state"].items():
            for slot in kinds - slots.keys():  # of another optimizer
                if any(part.key for part in stored(name, f"{_STATE}{slot}.")):
                    found[f"{_STATE}{name}.{slot}"] = BytesStorageMetadata()
            for slot, value in slots.items():
                entry = f"{_STATE}{name}.{slot}"
                if slot != STEP:
                    present(entry, name, value, f"{_STATE}{slot}.")
                elif self.step is not None:
                    found[entry] = BytesStorageMetadata()
        for name, meta in optimizer["param_to_group_meta"].items():
            self._settings[name] = self._settings_of(meta)
            for key in self._settings[name]:
                found[setting(name, key)] = BytesStorageMetadata()
        weights = [
            key for key in reader.tensors() if not _CHAINED.sub("", key).startswith(_OF_OPTIMIZER)
        ]
        taken = of_any_rank([reader.is_presented(key) for key in weights])
        self.left_over = [key for key, is_taken in zip(weights, taken, strict=True) if not is_taken]
        return found | reader.read_metadata().state_dict_metadata

    def load(self, state: State) -> None:
        """Fill a state dict that `entries` can fill. Collective."""
        optimizer = state.get("optimizer", _NO_STATE)
        tensors = {}
        for name, slots in optimizer["state"].items():
            tensors[name] = dict(slots)
            if STEP in slots:
                tensors[name].pop(STEP).fill_(self.step)
        wanted = {"model": state["model"], "optimizer": {"state": tensors}}
        load_entries(wanted, storage_reader=self._reader, planner=TorchDistPlanner())
        for parameter, meta in optimizer["param_to_group_meta"].items():
            stored = self._settings[parameter]
            meta.update({name: stored[name] for name in meta})

    def load_objects(self, state: State) -> None:
        """Take arguments, iteration, schedule and, if they fit, random numbers."""
        for name in _OBJECTS:
            if name in self.common and (name in state or name in _ALWAYS):
                state[name] = self.common[name]
        if not state.get("rng_state"):
            return
        rank = parallel_state.get_tensor_model_parallel_rank()
        size = parallel_state.get_tensor_model_parallel_world_size()
        stages = self.common["args"].pipeline_model_parallel_size
        found = read_object(self.folder, f"rng_state/shard_0.{rank}_{stages}.{size}")
        if found is not None:
            state["rng_state"] = {f"(0, {rank})": found}
            return
        say(
            "megatron-muon: warning: the checkpoint has another tensor-parallel size, or no"
            " random-number state; it starts anew"
        )

    def warn_of_other_settings(self, args: Any) -> None:
        """Print the settings of Muon that differ from those of the run that wrote it."""
        theirs = vars(self.common["args"])
        say(
            f"megatron-muon: note: {self.folder} is of megatron-core's own"
            f" --optimizer {theirs['optimizer']}, which this run continues"
        )
        ours = {*MuonSettings.__dataclass_fields__}
        if args.tensor_model_parallel_size == theirs["tensor_model_parallel_size"] == 1:
            ours.add("muon_tp_mode")
        for name, value in theirs.items():
            own = getattr(args, name, value)
            if name.startswith("muon_") and name not in ours and own != value:
                say(
                    f"megatron-muon: warning: the checkpoint's run had {flag_of(name)} {value};"
                    f" this run has {own}"
                )

    def _settings_of(self, meta: State) -> State:
        """The settings of the stored group that a run's group with these settings was."""

        def misses(group: State, names: Sequence[str]) -> int:
            return sum(group.get(name) != meta.get(name) for name in names)

        same = [group for group in self._groups if not misses(group, _SAME_GROUP)]
        return min(same, key=lambda group: misses(group, _BEST_GROUP), default={})


def _parameter_groups(optimizer: Mapping[Any, Any]) -> Iterator[State]:
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


class _Layout(torch.nn.Module):
    """Returns a model's `sharded_state_dict`; `functional_call` replaces parameters meanwhile."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model: Any = model

    def forward(self, metadata: State) -> State:
        """State with parameters and buffers themselves."""
        found: State = self.model.sharded_state_dict(metadata=metadata)
        return found


def _locate(model: Any, metadata: State) -> dict[str, list[Part]]:
    """Where this rank's parameters and buffers are, by names with experts of all ranks.

    Tensors without storage, of a tensor-parallel rank's shapes, stand in for shards.
    """
    while isinstance(getattr(model, "module", None), torch.nn.Module):
        model = model.module
    stand_ins = {}
    for name, parameter in model.named_parameters(prefix="model"):
        shape = getattr(parameter, "orig_param", parameter).shape
        stand_ins[name] = torch.empty(shape, dtype=parameter.dtype, device="meta")
    tensors = [*stand_ins.items(), *model.named_buffers(prefix="model")]
    names = {id(tensor): name.removeprefix("model.") for name, tensor in tensors}
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    given = {**metadata, "dp_cp_group": group}
    located = {}
    for entry in nested_values(functional_call(_Layout(model), stand_ins, (given,))):
        name = names.get(id(getattr(entry, "data", None)))
        if name is not None:
            made = entry.build() if isinstance(entry, ShardedTensorFactory) else entry
            located[name] = [_part(tensor) for tensor in nested_values([made])]
    numbered = with_all_experts({name: name for name in located}, model.config)
    return {numbered[name]: parts for name, parts in located.items()}


def _part(tensor: ShardedTensor) -> Part:
    lacking = tensor.prepend_axis_num
    return Part(
        key=tensor.key,
        whole=torch.Size(tensor.global_shape),
        offsets=tuple(tensor.global_offset),
        sizes=(*(1,) * lacking, *tensor.local_shape),
        place=tuple(tensor.global_offset[lacking:]),
    )


def _parts(name: str, located: Mapping[str, list[Part]]) -> list[Part]:
    """The parts of a requested tensor, which may be a gated projection's half, at their rows.

    A tensor-parallel rank has rows of each part, one part after the other.
    """
    whole = name if name in located else re.sub("_[wv]$", "", name)
    parts = located.get(whole, [])
    if len(parts) < 2:
        return parts if name in located else []
    rank = parts[0].place[0] // _rows(parts[0])
    if name not in located:
        parts = [parts[name.endswith("_v")]]
    row = rank * sum(map(_rows, parts))
    placed = []
    for part in parts:
        placed.append(replace(part, place=(row, *part.place[1:])))
        row += _rows(part)
    return placed


def _rows(part: Part) -> int:
    return part.sizes[len(part.leading)]
