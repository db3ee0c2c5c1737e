"""The state of `Muon` as dicts, for torch's distributed checkpoints and for `torch.save`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, override

import torch

from megatron_muon.core.exchange import LOCAL, SHARED
from megatron_muon.core.optimizer import MOMENTUM, STEPS, refuse_copy
from megatron_muon.core.ranks import Alone
from megatron_muon.core.user_errors import UserError
from megatron_muon.errors import OffloadError
from megatron_muon.fsdp.group_muon import GroupMuon
from megatron_muon.fsdp.options import without_shared_settings
from megatron_muon.fsdp.parameter_groups import MUON, OPTIMIZER
from megatron_muon.fsdp.selection import Selection
from megatron_muon.fsdp.step import make_state
from megatron_muon.offload.run import OffloadRun
from megatron_muon.offload.store import RecordStore, first_failure

type Slots = dict[str, Any]


class MuonState(torch.optim.Optimizer):
    """State of matrices, which `parts` have, and of AdamW, as state dicts of torch's optimizers."""

    parts: list[GroupMuon]  # the matrices of each set of ranks
    selection: Selection
    _settings: dict[str, Any]  # the arguments of `Muon`
    _run: OffloadRun | None  # keeps momentum off the device; None once it is closed
    _state_groups: list[Any]  # the ranks that agree on failures, in one order on all of them

    def _follow_exchanged(self) -> None:
        """Follow parameters that a framework has put into `param_groups`; `Muon` implements it."""
        raise NotImplementedError

    def _require_open(self) -> None:
        if self._run is None and any(part.store is not None for part in self.parts):
            raise UserError("this optimizer was closed, and its momentum with it; make another one")

    @property
    def stores(self) -> list[RecordStore]:
        """The stores of momentum that is not in the state."""
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
        """Restart parameters whose state a user has removed, as torch's optimizers do."""
        cleared = {p for p in members if not self.state[p]}
        if cleared:
            for part in self.parts:
                for p in part.shown.keys() & cleared:
                    part.restart(p, self.state)
            self.initialize_state()

    def refuse_lost_state(self, group: Any = None) -> None:
        """Raise an OffloadError on every rank if one has lost state.

        Collective over `group`, or all ranks that have matrices together, where momentum is in
        files.
        """
        groups = self._state_groups if group is None else [group]
        failures = [first_failure(self.stores, each) for each in groups]
        failure = next(filter(None, failures), None)
        if failure is not None:
            raise OffloadError(failure)

    def momentum_state(self, *, empty: bool = False) -> dict[torch.Tensor, torch.Tensor]:
        """As `ShardedMuon.momentum_state`, for each parameter.

        Collective if momentum is in files and matrices are sharded.
        """
        self._require_open()
        state: dict[torch.Tensor, torch.Tensor] = {}
        for part in self.parts:
            state.update(part.momentum_state(empty=empty))
        # one rank alone may save whole matrices
        is_whole = all(part.exchange.scheme in (LOCAL, SHARED) for part in self.parts)
        self.refuse_lost_state(Alone() if is_whole else None)
        return state

    @override
    def state_dict(self) -> dict[str, Any]:
        """As any optimizer's: its tensors are those of the optimizer, and each owns its storage.

        Momentum in a store is copied into it, as `momentum_state` reads it.
        """
        self._follow_exchanged()
        for part in self.parts:
            part.adopt_replaced(self.state)
        if not self.stores:
            return super().state_dict()
        before = {p: self.state[p] for p in self.selection.views}
        try:
            for p, momentum in self.momentum_state().items():
                self.state[p] = {**before[p], MOMENTUM: momentum}
            return super().state_dict()  # with the hooks that frameworks add
        finally:
            self.state.update(before)

    @torch.no_grad()
    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As any optimizer's, except that momentum stays fp32 whatever the parameters are.

        A parameter that was frozen after construction keeps its state; missing state of AdamW
        starts at zero. Raises a UserError, with nothing loaded, if state of a matrix is missing or
        of another shape.
        """
        self._require_open()
        self._follow_exchanged()
        state_dict = without_shared_settings(state_dict, self._settings)
        for part in self.parts:
            for p in part.shown:
                part.show_own(p, self.state)
        own = {MOMENTUM}
        for part in self.parts:
            for rule in part.rules:
                own.update(rule.slots)
        saved = self._saved_slots(state_dict, own)
        groups = self.param_groups
        super().load_state_dict({**state_dict, "state": _without(state_dict["state"], own)})
        for group, old in zip(self.param_groups, groups, strict=True):
            for name, value in old.items():
                group.setdefault(name, value)
            if "betas" in group:  # torch's full state dicts have a list
                group["betas"] = tuple(group["betas"])
        for part in self.parts:
            part.take_settings(self.param_groups)
            for p in part.shown:
                part.load(p, saved[p])
        for slots in self.state.values():
            if "step" in slots:  # older checkpoints have whole numbers
                slots["step"] = torch.as_tensor(slots["step"], dtype=torch.float32)
        self.initialize_state()

    def _saved_slots(
        self,
        state_dict: dict[str, Any],
        own: set[str],
    ) -> dict[torch.Tensor, Slots]:
        """The saved tensors of each matrix parameter, checked.

        State is keyed by numbers, or by names in torch's distributed checkpoints, in the order of
        the groups.
        """
        keys: dict[torch.Tensor, Any] = {}
        pairs = zip(self.param_groups, state_dict["param_groups"], strict=False)
        for ours, theirs in pairs:
            keys.update(zip(ours["params"], theirs["params"], strict=False))
        saved: dict[torch.Tensor, Slots] = {}
        for p in self.selection.views:
            slots = state_dict["state"].get(keys.get(p), {})
            saved[p] = {slot: slots[slot] for slot in sorted(own) if slot in slots}
            for slot in sorted(own):
                found = saved[p].get(slot)
                shape = p.shape if slot == MOMENTUM else self.state[p][slot].shape
                if found is None and not p.requires_grad:
                    continue
                if found is None or found.shape != shape:
                    shown = "no" if found is None else tuple(found.shape)
                    raise UserError(
                        f"the state to load has {shown} {slot} of {self.selection.name(p)}, which"
                        f" here is {tuple(shape)}; was it saved by Muon with these settings?"
                    )
        return saved

    def __getstate__(self) -> dict[str, Any]:
        refuse_copy()


def _without(state: Mapping[Any, Slots], own: set[str]) -> dict[Any, Slots]:
    """Copies of AdamW's state.

    torch casts all that it loads to the parameters' dtype and device, at once, which is wrong for
    `own`, and shares tensors with what it is given, which may be another optimizer's.
    """
    others: dict[Any, Slots] = {}
    for key, slots in state.items():
        others[key] = {}
        for slot, value in slots.items():
            if slot not in own:
                if isinstance(value, torch.Tensor):
                    value = value.clone()
                others[key][slot] = value
    return others
