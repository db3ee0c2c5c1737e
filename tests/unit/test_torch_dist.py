"""Rectangles of stacked tensors are read as tensors of their own, whatever chunks they are in."""

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from megatron_muon.checkpoint.torch_dist import (
    Rectangle,
    TorchDistPlanner,
    TorchDistReader,
    _intersection,
    is_torch_dist,
)

STACK = torch.arange(2 * 6 * 3).view(2, 6, 3)


def test_a_chunk_and_a_rectangle_share_their_intersection():
    part = Rectangle("w", (1, 2, 0), (4, 3), (0, 0))
    chunk = ChunkStorageMetadata(torch.Size((1, 4, 0)), torch.Size((1, 2, 3)))
    assert _intersection(part, chunk) == ([1, 4, 0], [1, 2, 3])
    other = ChunkStorageMetadata(torch.Size((1, 0, 0)), torch.Size((1, 2, 3)))
    assert _intersection(part, other) is None
    layer = ChunkStorageMetadata(torch.Size((0, 4, 0)), torch.Size((1, 2, 3)))
    assert _intersection(part, layer) is None


def test_layers_and_halves_are_read_from_a_stack(tmp_path):
    """Gate and up of a layer, and a tensor of rows that are stored apart."""
    layers = {f"layer{number}": STACK[number][None].clone() for number in range(2)}
    writer = FileSystemWriter(tmp_path)
    save(dict(layers), storage_writer=writer, no_dist=True)
    rectangles = {
        "gate": [Rectangle("layer1", (0, 0, 0), (3, 3), (0, 0))],
        "up": [Rectangle("layer1", (0, 3, 0), (3, 3), (0, 0))],
        "joined": [
            Rectangle("layer1", (0, 4, 0), (2, 3), (0, 0)),
            Rectangle("layer0", (0, 1, 0), (1, 3), (2, 0)),
        ],
        "lost": [Rectangle("layer2", (0, 0, 0), (6, 3), (0, 0))],
    }
    shape = torch.Size((3, 3))
    reader = TorchDistReader(tmp_path, rectangles, dict.fromkeys(rectangles, shape))
    assert reader.read_metadata().state_dict_metadata.keys() == rectangles.keys() - {"lost"}
    found = {name: torch.zeros(shape, dtype=STACK.dtype) for name in ("gate", "up", "joined")}
    load(found, storage_reader=reader, planner=TorchDistPlanner(), no_dist=True)
    assert torch.equal(found["gate"], STACK[1, :3])
    assert torch.equal(found["up"], STACK[1, 3:])
    assert torch.equal(found["joined"], torch.cat([STACK[1, 4:], STACK[0, 1:2]]))


def test_a_folder_is_known_by_its_backend(tmp_path):
    assert not is_torch_dist(tmp_path)
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    assert not is_torch_dist(tmp_path)
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    assert is_torch_dist(tmp_path)
