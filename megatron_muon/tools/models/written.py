"""Writes checkpoints that Megatron loads, a weight at a time: fsdp_dtensor for Megatron-FSDP, torch_dist for the rest.

Memory stays near the largest weight. Names and other entries are those of megatron-core 0.19's own saves, without
optimizer state: `--finetune` starts it anew.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from megatron_muon.checkpoint import files
from megatron_muon.checkpoint.summed_files import SummedFiles
from megatron_muon.tools.models.command import FSDP_DTENSOR, TORCH_DIST
from megatron_muon.tools.models.weights import COMMON_STATE, EXPERTS, STACKED, TORCH_DIST_MARK

_OF_EXPERTS = re.compile(rf"{re.escape(STACKED)}(\d+)\.mlp\.(?:router|experts)\.")


@dataclass(frozen=True)
class _Place:
    """Where a weight goes: an entry, offsets and sizes in it, and the entry's whole shape."""

    weight: str
    entry: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    whole: tuple[int, ...]


def write(
    save_dir: Path,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], Tensor],
    *,
    layout: str,
    args: argparse.Namespace,
    iteration: int | None,
    dtype: torch.dtype,
) -> None:
    """Writes a checkpoint and names it in the tracker file.

    Args:
        save_dir: the folder that --load is to name.
        shapes: of the weights, which are named as in `weights`.
        read: the weight of a name, in any dtype. It is given away: its memory is freed when it is written.
        layout: `FSDP_DTENSOR` or `TORCH_DIST`.
        args: of the run that is to load it.
        iteration: None for what no run of Megatron has trained, a "release".
        dtype: of the weights in the files.
    """
    is_te = args.transformer_impl == "transformer_engine"
    state = {"args": args, "checkpoint_version": 3.0, "iteration": iteration or 0}
    if layout == FSDP_DTENSOR:
        places = [_of_layer(name, shape, is_te, args) for name, shape in shapes.items()]
        objects: dict[str, Any] = state
    else:
        sparse = {match[1] for name in shapes if (match := _OF_EXPERTS.match(name))} if is_te else set()
        places = [_stacked(name, shape, sparse, args) for name, shape in shapes.items()]
        content = {"content_metadata": {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}}
        objects = {COMMON_STATE: [state | content]} | {name: [None] for name in _extra_states(places)}
    named = "release" if iteration is None else iteration
    folder = files.iteration_folder(save_dir, named)
    writer = FileSystemWriter(files.begin(folder), per_thread_copy_ahead=0)
    writer.fs = written = SummedFiles()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as meant
        save({}, storage_writer=writer, planner=_Planner(places, objects, read, dtype), no_dist=True)
    if layout == TORCH_DIST:
        mark = {"sharded_backend": TORCH_DIST, "sharded_backend_version": 1}
        (Path(writer.path) / TORCH_DIST_MARK).write_text(json.dumps(mark), "utf-8")
    files.finish(folder, written.sums)
    with files.written_at_once(save_dir / files.TRACKER) as stream:
        stream.write(str(named))


def _of_layer(weight: str, shape: tuple[int, ...], is_te: bool, args: argparse.Namespace) -> _Place:
    """The entry of fsdp_dtensor."""
    name = weight
    if is_te:
        name = name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
        if not args.num_experts:
            name = name.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")
        elif getattr(args, "moe_grouped_gemm", False):
            name = re.sub(r"local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)", r"\2.\3\1", name)
    return _Place(weight, f"model.module.{name}", (0,) * len(shape), shape, shape)


def _stacked(weight: str, shape: tuple[int, ...], sparse: Collection[str], args: argparse.Namespace) -> _Place:
    """The part of an entry of torch_dist: of one for all layers where they are alike, and for all experts.

    `sparse` are Transformer Engine's layers with experts, by number: the norm before their experts stays by itself.
    """
    name, sizes = weight, shape
    offsets, whole = (0,) * len(sizes), sizes
    if half := re.fullmatch(r"(.*linear_fc1\.(?:weight|bias))_([wv])", name):
        name, whole = half[1], (2 * sizes[0], *sizes[1:])
        offsets = (sizes[0] * "wv".index(half[2]), *offsets[1:])
    if layer := re.fullmatch(rf"{re.escape(STACKED)}(\d+)\.(.*)", name):
        alike = getattr(args, "moe_layer_freq", 1) in (1, None)
        lead, lengths = ((int(layer[1]),), (args.num_layers,)) if alike else ((), ())
        part = layer[2]
        if expert := re.fullmatch(r"mlp\.experts\.local_experts\.(\d+)\.(.*)", part):
            lead, lengths, part = (*lead, int(expert[1])), (*lengths, args.num_experts), EXPERTS + expert[2]
        part = part.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
        if layer[1] not in sparse:
            part = part.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        name = STACKED + (part if alike else f"{layer[1]}.{part}")
        offsets, whole, sizes = (*lead, *offsets), (*lengths, *whole), (*(1 for _ in lead), *sizes)
    return _Place(weight, name, offsets, sizes, whole)


def _extra_states(places: list[_Place]) -> Iterator[str]:
    """Entries that hold nothing and that megatron-core's linear layers ask for all the same."""
    for place in places:
        if linear := re.fullmatch(r"(.*\.linear_\w+)\.weight", place.entry):
            lead = len(place.whole) - 2
            at, of = (
                ".".join(map(str, sizes[:lead] or default))
                for sizes, default in ((place.offsets, "0"), (place.whole, "1"))
            )
            yield f"{linear[1]}._extra_state/shard_{at}_{of}"


class _Planner(DefaultSavePlanner):
    """Plans a save of weights that are not there yet, and has each read when it is its turn.

    torch's writer, 2.13's at least, keeps the tensors of a file until all of them are written. A weight's memory is
    freed here when the next is asked for: without copying ahead, the one before has been written then.
    """

    def __init__(
        self, places: list[_Place], objects: dict[str, Any], read: Callable[[str], Tensor], dtype: torch.dtype
    ) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._at = {(place.entry, torch.Size(place.offsets)): place for place in places}
        self._objects, self._read, self._dtype = objects, read, dtype
        self._written: torch.UntypedStorage | None = None

    def create_local_plan(self) -> SavePlan:
        items = [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in self._objects]
        for (entry, offsets), place in self._at.items():
            chunk = ChunkStorageMetadata(offsets, torch.Size(place.sizes))
            data = TensorWriteData(chunk, TensorProperties(dtype=self._dtype_of(entry)), torch.Size(place.whole))
            items.append(WriteItem(MetadataIndex(entry, offsets), WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def _dtype_of(self, entry: str) -> torch.dtype:
        """Megatron keeps a router's biases in fp32, so that rounding chooses no other experts."""
        return torch.float32 if entry.endswith("router.expert_bias") else self._dtype

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        index = write_item.index
        if write_item.type == WriteItemType.BYTE_IO:
            stream = io.BytesIO()
            torch.save(self._objects[index.fqn], stream)
            return stream
        if self._written is not None:
            self._written.resize_(0)
        assert index.offset is not None
        place = self._at[index.fqn, index.offset]
        weight = self._read(place.weight).to(self._dtype_of(place.entry)).contiguous().view(place.sizes)
        storage = weight.untyped_storage()
        if storage.nbytes() != weight.nbytes or not storage.resizable():  # others', as a mapped file's
            weight = weight.clone()
        self._written = weight.untyped_storage()
        return weight
