"""The scalar optimizer's state, and the main weights of its parameters, out of device memory between steps.

With `--muon-offload-state all` each shard is cut into pieces, of which a third of the ring holds at least one. A piece
is one record, fp32, with a row for its main weights and one for each slot: exp_avg, exp_avg_sq. A step takes as many
pieces as a third of the ring holds, has megatron-core's optimizer itself step them as parameters of their own, copies
the weights to the model's and gives the pieces back. The arithmetic is elementwise, so it is the same to the last bit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch.distributed.tensor import DTensor

from megatron_muon.checkpoint.content import STEP
from megatron_muon.core.layout import Shard
from megatron_muon.core.rows import local_rows, sharded_like
from megatron_muon.megatron.main_weights import MainWeights
from megatron_muon.megatron.state import keep_counters_alike
from megatron_muon.offload.codecs import codec_of
from megatron_muon.offload.run import OffloadRun
from megatron_muon.offload.store import PARTS

_ALIGNED = 1024
"""Pieces begin at multiples of this, so that a CPU's vectors end where they end without pieces."""


@dataclass(frozen=True)
class _Piece:
    """Elements `start` to `stop` of this rank's shard of parameter `index`."""

    index: int
    start: int
    stop: int


class ScalarState:
    """Keeps the state of a scalar optimizer and the main weights of its parameters, and takes its steps.

    Args:
        wrapped: megatron-core's optimizer, still without state.
        weights: has the main weights.
        offload: makes the store. Collective where that is on disk.
        names: of the parameters.
        kind: for names of files.
    """

    def __init__(
        self,
        wrapped: MegatronOptimizer,
        weights: MainWeights,
        offload: OffloadRun,
        names: Mapping[torch.Tensor, str],
    ) -> None:
        self._inner = wrapped.optimizer
        groups = self._inner.param_groups
        self.parameters: Sequence[torch.Tensor] = [parameter for group in groups for parameter in group["params"]]
        self._group_of = [number for number, group in enumerate(groups) for _ in group["params"]]
        self._weights = weights
        self._slots = self._make_state(wrapped)
        self._counters = {name: _copied(value) for name, value in self._inner.state[self.parameters[0]].items()}
        rows = 1 + len(self._slots)
        most = int(offload.buffer_mb * 2**20) // (PARTS * 4 * rows) // _ALIGNED * _ALIGNED
        sizes = [weights.shard(parameter).numel() for parameter in self.parameters]
        self._pieces = _cut(sizes, max(most, _ALIGNED))
        self._without_rows = [_Piece(index, 0, 0) for index, size in enumerate(sizes) if not size]
        self.store = offload.make_records(
            [names[self.parameters[piece.index]] for piece in self._pieces],
            [Shard(0, 0, rows, piece.start, piece.stop - piece.start) for piece in self._pieces],
            device=self.parameters[0].device,
            codec=codec_of("fp32"),
            what="scalar state",
        )
        weights.keep(self)

    @torch.no_grad()
    def step(self) -> None:
        """A step of the scalar optimizer, piece by piece; the model's weights are installed."""
        of_parameters: dict[int, dict[str, Any]] = {}  # counters after the step
        of_groups: dict[int, Any] = {}
        if self._without_rows:
            nothing = torch.empty(1 + len(self._slots), 0, device=self.parameters[0].device)
            self._step_pieces([(piece, nothing) for piece in self._without_rows], of_parameters, of_groups)
        for part, records in self.store.borrow(range(len(self._pieces))):
            borrowed = list(zip((self._pieces[number] for number in part), records, strict=True))
            self._step_pieces(borrowed, of_parameters, of_groups)
            for number, (piece, values) in zip(part, borrowed, strict=True):
                if number not in self.store.lost:
                    self._model_part(piece).copy_(values[0])
        self.store.end_step()
        for index, counters in of_parameters.items():
            self._inner.state[self.parameters[index]].update(counters)
        for number, steps in of_groups.items():
            self._inner.param_groups[number][STEP] = steps

    def state(self, *, empty: bool = False) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        """Copies of each parameter's slots as a checkpoint holds them; `empty` leaves out the values."""
        sizes = [self._weights.shard(parameter).numel() for parameter in self.parameters for _ in self._slots]
        memory = iter(self.store.scratch(sizes))
        shards = [{slot: next(memory) for slot in self._slots} for _ in self.parameters]
        for number, piece in enumerate(self._pieces) if not empty else ():
            for slot, values in zip(self._slots, self.store.read(number)[1:], strict=True):
                shards[piece.index][slot][piece.start : piece.stop].copy_(values)
        return {
            parameter: {slot: sharded_like(parameter, shard) for slot, shard in slots.items()}
            for parameter, slots in zip(self.parameters, shards, strict=True)
        }

    def take_slots(self, state: dict[str, Any]) -> dict[str, Any]:
        """What `load` takes, out of a parameter's state in a checkpoint."""
        return {slot: state.pop(slot) for slot in self._slots}

    def load(self, state: Mapping[torch.Tensor, Mapping[str, torch.Tensor]]) -> None:
        """Take the slots of a checkpoint, as `state` gives them; a parameter that it lacks keeps what it has."""
        for parameter in self.parameters:  # one that starts afresh has lost its counters
            for name, value in self._counters.items():
                self._inner.state[parameter].setdefault(name, _copied(value))
        for number, piece in enumerate(self._pieces):
            if (slots := state.get(self.parameters[piece.index])) is not None:
                values = self.store.read(number)
                for slot, row in zip(self._slots, values[1:], strict=True):
                    row.copy_(local_rows(slots[slot]).reshape(-1)[piece.start : piece.stop])
                self.store.write(number, values)

    def read_weights(self, index: int, values: torch.Tensor) -> None:
        """Of parameter `index`, as a `Keeper` of main weights gives them."""
        for number, piece in self._pieces_of(index):
            values[piece.start : piece.stop].copy_(self.store.read(number)[0])

    def write_weights(self, index: int, values: torch.Tensor) -> None:
        """Of parameter `index`, as a `Keeper` of main weights takes them."""
        for number, piece in self._pieces_of(index):
            record = self.store.read(number)
            record[0].copy_(values[piece.start : piece.stop])
            self.store.write(number, record)

    def _pieces_of(self, index: int) -> list[tuple[int, _Piece]]:
        return [(number, piece) for number, piece in enumerate(self._pieces) if piece.index == index]

    def _model_part(self, piece: _Piece) -> torch.Tensor:
        return self._weights.model_shard(self.parameters[piece.index])[piece.start : piece.stop]

    def _make_state(self, wrapped: MegatronOptimizer) -> tuple[str, ...]:
        """Give every parameter its counters, and have megatron-core make the state of one; the names of the slots."""
        smallest = min(self.parameters, key=torch.Tensor.numel)
        alone = SimpleNamespace(param_groups=[{"params": [smallest]}], state=defaultdict(dict))
        wrapped.init_state_fn(alone, wrapped.config)
        keep_counters_alike(self._inner)
        return tuple(name for name, value in alone.state[smallest].items() if isinstance(value, torch.Tensor))

    def _step_pieces(
        self,
        borrowed: Sequence[tuple[_Piece, torch.Tensor]],
        of_parameters: dict[int, dict[str, Any]],
        of_groups: dict[int, Any],
    ) -> None:
        """Have the optimizer step pieces as parameters: main weights and slots are `(slots, elements)` of each."""
        inner, params = self._inner, defaultdict[int, list[torch.Tensor]](list)
        groups, state = inner.param_groups, inner.state
        states: defaultdict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
        for piece, (weights, *slots) in borrowed:
            parameter = self.parameters[piece.index]
            alone = _shown(weights, parameter)
            if parameter.grad is not None:
                alone.grad = _shown(local_rows(parameter.grad).reshape(-1)[piece.start : piece.stop], parameter.grad)
            states[alone] = {name: _copied(value) for name, value in state[parameter].items()}
            states[alone] |= {slot: _shown(row, parameter) for slot, row in zip(self._slots, slots, strict=True)}
            params[self._group_of[piece.index]].append(alone)
        stepped = {number: {**groups[number], "params": params[number]} for number in params}
        for group in stepped.values():  # Transformer Engine's FusedAdam counts the steps of groups
            group |= {STEP: _copied(group[STEP])} if STEP in group else {}
        inner.param_groups, inner.state = list(stepped.values()), states
        try:
            inner.step()
        finally:
            inner.param_groups, inner.state = groups, state
        for (piece, (_, *slots)), after in zip(borrowed, states.values(), strict=True):
            for slot, row in zip(self._slots, slots, strict=True):
                values = local_rows(after.pop(slot))
                if values.data_ptr() != row.data_ptr():
                    row.copy_(values)
            of_parameters[piece.index] = after
        of_groups |= {number: group[STEP] for number, group in stepped.items() if STEP in group}


def _cut(sizes: Sequence[int], most: int) -> list[_Piece]:
    """Shards of so many elements in pieces of at most `most`."""
    return [
        _Piece(index, start, min(start + most, size))
        for index, size in enumerate(sizes)
        for start in range(0, size, most)
    ]


def _shown(elements: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Some of a shard's elements, 1D, as what their parameter is: optimizers choose their arithmetic by that."""
    return DTensor(elements, like._spec, requires_grad=False) if isinstance(like, DTensor) else elements


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
