"""Reads the weights of a checkpoint one at a time, whole, under one set of names, whatever wrote it.

Names are those of megatron-core's local layers, without wrappers: `decoder.layers.0.mlp.linear_fc1.weight`. Of a gated
projection the gate's rows end in `_w` and the others in `_v`, as in fsdp_dtensor. Transformer Engine keeps a norm in
the linear layer that follows it and numbers experts otherwise, and torch_dist stacks all layers: `Weights` hides that.
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_muon.checkpoint import content, files
from megatron_muon.checkpoint.unpickling import Reader
from megatron_muon.errors import UserError

TORCH_DIST_MARK = "metadata.json"
"""The file by which megatron-core knows a torch_dist checkpoint."""

COMMON_STATE = "common_state/shard_0_1"
"""The entry of a torch_dist checkpoint that holds a list with one dict: arguments, iteration and the like."""

STACKED = "decoder.layers."
"""torch_dist has one tensor for all layers under this name without a number, where layers are alike."""

EXPERTS = "mlp.experts.experts."
"""torch_dist has one tensor for all experts under this name."""

_RENAMED = (
    (r"self_attention\.linear_qkv\.layer_norm_(weight|bias)$", r"input_layernorm.\1"),
    (r"mlp\.linear_fc1\.layer_norm_(weight|bias)$", r"pre_mlp_layernorm.\1"),
    (r"mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)(_[wv])?$", r"mlp.experts.local_experts.\3.\1.\2\4"),
)
"""Names of Transformer Engine's layers, and those of the local ones."""


@dataclass(frozen=True)
class _Place:
    """Where a weight lies: the entry of the checkpoint, offsets and sizes in all of the entry's dimensions.

    The weight has the last `ndim` of these dimensions.
    """

    entry: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    ndim: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.sizes[len(self.sizes) - self.ndim :]


class Weights(Mapping[str, torch.Tensor]):
    """The weights of one checkpoint; looking one up reads it, and nothing is kept.

    Args:
        folder: of the checkpoint, see `checkpoint.files.find`.
        verify: whether files must have their checksums.

    Attributes:
        args: Megatron's arguments of the run that wrote it.
        iteration: of that run.

    Raises:
        UserError: it is incomplete or damaged, or not a checkpoint with weights and arguments.
    """

    def __init__(self, folder: Path, *, verify: bool = True) -> None:
        if wrong := files.problems(folder, verify=verify, threads=2):
            raise UserError(f"this checkpoint cannot be read: {wrong[0]}; {_remedy(folder)}")
        self.folder = folder
        self._reader = Reader(folder)
        metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        described = metadata.state_dict_metadata.items()
        self._tensors = {name: of for name, of in described if isinstance(of, TensorStorageMetadata)}
        common = self._common_state()
        if not isinstance(common.get("args"), argparse.Namespace):
            raise UserError(f"{folder} holds no arguments of a run, so what its weights are is not known")
        self.args: argparse.Namespace = common["args"]
        self.iteration = int(common.get("iteration") or 0)
        places = self._stacked() if self._is_torch_dist else self._by_layer()
        self._places = {_local(name): place for name, place in places}
        if not self._places:
            raise UserError(f"{folder} holds no weights of a model")

    @property
    def trained_in(self) -> torch.dtype:
        """The dtype of the run's matrix products."""
        return torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else torch.float32

    @property
    def _is_torch_dist(self) -> bool:
        return (self.folder / TORCH_DIST_MARK).is_file()

    def _common_state(self) -> dict[str, Any]:
        if not self._is_torch_dist:
            return content.read(self.folder, ["args", "iteration"])
        common = content.read(self.folder, [COMMON_STATE]).get(COMMON_STATE) or [{}]
        found: dict[str, Any] = common[0]
        return found

    def _by_layer(self) -> Iterator[tuple[str, _Place]]:
        """The weights of an fsdp_dtensor checkpoint."""
        for name, entry in self._tensors.items():
            if name in content.weight_names([name]):
                size = tuple(entry.size)
                yield content.plain(name.removeprefix("model.")), _Place(name, (0,) * len(size), size, len(size))

    def _stacked(self) -> Iterator[tuple[str, _Place]]:
        """The weights of a torch_dist checkpoint, layer by layer, gates apart from what they act on."""
        for name, entry in self._tensors.items():
            if name.startswith("optimizer."):
                continue
            size = tuple(entry.size)
            match = re.fullmatch(rf"{re.escape(STACKED)}(?:(\d+)\.)?(.*)", name)
            if match is None:
                yield from self._halves(name, _Place(name, (0,) * len(size), size, len(size)))
                continue
            layer, part = match.groups()
            experts = part.startswith(EXPERTS)
            lead = (layer is None) + experts
            for at in itertools.product(*(range(length) for length in size[:lead])):
                local = part.replace(EXPERTS, f"mlp.experts.local_experts.{at[-1]}.") if experts else part
                offsets, sizes = (*at, *(0 for _ in size[lead:])), (*(1 for _ in at), *size[lead:])
                place = _Place(name, offsets, sizes, len(size) - lead)
                yield from self._halves(f"{STACKED}{at[0] if layer is None else layer}.{local}", place)

    def _halves(self, name: str, place: _Place) -> Iterator[tuple[str, _Place]]:
        """A gated projection as its two halves, anything else as it is."""
        if not (getattr(self.args, "swiglu", False) and re.search(r"linear_fc1\.(weight|bias)$", name)):
            yield name, place
            return
        row = len(place.sizes) - place.ndim
        rows = place.sizes[row] // 2
        for number, half in enumerate("wv"):
            offsets = (*place.offsets[:row], number * rows, *place.offsets[row + 1 :])
            sizes = (*place.sizes[:row], rows, *place.sizes[row + 1 :])
            yield f"{name}_{half}", _Place(place.entry, offsets, sizes, place.ndim)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a weight."""
        return self._places[name].shape

    def __getitem__(self, name: str) -> torch.Tensor:
        """Reads a weight. What one rank wrote is not copied; of several ranks, one's piece is in memory beside it."""
        place = self._places[name]
        entry = self._tensors[place.entry]
        chunk = ChunkStorageMetadata(torch.Size(place.offsets), torch.Size(place.sizes))
        items = create_read_items_for_chunk_list(place.entry, entry, [chunk])
        if [tuple(item.lengths) for item in items] == [place.sizes]:
            return self._piece(items[0]).reshape(place.shape)
        whole = torch.empty(place.sizes, dtype=entry.properties.dtype)
        for item in items:
            narrow_tensor_by_index(whole, item.dest_offsets, item.lengths).copy_(self._piece(item))
        return whole.view(place.shape)

    def _piece(self, item: ReadItem) -> torch.Tensor:
        """What a rank wrote, narrowed to what is wanted of it."""
        stored = self._reader.storage_data[item.storage_index]
        file = self._reader.fs.concat_path(self._reader.path, stored.relative_path)
        with self._reader.fs.create_stream(file, "rb") as stream:
            written = torch.load(self._reader._slice_file(stream, stored), map_location="cpu", weights_only=True)
        return narrow_tensor_by_index(written, item.storage_offsets, item.lengths)


def _local(name: str) -> str:
    for pattern, replacement in _RENAMED:
        name = re.sub(pattern, replacement, name)
    return name


def _remedy(folder: Path) -> str:
    return files.resume_hint(folder.parent, but=files.iteration_of(folder)).replace("to resume from", "").rstrip()
