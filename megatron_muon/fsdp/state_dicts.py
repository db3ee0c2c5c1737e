"""The state of `Muon` as dicts, for torch's distributed checkpoints and for `torch.save`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, override

import torch

from megatron_muon.core.build import LOCAL, SHARED
from megatron_muon.core.rows import MOMENTUM, STEPS
from megatron_muon.errors import OffloadError, UserError
from megatron_muon.fsdp.foreign_state import GROUPS, in_own_form
from megatron_muon.fsdp.parameter_groups import ADAMW, MUON, OPTIMIZER, members_of
from megatron_muon.fsdp.part import Part, State, refuse_copy
from megatron_muon.fsdp.selection import Selection
from megatron_muon.fsdp.step import CapturedStep, make_state, put_on_device
from megatron_muon.offload.run import OffloadRun
from megatron_muon.offload.store import RecordStore, first_failure
from megatron_muon.ranks import Alone


class MuonState(torch.optim.Optimizer):
    """State of matrices, which `parts` have, and of AdamW, as state dicts of torch's optimizers."""

    matrix_optimizer = MUON  # its name in groups and tables
    parts: list[Part]  # the matrices of each set of ranks
    selection: Selection
    _run: OffloadRun | None = None  # keeps momentum off the device; None once it is closed
    _is_fresh: bool  # neither stepped nor loaded
    _state_groups: list[Any]  # the ranks that agree on failures, in one order on all of them

    def _follow_replaced(self) -> None:
        """Follow parameters that a framework has put into `param_groups`; `Muon` implements it."""
        raise NotImplementedError

    def _require_open(self) -> None:
        if self._run is None and self.stores:
            raise UserError("this optimizer was closed, and its momentum with it; make another one")

    @property
    def stores(self) -> list[RecordStore]:
        """The stores of momentum that is not in the state."""
        return [part.store for part in self.parts if part.store is not None]

    def initialize_state(self) -> None:
        """Give every parameter that has none its state, on every rank alike."""
        for part in self.parts:
            part.show_kept()
            for p, slots in part.state.items():
                self.state[p] = dict(slots)
        for group in self.param_groups:
            # torch's checkpoints load what the run has alone, whatever dtype comes later
            if group[OPTIMIZER] != ADAMW:
                group.setdefault(STEPS, 0)
                continue
            for p in group["params"]:
                if not self.state[p]:
                    self.state[p].update(make_state(p))

    def refuse_lost_state(self, groups: Sequence[Any] | None = None) -> None:
        """Raise an OffloadError on every rank if one has lost state.

        Collective over `groups`, or all ranks that have matrices together, where momentum is in
        files.
        """
        groups = groups or self._state_groups
        for failure in [first_failure(self.stores, each) for each in groups]:
            if failure is not None:
                raise OffloadError(failure)

    def _steps_taken(self) -> int:
        """Steps of the matrices, those before a checkpoint too."""
        return max(int(group.get(STEPS, 0)) for group in self.param_groups)

    def momentum_state(self) -> dict[torch.Tensor, torch.Tensor]:
        """As `Part.momentum_state`, for each parameter.

        Collective if momentum is in files and matrices are sharded.
        """
        self._require_open()
        state: dict[torch.Tensor, torch.Tensor] = {}
        for part in self.parts:
            state |= part.momentum_state()
        # one rank alone may save whole matrices
        is_whole = all(part.waves.scheme in (LOCAL, SHARED) for part in self.parts)
        self.refuse_lost_state([Alone()] if is_whole else None)
        return state

    @override
    def state_dict(self) -> dict[str, Any]:
        """As any optimizer's: its tensors are those of the optimizer, and each owns its storage.

        Momentum in a store is copied into it, as `momentum_state` reads it, and so is state of the
        method. Collective if there is either.
        """
        self._follow_replaced()
        for part in self.parts:
            part.take_up(self.state)
        before = {p: self.state[p] for p in self.selection.matrices}
        try:
            self.state.update((p, dict(slots)) for p, slots in before.items())
            for p, momentum in self.momentum_state().items():
                self.state[p][MOMENTUM] = momentum
            for part in self.parts:
                for p, slots in part.method_state.save().items():
                    self.state[p].update(slots)
            return super().state_dict()  # with the hooks that frameworks add
        finally:
            self.state.update(before)

    @torch.no_grad()
    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As any optimizer's, except that momentum stays fp32 whatever the parameters are.

        Also takes what `momentum_from` returns; groups keep their settings then.

        A parameter that was frozen after construction keeps its state; missing state of AdamW
        starts at zero, and so, with a warning, do matrices whose state is another optimizer's. If
        state of a matrix is missing or of another shape, raises a UserError and loads nothing.
        """
        self._require_open()
        self._follow_replaced()
        if GROUPS in state_dict:
            self._refuse_foreign()
            state_dict = in_own_form(state_dict, self.param_groups, self.selection.choices)
        elif any(OPTIMIZER not in group for group in state_dict["param_groups"]):
            raise UserError(
                "the state to load is another optimizer's; load one that Muon has saved, or convert"
                " that of another Muon by megatron_muon.momentum_from"
            )
        saved, others = self._saved(state_dict)
        before = [dict(group) for group in self.param_groups]
        super().load_state_dict({**state_dict, "state": others})
        for group in self.param_groups:
            if "betas" in group:  # torch's full state dicts have a list
                group["betas"] = tuple(group["betas"])
        for group, own in zip(self.param_groups, before, strict=True):
            if group[OPTIMIZER] not in (self.matrix_optimizer, ADAMW):
                own["params"] = group["params"]
                group.clear()
                group.update(own)
        steps = self._steps_taken()
        for part in self.parts:
            part.load({p: saved[p] for p in part.viewed}, steps)
        self.initialize_state()
        self._is_fresh = False
        if self.parts[0].captured is not None:
            self._capture()  # other tensors have the numbers of groups

    def _refuse_foreign(self) -> None:
        if self.matrix_optimizer != MUON:
            raise UserError(f"{self.matrix_optimizer} cannot take the state of another Muon")

    def _saved(
        self,
        state_dict: dict[str, Any],
    ) -> tuple[State, dict[Any, Any]]:
        """The saved state of Muon's parameters, checked, and by key a copy of the others'.

        torch casts all that it loads to the parameters' dtype and device, which is wrong for
        Muon's, and shares tensors with what it is given, which may be another optimizer's. State is
        keyed by numbers, or by names in torch's distributed checkpoints, in the order of groups.
        """
        ours = members_of(self.param_groups)
        theirs = members_of(state_dict["param_groups"])
        keys = dict(zip(ours, theirs, strict=False))  # torch refuses other groups
        others = dict(state_dict["state"])
        saved: State = {}
        written_by = {group[OPTIMIZER] for group in state_dict["param_groups"]} - {ADAMW}
        is_other = written_by != {self.matrix_optimizer}
        if is_other:
            warnings.warn(
                f"matrices start afresh, with this {self.matrix_optimizer}'s settings: the state to"
                f" load is of {', '.join(sorted(written_by))}",
                stacklevel=3,
            )
        for part in self.parts:
            for p, own in part.state.items():
                name = self.selection.choices[p].name
                slots = others.pop(keys.get(p), {})
                if is_other:
                    saved[p] = part.zeros_of(p)
                    continue
                saved[p] = slots
                if not p.requires_grad and not slots:
                    continue
                shapes = {slot: tuple(tensor.shape) for slot, tensor in own.items()}
                if part.has_momentum:
                    shapes[MOMENTUM] = tuple(p.shape)
                for slot, numel in part.method_state.numels(p).items():
                    shapes[slot] = (numel,)
                for slot, shape in shapes.items():
                    found = tuple(slots[slot].shape) if slot in slots else "no"
                    if found != shape:
                        raise UserError(
                            f"the state to load has {found} {slot} of {name}, which"
                            f" here is {shape}; was it saved by Muon with these settings?"
                        )
        for key, slots in others.items():
            others[key] = dict(slots)
            for slot, value in slots.items():
                if isinstance(value, torch.Tensor):  # steps change it in place
                    others[key][slot] = value.clone()
        return saved, others

    def _capture(self) -> None:
        """From now on have the steps of the matrices captured."""
        device = self.parts[0].device
        if device.type != "cuda":
            raise UserError(f"cuda_graph=True needs a GPU, not {device}; leave it out")
        groups = [group for group in self.param_groups if group[OPTIMIZER] != ADAMW]
        put_on_device(groups, device)
        for part in self.parts:
            look = part.engine.passes.look
            part.captured = CapturedStep(part.engine.step, look, part.viewed, groups)

    def __getstate__(self) -> dict[str, Any]:
        refuse_copy()
