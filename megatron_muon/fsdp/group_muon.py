"""The core's step for the matrices of one set of ranks, as views of their parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, override

import torch

from megatron_muon.core.layout import Rectangle
from megatron_muon.core.optimizer import MOMENTUM, STEPS, ShardedMuon
from megatron_muon.core.rows import sharded_like
from megatron_muon.core.user_errors import UserError
from megatron_muon.fsdp.step import CapturedStep, local_part
from megatron_muon.fsdp.views import View

type State = dict[torch.Tensor, dict[str, torch.Tensor]]


class ViewedParameter:
    """A parameter, and the matrices of the core's optimizer that view it.

    Attributes:
        matrices: the parameter itself, or views; empty tensors for matrices of other ranks.
        first: the number of the first matrix among all of the optimizer.
        held: the numbers of matrices of which this rank holds rows.
    """

    def __init__(
        self,
        name: str,
        parameter: torch.Tensor,
        view: View,
        rectangles: Sequence[Rectangle],
        first: int,
    ) -> None:
        self.name = name
        self.parameter = parameter
        self.view = view
        self.first = first
        if view.is_itself:
            self.matrices = [parameter]
            self.held = [first]
            return
        views = self._views()
        numbers = []
        for number, (_, rows, _, cols) in enumerate(rectangles):
            if rows and cols:
                numbers.append(number)
        numbers = numbers or list(range(len(views)))  # any will do for matrices without rows
        self.held = [first + number for number in numbers]
        self.matrices = [local_part(parameter).new_empty(0, 0) for _ in range(view.count)]
        for number, matrix in zip(numbers, views, strict=True):
            matrix.grad_dtype = None  # any, as the parameter has it
            self.matrices[number] = matrix

    def rows_of(self, tensor: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """The numbers of held matrices, with this rank's rows in a tensor like the parameter."""
        return zip(self.held, self.view.tensors(local_part(tensor)), strict=True)

    def follow(self) -> None:
        """Have the matrices view the parameter's memory again, if it has moved."""
        if local_part(self.parameter).data_ptr() != self._address:
            for number, rows in zip(self.held, self._views(), strict=True):
                self.matrices[number - self.first].data = rows

    def _views(self) -> list[torch.Tensor]:
        local = local_part(self.parameter.detach())
        self._address = local.data_ptr()
        views = self.view.tensors(local)
        if views and views[0].numel() and views[0].data_ptr() != self._address:
            raise UserError(
                f"{self.name} is not contiguous, strides {local.stride()}; make it so, or leave it"
                " out of flatten="
            )
        return views


class GroupMuon(ShardedMuon):
    """`ShardedMuon` for matrices that parameters hold.

    Groups, gradients and state are those of the whole optimizer.

    Args:
        viewed: the parameters, in the order of their matrices.
        groups: for each group of matrices, its number among the groups of the whole optimizer, and
            its settings.

    Attributes:
        shown: the state of each parameter, of its shape and sharded alike, of which matrices have
            views.
        captured: replays the step, once it is captured.
        copies: ranks that hold these matrices alike and share nothing, so that measurements count
            one of them.
    """

    def __init__(
        self,
        viewed: Sequence[ViewedParameter],
        groups: Sequence[tuple[int, dict[str, Any]]],
        *args: Any,
        **options: Any,
    ) -> None:
        self.captured: CapturedStep | None = None
        self.copies = 1
        self.shown: State = {}
        self._viewed = {each.parameter: each for each in viewed}
        self._apart = [each for each in viewed if not each.view.is_itself]
        self._numbers = [number for number, _ in groups]
        momentum: dict[int, torch.Tensor] = {}
        if options.get("store") is None:
            for each in self._apart:
                local = local_part(each.parameter)
                zeros = torch.zeros(local.numel(), dtype=torch.float32, device=local.device)
                shown = sharded_like(each.parameter, zeros)
                self.shown[each.parameter] = {MOMENTUM: shown}
                momentum.update(each.rows_of(shown))
        super().__init__([group for _, group in groups], *args, momentum=momentum, **options)

    @override
    def initialize_state(self) -> None:
        for each in self._apart:
            shown = self.shown.setdefault(each.parameter, {})
            like = each.view.whole(each.parameter.detach())
            for rule in self.rules:
                for slot in rule.slots:
                    if slot not in shown:
                        shown[slot] = rule.zeros(slot, each.first, like)
                        rows = each.view.unstacked(local_part(shown[slot]))
                        for number, part in zip(each.held, rows, strict=True):
                            self.state[self._matrices[number]][slot] = part
        super().initialize_state()
        for p, each in self._viewed.items():
            if each.view.is_itself:
                self.shown[p] = self.state[p]
            if self.store is not None:
                # for readers of the slot; `MuonState.state_dict` puts the momentum here
                self.shown[p][MOMENTUM] = torch.empty(0)

    def check_state(self, state: State) -> None:
        """Raise a UserError for tensors of `state` that a user has replaced or removed."""
        for p, own in self.shown.items():
            given = state.get(p, {})
            if any(given.get(slot) is not tensor for slot, tensor in own.items()):
                raise UserError(
                    f"the state of {self._viewed[p].name} was replaced; change its tensors in"
                    " place, or call load_state_dict"
                )

    def load(self, parameter: torch.Tensor, slots: Mapping[str, torch.Tensor]) -> None:
        """Copy tensors, of the parameter's shape and sharded alike, into its state."""
        for slot, tensor in slots.items():
            if slot == MOMENTUM:
                self.load_momentum({parameter: tensor})
            else:
                local_part(self.shown[parameter][slot]).copy_(local_part(tensor))

    def take_settings(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Copy the settings of the whole optimizer's groups."""
        for number, group in zip(self._numbers, self.param_groups, strict=True):
            members = group["params"]
            group.update(groups[number])
            group["params"] = members

    def show_settings(self, groups: Sequence[dict[str, Any]]) -> None:
        """Copy settings that this optimizer added or counted to the whole optimizer's groups."""
        for number, group in zip(self._numbers, self.param_groups, strict=True):
            for name, value in group.items():
                if name == STEPS or name not in groups[number]:
                    groups[number][name] = value

    def take_gradients(self) -> None:
        """Take the gradients of parameters for a step, and their weights if these have moved."""
        self.drop_gradients()  # a step that failed has kept some
        for each in self._apart:
            each.follow()
            if each.parameter.grad is not None:
                for number, rows in each.rows_of(each.parameter.grad):
                    self._matrices[number].grad = rows

    def drop_gradients(self) -> None:
        """Forget gradients, so that their memory can be freed."""
        for each in self._apart:
            for number in each.held:
                self._matrices[number].grad = None

    @override
    def _enqueue(self) -> None:
        (self.captured or super()._enqueue)()

    def capture(self, groups: Sequence[dict[str, Any]]) -> None:
        """From now on have the step captured; `groups` have its settings, as tensors."""
        self.captured = CapturedStep(super()._enqueue, self._matrices, groups)

    @override
    def momentum_state(self, *, empty: bool = False) -> dict[torch.Tensor, torch.Tensor]:
        """As `ShardedMuon.momentum_state`, for each parameter."""
        if self.store is None:
            return {p: self.shown[p][MOMENTUM] for p in self._viewed}
        memory = self.store.scratch([local_part(p).numel() for p in self._viewed])
        state = {}
        for (p, each), flat in zip(self._viewed.items(), memory, strict=True):
            state[p] = sharded_like(p, flat)
            for number, rows in each.rows_of(state[p]):
                if rows.numel() and not empty:
                    rows.copy_(self.store.read(number))
        return state

    @override
    def load_momentum(self, state: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Take momentum of parameters, as `momentum_state` gives it."""
        of_matrices = dict[torch.Tensor, torch.Tensor]()
        for p, momentum in state.items():
            if self.store is None:
                local_part(self.shown[p][MOMENTUM]).copy_(local_part(momentum))
            else:
                for number, rows in self._viewed[p].rows_of(momentum):
                    of_matrices[self._matrices[number]] = rows
        if self.store is not None:
            super().load_momentum(of_matrices)
