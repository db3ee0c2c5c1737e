"""The state of `Muon` as dicts, for torch's distributed checkpoints and for `torch.save`."""

from __future__ import annotations

import warnings
from typing import Any, override

import torch

from megatron_muon.core.errors import UserError
from megatron_muon.core.exchange import LOCAL, SHARED
from megatron_muon.core.optimizer import MOMENTUM, STEPS, ShardedMuon
from megatron_muon.core.ranks import Alone
from megatron_muon.errors import OffloadError
from megatron_muon.fsdp.arguments import check_loaded
from megatron_muon.fsdp.selection import MUON, OPTIMIZER
from megatron_muon.fsdp.step import make_state
from megatron_muon.offload.run import OffloadRun
from megatron_muon.offload.store import RecordStore, worst_failure


class MuonState(ShardedMuon):
    """`ShardedMuon` with AdamW's state beside its own, and the state dicts of torch's optimizers."""

    _settings: dict[str, Any]  # that it was made with
    _run: OffloadRun | None  # what keeps momentum elsewhere; None once it is closed
    _warned: set[str]

    def _take_up_exchanged(self) -> None:
        """Take up parameters that a framework has put into `param_groups`: for `Muon`, which can be made anew."""
        raise NotImplementedError

    def _require_open(self) -> None:
        if self.store is not None and self._run is None:
            raise UserError("this optimizer was closed, and its momentum with it; make another one")

    @override
    def initialize_state(self) -> None:
        super().initialize_state()
        if self.store is not None:
            for p in self._matrices:  # what asks the state for its slots finds this one; see state_dict
                self.state[p][MOMENTUM] = torch.empty(0)
        for group in self.param_groups:
            if group[OPTIMIZER] == MUON:  # torch's checkpoints load what the run has alone, whatever dtype comes later
                group.setdefault(STEPS, 0)
                continue
            for p in group["params"]:
                if not self.state[p]:
                    self.state[p].update(make_state(p))

    def refuse_lost_state(self, group: Any = None) -> None:
        """Raise an OffloadError on every rank where one has lost state, and warn of what it could not write.

        Collective over `group`, or all ranks, where momentum is in files.
        """
        failure = worst_failure([self.store], group) if isinstance(self.store, RecordStore) else None
        if failure is None:
            return
        nothing_is_lost, text = failure
        if not nothing_is_lost:
            raise OffloadError(text)
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(f"{text}; save a checkpoint and look at the disk", stacklevel=3)

    @override
    def momentum_state(self, *, empty: bool = False) -> dict[torch.Tensor, torch.Tensor]:
        """As `ShardedMuon`. Collective where momentum is in files and matrices are sharded."""
        self._require_open()
        state = super().momentum_state(empty=empty)
        is_whole = self.exchange.scheme in (LOCAL, SHARED)  # one rank alone may save it
        self.refuse_lost_state(Alone() if is_whole else self.exchange.group)
        return state

    @override
    def state_dict(self) -> dict[str, Any]:
        """As of any optimizer; momentum that is stored elsewhere is copied into it, as `momentum_state` reads it."""
        self._take_up_exchanged()
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

        A parameter that was frozen after construction keeps its state; AdamW's state that is missing starts at zero. A
        UserError, with nothing loaded, where state of a matrix is missing, or of another shape.
        """
        self._require_open()
        self._take_up_exchanged()
        state_dict = check_loaded(state_dict, self._settings)
        # Keyed by numbers, or by names where it comes from torch's distributed checkpoints; in the order of the groups.
        of_muon, before, groups = set(self._group_of), dict(self.state), self.param_groups
        groups_to_load = enumerate(state_dict["param_groups"])
        keys = [key for number, group in groups_to_load if number in of_muon for key in group["params"]]
        saved = {p: state_dict["state"].get(key, {}) for p, key in zip(self._matrices, keys, strict=False)}
        own = {slot for rule in self.rules for slot in rule.slots}
        for p in self._matrices:
            for slot in (MOMENTUM, *sorted(own)):
                shape = tuple((p if slot == MOMENTUM else self.state[p][slot]).shape)
                found = saved.get(p, {}).get(slot)
                if (found is None and p.requires_grad) or (found is not None and found.shape != shape):
                    raise UserError(
                        f"the state to load has {'no' if found is None else tuple(found.shape)} {slot} of "
                        f"{self._names[p]}, which here is {shape}; was it saved by Muon with the same settings?"
                    )
        # torch casts all that it is given to the parameters' dtype and device, at once: neither is where ours belongs.
        others = {
            key: {slot: value for slot, value in slots.items() if slot not in {MOMENTUM, *own}}
            for key, slots in state_dict["state"].items()
        }
        super().load_state_dict({**state_dict, "state": others})
        for group, old in zip(self.param_groups, groups, strict=True):
            group.update({name: value for name, value in old.items() if name not in group})
        for p in self._matrices:
            slots = saved.get(p, {})
            for slot in own | ({MOMENTUM} if self.store is None else set()) if slots else ():
                self.state[p][slot] = slots[slot].to(device=p.device, dtype=torch.float32)
            if not slots:
                self.state[p] = before[p]
        if self.store is not None:
            self.load_momentum({p: slots[MOMENTUM] for p, slots in saved.items() if slots})
        self.initialize_state()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "Muon holds process groups and cannot be copied or pickled; make another one and give it the state_dict"
        )
