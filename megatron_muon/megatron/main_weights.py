"""What leaves the device with `--muon-offload-state all`, beside momentum: main weights, the scalar optimizer's state.

Megatron-FSDP keeps the weights twice: those that the model computes with, and beside them this
rank's shard of the fp32 main weights that optimizers change. Here the main weights live as records
in stores (`offload.store`), and its buffers hold none: what reads them there gets an error of torch
about tensors without data. A step borrows some of them at a time, and each is copied to the model's
weights as it goes back. For checkpoints all of them lie in memory for a while.

Each shard of the scalar optimizer is cut into pieces, of which a slot of staging memory holds at
least one. A piece is one record with a row for its main weights and one for each slot: exp_avg,
exp_avg_sq. A step takes as many pieces as a slot holds, has megatron-core's optimizer itself step
them as parameters of their own, and gives them back. The arithmetic is elementwise, so it is the
same to the last bit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch.distributed.tensor import DTensor

from megatron_muon.checkpoint.content import STEP
from megatron_muon.core.layout import Shard
from megatron_muon.core.rows import local_rows, sharded_like
from megatron_muon.megatron.scalar_state import keep_counters_alike
from megatron_muon.offload.run import OffloadRun
from megatron_muon.offload.store import SLOTS, RecordStore

_NOTES = ("__create_chunk_list__", "__create_write_items__")
"""What Megatron-FSDP attaches to a shard for checkpoints: which part of the whole it is."""


@dataclass(frozen=True)
class Piece:
    """A record that begins with the main weights `start` to `stop` of this rank's shard of a parameter."""

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
                    self._places[parameter] = _Place(
                        main, model, main.param_idx[parameter.orig_param], shown_by
                    )
        self._buffers = list(
            {id(place.main): place.main for place in self._places.values()}.values()
        )
        self._kept: list[tuple[RecordStore, Sequence[Piece]]] = []
        self._parameters: set[torch.Tensor] = set()  # that are kept
        self._at_hand = True

    @property
    def stores(self) -> list[RecordStore]:
        """What keeps main weights."""
        return [store for store, _ in self._kept]

    def shard(self, parameter: torch.Tensor) -> torch.Tensor:
        """This rank's main weights of a parameter, 1D, in Megatron-FSDP's buffer while they are there."""
        place = self._places[parameter]
        shard: torch.Tensor = place.main.get_item(place.item, only_shard=True)
        return shard

    def keep(
        self, store: RecordStore, parameters: Sequence[torch.Tensor], pieces: Sequence[Piece]
    ) -> None:
        """Put the main weights of `parameters` into the records of a store, of which `pieces` says what they hold.

        From then on each borrowed record is copied to the model's weights as it goes back.
        """
        self._kept.append((store, pieces))
        self._parameters.update(parameters)
        self._write(store, pieces)
        store.on_return = partial(self._copy_to_model, pieces)

    def keep_beside(
        self, momentum: RecordStore, offload: OffloadRun, parameters: Sequence[torch.Tensor]
    ) -> RecordStore:
        """Keep matrices' weights in records of their own beside those of the same shards' momentum. Collective."""
        store = offload.make_records(
            momentum.names, momentum.shards, parameters[0].device, what="main weights"
        )
        pieces = [
            Piece(p, 0, shard.numel) for p, shard in zip(parameters, momentum.shards, strict=True)
        ]
        self.keep(store, parameters, pieces)
        return store

    def move_out(self) -> None:
        """Give up the memory of Megatron-FSDP's buffers: from now on the stores alone have the main weights."""
        assert self._parameters == self._places.keys(), (
            "a parameter that trains is not kept, or another one is"
        )
        self._show([torch.empty(buffer.data_size, device="meta") for buffer in self._buffers])
        self._at_hand = False

    @contextmanager
    def at_hand(self, *, values: bool = True, write: bool = False) -> Iterator[None]:
        """Have the main weights in Megatron-FSDP's buffers, in the stores' scratch memory; not within a step.

        Without `values` the memory has any, as they will be loaded; with `write` the stores take
        the values at the end, unless an error ends it.
        """
        if self._at_hand:
            yield
            return
        sizes = [buffer.data_size for buffer in self._buffers]
        # scratch is where a store's file is
        stores = sorted(self.stores, key=lambda store: store.disk.file is None)
        self._show(stores[0].scratch(sizes) if stores else [])
        self._at_hand = True
        try:
            for store, pieces in self._kept if values else ():
                for number, piece in enumerate(pieces):
                    if piece.stop > piece.start:
                        piece.of_shard(self.shard(piece.parameter)).copy_(
                            piece.of_record(store.read(number))
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
                piece.of_record(record).copy_(piece.of_shard(self.shard(piece.parameter)))
                store.write(number, record)

    def _copy_to_model(self, pieces: Sequence[Piece], number: int, record: torch.Tensor) -> None:
        piece = pieces[number]
        place = self._places[piece.parameter]
        shard = place.model.get_item(place.item, only_shard=True).detach()
        piece.of_shard(shard).copy_(piece.of_record(record))

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
                # For state dicts: a view of a DTensor must lie on the device on which the DTensor
                # was made.
                detach = partial(DTensor, tensor._local_tensor, tensor._spec, requires_grad=False)
                tensor.detach = detach  # type: ignore[method-assign]


_ALIGNED = 1024
"""Pieces begin at multiples of this, so that a CPU's vectors end where they end without pieces."""

State = Mapping[torch.Tensor, Mapping[str, torch.Tensor]]
"""Slots of each parameter as a checkpoint holds them."""


class ScalarState:
    """Keeps the state of a scalar optimizer and the main weights of its parameters, and takes its steps.

    `wrapped` is megatron-core's optimizer, still without state; `slots` are the names of the
    state's tensors. Collective where `offload` stores on disk.
    """

    def __init__(
        self,
        wrapped: MegatronOptimizer,
        weights: MainWeights,
        offload: OffloadRun,
        names: Mapping[torch.Tensor, str],
    ) -> None:
        self._inner = wrapped.optimizer
        groups = enumerate(self._inner.param_groups)
        self._group_of = {
            parameter: number for number, group in groups for parameter in group["params"]
        }
        self.slots = self._make_state(wrapped)
        first = next(iter(self._group_of))
        self._counters = {name: _copied(value) for name, value in self._inner.state[first].items()}
        rows = 1 + len(self.slots)
        most = max(int(offload.buffer_mb * 2**20) // (SLOTS * 4 * rows) // _ALIGNED, 1) * _ALIGNED
        self._sizes = {p: weights.shard(p).numel() for p in self._group_of}
        self._pieces = [
            Piece(p, start, min(start + most, size))
            for p, size in self._sizes.items()
            for start in range(0, size, most)
        ]
        self.store = offload.make_records(
            [names[piece.parameter] for piece in self._pieces],
            [Shard(0, 0, rows, piece.start, piece.stop - piece.start) for piece in self._pieces],
            first.device,
            what="scalar state",
        )
        weights.keep(self.store, list(self._group_of), self._pieces)

    @torch.no_grad()
    def step(self) -> None:
        """A step of the scalar optimizer, piece by piece; the model's weights are installed."""
        counters: dict[torch.Tensor, dict[str, Any]] = {}  # after the step
        counts: dict[int, Any] = {}  # of groups
        if empty := [Piece(parameter, 0, 0) for parameter, size in self._sizes.items() if not size]:
            nothing = torch.empty(1 + len(self.slots), 0, device=empty[0].parameter.device)
            self._step_pieces(empty, [nothing] * len(empty), counters, counts)
        for part, records in self.store.borrow(range(len(self._pieces))):
            self._step_pieces([self._pieces[number] for number in part], records, counters, counts)
        self.store.end_step()
        for parameter, after in counters.items():
            self._inner.state[parameter].update(after)
        for number, count in counts.items():
            self._inner.param_groups[number][STEP] = count

    def state(self, *, empty: bool = False) -> State:
        """Copies of each parameter's slots; `empty` leaves out the values."""
        memory = iter(
            self.store.scratch([size for size in self._sizes.values() for _ in self.slots])
        )
        shards = {
            parameter: {slot: next(memory) for slot in self.slots} for parameter in self._sizes
        }
        for number, piece in enumerate(self._pieces) if not empty else ():
            for slot, values in zip(self.slots, self.store.read(number)[1:], strict=True):
                piece.of_shard(shards[piece.parameter][slot]).copy_(values)
        return {
            p: {slot: sharded_like(p, shard) for slot, shard in slots.items()}
            for p, slots in shards.items()
        }

    def load(self, state: State) -> None:
        """Take the slots of a checkpoint, as `state` gives them; a parameter that it lacks keeps what it has."""
        for parameter in self._group_of:  # one that starts afresh has lost its counters
            for name, value in self._counters.items():
                self._inner.state[parameter].setdefault(name, _copied(value))
        for number, piece in enumerate(self._pieces):
            if (slots := state.get(piece.parameter)) is not None:
                values = self.store.read(number)
                for slot, row in zip(self.slots, values[1:], strict=True):
                    row.copy_(piece.of_shard(local_rows(slots[slot])))
                self.store.write(number, values)

    def _make_state(self, wrapped: MegatronOptimizer) -> tuple[str, ...]:
        """Give every parameter its counters, and have megatron-core make the state of one; the names of the slots."""
        smallest = min(self._group_of, key=torch.Tensor.numel)
        alone = SimpleNamespace(param_groups=[{"params": [smallest]}], state=defaultdict(dict))
        wrapped.init_state_fn(alone, wrapped.config)
        keep_counters_alike(self._inner)
        return tuple(
            name for name, value in alone.state[smallest].items() if isinstance(value, torch.Tensor)
        )

    def _step_pieces(
        self,
        pieces: Sequence[Piece],
        records: Sequence[torch.Tensor],
        counters: dict[torch.Tensor, dict[str, Any]],
        counts: dict[int, Any],
    ) -> None:
        """Have the optimizer step pieces as parameters; records are `(1 + slots, elements)`, main weights first."""
        inner, params = self._inner, defaultdict[int, list[torch.Tensor]](list)
        groups, state = inner.param_groups, inner.state
        states: defaultdict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
        for piece, (weights, *slots) in zip(pieces, records, strict=True):
            parameter = piece.parameter
            alone = _shown(weights, parameter)
            if parameter.grad is not None:
                alone.grad = _shown(piece.of_shard(local_rows(parameter.grad)), parameter.grad)
            states[alone] = {name: _copied(value) for name, value in state[parameter].items()}
            states[alone] |= {
                slot: _shown(row, parameter) for slot, row in zip(self.slots, slots, strict=True)
            }
            params[self._group_of[parameter]].append(alone)
        stepped = {number: {**groups[number], "params": params[number]} for number in params}
        for group in stepped.values():  # Transformer Engine's FusedAdam counts the steps of groups
            group |= {STEP: _copied(group[STEP])} if STEP in group else {}
        inner.param_groups, inner.state = list(stepped.values()), states
        try:
            inner.step()
        finally:
            inner.param_groups, inner.state = groups, state
        for piece, (_, *slots), after in zip(pieces, records, states.values(), strict=True):
            for slot, row in zip(self.slots, slots, strict=True):
                values = local_rows(after.pop(slot))
                if values.data_ptr() != row.data_ptr():
                    row.copy_(values)
            counters[piece.parameter] = after
        counts |= {number: group[STEP] for number, group in stepped.items() if STEP in group}


def _shown(elements: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Some of a shard's elements, 1D, as what their parameter is: optimizers choose their arithmetic by that."""
    return (
        DTensor(elements, like._spec, requires_grad=False)
        if isinstance(like, DTensor)
        else elements
    )


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
