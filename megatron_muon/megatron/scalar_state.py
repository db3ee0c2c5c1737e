"""State of the scalar optimizers: created at the start, and perhaps offloaded.

Saving an fsdp_dtensor checkpoint runs collectives key by key, so ranks whose keys differ wait for
each other for ever.

With `--muon-offload-state all` each shard is cut into slices, of which a slot of staging memory
holds at least one. A slice is one record with a row for its main weights and one for each slot:
exp_avg, exp_avg_sq. A step borrows as many slices as a slot holds, has megatron-core's optimizer
itself step them as parameters, and returns them. The arithmetic is elementwise, so it is the same
to the last bit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from megatron_muon.checkpoint.content import STEP
from megatron_muon.core.layout import Shard
from megatron_muon.megatron.main_weights import MainWeights, ShardSlice
from megatron_muon.megatron.upstream import MegatronOptimizer
from megatron_muon.offload.run import OffloadRun
from megatron_muon.offload.store import SLOTS
from megatron_muon.shards import local_part, sharded_like

_ALIGNED = 1024
"""Slices begin at multiples of this, so that a CPU's vectors end where they end without slices."""

type SlotsOf = Mapping[torch.Tensor, Mapping[str, torch.Tensor]]
"""Slots of each parameter as a checkpoint holds them."""


def initialize_scalar_state(wrapped: MegatronOptimizer) -> None:
    """Create a scalar optimizer's state now, with step counters that are alike on every rank.

    0.19 creates the step counter in the first step, which a resumed run must not take; without it
    the run would not ask the checkpoint for it and count from 0 again.
    """
    wrapped.init_state_fn(wrapped.optimizer, wrapped.config)
    keep_counters_alike(wrapped.optimizer)


def keep_counters_alike(inner: torch.optim.Optimizer) -> None:
    """Create step counters: torch's AdamW has one for each parameter, FusedAdam for each group.

    torch's then also steps over shards without rows, where Megatron-FSDP sets no gradient: a
    checkpoint keeps one counter for a parameter, and the rank that writes it may be without rows.
    FusedAdam gets no such gradients: its kernel is not launched for what precedes an empty tensor
    at a group's end.
    """
    if isinstance(inner, (torch.optim.Adam, torch.optim.AdamW)):
        _create_counters(inner)
        inner.register_step_pre_hook(_give_empty_gradients)
    elif type(inner).__name__ == "FusedAdam":
        for group in inner.param_groups:
            if group["params"]:
                count = torch.zeros(1, dtype=torch.int, device=group["params"][0].device)
                group.setdefault("step", count if getattr(inner, "capturable", False) else 0)


def _create_counters(inner: torch.optim.Optimizer) -> None:
    """Give each parameter without a step counter one that is 0."""
    for group in inner.param_groups:
        on_device = group.get("capturable") or group.get("fused")
        for parameter in group["params"]:
            device = parameter.device if on_device else "cpu"
            step = torch.zeros((), dtype=torch.float32, device=device)
            inner.state[parameter].setdefault("step", step)


def _give_empty_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None and local_part(parameter).numel() == 0:
                parameter.grad = torch.zeros_like(parameter.detach())


class ScalarState:
    """Keeps a scalar optimizer's state and the main weights of its parameters; takes its steps.

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
        self._group_of: dict[torch.Tensor, int] = {}
        for number, group in enumerate(self._inner.param_groups):
            self._group_of.update((parameter, number) for parameter in group["params"])
        self.slots = self._make_state(wrapped)
        first = next(iter(self._group_of))
        rows = 1 + len(self.slots)
        slot_elements = int(offload.buffer_mb * 2**20) // (SLOTS * 4 * rows)
        most = max(slot_elements // _ALIGNED, 1) * _ALIGNED
        self._sizes = {p: weights.shard(p).numel() for p in self._group_of}
        self._slices: list[ShardSlice] = []
        for p, size in self._sizes.items():
            for start in range(0, size, most):
                self._slices.append(ShardSlice(p, start, min(start + most, size)))
        self.store = offload.make_records(
            [names[part.parameter] for part in self._slices],
            [Shard(0, 0, rows, part.start, part.stop - part.start) for part in self._slices],
            first.device,
            what="scalar state",
        )
        weights.keep(self.store, list(self._group_of), self._slices)

    @torch.no_grad()
    def step(self) -> None:
        """Step the scalar optimizer slice by slice, and install the model's weights."""
        for numbers, records in self.store.borrow(range(len(self._slices))):
            self._step_slices([self._slices[number] for number in numbers], records)
        self.store.end_step()
        # slices have stepped copies of the counters
        for group in self._inner.param_groups:
            if STEP in group:
                group[STEP] += 1
        for parameter, slots in self._inner.state.items():
            has_stepped = parameter.grad is not None or not self._sizes[parameter]
            if STEP in slots and has_stepped:
                slots[STEP] += 1

    def state(self, *, empty: bool = False) -> SlotsOf:
        """Copies of each parameter's slots; `empty` leaves out the values."""
        sizes = [size for size in self._sizes.values() for _ in self.slots]
        memory = iter(self.store.scratch(sizes))
        shards = {p: {slot: next(memory) for slot in self.slots} for p in self._sizes}
        if not empty:
            for number, part in enumerate(self._slices):
                rows = self.store.read(number)[1:]
                for slot, row in zip(self.slots, rows, strict=True):
                    part.of_shard(shards[part.parameter][slot]).copy_(row)
        return {
            p: {slot: sharded_like(p, shard) for slot, shard in slots.items()}
            for p, slots in shards.items()
        }

    def load(self, state: SlotsOf) -> None:
        """Take a checkpoint's slots, as `state` returns them; missing parameters keep theirs."""
        if isinstance(self._inner, (torch.optim.Adam, torch.optim.AdamW)):
            _create_counters(self._inner)  # torch drops those of parameters that start fresh
        for number, part in enumerate(self._slices):
            if part.parameter not in state:
                continue
            record = self.store.read(number)
            for slot, row in zip(self.slots, record[1:], strict=True):
                row.copy_(part.of_shard(local_part(state[part.parameter][slot])))
            self.store.write(number, record)

    def _make_state(self, wrapped: MegatronOptimizer) -> tuple[str, ...]:
        """Create counters; the names of slots, from megatron-core's state of one parameter."""
        smallest = min(self._group_of, key=torch.Tensor.numel)
        alone = SimpleNamespace(param_groups=[{"params": [smallest]}], state=defaultdict(dict))
        wrapped.init_state_fn(alone, wrapped.config)
        keep_counters_alike(self._inner)
        state = alone.state[smallest]
        return tuple(name for name, value in state.items() if isinstance(value, torch.Tensor))

    def _step_slices(self, slices: Sequence[ShardSlice], records: Sequence[torch.Tensor]) -> None:
        """Have the optimizer step slices; records are `(1 + slots, elements)`, weights first."""
        inner = self._inner
        groups = inner.param_groups
        state = inner.state
        stepped = [{**group, "params": []} for group in groups]
        for group in stepped:
            if STEP in group:
                group[STEP] = _copied(group[STEP])
        states = []
        inner.state = defaultdict(dict)
        for part, record in zip(slices, records, strict=True):
            parameter = part.parameter
            alone = _like(parameter, record[0])
            if parameter.grad is not None:
                gradient = part.of_shard(local_part(parameter.grad))
                alone.grad = _like(parameter.grad, gradient)
            slots = inner.state[alone]
            for name, value in state[parameter].items():
                slots[name] = _copied(value)
            for slot, row in zip(self.slots, record[1:], strict=True):
                slots[slot] = _like(parameter, row)
            states.append(slots)
            stepped[self._group_of[parameter]]["params"].append(alone)
        inner.param_groups = [group for group in stepped if group["params"]]
        try:
            inner.step()
        finally:
            inner.param_groups = groups
            inner.state = state
        for slots, record in zip(states, records, strict=True):
            for slot, row in zip(self.slots, record[1:], strict=True):
                values = local_part(slots[slot])
                if values.data_ptr() != row.data_ptr():
                    row.copy_(values)


def _like(parameter: torch.Tensor, elements: torch.Tensor) -> torch.Tensor:
    """Elements of a shard, 1D, as a DTensor if the parameter is one: arithmetic depends on that."""
    if not isinstance(parameter, DTensor):
        return elements
    return DTensor(elements, parameter._spec, requires_grad=False)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
