"""The state of `Muon` as dicts, for torch's distributed checkpoints and for `torch.save`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, override

import torch

from megatron_muon.core.errors import UserError
from megatron_muon.core.optimizer import MOMENT2, MOMENTUM, ShardedMuon


class MuonState(ShardedMuon):
    """`ShardedMuon` with the state dicts of torch's optimizers."""

    @override
    def initialize_state(self) -> None:
        super().initialize_state()
        if self.store is not None:
            for p in self._matrices:  # what asks the state for its slots finds this one; see state_dict
                self.state[p][MOMENTUM] = torch.empty(0)

    @override
    def state_dict(self) -> dict[str, Any]:
        """As of any optimizer; momentum that is stored elsewhere is copied into it."""
        if self.store is None:
            return super().state_dict()
        apart = {p: self.state[p] for p in self._matrices}
        try:
            for p, momentum in self.momentum_state().items():
                self.state[p] = {**apart[p], MOMENTUM: momentum}
            return super().state_dict()  # with the hooks that frameworks add
        finally:
            self.state.update(apart)

    @torch.no_grad()
    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As of any optimizer, but that momentum stays fp32 whatever the parameters are.

        A parameter that was frozen after construction keeps its state; AdamW's state that is missing starts at zero.

        Raises:
            UserError: state of a matrix is missing, or of another shape; nothing is loaded then.
        """
        # Keyed by numbers, or by names where it comes from torch's distributed checkpoints; in the order of the groups.
        of_muon = set(self._group_of)
        groups_to_load = enumerate(state_dict["param_groups"])
        keys = [key for number, group in groups_to_load if number in of_muon for key in group["params"]]
        saved = [state_dict["state"].get(key, {}) for key in keys[: len(self._matrices)]]
        wanted: dict[str, Sequence[torch.Tensor]] = {MOMENTUM: self._matrices}
        if self.moment is not None:
            wanted[MOMENT2] = [self.state[p][MOMENT2] for p in self._matrices]
        for slot, like in wanted.items():
            for index, (p, each) in enumerate(zip(self._matrices, like, strict=True)):
                found = saved[index].get(slot) if index < len(saved) else None
                if (found is None and p.requires_grad) or (found is not None and found.shape != each.shape):
                    shape = "no" if found is None else tuple(found.shape)
                    raise UserError(
                        f"the state to load has {shape} {slot} of {self._names[p]}, which here is {tuple(each.shape)}; "
                        "was it saved by Muon with the same settings?"
                    )
        before, groups = dict(self.state), self.param_groups
        super().load_state_dict(state_dict)
        for group, old in zip(self.param_groups, groups, strict=True):
            group.update({name: value for name, value in old.items() if name not in group})
        for index, p in enumerate(self._matrices):
            for slot in wanted if p.dtype != torch.float32 and saved[index] else ():
                self.state[p][slot] = saved[index][slot].to(device=p.device, dtype=torch.float32)
            if not saved[index]:
                self.state[p] = before[p]
        if self.store is not None:
            of_matrices = zip(self._matrices, saved, strict=True)
            self.load_momentum({p: self.state[p][MOMENTUM] for p, slots in of_matrices if slots})
        self.initialize_state()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "Muon holds process groups and cannot be copied or pickled; make another one and give it the state_dict"
        )
