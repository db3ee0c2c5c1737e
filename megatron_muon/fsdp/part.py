"""The matrices of parameters that one set of ranks holds, their state and their step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_muon.core.build import Waves
from megatron_muon.core.engine import Engine
from megatron_muon.core.fused import FusedPasses, can_fuse
from megatron_muon.core.layout import Rectangle
from megatron_muon.core.passes import DECOUPLED, Passes
from megatron_muon.core.probe import SILENT
from megatron_muon.core.rows import MOMENTUM, Rows, Storage
from megatron_muon.core.rules.rule import Rule
from megatron_muon.errors import UserError
from megatron_muon.fsdp.audit import Audit
from megatron_muon.fsdp.method_state import MethodState
from megatron_muon.fsdp.read_numbers import ON_DEVICE, read_group
from megatron_muon.matrices.views import Matrices
from megatron_muon.offload.store import RecordStore
from megatron_muon.shards import local_part, sharded_like

type State = dict[Tensor, dict[str, Tensor]]

NUMBERS = ("lr", "momentum", "weight_decay")
"""Numbers of a parameter group that every step reads; `momentum` only if holders keep it."""


def refuse_copy() -> NoReturn:
    """Raise a TypeError, when pickle or `copy.deepcopy` meet an optimizer."""
    raise TypeError(
        "Muon holds process groups and cannot be copied or pickled; make another one and give it"
        " the state_dict"
    )


class ViewedParameter:
    """A parameter and its matrices.

    Attributes:
        first: number of its first matrix among all of the layout.
        numbers: of its matrices.
        is_itself: it is a matrix.
        held: numbers of matrices of which this rank holds rows.
        state: of the part, by slot name.
    """

    def __init__(
        self,
        parameter: Tensor,
        matrices: Matrices,
        rectangles: Sequence[Rectangle],
        first: int,
    ) -> None:
        self.name = matrices.name
        self.parameter = parameter
        self.view = matrices.view
        self.first = first
        self.numbers = range(first, first + self.view.count)
        self.is_itself = self.view.is_itself
        self.state: dict[str, Tensor] = {}
        self._address = -1  # that of an empty part is 0
        self._rows: list[Tensor] = []
        if self.is_itself:
            self.held = [first]
            return
        self._look()
        # also of no rows: it may have numbers of columns
        cuts = zip(self.numbers, rectangles, strict=True)
        held = [number for number, cut in cuts if any(cut)]
        # any will do for matrices without either
        self.held = held or list(self.numbers[: len(self._rows)])

    def rows_of(self, tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The numbers of held matrices, with this rank's rows in a tensor like the parameter."""
        return zip(self.held, self.view.tensors(local_part(tensor)), strict=True)

    def weights(self) -> Iterator[tuple[int, Tensor]]:
        """The same of the parameter itself, wherever its memory is now."""
        if local_part(self.parameter).data_ptr() != self._address:
            self._look()
        return zip(self.held, self._rows, strict=True)

    def _look(self) -> None:
        local = local_part(self.parameter.detach())
        self._address = local.data_ptr()
        self._rows = self.view.tensors(local)
        if local.numel() and self._rows[0].data_ptr() != self._address:
            raise UserError(
                f"{self.name} is not contiguous, strides {local.stride()}; make it so, or leave it"
                " out of flatten="
            )


def view_parameters(
    matrices: Mapping[Tensor, Matrices],
    rectangles: Sequence[Rectangle],
) -> list[ViewedParameter]:
    """Parameters with their matrices, of which this rank holds these rectangles."""
    viewed = []
    first = 0
    for p, several in matrices.items():
        end = first + several.view.count
        viewed.append(ViewedParameter(p, several, rectangles[first:end], first))
        first = end
    return viewed


class Part:
    """Matrices whose rows one set of ranks holds.

    A matrix's update depends on its gradient alone, never on how many ranks hold it; the number of
    its owners changes its rounding. State exists from construction on every rank, also for empty
    shards.

    Args:
        viewed: the parameters, in the order of their matrices in the layout.
        waves: of the step.
        rules: variants of Muon, in the order of a step.
        passing: arguments of `Passes`.
        store: keeps momentum; None keeps it as state, fp32.
        outside: rows of weights that parameters do not hold.
        skip_missing: as for `Rows`.

    Attributes:
        device: of the parameters.
        state: of each parameter, of its shape and sharded alike, without momentum in a store.
        settings: defaults of parameter groups that rules add.
        has_momentum: holders keep momentum.
        audit: compares steps with those of whole matrices.
        captured: replays the step, once it is captured.
        probe: measures a step.
        copies: ranks that hold these matrices alike and share nothing; measurements count one.
    """

    def __init__(
        self,
        viewed: Sequence[ViewedParameter],
        waves: Waves,
        rules: Sequence[Rule],
        passing: Mapping[str, Any],
        *,
        store: RecordStore | None = None,
        outside: Storage | None = None,
        skip_missing: bool = False,
    ) -> None:
        self.viewed = {each.parameter: each for each in viewed}
        self.names = [matrix.name for matrix in waves.transport.layout.matrices]
        self.device = viewed[0].parameter.device
        self.rules = rules
        self.store = store
        self.waves = waves
        self.has_momentum = waves.method.takes_momentum
        self.copies = 1
        self.probe = SILENT
        self.captured: Any = None
        self.audit: Audit | None = None
        self.state: State = {each.parameter: each.state for each in viewed}
        self.settings: dict[str, float] = {}
        self.method_state = MethodState(waves, self.viewed)
        self._weights: dict[int, Tensor] = {}
        self._slots: dict[str, list[Tensor]] = {}
        self._members: dict[tuple[int, int], tuple[Any, list[int]]] = {}
        self._with_rows = [each for each in viewed if local_part(each.parameter).numel()]
        self.rows = Rows(
            self.names,
            waves,
            self._weights.__getitem__,
            outside=outside,
            momentum=self._momentum_of_views(),
            store=store,
            skip_missing=skip_missing,
        )
        self.skipped_updates = self.rows.skipped_updates
        self.engine = Engine(waves, self._make_passes(passing, outside))
        self._show_state()

    def _make_passes(self, passing: Mapping[str, Any], outside: Storage | None) -> Passes:
        """Passes by kernels where these have all that is asked for, or in torch operations."""
        levels = self.waves.method.takes_levelled
        is_resident = outside is None and (self.store is None or self.store.is_resident)
        decay = passing.get("decay", DECOUPLED)
        can_use = is_resident and self.has_momentum
        if not (can_use and can_fuse(self.device, self.rules, decay)):
            return Passes(self.rows, self.rules, levels=levels, **passing)
        return FusedPasses(
            self.rows,
            self.rules,
            waves=self.waves.all,
            levels=levels,
            **passing,
        )

    def _momentum_of_views(self) -> dict[int, Tensor]:
        """Momentum of parameters that are not held matrices themselves, in their own order."""
        momentum: dict[int, Tensor] = {}
        for p, each in self.viewed.items():
            is_row = each.is_itself and local_part(p).numel()
            if self.has_momentum and not (self.store or is_row):
                zeros = torch.zeros_like(p.detach(), dtype=torch.float32)
                each.state[MOMENTUM] = zeros
                momentum.update(each.rows_of(zeros))
        return momentum

    def _show_state(self) -> None:
        """Have the momentum of other parameters as state, and make that of rules."""
        for p, slots in self.state.items():
            is_state = self.has_momentum and self.store is None
            if is_state and MOMENTUM not in slots:
                slots[MOMENTUM] = sharded_like(p, self.rows.momentum[self.viewed[p].first])
        for rule in self.rules:
            self.settings |= rule.settings
            for slot in rule.slots:
                self._slots[slot] = [torch.empty(0)] * len(self.names)
                for p, each in self.viewed.items():
                    zeros = rule.zeros(each.first, each.view.whole(p.detach()))
                    each.state[slot] = zeros
                    of_matrices = each.view.unstacked(local_part(zeros))
                    for number, rows in zip(each.held, of_matrices, strict=True):
                        self._slots[slot][number] = rows
        self.rows.state = self._slots.__getitem__

    def take_up(
        self,
        state: Mapping[Tensor, dict[str, Tensor]],
    ) -> None:
        """Copy tensors with elements that have been put in the place of this optimizer's own.

        Raises:
            UserError: there are others, or some are missing.
        """
        for each in self._with_rows:
            given = state.get(each.parameter, {})
            for slot, own in each.state.items():
                found = given.get(slot)
                if found is own:
                    continue
                if found is None or found.shape != own.shape:
                    raise UserError(
                        f"the state of {each.name} was removed, or is of other shapes; change its"
                        " tensors in place, or call load_state_dict"
                    )
                local_part(own).copy_(local_part(found))
                given[slot] = own

    def read_groups(
        self,
        param_groups: Sequence[dict[str, Any]],
    ) -> list[dict[str, Any]]:
        """The group of each matrix with numbers as a step reads them; rules may refuse some.

        Groups get the numbers of rules that they lack.
        """
        of_matrices: list[dict[str, Any]] = [{}] * len(self.names)
        for group in param_groups:
            members = self._matrices_of(group["params"])
            if not members:
                continue
            group.update(self.settings | group)
            names = [name for name in NUMBERS if self.has_momentum or name in ON_DEVICE]
            read = read_group(group, (*names, *self.settings), self.device)
            for number in members:
                of_matrices[number] = read
        for rule in self.rules:
            rule.check(of_matrices, self.names)
        return of_matrices

    def _matrices_of(self, parameters: Sequence[Tensor]) -> list[int]:
        """Numbers of the matrices of parameters, of those that this part has."""
        key = id(parameters), len(parameters)
        if key not in self._members:
            own = (self.viewed[p] for p in parameters if p in self.viewed)
            numbers = [number for each in own for number in each.numbers]
            # with the list, so that no other has its id
            self._members[key] = parameters, numbers
        return self._members[key][1]

    def step(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """One update of every matrix, outside of any autocast. Collective.

        Raises:
            RuntimeError: a shard with rows has no gradient, unless missing ones are skipped.
        """
        device = self.device.type
        if torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                return self.step(param_groups)
        groups = self.read_groups(param_groups)  # schedules change them
        gradients: list[Tensor | None] = [None] * len(self.names)
        for each in self._with_rows:
            p = each.parameter
            gradient = p.grad
            if each.is_itself:  # as `local_part`, without two calls for each of thousands
                self._weights[each.first] = p._local_tensor if isinstance(p, DTensor) else p
                if isinstance(gradient, DTensor):
                    gradient = gradient._local_tensor
                gradients[each.first] = gradient
                continue
            self._weights.update(each.weights())
            if gradient is not None:
                for number, rows in each.rows_of(gradient):
                    gradients[number] = rows
        self.rows.gradients = gradients
        self.rows.groups = groups
        self.engine.probe = self.probe if self.audit is None else self.audit.begin(self.probe)
        (self.captured or self.engine.step)()
        self.rows.end_step()
        if self.audit is not None:
            self.audit.end()

    def check_weights(self) -> None:
        """Refuse weights that a rule cannot work with. Collective; may wait for the device."""
        for p, each in self.viewed.items():
            self._weights.update(each.rows_of(p.detach()))
        none = torch.empty(0, 0)
        rows = [self._weights.get(number, none) for number in range(len(self.names))]
        for rule in self.rules:
            rule.check_weights(rows, self.names)

    def momentum_state(
        self,
        *,
        empty: bool = False,
    ) -> dict[Tensor, Tensor]:
        """Momentum of each parameter as a checkpoint holds it: fp32, sharded as the parameter.

        Copies if it is in a store, outside of the process's own memory where that is on disk;
        `empty` leaves out the values, as they will be loaded.
        """
        if not self.has_momentum:
            return {}
        if self.store is None:
            return {p: slots[MOMENTUM] for p, slots in self.state.items()}
        memory = self.store.scratch([local_part(p).numel() for p in self.viewed])
        state = {}
        for p, flat in zip(self.viewed, memory, strict=True):
            state[p] = sharded_like(p, flat)
            for number, rows in self.viewed[p].rows_of(state[p]):
                if rows.numel() and not empty:
                    rows.copy_(self.store.read(number))
        return state

    def kept_slots(self, p: Tensor) -> list[str]:
        """Slots of a parameter that are kept elsewhere: momentum in a store, and the method's."""
        kept = list(self.method_state.numels(p))
        return kept if self.store is None else [MOMENTUM, *kept]

    def show_kept(self) -> None:
        """Put empty tensors into the state for them: torch's flattened state dicts read names."""
        for p, slots in self.state.items():
            slots |= dict.fromkeys(self.kept_slots(p), torch.empty(0))

    def zeros_of(self, p: Tensor) -> dict[str, Tensor]:
        """State of a parameter before its first step, as a checkpoint has it."""
        zeros = {slot: torch.zeros_like(tensor) for slot, tensor in self.state[p].items()}
        if self.store is not None:
            zeros[MOMENTUM] = torch.zeros_like(p.detach(), dtype=torch.float32)
        return zeros | self.method_state.zeros_of(p)

    def load(self, saved: State, steps: int) -> None:
        """Take state, momentum as `momentum_state` gives it; `steps` are of a rounding store.

        Collective if the method has state.
        """
        for p, slots in saved.items():
            own = self.state[p]
            for slot in (own.keys() & slots).difference(self.kept_slots(p)):
                local_part(own[slot]).copy_(local_part(slots[slot]))
            if self.store is not None and MOMENTUM in slots:
                for number, rows in self.viewed[p].rows_of(slots[MOMENTUM]):
                    if rows.numel():
                        self.store.write(number, rows)
            self.method_state.load(p, slots)
        if self.store is not None:
            self.store.steps = steps
        if self.audit is not None:
            self.audit.is_due = True
            self.audit.is_new = False
