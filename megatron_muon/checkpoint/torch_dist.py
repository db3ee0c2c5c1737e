"""Checkpoints in megatron-core's torch_dist format, read as if they were fsdp_dtensor.

Both are written by torch's distributed checkpointing, but torch_dist stacks layers and experts:
`decoder.layers.mlp.linear_fc2.weight` is `(layers, rows, columns)`, and the gate and up of a gated
projection are one tensor. `TorchDistReader` presents rectangles of these tensors under other names,
so that each rank reads the rows of its shards alone. No collectives.

    SAVE_DIR/iter_0000008/metadata.json            {"sharded_backend": "torch_dist", ...}
    SAVE_DIR/iter_0000008/.metadata                torch's index
    SAVE_DIR/iter_0000008/__0_0.distcp, ...        tensors, and one entry of all that is no tensor
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class Rectangle:
    """A part of a stored tensor, and its place in a tensor with fewer axes.

    `offsets` are of the stored tensor, whose first axes (layer, expert) the other tensor lacks.
    """

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: tuple[int, ...]

    @property
    def leading(self) -> tuple[int, ...]:
        """The position on the axes that the other tensor lacks."""
        return self.offsets[: len(self.offsets) - len(self.sizes)]


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
    """Reads tensors that `rectangles` make of stored ones, by name.

    `sizes` are the whole sizes of these tensors. Names whose stored tensors are missing are left
    out.
    """

    def __init__(
        self,
        folder: Path,
        rectangles: Mapping[str, Sequence[Rectangle]],
        sizes: Mapping[str, torch.Size],
    ) -> None:
        super().__init__(folder)
        self._stored = super().read_metadata()
        self._source: dict[MetadataIndex, tuple[MetadataIndex, tuple[int, ...]]] = {}
        chunks = _chunks_by_position(self._stored, _keys(rectangles))
        self._tensors: dict[str, TensorStorageMetadata] = {}
        for name, parts in rectangles.items():
            if all(part.key in self._stored.state_dict_metadata for part in parts):
                self._tensors[name] = self._describe(name, parts, sizes[name], chunks)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """An index of the tensors made."""
        return replace(self._stored, state_dict_metadata=dict(self._tensors))

    def read_data(self, plan: LoadPlan, planner: Any) -> Future[None]:
        """Read the parts that a plan requests; `planner` is a `TorchDistPlanner`."""
        items = [self._of_stored(item) for item in plan.items]
        return super().read_data(replace(plan, items=items), planner)

    def _describe(
        self,
        name: str,
        parts: Sequence[Rectangle],
        size: torch.Size,
        chunks: Mapping[tuple[str, tuple[int, ...]], Sequence[tuple[int, ChunkStorageMetadata]]],
    ) -> TensorStorageMetadata:
        made = []
        for part in parts:
            for number, chunk in chunks.get((part.key, part.leading), ()):
                common = _intersection(part, chunk)
                if common is None:
                    continue
                start, sizes = common
                first = len(part.leading)
                place = [
                    at - offset + here
                    for at, offset, here in zip(
                        start[first:], part.offsets[first:], part.place, strict=True
                    )
                ]
                stored = MetadataIndex(part.key, chunk.offsets, number)
                within = tuple(a - b for a, b in zip(start, chunk.offsets, strict=True))
                self._source[MetadataIndex(name, torch.Size(place))] = (stored, within)
                made.append(ChunkStorageMetadata(torch.Size(place), torch.Size(sizes[first:])))
        stored_as: Any = self._stored.state_dict_metadata[parts[0].key]
        properties = stored_as.properties
        return TensorStorageMetadata(properties, size, made)

    def _of_stored(self, item: ReadItem) -> ReadItem:
        index = MetadataIndex(item.storage_index.fqn, item.storage_index.offset)
        stored, within = self._source[index]
        lacking = len(within) - len(item.storage_offsets)
        offsets = (0,) * lacking + tuple(item.storage_offsets)
        return replace(
            item,
            storage_index=stored,
            storage_offsets=torch.Size(a + b for a, b in zip(within, offsets, strict=True)),
            lengths=torch.Size((1,) * lacking + tuple(item.lengths)),
        )


class TorchDistPlanner(Planner):
    """A planner whose tensors may lack the first axes of the stored ones."""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The part of a tensor to fill, with the stored tensor's axes."""
        lacking = len(read_item.lengths) - len(read_item.dest_offsets)
        own = replace(read_item, lengths=read_item.lengths[lacking:])
        target: torch.Tensor = super().resolve_tensor(own)
        return target[(None,) * lacking]


def _keys(rectangles: Mapping[str, Sequence[Rectangle]]) -> Iterator[tuple[str, int]]:
    """The stored tensors that are needed, with their number of leading axes."""
    for parts in rectangles.values():
        for part in parts:
            yield part.key, len(part.leading)


def _chunks_by_position(
    stored: Metadata, keys: Iterable[tuple[str, int]]
) -> dict[tuple[str, tuple[int, ...]], list[tuple[int, ChunkStorageMetadata]]]:
    """Stored chunks with their numbers, by key and position on the leading axes."""
    found = defaultdict(list)
    for key, leading in dict(keys).items():
        entry = stored.state_dict_metadata.get(key)
        for number, chunk in enumerate(getattr(entry, "chunks", ())):
            assert all(size == 1 for size in chunk.sizes[:leading]), key
            found[key, tuple(chunk.offsets[:leading])].append((number, chunk))
    return found


def _intersection(
    part: Rectangle, chunk: ChunkStorageMetadata
) -> tuple[list[int], list[int]] | None:
    """Offsets and sizes, in the stored tensor; None without elements."""
    sizes = (1,) * len(part.leading) + part.sizes
    start = [max(a, b) for a, b in zip(part.offsets, chunk.offsets, strict=True)]
    stop = []
    for offset, size, at, length in zip(
        part.offsets, sizes, chunk.offsets, chunk.sizes, strict=True
    ):
        stop.append(min(offset + size, at + length))
    found = [b - a for a, b in zip(start, stop, strict=True)]
    return (start, found) if all(size > 0 for size in found) else None
