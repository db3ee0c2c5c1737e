"""Rectangles of stacked tensors are read as tensors of their own, whatever chunks they are in."""

from dataclasses import replace

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from megatron_muon.checkpoint.torch_dist import (
    Part,
    TorchDistPlanner,
    TorchDistReader,
    _intersection,
    is_torch_dist,
)

STACK = torch.arange(2 * 6 * 3).view(2, 6, 3)
WHOLE = STACK.shape


def part(key: str, layer: int, row: int, rows: int, place: int = 0) -> Part:
    """Rows of a layer of a stack."""
    return Part(key, WHOLE, (layer, row, 0), (1, rows, 3), (place, 0))


def test_a_chunk_and_a_part_share_their_intersection():
    rows = part("w", 1, 2, 4)

    def shared(*offsets: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size((1, 2, 3)))
        return _intersection(rows, chunk)

    assert shared(1, 4, 0) == ((1, 4, 0), (1, 2, 3))
    assert min(shared(1, 0, 0)[1]) == 0
    assert min(shared(0, 4, 0)[1]) == 0


def test_layers_and_halves_are_read_from_a_stack(tmp_path):
    """Gate and up of a layer, and a tensor of rows that are stored apart, in chunks of a layer."""
    layers = {f"layer{number}": STACK[number][None].clone() for number in range(2)}
    save(dict(layers), storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    reader = TorchDistReader(tmp_path)
    shape = torch.Size((3, 3))

    def layer(number: int, row: int, rows: int, place: int = 0) -> Part:
        stored = part(f"layer{number}", 0, row, rows, place)
        return replace(stored, whole=torch.Size((1, 6, 3)))

    reader.present("gate", [layer(1, 0, 3)], shape)
    presented = {name: reader.is_presented(name) for name in reader.tensors()}
    assert presented == {"layer0": False, "layer1": True}
    reader.present("up", [layer(1, 3, 3)], shape)
    reader.present("joined", [layer(1, 4, 2), layer(0, 1, 1, 2)], shape)
    reader.present("lost", [layer(1, 0, 3), layer(2, 0, 3)], shape)
    reader.present("nothing", [], shape)
    assert reader.read_metadata().state_dict_metadata.keys() == {"gate", "up", "joined"}
    assert all(map(reader.is_presented, reader.tensors()))
    found = {name: torch.zeros(shape, dtype=STACK.dtype) for name in ("gate", "up", "joined")}
    load(found, storage_reader=reader, planner=TorchDistPlanner(), no_dist=True)
    assert torch.equal(found["gate"], STACK[1, :3])
    assert torch.equal(found["up"], STACK[1, 3:])
    assert torch.equal(found["joined"], torch.cat([STACK[1, 4:], STACK[0, 1:2]]))


def test_a_stack_of_more_layers_is_of_another_model(tmp_path):
    """Its first layers were loaded without a word."""
    save({"w": STACK.clone()}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    reader = TorchDistReader(tmp_path)
    one = replace(part("w", 0, 0, 6), whole=torch.Size((1, 6, 3)))
    reader.present("fewer", [one], torch.Size((6, 3)))
    (made,) = reader.read_metadata().state_dict_metadata.values()
    assert made.size == (2, 6, 3)
    assert not made.chunks


def test_a_folder_is_known_by_its_backend(tmp_path):
    assert not is_torch_dist(tmp_path)
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    assert not is_torch_dist(tmp_path)
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    assert is_torch_dist(tmp_path)
