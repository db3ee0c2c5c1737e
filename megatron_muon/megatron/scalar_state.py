"""The scalar optimizer's state, and the main weights of its parameters, out of device memory between steps.

With `--muon-offload-state all` each shard is cut into pieces, of which a slot of staging memory holds at least one. A
piece is one record, fp32, with a row for its main weights and one for each slot: exp_avg, exp_avg_sq. A step takes as
many pieces as a slot holds, has megatron-core's optimizer itself step them as parameters of their own, and gives them
back. The arithmetic is elementwise, so it is the same to the last bit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch.distributed.tensor import DTensor

from megatron_muon.checkpoint.content import STEP
from megatron_muon.core.layout import Shard
from megatron_muon.core.rows import local_rows, sharded_like
from megatron_muon.megatron.main_weights import MainWeights, Piece
from megatron_muon.megatron.state import keep_counters_alike
from megatron_muon.offload.run import OffloadRun
from megatron_muon.offload.store import SLOTS

_ALIGNED = 1024
"""Pieces begin at multiples of this, so that a CPU's vectors end where they end without pieces."""

State = Mapping[torch.Tensor, Mapping[str, torch.Tensor]]
"""Slots of each parameter as a checkpoint holds them."""


class ScalarState:
    """Keeps the state of a scalar optimizer and the main weights of its parameters, and takes its steps.

    Args:
        wrapped: megatron-core's optimizer, still without state.
        weights: has the main weights.
        offload: makes the store. Collective where that is on disk.
        names: of the parameters.

    Attributes:
        slots: the names of the state's tensors.
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
        self._group_of = {parameter: number for number, group in groups for parameter in group["params"]}
        self.slots = self._make_state(wrapped)
        first = next(iter(self._group_of))
        self._counters = {name: _copied(value) for name, value in self._inner.state[first].items()}
        rows = 1 + len(self.slots)
        most = max(int(offload.buffer_mb * 2**20) // (SLOTS * 4 * rows) // _ALIGNED, 1) * _ALIGNED
        self._sizes = {parameter: weights.shard(parameter).numel() for parameter in self._group_of}
        self._pieces = [
            Piece(parameter, start, min(start + most, size))
            for parameter, size in self._sizes.items()
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
        """Copies of each parameter's slots as a checkpoint holds them; `empty` leaves out the values."""
        memory = iter(self.store.scratch([size for size in self._sizes.values() for _ in self.slots]))
        shards = {parameter: {slot: next(memory) for slot in self.slots} for parameter in self._sizes}
        for number, piece in enumerate(self._pieces) if not empty else ():
            for slot, values in zip(self.slots, self.store.read(number)[1:], strict=True):
                shards[piece.parameter][slot][piece.start : piece.stop].copy_(values)
        return {
            parameter: {slot: sharded_like(parameter, shard) for slot, shard in slots.items()}
            for parameter, slots in shards.items()
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
                    row.copy_(local_rows(slots[slot]).reshape(-1)[piece.start : piece.stop])
                self.store.write(number, values)

    def _make_state(self, wrapped: MegatronOptimizer) -> tuple[str, ...]:
        """Give every parameter its counters, and have megatron-core make the state of one; the names of the slots."""
        smallest = min(self._group_of, key=torch.Tensor.numel)
        alone = SimpleNamespace(param_groups=[{"params": [smallest]}], state=defaultdict(dict))
        wrapped.init_state_fn(alone, wrapped.config)
        keep_counters_alike(self._inner)
        return tuple(name for name, value in alone.state[smallest].items() if isinstance(value, torch.Tensor))

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
                alone.grad = _shown(local_rows(parameter.grad).reshape(-1)[piece.start : piece.stop], parameter.grad)
            states[alone] = {name: _copied(value) for name, value in state[parameter].items()}
            states[alone] |= {slot: _shown(row, parameter) for slot, row in zip(self.slots, slots, strict=True)}
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
    return DTensor(elements, like._spec, requires_grad=False) if isinstance(like, DTensor) else elements


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
