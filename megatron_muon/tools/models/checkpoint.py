"""Reads and writes the weights of checkpoints one at a time, whole, under one set of names, whatever the layout.

Names are those of megatron-core's local layers, without wrappers:
`decoder.layers.0.mlp.linear_fc1.weight`. Of a gated projection the gate's rows end in `_w` and the
others in `_v`, as in fsdp_dtensor. Transformer Engine keeps a norm in the linear layer that follows
it and numbers experts otherwise, and torch_dist stacks all layers. Names and entries of what is
written are those of megatron-core 0.19's own saves, without optimizer state: `--finetune` starts it
anew.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

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
"""The file by which megatron-core knows a torch_dist checkpoint."""

_COMMON_STATE = "common_state/shard_0_1"
"""The entry of a torch_dist checkpoint that holds a list with one dict: arguments, iteration and the like."""

STACKED = "decoder.layers."
"""torch_dist has one tensor for all layers under this name without a number, where layers are alike."""

_EXPERTS = "mlp.experts.experts."
"""torch_dist has one tensor for all experts under this name."""

_RENAMED = (
    (r"self_attention\.linear_qkv\.layer_norm_(weight|bias)$", r"input_layernorm.\1"),
    (r"mlp\.linear_fc1\.layer_norm_(weight|bias)$", r"pre_mlp_layernorm.\1"),
    (
        r"mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)(_[wv])?$",
        r"mlp.experts.local_experts.\3.\1.\2\4",
    ),
)
"""Names of Transformer Engine's layers, and those of the local ones."""

_OF_EXPERTS = re.compile(rf"{re.escape(STACKED)}(\d+)\.mlp\.(?:router|experts)\.")


class _Place(NamedTuple):
    """Where a weight lies: an entry and its `whole` sizes, offsets and sizes in it, of which the first `lead` are 1."""

    entry: str
    whole: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    lead: int = 0


class Weights:
    """The weights of a run's, --save's or an iteration's folder; with `verify` files must have their checksums.

    `folder` is the iteration's, `args` are Megatron's arguments of the run, `shapes` are those of
    each weight by name.

    Raises:
        UserError: it is incomplete or damaged, or not a checkpoint with weights and arguments.
    """

    def __init__(self, directory: Path, *, verify: bool = True) -> None:
        self.folder = folder = folders.find(directory)
        if wrong := folders.problems(folder, verify=verify, threads=2):
            raise UserError(f"this checkpoint cannot be read: {wrong[0]}")
        self._reader = Reader(folder)
        metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        entries = metadata.state_dict_metadata.items()
        self._entries = {name: of for name, of in entries if isinstance(of, TensorStorageMetadata)}
        if is_torch_dist := (folder / _TORCH_DIST_MARK).is_file():
            common = (content.read(folder, [_COMMON_STATE]).get(_COMMON_STATE) or [{}])[0]
        else:
            common = content.read(folder, ["args", "iteration"])
        if not isinstance(common.get("args"), argparse.Namespace):
            raise UserError(f"{folder} holds no arguments of a run")
        self.args: argparse.Namespace = common["args"]
        self.iteration = int(common.get("iteration") or 0)
        places = self._stacked() if is_torch_dist else self._by_layer()
        self._places = {_local(name): place for name, place in places}
        self.shapes = {name: place.sizes[place.lead :] for name, place in self._places.items()}

    @property
    def trained_in(self) -> torch.dtype:
        """The dtype of the run's matrix products."""
        return (
            torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else torch.float32
        )

    def read(self, name: str) -> Tensor:
        """Reads a weight. What one rank wrote is not copied; of several ranks, one's piece is in memory beside it."""
        place = self._places[name]
        entry = self._entries[place.entry]
        chunk = ChunkStorageMetadata(torch.Size(place.offsets), torch.Size(place.sizes))
        items = create_read_items_for_chunk_list(place.entry, entry, [chunk])
        if len(items) == 1:
            return self._piece(items[0]).reshape(self.shapes[name])
        whole = torch.empty(place.sizes, dtype=entry.properties.dtype)
        for item in items:
            narrow_tensor_by_index(whole, item.dest_offsets, item.lengths).copy_(self._piece(item))
        return whole.view(self.shapes[name])

    def _piece(self, item: ReadItem) -> Tensor:
        """What a rank wrote, narrowed to what is wanted of it."""
        stored = self._reader.storage_data[item.storage_index]
        file = self._reader.fs.concat_path(self._reader.path, stored.relative_path)
        with self._reader.fs.create_stream(file, "rb") as stream:
            written = torch.load(
                self._reader._slice_file(stream, stored), map_location="cpu", weights_only=True
            )
        return narrow_tensor_by_index(written, item.storage_offsets, item.lengths)

    def _by_layer(self) -> Iterator[tuple[str, _Place]]:
        """The weights of an fsdp_dtensor checkpoint."""
        for name in content.weight_names(self._entries):
            size = tuple(self._entries[name].size)
            yield (
                content.plain(name.removeprefix("model.")),
                _Place(name, size, (0,) * len(size), size),
            )

    def _stacked(self) -> Iterator[tuple[str, _Place]]:
        """The weights of a torch_dist checkpoint: layer by layer, expert by expert, and gates by themselves."""
        for name, entry in self._entries.items():
            if name.startswith("optimizer."):
                continue
            match = re.fullmatch(rf"{re.escape(STACKED)}(?:(\d+)\.)?(.*)", name)
            layer, part = match.groups() if match else ("", name)
            experts = part.startswith(_EXPERTS)
            lead = (layer is None) + experts
            sizes = tuple(entry.size[lead:])
            gated = getattr(self.args, "swiglu", False) and re.search(
                r"linear_fc1\.(weight|bias)$", name
            )
            if gated:
                sizes = (sizes[0] // 2, *sizes[1:])
            for at in itertools.product(*map(range, entry.size[:lead])):
                local = (
                    part.replace(_EXPERTS, f"mlp.experts.local_experts.{at[-1]}.")
                    if experts
                    else part
                )
                if match:
                    local = f"{STACKED}{at[0] if layer is None else layer}.{local}"
                for half, ending in enumerate(("_w", "_v") if gated else ("",)):
                    offsets = (*at, half * sizes[0], *(0 for _ in sizes[1:]))
                    yield (
                        local + ending,
                        _Place(name, tuple(entry.size), offsets, (*(1 for _ in at), *sizes), lead),
                    )


def _local(name: str) -> str:
    for pattern, replacement in _RENAMED:
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
    """Writes a checkpoint for a run with these arguments, whose --load is `save_dir`.

    `read` gives the weight of a name of `shapes`, in any dtype, away: its memory is freed when it
    is written. `dtype` is that of the files. `iteration` is None for what no run of Megatron has
    trained, a "release".
    """
    is_te = args.transformer_impl == "transformer_engine"
    state = {"args": args, "checkpoint_version": 3.0, "iteration": iteration or 0}
    if layout == FSDP_DTENSOR:
        places = {name: _of_layer(name, shape, is_te, args) for name, shape in shapes.items()}
        objects: dict[str, Any] = state
    else:
        sparse = (
            {match[1] for name in shapes if (match := _OF_EXPERTS.match(name))} if is_te else set()
        )
        places = {name: _of_stack(name, shape, sparse, args) for name, shape in shapes.items()}
        content = {
            "content_metadata": {
                "singleton_local_shards": False,
                "chained_optim_avoid_prefix": True,
            }
        }
        objects = {_COMMON_STATE: [state | content]} | {
            name: [None] for name in _extra_states(places.values())
        }
    named = "release" if iteration is None else iteration
    folder = folders.iteration_folder(save_dir, named)
    writer = FileSystemWriter(folders.begin(folder), per_thread_copy_ahead=0)
    writer.fs = written = SummedFiles()
    save(objects, storage_writer=writer, planner=_Planner(places, read, dtype), no_dist=True)
    if layout == TORCH_DIST:
        mark = {"sharded_backend": TORCH_DIST, "sharded_backend_version": 1}
        (Path(writer.path) / _TORCH_DIST_MARK).write_text(json.dumps(mark), "utf-8")
    folders.finish(folder, written.sums)
    with folders.written_at_once(save_dir / folders.TRACKER) as stream:
        stream.write(str(named))


def _of_layer(name: str, shape: tuple[int, ...], is_te: bool, args: argparse.Namespace) -> _Place:
    """The entry of fsdp_dtensor."""
    if is_te:
        name = name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
        if not args.num_experts:
            name = name.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")
        elif getattr(args, "moe_grouped_gemm", False):
            name = re.sub(r"local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)", r"\2.\3\1", name)
    return _Place(f"model.module.{name}", shape, (0,) * len(shape), shape)


def _of_stack(
    name: str, shape: tuple[int, ...], sparse: Collection[str], args: argparse.Namespace
) -> _Place:
    """The part of an entry of torch_dist: of one for all layers where they are alike, and for all experts.

    `sparse` are Transformer Engine's layers with experts, by number: the norm before their experts
    stays by itself.
    """
    lead: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    offsets, whole = (0,) * len(shape), shape
    if half := re.fullmatch(r"(.*linear_fc1\.(?:weight|bias))_([wv])", name):
        name, whole = half[1], (2 * shape[0], *shape[1:])
        offsets = (shape[0] * "wv".index(half[2]), *offsets[1:])
    if layer := re.fullmatch(rf"{re.escape(STACKED)}(\d+)\.(.*)", name):
        alike = getattr(args, "moe_layer_freq", 1) in (1, None)
        if alike:
            lead, lengths = (int(layer[1]),), (args.num_layers,)
        part = layer[2]
        if expert := re.fullmatch(r"mlp\.experts\.local_experts\.(\d+)\.(.*)", part):
            lead, lengths, part = (
                (*lead, int(expert[1])),
                (*lengths, args.num_experts),
                _EXPERTS + expert[2],
            )
        part = part.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
        if layer[1] not in sparse:
            part = part.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        name = STACKED + (part if alike else f"{layer[1]}.{part}")
    return _Place(
        name, (*lengths, *whole), (*lead, *offsets), (*(1 for _ in lead), *shape), len(lead)
    )


def _extra_states(places: Iterable[_Place]) -> Iterator[str]:
    """Entries that hold nothing and that megatron-core's linear layers ask for all the same."""
    for place in places:
        if linear := re.fullmatch(r"(.*\.linear_\w+)\.weight", place.entry):
            at, of = place.offsets[: place.lead] or (0,), place.whole[: place.lead] or (1,)
            yield (
                f"{linear[1]}._extra_state/shard_{'.'.join(map(str, at))}_{'.'.join(map(str, of))}"
            )


class _Planner(DefaultSavePlanner):
    """Plans a save of weights that are not there yet, and has each read when it is its turn.

    torch's writer, 2.13's at least, keeps the tensors of a file until all of them are written. A
    weight's memory is freed here when the next is asked for: without copying ahead, the one before
    has been written then.
    """

    def __init__(
        self, places: Mapping[str, _Place], read: Callable[[str], Tensor], dtype: torch.dtype
    ) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._at = {
            (place.entry, torch.Size(place.offsets)): (name, place)
            for name, place in places.items()
        }
        self._read, self._dtype = read, dtype
        self._written: torch.UntypedStorage | None = None

    def create_local_plan(self) -> SavePlan:
        items = super().create_local_plan().items
        for (entry, offsets), (_, place) in self._at.items():
            chunk = ChunkStorageMetadata(offsets, torch.Size(place.sizes))
            data = TensorWriteData(
                chunk, TensorProperties(dtype=self._dtype_of(entry)), torch.Size(place.whole)
            )
            items.append(
                WriteItem(MetadataIndex(entry, offsets), WriteItemType.SHARD, tensor_data=data)
            )
        self.plan = SavePlan(items)
        return self.plan

    def _dtype_of(self, entry: str) -> torch.dtype:
        """Megatron keeps a router's biases in fp32, so that rounding chooses no other experts."""
        return torch.float32 if entry.endswith("router.expert_bias") else self._dtype

    def lookup_object(self, index: MetadataIndex) -> Any:
        if index.offset is None:
            return super().lookup_object(index)
        if self._written is not None:
            self._written.resize_(0)
        name, place = self._at[index.fqn, index.offset]
        weight = self._read(name).to(self._dtype_of(place.entry)).contiguous().view(place.sizes)
        storage = weight.untyped_storage()
        # others', as a mapped file's
        if storage.nbytes() != weight.nbytes or not storage.resizable():
            weight = weight.clone()
        self._written = weight.untyped_storage()
        return weight
