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
from typing import Any, Protocol, override

import torch
from torch.distributed.tensor import DTensor

from megatron_muon.core.storage import Borrowed, Storage
from megatron_muon.offload.codecs import codec_of
from megatron_muon.offload.run import OffloadRun
from megatron_muon.offload.store import RecordStore

_NOTES = ("__create_chunk_list__", "__create_write_items__")
"""What Megatron-FSDP attaches to a shard for checkpoints: which part of the whole it is."""


class Keeper(Protocol):
    """Keeps the main weights of some parameters."""

    parameters: Sequence[torch.Tensor]
    store: RecordStore

    def read_weights(self, index: int, values: torch.Tensor) -> None:
        """Copy a parameter's main weights, this rank's, to `values`, 1D and on any device, between steps."""

    def write_weights(self, index: int, values: torch.Tensor) -> None:
        """Replace a parameter's main weights by 1D values, between steps."""


@dataclass(eq=False)
class _Place:
    """Where Megatron-FSDP has a parameter: item `item` of its buffers, and tensors that show the main weights."""

    main: Any
    model: Any
    item: int
    shown_by: tuple[DTensor, ...]


class MainWeights:
    """The main weights of a model, which are in Megatron-FSDP's buffers until `move_out`.

    Every parameter that trains is to be kept by one of the keepers, which take its values when they are made.
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
        self._keepers: list[Keeper] = []
        self._at_hand = True

    @property
    def stores(self) -> list[RecordStore]:
        """The keepers'."""
        return [keeper.store for keeper in self._keepers]

    def shard(self, parameter: torch.Tensor) -> torch.Tensor:
        """This rank's main weights of a parameter, 1D, in Megatron-FSDP's buffer while they are there."""
        place = self._places[parameter]
        shard: torch.Tensor = place.main.get_item(place.item, only_shard=True)
        return shard

    def model_shard(self, parameter: torch.Tensor) -> torch.Tensor:
        """The same elements of the weights that the model computes with, 1D."""
        place = self._places[parameter]
        shard: torch.Tensor = place.model.get_item(place.item, only_shard=True)
        return shard.detach()

    def keep(self, keeper: Keeper) -> None:
        """Put the main weights of a keeper's parameters into its records, too."""
        for index, parameter in enumerate(keeper.parameters):
            if self.shard(parameter).numel():
                keeper.write_weights(index, self.shard(parameter))
        self._keepers.append(keeper)

    def move_out(self) -> None:
        """Give up the memory of Megatron-FSDP's buffers: from now on the keepers alone have the main weights."""
        kept = {parameter for keeper in self._keepers for parameter in keeper.parameters}
        assert kept == self._places.keys(), "a parameter that trains has no keeper, or one that does not has one"
        self._show([torch.empty(buffer.data_size, device="meta") for buffer in self._buffers])
        self._at_hand = False

    @contextmanager
    def at_hand(self, *, values: bool = True, write: bool = False) -> Iterator[None]:
        """Have the main weights in Megatron-FSDP's buffers, in the stores' scratch memory; not within a step.

        Args:
            values: with their values; without, the memory has any, as they will be loaded.
            write: the keepers take the values at the end, unless an error ends it.
        """
        if self._at_hand:
            yield
            return
        sizes = [buffer.data_size for buffer in self._buffers]
        stores = sorted(self.stores, key=lambda store: not store.disk.files)  # scratch is where a store's files are
        self._show(stores[0].scratch(sizes) if stores else [])
        self._at_hand = True
        try:
            for keeper, index, shard in self._shards() if values else ():
                keeper.read_weights(index, shard)
            yield
            for keeper, index, shard in self._shards() if write else ():
                keeper.write_weights(index, shard)
        finally:
            self.move_out()

    def _shards(self) -> Iterator[tuple[Keeper, int, torch.Tensor]]:
        for keeper in self._keepers:
            for index, parameter in enumerate(keeper.parameters):
                if (shard := self.shard(parameter)).numel():
                    yield keeper, index, shard

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


class MatrixWeights(Storage):
    """The main weights of Muon's matrices, from records, one for each; what goes back is copied to the model, too."""

    def __init__(self, weights: MainWeights, parameters: Sequence[torch.Tensor], store: RecordStore) -> None:
        super().__init__(store.read)
        self.parameters = parameters
        self.store = store
        self._weights = weights
        weights.keep(self)

    def read_weights(self, index: int, values: torch.Tensor) -> None:
        """Of matrix `index`, as `Keeper` has it."""
        values.copy_(self.store.read(index).view(-1))

    def write_weights(self, index: int, values: torch.Tensor) -> None:
        """Of matrix `index`, as `Keeper` has it."""
        shard = self.store.shards[index]
        self.store.write(index, values.view(shard.rows, shard.cols))

    @override
    def borrow(self, indices: Sequence[int]) -> Borrowed:
        for places, rows in self.store.borrow(indices):
            yield places, rows
            for place, values in zip(places, rows, strict=True):
                if (index := indices[place]) not in self.store.lost:
                    self._weights.model_shard(self.parameters[index]).copy_(values.view(-1))

    @override
    def end_step(self) -> None:
        self.store.end_step()


def matrix_weights(
    weights: MainWeights,
    offload: OffloadRun,
    parameters: Sequence[torch.Tensor],
    momentum: RecordStore,
) -> MatrixWeights:
    """Records of main weights, with their values, beside those of the same shards' momentum. Collective."""
    store = offload.make_records(
        momentum.names,
        momentum.shards,
        device=parameters[0].device,
        codec=codec_of("fp32"),
        what="main weights",
    )
    return MatrixWeights(weights, parameters, store)
