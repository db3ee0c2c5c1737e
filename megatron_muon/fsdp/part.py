"""The core's step for the matrices of one set of ranks, as views of the parameters that hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, override

import torch

from megatron_muon.core.errors import UserError
from megatron_muon.core.layout import Rectangle
from megatron_muon.core.optimizer import MOMENTUM, STEPS, ShardedMuon
from megatron_muon.core.rows import sharded_like
from megatron_muon.fsdp.step import CapturedStep, local_parts
from megatron_muon.fsdp.views import View


class Source(NamedTuple):
    """A parameter, and what stands in the core's optimizer for the matrices that it holds."""

    parameter: torch.Tensor
    view: View
    # the parameter itself, or views; empty tensors for those that other ranks hold
    matrices: list[torch.Tensor]
    first: int  # place of the first among all matrices of the part
    places: list[int]  # of matrices that this rank holds rows of, among all matrices of the part

    def of(self, other: torch.Tensor) -> zip[tuple[int, torch.Tensor]]:
        """Each of these places with this rank's rows of the matrix in `other`, a tensor like the parameter."""
        return zip(self.places, self.view.tensors(local_parts([other])[0]), strict=True)


def weights_of(name: str, parameter: torch.Tensor, view: View) -> list[torch.Tensor]:
    """The matrices that this rank has a part of, in the parameter's memory; a UserError where they cannot be."""
    local = local_parts([parameter.detach()])[0]
    here = view.tensors(local)
    if any(part.data_ptr() != local.data_ptr() for part in here[:1] if part.numel()):
        raise UserError(
            f"{name} is not contiguous, strides {local.stride()}; make it so, or leave it out of"
            " flatten="
        )
    return here


def source_of(
    name: str, parameter: torch.Tensor, view: View, rectangles: Sequence[Rectangle], first: int
) -> Source:
    """How this rank, which holds `rectangles`, has a parameter stand; a UserError where that cannot be by views."""
    if view.is_itself:
        return Source(parameter, view, [parameter], first, [first])
    here = weights_of(name, parameter, view)
    for matrix in here:
        matrix.grad_dtype = None  # any, as its parameter has it
    held = [number for number, (_, rows, _, cols) in enumerate(rectangles) if rows and cols]
    numbers = held or range(len(here))  # of matrices without rows any will do
    matrices = [local_parts([parameter])[0].new_empty(0, 0) for _ in range(view.count)]
    for number, matrix in zip(numbers, here, strict=True):
        matrices[number] = matrix
    return Source(parameter, view, matrices, first, [first + number for number in numbers])


class Part(ShardedMuon):
    """`ShardedMuon` for matrices that parameters hold, with the groups, gradients and state of the whole optimizer.

    Args:
        sources: the parameters, in the order of their matrices.
        groups: for each group of matrices, its place among the groups of the whole optimizer, and
            its settings.

    Attributes:
        shown: the state of each parameter, of its shape and sharded alike; this optimizer's own are
            views of it.
        captured: replays the step, once it is captured.
        copies: on how many ranks that share nothing these matrices are held alike, so that a
            measured step counts one.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        groups: Sequence[tuple[int, dict[str, Any]]],
        *args: Any,
        **options: Any,
    ) -> None:
        self.sources = list(sources)
        self.captured: CapturedStep | None = None
        self.copies = 1
        self.shown: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        # what is shown, unless it was replaced
        self._own: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        self._numbers = [number for number, _ in groups]
        self._apart = [source for source in sources if not source.view.is_itself]
        self._lies_at = [local_parts([source.parameter])[0].data_ptr() for source in self._apart]
        momentum: dict[int, torch.Tensor] = {}
        for source in self._apart if options.get("store") is None else ():
            local = local_parts([source.parameter])[0]
            zeros = torch.zeros(local.numel(), dtype=torch.float32, device=local.device)
            self.shown[source.parameter] = {MOMENTUM: sharded_like(source.parameter, zeros)}
            momentum |= source.of(self.shown[source.parameter][MOMENTUM])
        super().__init__([group for _, group in groups], *args, momentum=momentum, **options)

    @override
    def initialize_state(self) -> None:
        for source in self._apart:
            shown, like = (
                self.shown.setdefault(source.parameter, {}),
                source.view.whole(source.parameter.detach()),
            )
            for rule in self.rules:
                for slot in (slot for slot in rule.slots if slot not in shown):
                    shown[slot] = rule.zeros(slot, source.first, like)
                    local = local_parts([shown[slot]])[0]
                    for place, part in zip(
                        source.places, source.view.unstacked(local), strict=True
                    ):
                        self.state[self._matrices[place]][slot] = part
        super().initialize_state()
        for source in self.sources:
            if source.view.is_itself:
                self.shown[source.parameter] = self.state[source.parameter]
            # what looks for a slot of momentum finds this one; see MuonState.state_dict
            if self.store is not None:
                self.shown[source.parameter][MOMENTUM] = torch.empty(0)
        for parameter, slots in self.shown.items():
            self._own.setdefault(parameter, dict(slots))

    def take_up_replaced(self, state: dict[torch.Tensor, dict[str, torch.Tensor]]) -> None:
        """Copy tensors that a user has put in the place of those in `state` into these, and show these again."""
        for p, own in self._own.items():
            given = state[p]
            if given is self.shown[p] and all(
                given.get(slot) is tensor for slot, tensor in own.items()
            ):
                continue
            if missing := sorted(own.keys() - given.keys()):
                name = next(
                    self._matrix_names[source.first]
                    for source in self.sources
                    if source.parameter is p
                )
                raise UserError(
                    f"the state of {name} has no {missing[0]}; to reset it, set it to zero in place"
                )
            replaced = {
                slot: given[slot] for slot, tensor in own.items() if given[slot] is not tensor
            }
            self.show_own(p, state)
            if MOMENTUM in replaced:
                self.load_momentum({p: replaced.pop(MOMENTUM)})
            for slot, tensor in replaced.items():
                local_parts([own[slot]])[0].copy_(local_parts([tensor])[0])

    def restart(
        self, parameter: torch.Tensor, state: dict[torch.Tensor, dict[str, torch.Tensor]]
    ) -> None:
        """Set this optimizer's own state of a parameter to zero, and show it in `state`."""
        for tensor in self._own[parameter].values():
            tensor.zero_()
        if self.store is not None:
            self.load_momentum(
                {parameter: torch.zeros_like(parameter.detach(), dtype=torch.float32)}
            )
        self.show_own(parameter, state)

    def show_own(
        self, parameter: torch.Tensor, state: dict[torch.Tensor, dict[str, torch.Tensor]]
    ) -> None:
        """Show this optimizer's own state of a parameter in `state`."""
        self.shown[parameter].update(self._own[parameter])
        state[parameter] = self.shown[parameter]

    def take_settings(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Take the settings of all groups."""
        for number, group in zip(self._numbers, self.param_groups, strict=True):
            group.update(
                {name: value for name, value in groups[number].items() if name != "params"}
            )

    def take_gradients(self) -> None:
        """Take the gradients of parameters for a step, and their weights where these lie elsewhere by now."""
        self.let_go()  # a step that failed has kept some
        for number, source in enumerate(self._apart):
            local, gradient = local_parts([source.parameter])[0], source.parameter.grad
            if local.data_ptr() != self._lies_at[number]:
                here = weights_of(self._matrix_names[source.first], source.parameter, source.view)
                self._lies_at[number] = local.data_ptr()
                for place, part in zip(source.places, here, strict=True):
                    self._matrices[place].data = part
            for place, part in source.of(gradient) if gradient is not None else ():
                self._matrices[place].grad = part

    def let_go(self) -> None:
        """Forget gradients, so that their memory can be freed."""
        for place in (place for source in self._apart for place in source.places):
            self._matrices[place].grad = None

    def show_settings(self, groups: Sequence[dict[str, Any]]) -> None:
        """Have all groups say what this optimizer has added to, or counted in, its own."""
        for number, group in zip(self._numbers, self.param_groups, strict=True):
            added = {name: value for name, value in group.items() if name not in groups[number]}
            groups[number].update(added | {STEPS: group[STEPS]} if STEPS in group else added)

    @override
    def _enqueue(self) -> None:
        (self.captured or super()._enqueue)()

    def capture(self, groups: Sequence[dict[str, Any]]) -> None:
        """From now on have the step captured; `groups` have its settings, as tensors."""
        self.captured = CapturedStep(super()._enqueue, self._matrices, groups)

    @override
    def momentum_state(self, *, empty: bool = False) -> dict[torch.Tensor, torch.Tensor]:
        """As of `ShardedMuon`, for each parameter."""
        if self.store is None:
            return {
                source.parameter: self.shown[source.parameter][MOMENTUM] for source in self.sources
            }
        memory = self.store.scratch(
            [local_parts([source.parameter])[0].numel() for source in self.sources]
        )
        state = {}
        for source, flat in zip(self.sources, memory, strict=True):
            state[source.parameter] = sharded_like(source.parameter, flat)
            for place, part in source.of(state[source.parameter]):
                if part.numel() and not empty:
                    part.copy_(self.store.read(place))
        return state

    @override
    def load_momentum(self, state: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Take momentum of parameters, as `momentum_state` gives it."""
        if self.store is None:
            for parameter, momentum in state.items():
                local_parts([self.shown[parameter][MOMENTUM]])[0].copy_(local_parts([momentum])[0])
            return
        given = (
            source.of(state[source.parameter])
            for source in self.sources
            if source.parameter in state
        )
        super().load_momentum(
            {self._matrices[place]: part for parts in given for place, part in parts}
        )
