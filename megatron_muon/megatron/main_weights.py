"""Megatron-FSDP's fp32 main weights out of its buffers between steps: `--muon-offload-state all`.

Megatron-FSDP keeps the weights twice: those that the model computes with, and beside them this rank's shard of the fp32
main weights that optimizers change. Here the main weights live as records in stores (`offload.store`), and its buffers
hold none: what reads them there gets an error of torch about tensors without data. A step borrows some of them at a
time, and each is copied to the model's weights as it goes back. For checkpoints all of them lie in memory for a while.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from megatron_muon.offload.run import OffloadRun
from megatron_muon.offload.store import RecordStore

_NOTES = ("__create_chunk_list__", "__create_write_items__")
"""What Megatron-FSDP attaches to a shard for checkpoints: which part of the whole it is."""


@dataclass(frozen=True)
class Piece:
    """A record that begins with the main weights `start` to `stop` of this rank's shard of a parameter."""

    parameter: torch.Tensor
    start: int
    stop: int


@dataclass(eq=False)
class _Place:
    """Where Megatron-FSDP has a parameter: item `item` of its buffers, and tensors that show the main weights."""

    main: Any
    model: Any
    item: int
    shown_by: tuple[DTensor, ...]


class MainWeights:
    """The main weights of a model, which are in Megatron-FSDP's buffers until `move_out`.

    Every parameter that trains is to be given to `keep` before, with the store of its main weights.
    """

    def __init__(self, model_chunks: Sequence[Any]) -> None:
        self._places: dict[torch.Tensor, _Place] = {}
        for buffer in (chunk.param_and_grad_buffer for chunk in model_chunks):
            for name, parameter in buffer.optimizer_named_parameters:
                group = buffer.parameter_groups[buffer.param_to_param_group[parameter.orig_param]]
                main, model = group.main_weight_buffer, group.model_weight_buffer
                if main is not None:
                    shown_by = (parameter, buffer.dist_main_weight[name])
                    self._places[parameter] = _Place(main, model, main.param_idx[parameter.orig_param], shown_by)
        self._buffers = list({id(place.main): place.main for place in self._places.values()}.values())
        self._kept: list[tuple[RecordStore, Sequence[Piece]]] = []
        self._parameters: set[torch.Tensor] = set()  # that are kept
        self._at_hand = True

    @property
    def stores(self) -> list[RecordStore]:
        """Those that keep main weights."""
        return [store for store, _ in self._kept]

    def shard(self, parameter: torch.Tensor) -> torch.Tensor:
        """This rank's main weights of a parameter, 1D, in Megatron-FSDP's buffer while they are there."""
        place = self._places[parameter]
        shard: torch.Tensor = place.main.get_item(place.item, only_shard=True)
        return shard

    def keep(self, store: RecordStore, parameters: Sequence[torch.Tensor], pieces: Sequence[Piece]) -> None:
        """Put the main weights of `parameters` into the records of a store, of which `pieces` says what they hold.

        From then on each borrowed record is copied to the model's weights as it goes back.
        """
        self._kept.append((store, pieces))
        self._parameters.update(parameters)
        self._write(store, pieces)
        store.on_return = partial(self._copy_to_model, pieces)

    def move_out(self) -> None:
        """Give up the memory of Megatron-FSDP's buffers: from now on the stores alone have the main weights."""
        assert self._parameters == self._places.keys(), "a parameter that trains is not kept, or another one is"
        self._show([torch.empty(buffer.data_size, device="meta") for buffer in self._buffers])
        self._at_hand = False

    @contextmanager
    def at_hand(self, *, values: bool = True, write: bool = False) -> Iterator[None]:
        """Have the main weights in Megatron-FSDP's buffers, in the stores' scratch memory; not within a step.

        Args:
            values: with their values; without, the memory has any, as they will be loaded.
            write: the stores take the values at the end, unless an error ends it.
        """
        if self._at_hand:
            yield
            return
        sizes = [buffer.data_size for buffer in self._buffers]
        stores = sorted(self.stores, key=lambda store: store.disk.file is None)  # scratch is where a store's file is
        self._show(stores[0].scratch(sizes) if stores else [])
        self._at_hand = True
        try:
            for store, pieces in self._kept if values else ():
                for number, piece in enumerate(pieces):
                    if piece.stop > piece.start:
                        self.shard(piece.parameter)[piece.start : piece.stop].copy_(
                            _weights_of(store.read(number), piece)
                        )
            yield
            for store, pieces in self._kept if write else ():
                self._write(store, pieces)
        finally:
            self.move_out()

    def _write(self, store: RecordStore, pieces: Sequence[Piece]) -> None:
        for number, piece in enumerate(pieces):
            if piece.stop > piece.start:
                record = store.read(number)
                _weights_of(record, piece).copy_(self.shard(piece.parameter)[piece.start : piece.stop])
                store.write(number, record)

    def _copy_to_model(self, pieces: Sequence[Piece], number: int, record: torch.Tensor) -> None:
        piece = pieces[number]
        place = self._places[piece.parameter]
        shard = place.model.get_item(place.item, only_shard=True).detach()
        shard[piece.start : piece.stop].copy_(_weights_of(record, piece))

    def _show(self, data: Sequence[torch.Tensor]) -> None:
        """Let Megatron-FSDP's buffers be this memory, and everything that shows main weights be parts of it."""
        for buffer, memory in zip(self._buffers, data, strict=True):
            buffer.data = memory
        for parameter, place in self._places.items():
            shard = self.shard(parameter)
            for tensor in place.shown_by:
                before = tensor._local_tensor
                tensor._local_tensor = shard.view(before.shape)
                for note in _NOTES:
                    if hasattr(before, note):
                        setattr(tensor._local_tensor, note, getattr(before, note))
                # For state dicts: a view of a DTensor must lie on the device on which the DTensor was made.
                detach = partial(DTensor, tensor._local_tensor, tensor._spec, requires_grad=False)
                tensor.detach = detach  # type: ignore[method-assign]


def _weights_of(record: torch.Tensor, piece: Piece) -> torch.Tensor:
    return record.view(-1)[: piece.stop - piece.start]


def keep_matrix_weights(
    weights: MainWeights, offload: OffloadRun, parameters: Sequence[torch.Tensor], momentum: RecordStore
) -> RecordStore:
    """Records of main weights, with their values, beside those of the same shards' momentum. Collective."""
    store = offload.make_records(momentum.names, momentum.shards, parameters[0].device, what="main weights")
    pieces = [Piece(p, 0, shard.numel) for p, shard in zip(parameters, momentum.shards, strict=True)]
    weights.keep(store, parameters, pieces)
    return store
