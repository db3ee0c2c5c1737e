"""The state of `Muon` as dicts, for torch's distributed checkpoints and for `torch.save`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, override

import torch

from megatron_muon.core.errors import UserError
from megatron_muon.core.exchange import LOCAL, SHARED
from megatron_muon.core.optimizer import MOMENTUM, STEPS, refuse_copy
from megatron_muon.core.ranks import Alone
from megatron_muon.errors import OffloadError
from megatron_muon.fsdp.arguments import check_loaded
from megatron_muon.fsdp.part import Part
from megatron_muon.fsdp.selection import MUON, OPTIMIZER, Selection
from megatron_muon.fsdp.step import local_parts, make_state
from megatron_muon.offload.run import OffloadRun
from megatron_muon.offload.store import RecordStore, worst_failure


class MuonState(torch.optim.Optimizer):
    """The state of all matrices, which `parts` have, with AdamW's beside it, as state dicts of torch's optimizers."""

    parts: list[Part]  # the matrices, for each set of ranks that share some
    selection: Selection
    _settings: dict[str, Any]  # that it was made with
    _run: OffloadRun | None  # what keeps momentum elsewhere; None once it is closed
    _warned: set[str]
    # of the ranks that agree on what has failed, in one order on all of them
    _state_groups: list[Any]

    def _take_up_exchanged(self) -> None:
        """Take up parameters that a framework has put into `param_groups`: for `Muon`, which can be made anew."""
        raise NotImplementedError

    def _require_open(self) -> None:
        if self._run is None and any(part.store is not None for part in self.parts):
            raise UserError("this optimizer was closed, and its momentum with it; make another one")

    @property
    def stores(self) -> list[RecordStore]:
        """What keeps momentum elsewhere than in the state."""
        return [part.store for part in self.parts if isinstance(part.store, RecordStore)]

    def initialize_state(self) -> None:
        """Give every parameter that has none its state, on every rank alike."""
        for part in self.parts:
            self.state.update(part.shown)
            part.show_settings(self.param_groups)
        for group in self.param_groups:
            # torch's checkpoints load what the run has alone, whatever dtype comes later
            if group[OPTIMIZER] == MUON:
                group.setdefault(STEPS, 0)
                continue
            for p in group["params"]:
                if not self.state[p]:
                    self.state[p].update(make_state(p))

    def _restart_cleared(self, members: Sequence[torch.Tensor]) -> None:
        """Start afresh the state of parameters whose entry a user has removed, as torch's optimizers do."""
        cleared = [p for p in members if not self.state[p]]
        for part in self.parts if cleared else ():
            for p in part.shown.keys() & set(cleared):
                part.restart(p, self.state)
        if cleared:
            self.initialize_state()

    def refuse_lost_state(self, group: Any = None) -> None:
        """Raise an OffloadError on every rank where one has lost state, and warn of what it could not write.

        Collective over `group`, or all ranks that have matrices together, where momentum is in
        files.
        """
        failures = [
            worst_failure(self.stores, each) for each in ([group] if group else self._state_groups)
        ]
        if (failure := min(filter(None, failures), default=None)) is None:
            return
        nothing_is_lost, text = failure
        if not nothing_is_lost:
            raise OffloadError(text)
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(f"{text}; save a checkpoint and look at the disk", stacklevel=3)

    def momentum_state(self, *, empty: bool = False) -> dict[torch.Tensor, torch.Tensor]:
        """As of `ShardedMuon`, for each parameter. Collective where momentum is in files and matrices are sharded."""
        self._require_open()
        state = {
            p: momentum
            for part in self.parts
            for p, momentum in part.momentum_state(empty=empty).items()
        }
        # one rank alone may save it
        is_whole = all(part.exchange.scheme in (LOCAL, SHARED) for part in self.parts)
        self.refuse_lost_state(Alone() if is_whole else None)
        return state

    @override
    def state_dict(self) -> dict[str, Any]:
        """As of any optimizer: its tensors are those of the optimizer, not copies, and each owns its storage.

        Momentum that is stored elsewhere is copied into it, as `momentum_state` reads it.
        """
        self._take_up_exchanged()
        for part in self.parts:
            part.take_up_replaced(self.state)
        if not self.stores:
            return super().state_dict()
        apart = {p: self.state[p] for p in self.selection.views}
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

        A parameter that was frozen after construction keeps its state; AdamW's state that is
        missing starts at zero. A UserError, with nothing loaded, where state of a matrix is
        missing, or of another shape.
        """
        self._require_open()
        self._take_up_exchanged()
        state_dict = check_loaded(state_dict, self._settings)
        # Keyed by numbers, or by names where it comes from torch's distributed checkpoints; in the
        # order of the groups.
        pairs = zip(self.param_groups, state_dict["param_groups"], strict=False)
        keys = {
            p: key
            for ours, theirs in pairs
            for p, key in zip(ours["params"], theirs["params"], strict=False)
        }
        saved = {p: dict(state_dict["state"].get(keys.get(p), {})) for p in self.selection.views}
        for part in self.parts:
            for p in part.shown:
                part.show_own(p, self.state)
        own = {
            MOMENTUM,
            *(slot for part in self.parts for rule in part.rules for slot in rule.slots),
        }
        for p in self.selection.views:
            for slot in sorted(own):
                shape = tuple((p if slot == MOMENTUM else self.state[p][slot]).shape)
                found = saved[p].get(slot)
                if (found is None and p.requires_grad) or (
                    found is not None and found.shape != shape
                ):
                    raise UserError(
                        f"the state to load has {'no' if found is None else tuple(found.shape)}"
                        f" {slot} of {self.selection.names[p]}, which here is {shape}; was it saved"
                        " by Muon with these settings?"
                    )
        # torch casts all that it is given to the parameters' dtype and device, at once: neither is
        # where ours belongs. It would share them with what it is given, which may be another
        # optimizer's.
        others = {
            key: {slot: _copied(value) for slot, value in slots.items() if slot not in own}
            for key, slots in state_dict["state"].items()
        }
        groups = self.param_groups
        super().load_state_dict({**state_dict, "state": others})
        for group, old in zip(self.param_groups, groups, strict=True):
            group.update({name: value for name, value in old.items() if name not in group})
            if "betas" in group:  # which whole state dicts of torch give back as a list
                group["betas"] = tuple(group["betas"])
        for part in self.parts:
            part.take_settings(self.param_groups)
            loaded = {p: slots for p, slots in saved.items() if slots and p in part.shown}
            for p, slots in loaded.items():
                for slot in own - {MOMENTUM}:
                    local_parts([part.shown[p][slot]])[0].copy_(local_parts([slots[slot]])[0])
            part.load_momentum({p: slots[MOMENTUM] for p, slots in loaded.items()})
        for slots in self.state.values():
            if "step" in slots:  # older checkpoints have whole numbers
                slots["step"] = torch.as_tensor(slots["step"], dtype=torch.float32)
        self.initialize_state()

    def __getstate__(self) -> dict[str, Any]:
        refuse_copy()


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
