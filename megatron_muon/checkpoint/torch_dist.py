"""Checkpoints in megatron-core's torch_dist format, read as if they were fsdp_dtensor.

Both are written by torch's distributed checkpointing, but torch_dist stacks layers and experts:
`decoder.layers.mlp.linear_fc2.weight` is `(layers, rows, columns)`, and the gate and up of a gated
projection are one tensor. `TorchDistReader` presents parts of these tensors under other names, so
that each rank reads the rows of its shards alone. No collectives.

    SAVE_DIR/iter_0000008/metadata.json            {"sharded_backend": "torch_dist", ...}
    SAVE_DIR/iter_0000008/.metadata                torch's index
    SAVE_DIR/iter_0000008/__0_0.distcp, ...        tensors, and one entry of all that is no tensor
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import add, sub
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.futures import Future

from megatron_muon.checkpoint import content
from megatron_muon.checkpoint.dcp import Planner, Reader

COMMON = "common_state/shard_0_1"
"""The entry of all that is no tensor: arguments, iteration, schedule, parameter groups."""

FORMAT = "torch_dist"

type Position = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """A rectangle of a stored tensor, and its place in a tensor that lacks the first axes.

    These axes, of layers and experts, have size 1 in the rectangle.
    """

    key: str
    whole: torch.Size  # of the stored tensor
    offsets: Position  # in the stored tensor
    sizes: Position
    place: Position

    @property
    def leading(self) -> Position:
        """The position on the axes that the other tensor lacks."""
        return self.offsets[: len(self.offsets) - len(self.place)]


def is_torch_dist(folder: Path) -> bool:
    """True for the folder of a torch_dist checkpoint."""
    try:
        found = json.loads((folder / "metadata.json").read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and found.get("sharded_backend") == FORMAT


def read_object(folder: Path, name: str) -> Any:
    """An entry that is no tensor; None if the checkpoint lacks it."""
    found = content.read(folder, [name]).get(name)
    return found[0] if found else None  # megatron-core keeps each in a list


class TorchDistReader(Reader):
    """Reads tensors that are made of parts of stored ones.

    Attributes:
        stored: the checkpoint's entries.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._index = super().read_metadata()
        self.stored: dict[str, Any] = self._index.state_dict_metadata
        self._tensors: dict[str, Any] = {}
        self._chunks: dict[str, dict[Position, list[MetadataIndex]]] = {}
        self._source: dict[MetadataIndex, tuple[MetadataIndex, Position]] = {}

    def present(self, name: str, parts: Sequence[Part], shape: torch.Size) -> None:
        """Make a tensor of parts, unless one of them is missing.

        If a stored tensor has another size, the checkpoint is of another model: this one gets that
        size, and cannot be read.
        """
        chunks: list[ChunkStorageMetadata] = []
        entry = None
        for part in parts:
            entry = self.stored.get(part.key)
            if entry is None:
                return
            if entry.size == part.whole:
                chunks += self._present_part(name, part)
            else:
                shape = entry.size
        if entry is not None:
            self._tensors[name] = TensorStorageMetadata(entry.properties, shape, chunks)

    def tensors(self) -> list[str]:
        """The names of stored tensors."""
        stored = self.stored.items()
        return sorted(key for key, entry in stored if isinstance(entry, TensorStorageMetadata))

    def is_presented(self, key: str) -> bool:
        """True if a part of a stored tensor is presented here."""
        return key in self._chunks

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """An index of the tensors made."""
        return replace(self._index, state_dict_metadata=dict(self._tensors))

    def read_data(self, plan: LoadPlan, planner: Any) -> Future[None]:
        """Read the parts that a plan requests; `planner` is a `TorchDistPlanner`."""
        items = [self._of_stored(item) for item in plan.items]
        return super().read_data(replace(plan, items=items), planner)

    def _present_part(self, name: str, part: Part) -> list[ChunkStorageMetadata]:
        """The intersections of a part with stored chunks, as chunks of the tensor made."""
        made = []
        lacking = len(part.leading)
        for index in self._chunks_of(part):
            chunk = self.stored[part.key].chunks[index.index]
            start, sizes = _intersection(part, chunk)
            if min(sizes, default=1) <= 0:
                continue
            moved = tuple(map(sub, start, part.offsets))[lacking:]
            place = torch.Size(map(add, part.place, moved))
            within = tuple(map(sub, start, chunk.offsets))
            self._source[MetadataIndex(name, place)] = (index, within)
            made.append(ChunkStorageMetadata(place, torch.Size(sizes[lacking:])))
        return made

    def _chunks_of(self, part: Part) -> list[MetadataIndex]:
        """Stored chunks at a part's position on the leading axes."""
        if part.key not in self._chunks:
            found = self._chunks[part.key] = defaultdict(list)
            lacking = len(part.leading)
            for number, chunk in enumerate(self.stored[part.key].chunks):
                assert all(size == 1 for size in chunk.sizes[:lacking]), part.key
                index = MetadataIndex(part.key, chunk.offsets, number)
                found[tuple(chunk.offsets[:lacking])].append(index)
        return self._chunks[part.key].get(part.leading, [])

    def _of_stored(self, item: ReadItem) -> ReadItem:
        stored, within = self._source[item.storage_index]
        lacking = len(within) - len(item.storage_offsets)
        offsets = (*(0,) * lacking, *item.storage_offsets)
        return replace(
            item,
            storage_index=stored,
            storage_offsets=torch.Size(map(add, within, offsets)),
            lengths=torch.Size((*(1,) * lacking, *item.lengths)),
        )


class TorchDistPlanner(Planner):
    """A planner whose tensors may lack the first axes of the stored ones."""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The part of a tensor to fill, with the stored tensor's axes."""
        lacking = len(read_item.lengths) - len(read_item.dest_offsets)
        own = replace(read_item, lengths=read_item.lengths[lacking:])
        target: torch.Tensor = super().resolve_tensor(own)
        return target[(None,) * lacking]


def _intersection(part: Part, chunk: ChunkStorageMetadata) -> tuple[Position, Position]:
    """Offsets in the stored tensor and sizes, which are positive if there are elements."""
    start = tuple(map(max, part.offsets, chunk.offsets))
    part_stop = map(add, part.offsets, part.sizes)
    chunk_stop = map(add, chunk.offsets, chunk.sizes)
    stop = map(min, part_stop, chunk_stop)
    return start, tuple(map(sub, stop, start))
