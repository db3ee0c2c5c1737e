"""Main weights outside the device, with `--muon-offload-state all`.

Megatron-FSDP keeps the weights twice: those that the model computes with, and this rank's shard of
the fp32 main weights that optimizers change. Here the main weights live as records in stores
(`offload.store`), and Megatron-FSDP's buffers are empty: a read there is an error of torch about
tensors without data. A step borrows some records at a time, and each is copied to the model's
weights when it goes back. For checkpoints all of them are in memory for a while.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from megatron_muon.fsdp.part import ViewedParameter
from megatron_muon.offload.run import OffloadRun
from megatron_muon.offload.store import RecordStore

_CHECKPOINT_NOTES = ("__create_chunk_list__", "__create_write_items__")
"""Attributes of a shard by which Megatron-FSDP places it in a checkpoint."""


@dataclass(frozen=True)
class ShardSlice:
    """A record that begins with the main weights `start` to `stop` of a parameter's shard."""

    parameter: torch.Tensor
    start: int
    stop: int

    def of_shard(self, shard: torch.Tensor) -> torch.Tensor:
        """These elements of a shard."""
        return shard.reshape(-1)[self.start : self.stop]

    def of_record(self, record: torch.Tensor) -> torch.Tensor:
        """The main weights of the record."""
        return record.view(-1)[: self.stop - self.start]


@dataclass(eq=False)
class _BufferItem:
    """A parameter in Megatron-FSDP: its item in two buffers, and the tensors that view `main`."""

    main: Any
    model: Any
    index: int
    views: tuple[DTensor, ...]

    def shard_of(self, buffer: Any) -> torch.Tensor:
        shard: torch.Tensor = buffer.get_item(self.index, only_shard=True)
        return shard


class MainWeights:
    """The main weights of a model, which are in Megatron-FSDP's buffers until `move_out`.

    Before that, `keep` takes every trainable parameter with the store of its main weights.
    """

    def __init__(self, model_chunks: Sequence[Any]) -> None:
        self._items: dict[torch.Tensor, _BufferItem] = {}
        for chunk in model_chunks:
            buffer = chunk.param_and_grad_buffer
            for name, parameter in buffer.optimizer_named_parameters:
                original = parameter.orig_param
                group = buffer.parameter_groups[buffer.param_to_param_group[original]]
                main = group.main_weight_buffer
                if main is not None:
                    views = (parameter, buffer.dist_main_weight[name])
                    item = _BufferItem(
                        main, group.model_weight_buffer, main.param_idx[original], views
                    )
                    self._items[parameter] = item
        buffers = {id(item.main): item.main for item in self._items.values()}
        self._buffers = list(buffers.values())
        self._kept: list[tuple[RecordStore, Sequence[ShardSlice]]] = []
        self._parameters: set[torch.Tensor] = set()  # kept ones
        self._at_hand = True

    @property
    def stores(self) -> list[RecordStore]:
        """The stores of main weights."""
        return [store for store, _ in self._kept]

    def shard(self, parameter: torch.Tensor) -> torch.Tensor:
        """This rank's main weights of a parameter, 1D, while they are in Megatron-FSDP's buffer."""
        item = self._items[parameter]
        return item.shard_of(item.main)

    def keep(
        self, store: RecordStore, parameters: Sequence[torch.Tensor], slices: Sequence[ShardSlice]
    ) -> None:
        """Put the main weights of `parameters` into the records of a store, one for each slice.

        From then on each borrowed record is copied to the model's weights when it goes back.
        """
        self._kept.append((store, slices))
        self._parameters.update(parameters)
        self._write(store, slices)
        store.on_return = partial(self._copy_to_model, slices)

    def keep_beside(
        self, offload: OffloadRun, momentum: RecordStore, viewed: Sequence[ViewedParameter]
    ) -> RecordStore:
        """Keep matrices' weights in a store of records like those of their momentum. Collective."""
        parameters = [each.parameter for each in viewed]
        device = parameters[0].device
        store = offload.make_records(momentum.names, momentum.shards, device, what="main weights")
        slices = [ShardSlice(parameters[0], 0, 0)] * len(momentum.names)
        for each in viewed:
            start = 0
            for number in each.held:
                stop = start + momentum.shards[number].numel
                slices[number] = ShardSlice(each.parameter, start, stop)
                start = stop
        self.keep(store, parameters, slices)
        return store

    def move_out(self) -> None:
        """Free Megatron-FSDP's buffers: from now on the stores alone have the main weights."""
        assert self._parameters == self._items.keys(), "kept parameters are not the trainable ones"
        self._set_buffers([torch.empty(each.data_size, device="meta") for each in self._buffers])
        self._at_hand = False

    @contextmanager
    def at_hand(self, *, values: bool = True, write: bool = False) -> Iterator[None]:
        """Have the main weights in Megatron-FSDP's buffers for a while; not within a step.

        They use the stores' scratch memory. Without `values` it is uninitialized, to be loaded;
        with `write` the stores take the values at the end, unless an error ends it.
        """
        if self._at_hand:
            yield
            return
        sizes = [buffer.data_size for buffer in self._buffers]
        # Scratch memory is beside a store's file.
        stores = sorted(self.stores, key=lambda store: store.disk.file is None)
        self._set_buffers(stores[0].scratch(sizes) if stores else [])
        self._at_hand = True
        try:
            if values:
                self._read()
            yield
            if write:
                for store, slices in self._kept:
                    self._write(store, slices)
        finally:
            self.move_out()

    def _read(self) -> None:
        for store, slices in self._kept:
            for number, part in enumerate(slices):
                if part.stop > part.start:
                    elements = part.of_shard(self.shard(part.parameter))
                    elements.copy_(part.of_record(store.read(number)))

    def _write(self, store: RecordStore, slices: Sequence[ShardSlice]) -> None:
        for number, part in enumerate(slices):
            if part.stop > part.start:
                record = store.read(number)
                part.of_record(record).copy_(part.of_shard(self.shard(part.parameter)))
                store.write(number, record)

    def _copy_to_model(
        self, slices: Sequence[ShardSlice], number: int, record: torch.Tensor
    ) -> None:
        part = slices[number]
        item = self._items[part.parameter]
        weights = item.shard_of(item.model).detach()
        part.of_shard(weights).copy_(part.of_record(record))

    def _set_buffers(self, memory: Sequence[torch.Tensor]) -> None:
        """Give Megatron-FSDP's buffers this memory, and let the views of main weights follow."""
        for buffer, data in zip(self._buffers, memory, strict=True):
            buffer.data = data
        for parameter, item in self._items.items():
            shard = self.shard(parameter)
            for view in item.views:
                before = view._local_tensor
                view._local_tensor = shard.view(before.shape)
                for note in _CHECKPOINT_NOTES:
                    if hasattr(before, note):
                        setattr(view._local_tensor, note, getattr(before, note))
                # For state dicts: DTensor.detach() requires the device of its creation.
                detach = partial(DTensor, view._local_tensor, view._spec, requires_grad=False)
                view.detach = detach  # type: ignore[method-assign]
