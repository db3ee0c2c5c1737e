"""Reads the weights of a checkpoint one at a time, whole, under one set of names, whatever wrote it.

Names are those of megatron-core's local layers, without wrappers: `decoder.layers.0.mlp.linear_fc1.weight`. Of a gated
projection the gate's rows end in `_w` and the others in `_v`, as in fsdp_dtensor. Transformer Engine keeps a norm in
the linear layer that follows it and numbers experts otherwise, and torch_dist stacks all layers: `Weights` hides that.
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import megatron.core  # noqa: F401  # tells torch which of its classes a checkpoint may hold
import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_muon.checkpoint import checksums, content, files
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
    """Where a weight lies: an entry of the checkpoint, offsets and sizes in it; the first `lead` sizes are 1."""

    entry: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    lead: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.sizes[self.lead :]


class Weights:
    """The weights of one checkpoint. Nothing is kept of what is read.

    Args:
        directory: a run's folder, its --save directory, or one iteration's.
        verify: whether files must have their checksums.

    Attributes:
        folder: the checkpoint's own folder.
        args: Megatron's arguments of the run that wrote it, with its `iteration`.
        shapes: of each weight, by name.

    Raises:
        UserError: it is incomplete or damaged, or not a checkpoint with weights and arguments.
    """

    def __init__(self, directory: Path, *, verify: bool = True) -> None:
        if (directory / "config.json").is_file():
            raise UserError(f"{directory} is a folder of Hugging Face already; give a checkpoint, or import it first")
        self.folder = folder = files.find(directory)
        wrong = files.problems(folder, verify=verify)
        if verify and not wrong and (sums := checksums.read(folder)):
            wrong = checksums.changed(folder, sums, checksums.share(sums, 0, 1), threads=2)
        if wrong:
            hint = files.resume_hint(folder.parent, but=files.iteration_of(folder)).replace("to resume from", "")
            raise UserError(f"this checkpoint cannot be read: {wrong[0]}; {hint.rstrip()}")
        self._reader = Reader(folder)
        metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        described = metadata.state_dict_metadata.items()
        self._entries = {name: of for name, of in described if isinstance(of, TensorStorageMetadata)}
        if is_torch_dist := (folder / TORCH_DIST_MARK).is_file():
            common = (content.read_objects(folder, [COMMON_STATE]).get(COMMON_STATE) or [{}])[0]
        else:
            common = content.read_objects(folder, ["args", "iteration"])
        if not isinstance(common.get("args"), argparse.Namespace):
            raise UserError(f"{folder} holds no arguments of a run, so what its weights are is not known")
        self.args: argparse.Namespace = common["args"]
        self.iteration = int(common.get("iteration") or 0)
        self._places = {_local(name): place for name, place in (self._stacked() if is_torch_dist else self._by_layer())}
        self.shapes = {name: place.shape for name, place in self._places.items()}
        if not self.shapes:
            raise UserError(f"{folder} holds no weights of a model")

    @property
    def trained_in(self) -> torch.dtype:
        """The dtype of the run's matrix products."""
        return torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else torch.float32

    def read(self, name: str) -> torch.Tensor:
        """Reads a weight. What one rank wrote is not copied; of several ranks, one's piece is in memory beside it."""
        place = self._places[name]
        entry = self._entries[place.entry]
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

    def _by_layer(self) -> Iterator[tuple[str, _Place]]:
        """The weights of an fsdp_dtensor checkpoint."""
        for name in content.weight_names(self._entries):
            size = tuple(self._entries[name].size)
            yield content.plain(name.removeprefix("model.")), _Place(name, (0,) * len(size), size)

    def _stacked(self) -> Iterator[tuple[str, _Place]]:
        """The weights of a torch_dist checkpoint: layer by layer, expert by expert, and gates by themselves."""
        for name, entry in self._entries.items():
            if name.startswith("optimizer."):
                continue
            size = tuple(entry.size)
            match = re.fullmatch(rf"{re.escape(STACKED)}(?:(\d+)\.)?(.*)", name)
            layer, part = match.groups() if match else ("", name)
            experts = part.startswith(EXPERTS)
            lead = (layer is None) + experts
            for at in itertools.product(*map(range, size[:lead])):
                local = part.replace(EXPERTS, f"mlp.experts.local_experts.{at[-1]}.") if experts else part
                if match:
                    local = f"{STACKED}{at[0] if layer is None else layer}.{local}"
                offsets, sizes = (*at, *(0 for _ in size[lead:])), (*(1 for _ in at), *size[lead:])
                yield from self._halves(local, _Place(name, offsets, sizes, lead))

    def _halves(self, name: str, place: _Place) -> Iterator[tuple[str, _Place]]:
        """A gated projection as its two halves, anything else as it is."""
        if not (getattr(self.args, "swiglu", False) and re.search(r"linear_fc1\.(weight|bias)$", name)):
            yield name, place
            return
        row = place.lead
        rows = place.sizes[row] // 2
        for number, half in enumerate("wv"):
            offsets = (*place.offsets[:row], number * rows, *place.offsets[row + 1 :])
            sizes = (*place.sizes[:row], rows, *place.sizes[row + 1 :])
            yield f"{name}_{half}", _Place(place.entry, offsets, sizes, row)


def _local(name: str) -> str:
    for pattern, replacement in _RENAMED:
        name = re.sub(pattern, replacement, name)
    return name
