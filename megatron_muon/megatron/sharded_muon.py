"""Muon for matrices under Megatron-FSDP, as an optimizer that megatron-core wraps."""

from __future__ import annotations

from typing import Any

import torch

from megatron_muon.core.rows import MOMENTUM, STEPS
from megatron_muon.fsdp.part import Part, State, refuse_copy
from megatron_muon.offload.store import RecordStore
from megatron_muon.shards import local_part


class ShardedMuon(torch.optim.Optimizer):
    """A torch optimizer around a part.

    State is one `momentum_buffer` for each parameter, fp32, of the shard's shape, and what rules
    keep; it exists from construction on every rank, also for empty shards. With a store momentum is
    kept there instead.

    Args:
        groups: parameter groups, in the order of the part's parameters.
        defaults: of parameter groups: `lr`, `weight_decay` and, if the part has it, `momentum` (the
            share of the old one that is kept).
    """

    def __init__(self, groups: list[dict[str, Any]], part: Part, defaults: dict[str, Any]) -> None:
        super().__init__(groups, defaults)
        self.part = part
        for group in self.param_groups:
            if part.store is not None and part.store.rounds:
                group.setdefault(STEPS, 0)
        part.read_groups(self.param_groups)
        self.initialize_state()

    @property
    def store(self) -> RecordStore | None:
        """The store of momentum, if it is not state."""
        return self.part.store

    def initialize_state(self) -> None:
        """Give every parameter that has none its state of zeros, on every rank alike."""
        for p, slots in self.part.state.items():
            for slot, tensor in slots.items():
                if slot not in self.state[p]:
                    local_part(tensor).zero_()
                    self.state[p][slot] = tensor

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """One update of every matrix from its gradient. Collective.

        Raises:
            RuntimeError: a shard with rows has no gradient.
        """
        self.part.take_up(self.state)
        self.part.step(self.param_groups)
        for group in self.param_groups:
            if STEPS in group:
                group[STEPS] += 1

    def momentum_state(self, *, empty: bool = False) -> dict[torch.Tensor, torch.Tensor]:
        """As `Part.momentum_state`."""
        return self.part.momentum_state(empty=empty)

    def kept_state(self, *, empty: bool = False) -> State:
        """State in these slots as a checkpoint holds it; `empty` leaves out the values.

        Collective if the method has state.
        """
        state = self.part.method_state.save(empty=empty)
        if self.store is not None:
            for p, momentum in self.momentum_state(empty=empty).items():
                state[p][MOMENTUM] = momentum
        return state

    def load_kept(self, state: State) -> None:
        """Take the state that `kept_state` returns of a checkpoint. Collective likewise."""
        steps = max((group.get(STEPS, 0) for group in self.param_groups), default=0)
        self.part.load(state, steps)

    def __getstate__(self) -> dict[str, Any]:
        refuse_copy()
