"""Reads and writes the weights of checkpoints one by one, under the same names for all layouts.

Names are those of megatron-core's local layers, without wrappers:
`decoder.layers.0.mlp.linear_fc1.weight`. In a gated projection the gate's rows are a weight ending
in `_w`, the others one ending in `_v`, as in fsdp_dtensor. Transformer Engine keeps a norm in the
linear layer that follows it and numbers experts differently, and torch_dist stacks all layers.
Entries are written as megatron-core 0.19 saves them, without optimizer state: `--finetune` starts
with a new one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megatron.core  # noqa: F401  # tells torch which of its classes a checkpoint may hold
import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_saver import save

from megatron_muon.checkpoint import content, folders
from megatron_muon.checkpoint.dcp import Reader, SummedFiles
from megatron_muon.errors import UserError

FSDP_DTENSOR, TORCH_DIST = "fsdp_dtensor", "torch_dist"
"""Layouts of checkpoints: for Megatron-FSDP, and for runs without it."""

_TORCH_DIST_MARK = "metadata.json"
"""The file by which megatron-core recognizes a torch_dist checkpoint."""

_COMMON_STATE = "common_state/shard_0_1"
"""An entry of torch_dist: a list with one dict, which holds arguments, iteration and the like."""

STACKED = "decoder.layers."
"""Where layers are alike, torch_dist has one tensor for all under this name without a number."""

_LAYER = re.compile(rf"{re.escape(STACKED)}(?:(\d+)\.)?(.*)")

_EXPERTS = "mlp.experts.experts."
"""torch_dist has one tensor for all experts under this name."""

_LOCAL_EXPERT = "mlp.experts.local_experts."

_TO_LOCAL = (
    (r"self_attention\.linear_qkv\.layer_norm_(weight|bias)$", r"input_layernorm.\1"),
    (r"mlp\.linear_fc1\.layer_norm_(weight|bias)$", r"pre_mlp_layernorm.\1"),
    (
        r"mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)(_[wv])?$",
        r"mlp.experts.local_experts.\3.\1.\2\4",
    ),
)
"""Patterns of Transformer Engine's names, and the names of the local layers."""

_FUSED_QKV_NORM = ("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
_FUSED_MLP_NORM = ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
"""Names of norms in local layers, and where Transformer Engine keeps them."""


@dataclass(frozen=True)
class EntrySlice:
    """The part of a checkpoint's entry that holds one weight.

    Attributes:
        entry: name of the entry.
        shape: of the weight.
        index: of its layer and expert, where the entry stacks them.
        stack: number of stacked layers and experts.
        half: 0 for the gate, 1 for the other rows of a gated projection.
        halves: 2 where the entry holds a gated projection.
    """

    entry: str
    shape: tuple[int, ...]
    index: tuple[int, ...] = ()
    stack: tuple[int, ...] = ()
    half: int = 0
    halves: int = 1

    @property
    def whole(self) -> torch.Size:
        """Shape of the entry."""
        rows = [self.halves * count for count in self.shape[:1]]
        return torch.Size([*self.stack, *rows, *self.shape[1:]])

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """Offsets and sizes of the slice in the entry."""
        first_row = [self.half * count for count in self.shape[:1]]
        offsets = [*self.index, *first_row, *(0 for _ in self.shape[1:])]
        sizes = [*(1 for _ in self.stack), *self.shape]
        return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


class Weights:
    """The weights in the folder of a run, of its --save, or of one iteration.

    Attributes:
        folder: the iteration's.
        args: Megatron's arguments of the run.
        iteration: its number.
        shapes: of each weight, by name.

    Raises:
        UserError: the checkpoint is incomplete or damaged (with `verify`, checksums are compared),
            or has no weights and arguments.
    """

    def __init__(self, directory: Path, *, verify: bool = True) -> None:
        self.folder = folder = folders.find(directory)
        if wrong := folders.problems(folder, verify=verify, threads=2):
            raise UserError(f"this checkpoint cannot be read: {wrong[0]}")
        self._reader = Reader(folder)
        metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self._entries = {
            name: entry
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        is_torch_dist = (folder / _TORCH_DIST_MARK).is_file()
        if is_torch_dist:
            common = (content.read(folder, [_COMMON_STATE]).get(_COMMON_STATE) or [{}])[0]
        else:
            common = content.read(folder, ["args", "iteration"])
        if not isinstance(common.get("args"), argparse.Namespace):
            raise UserError(f"{folder} has no arguments of a run")
        self.args: argparse.Namespace = common["args"]
        self.iteration = int(common.get("iteration") or 0)
        slices = self._torch_dist_slices() if is_torch_dist else self._fsdp_slices()
        self._slices = {_local(name): entry_slice for name, entry_slice in slices}
        self.shapes = {name: entry_slice.shape for name, entry_slice in self._slices.items()}

    @property
    def trained_in(self) -> torch.dtype:
        """The dtype of the run's matrix products."""
        if self.args.bf16:
            return torch.bfloat16
        return torch.float16 if self.args.fp16 else torch.float32

    def read(self, name: str) -> Tensor:
        """Read a weight, without a copy if one rank wrote it."""
        source = self._slices[name]
        entry = self._entries[source.entry]
        items = create_read_items_for_chunk_list(source.entry, entry, [source.chunk])
        if len(items) == 1:
            return self._read_item(items[0]).reshape(source.shape)
        weight = torch.empty(source.chunk.sizes, dtype=entry.properties.dtype)
        for item in items:
            part = narrow_tensor_by_index(weight, item.dest_offsets, item.lengths)
            part.copy_(self._read_item(item))
        return weight.view(source.shape)

    def _read_item(self, item: ReadItem) -> Tensor:
        """The requested part of a tensor that one rank wrote."""
        stored = self._reader.storage_data[item.storage_index]
        file = self._reader.fs.concat_path(self._reader.path, stored.relative_path)
        with self._reader.fs.create_stream(file, "rb") as stream:
            part = self._reader._slice_file(stream, stored)
            tensor = torch.load(part, map_location="cpu", weights_only=True)
        return narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths)

    def _fsdp_slices(self) -> Iterator[tuple[str, EntrySlice]]:
        """The weights of an fsdp_dtensor checkpoint: each is an entry."""
        for name in content.weight_names(self._entries):
            shape = tuple(self._entries[name].size)
            yield content.plain(name.removeprefix("model.")), EntrySlice(name, shape)

    def _torch_dist_slices(self) -> Iterator[tuple[str, EntrySlice]]:
        """The weights of a torch_dist checkpoint: slices by layer, expert and half."""
        for name, entry in self._entries.items():
            if not name.startswith("optimizer."):
                yield from self._slices_of(name, tuple(entry.size))

    def _slices_of(self, entry: str, size: tuple[int, ...]) -> Iterator[tuple[str, EntrySlice]]:
        match = _LAYER.fullmatch(entry)
        layer, part = match.groups() if match else ("", entry)
        has_experts = part.startswith(_EXPERTS)
        stacked_dims = (layer is None) + has_experts
        stack, shape = size[:stacked_dims], size[stacked_dims:]
        halves = [""]
        if self.args.swiglu and re.search(r"linear_fc1\.(weight|bias)$", entry):
            halves = ["_w", "_v"]
            shape = (shape[0] // 2, *shape[1:])
        for index in itertools.product(*map(range, stack)):
            name = part
            if has_experts:
                name = part.replace(_EXPERTS, f"{_LOCAL_EXPERT}{index[-1]}.")
            if match:
                number = index[0] if layer is None else layer
                name = f"{STACKED}{number}.{name}"
            for half, ending in enumerate(halves):
                source = EntrySlice(entry, shape, index, stack, half, len(halves))
                yield name + ending, source


def _local(name: str) -> str:
    for pattern, replacement in _TO_LOCAL:
        name = re.sub(pattern, replacement, name)
    return name


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
    """Write a checkpoint for a run with these arguments, whose --load is `save_dir`.

    `read` returns the weight of a name in `shapes`, in any dtype, and gives up its memory, which is
    freed when the weight is written. `dtype` is that of the files. `iteration` is None for weights
    that no run of Megatron has trained: a "release".
    """
    state: dict[str, Any] = {"args": args, "checkpoint_version": 3.0, "iteration": iteration or 0}
    if layout == FSDP_DTENSOR:
        slices = {name: _fsdp_slice(name, shape, args) for name, shape in shapes.items()}
    else:
        # Transformer Engine keeps the norm before a layer's experts by itself.
        routed: set[str] = set()
        if args.transformer_impl == "transformer_engine":
            pattern = rf"{re.escape(STACKED)}(\d+)\.mlp\.(router|experts)\."
            routed = {match[1] for match in (re.match(pattern, name) for name in shapes) if match}
        slices = {
            name: _torch_dist_slice(name, shape, routed, args) for name, shape in shapes.items()
        }
        state["content_metadata"] = {
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
        }
        state = {_COMMON_STATE: [state], **_extra_states(slices.values())}
    named = "release" if iteration is None else iteration
    folder = folders.iteration_folder(save_dir, named)
    writer = FileSystemWriter(folders.begin(folder), per_thread_copy_ahead=0)
    writer.fs = written = SummedFiles()
    save(state, storage_writer=writer, planner=_LazyPlanner(slices, read, dtype), no_dist=True)
    if layout == TORCH_DIST:
        mark = {"sharded_backend": TORCH_DIST, "sharded_backend_version": 1}
        (Path(writer.path) / _TORCH_DIST_MARK).write_text(json.dumps(mark), "utf-8")
    folders.finish(folder, written.sums)
    with folders.written_at_once(save_dir / folders.TRACKER) as stream:
        stream.write(str(named))


def _fsdp_slice(name: str, shape: tuple[int, ...], args: argparse.Namespace) -> EntrySlice:
    if args.transformer_impl == "transformer_engine":
        name = name.replace(*_FUSED_QKV_NORM)
        if not args.num_experts:
            name = name.replace(*_FUSED_MLP_NORM)
        elif args.moe_grouped_gemm:
            name = re.sub(r"local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)", r"\2.\3\1", name)
    return EntrySlice(f"model.module.{name}", shape)


def _torch_dist_slice(
    name: str, shape: tuple[int, ...], routed: set[str], args: argparse.Namespace
) -> EntrySlice:
    """The slice for a weight: layers share an entry where they are alike, and experts always do.

    `routed` are the numbers of the layers whose MLP norm has an entry of its own.
    """
    half, halves = 0, 1
    if gated := re.fullmatch(r"(.*linear_fc1\.(?:weight|bias))_([wv])", name):
        name = gated[1]
        half, halves = "wv".index(gated[2]), 2
    layer = _LAYER.fullmatch(name)
    if not layer:
        return EntrySlice(name, shape, half=half, halves=halves)
    number, part = layer.groups()
    index: list[int] = []
    stack: list[int] = []
    are_alike = args.moe_layer_freq in (1, None)
    if are_alike:
        index.append(int(number))
        stack.append(args.num_layers)
    if expert := re.fullmatch(rf"{re.escape(_LOCAL_EXPERT)}(\d+)\.(.*)", part):
        index.append(int(expert[1]))
        stack.append(args.num_experts)
        part = _EXPERTS + expert[2]
    part = part.replace(*_FUSED_QKV_NORM)
    if number not in routed:
        part = part.replace(*_FUSED_MLP_NORM)
    entry = f"{STACKED}{part}" if are_alike else f"{STACKED}{number}.{part}"
    return EntrySlice(entry, shape, tuple(index), tuple(stack), half, halves)


def _extra_states(slices: Iterable[EntrySlice]) -> dict[str, list[None]]:
    """Empty entries that megatron-core's linear layers ask for all the same."""
    states = {}
    for each in slices:
        if linear := re.fullmatch(r"(.*\.linear_\w+)\.weight", each.entry):
            index = ".".join(map(str, each.index or (0,)))
            stack = ".".join(map(str, each.stack or (1,)))
            states[f"{linear[1]}._extra_state/shard_{index}_{stack}"] = [None]
    return states


class _LazyPlanner(DefaultSavePlanner):
    """Plans a save of weights and reads each one when it is written.

    torch's writer, 2.13's at least, keeps the tensors of a file until all of them are written. A
    weight's memory is freed here when the next one is requested: without copying ahead, the one
    before has been written by then.
    """

    def __init__(
        self, slices: Mapping[str, EntrySlice], read: Callable[[str], Tensor], dtype: torch.dtype
    ) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._names = {(each.entry, each.chunk.offsets): name for name, each in slices.items()}
        self._slices = slices
        self._read = read
        self._dtype = dtype
        self._written: torch.UntypedStorage | None = None

    def create_local_plan(self) -> SavePlan:
        items = super().create_local_plan().items
        for (entry, offsets), name in self._names.items():
            target = self._slices[name]
            properties = TensorProperties(dtype=self._dtype_of(entry))
            data = TensorWriteData(target.chunk, properties, target.whole)
            index = MetadataIndex(entry, offsets)
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def _dtype_of(self, entry: str) -> torch.dtype:
        """Megatron keeps a router's biases in fp32, so that rounding selects no other experts."""
        return torch.float32 if entry.endswith("router.expert_bias") else self._dtype

    def lookup_object(self, index: MetadataIndex) -> Any:
        if index.offset is None:
            return super().lookup_object(index)
        if self._written is not None:
            self._written.resize_(0)
        name = self._names[index.fqn, index.offset]
        weight = self._read(name).to(self._dtype_of(index.fqn)).contiguous()
        storage = weight.untyped_storage()
        # the memory of others, such as a mapped file's
        if storage.nbytes() != weight.nbytes or not storage.resizable():
            weight = weight.clone()
        self._written = weight.untyped_storage()
        return weight.view(self._slices[name].chunk.sizes)
