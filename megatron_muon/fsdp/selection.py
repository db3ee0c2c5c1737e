"""Which parameters of a model Muon takes and which AdamW, by names, patterns and groups.

Muon is for matrices inside a network. By name: a 2D parameter is one, unless it is an embedding or
an output layer, and a 3D parameter of experts is a stack of them. A shape alone says nothing, so
parameters without names must all be matrices, as for `torch.optim.Muon`, or be in a group that says
its optimizer.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from megatron_muon.errors import UserError
from megatron_muon.fsdp.parameter_groups import (
    ADAMW,
    MUON,
    OPTIMIZER,
    Choice,
    check_tensor,
    decays,
    members_of,
    read_parameters,
)
from megatron_muon.matrices import fused
from megatron_muon.matrices.roles import may_be_stack, roles_of, why_not_muon
from megatron_muon.matrices.table import CHOSEN, Row, doubt, totals
from megatron_muon.patterns import matching, values_of
from megatron_muon.ranks import is_first_rank, say

Predicate = Callable[[str, torch.Tensor], bool]
"""True if Muon takes the parameter of this name."""


@dataclass
class Selection:
    """Parameter groups, each of one optimizer, without parameters that need no gradient.

    Attributes:
        groups: one for each that was given, in that order, and after these AdamW's parts of those
            that hold both.
        choices: of all parameters of the groups.
        frozen: what needs no gradient, with names.
    """

    groups: list[dict[str, Any]]
    choices: dict[torch.Tensor, Choice]
    frozen: dict[torch.Tensor, str]

    @property
    def matrices(self) -> dict[torch.Tensor, Choice]:
        """Muon's parameters."""
        return {p: choice for p, choice in self.choices.items() if not choice.why}

    def with_parameters(
        self,
        before: Sequence[torch.Tensor],
        groups: list[dict[str, Any]],
    ) -> Selection:
        """The same choices for `groups` with other parameters in the places of those before."""
        now = dict(zip(before, members_of(groups), strict=True))
        choices = {now[p]: choice for p, choice in self.choices.items()}
        for p, choice in choices.items():
            check_tensor(choice.name, p)
        # the frozen tensors of before would keep the unsharded model in memory
        frozen = {torch.empty(0): name for name in self.frozen.values()}
        return Selection(groups, choices, frozen)

    def rows(self) -> list[Row]:
        """Rows of the table: parameters, their optimizer and why, splits, and decay."""
        rows = []
        for group in sorted(self.groups, key=lambda group: group[OPTIMIZER] == ADAMW):
            optimizer = group[OPTIMIZER]
            for p in group["params"]:
                choice = self.choices[p]
                note = choice.note()
                if optimizer == ADAMW and not decays(group, p):
                    note += "; no weight decay"
                rows.append(Row(optimizer, choice.name, p.shape, note))
        return rows


def report(selection: Selection, matrix_optimizer: str) -> None:
    """Print totals on the first rank, and warn if few of the matrices' elements are Muon's."""
    rows = selection.rows()
    say(f"megatron-muon: parameters: {totals(rows)}")
    text = doubt(rows, matrix_optimizer)
    if text and is_first_rank():
        warnings.warn(
            f"{text}. If it is a matrix or stack, name it in matrices= or stacks=; if not, put it"
            " in a group with optimizer='adamw'",
            stacklevel=4,
        )


@dataclass(frozen=True)
class Patterns:
    """The arguments of `Muon` that say by name how parameters are read, and which Muon takes."""

    matrices: Sequence[str] | Predicate | None = None
    exclude: Sequence[str] = ()
    flatten: Mapping[str, bool] | None = None
    transposed: Sequence[str] = ()
    stacks: Sequence[str] = ()
    split: Mapping[str, fused.Split] | None = None
    ns_steps_for: Mapping[str, int] | None = None


def select(params: Any, matrix_optimizer: str = MUON, **patterns: Any) -> Selection:
    """Selects the parameters that Muon takes, and as which matrices; AdamW takes the others.

    Args:
        params: as for `Muon`.
        matrix_optimizer: its name in groups.
        patterns: fields of `Patterns`.

    Raises:
        TypeError: `params` is a tensor, or holds something that is not a tensor.
        UserError: something in `params` that Muon cannot take, a pattern that matches nothing.
    """
    given = Patterns(**patterns)
    model = params if isinstance(params, nn.Module) else nn.Module()
    parameters = read_parameters(params, matrix_optimizer)
    choices = {}
    frozen = {}
    for p, each in parameters.items():
        if p.requires_grad:
            choices[p] = each
        else:
            frozen[p] = each.name
    read_as = _flatten_or_stack(choices, given)
    free = {}
    for p, each in choices.items():
        if each.is_named and each.options.get(OPTIMIZER) is None:
            free[each.name] = p
    _give_reasons(choices, free, read_as, roles_of(model), given)
    for p, each in choices.items():
        if not each.why and each.name not in read_as:
            _check_shape(p, each)
    selection = Selection(_groups(choices, matrix_optimizer), choices, frozen)
    taken = {each.name: each for each in selection.matrices.values()}
    if not taken:
        raise UserError(
            "no parameter that needs a gradient is a matrix for Muon; name some in matrices=, or"
            " use torch.optim.AdamW"
        )
    _read(taken, free, dict(model.named_modules()), given)
    return selection


def _flatten_or_stack(choices: Mapping[torch.Tensor, Choice], given: Patterns) -> set[str]:
    """The names of parameters that `flatten=` or `stacks=` makes matrices."""
    named = {each.name: each for each in choices.values() if each.is_named}
    possible = [name for name, each in named.items() if len(each.view.shape) > 2]
    flat = values_of(possible, given.flatten or {}, argument="flatten", others=named)
    for name, is_flat in flat.items():
        named[name].view = replace(named[name].view, flat=is_flat)
    stacked = matching("stacks", given.stacks, possible, others=named)
    return {name for name in flat if flat[name]}.union(stacked)


def _give_reasons(
    choices: Mapping[torch.Tensor, Choice],
    free: Mapping[str, torch.Tensor],
    read_as: Collection[str],
    roles: Mapping[str, str],
    given: Patterns,
) -> None:
    """Set why AdamW takes some of the parameters about which their groups say nothing."""
    possible = []
    for name, p in free.items():
        role = roles.get(name, "")
        is_named = name in read_as
        choices[p].why = why_not_muon(name, p, is_named=is_named, role=role)
        if is_named or p.ndim == 2 or may_be_stack(name, p.shape):
            possible.append(name)
    if given.matrices is not None:
        if callable(given.matrices):
            wanted = [name for name, p in free.items() if given.matrices(name, p)]
        else:
            wanted = matching("matrices", given.matrices, possible, others=free)
        for name, p in free.items():
            why = choices[p].why or "not among matrices"
            choices[p].why = "" if name in wanted else why
    taken = [name for name, p in free.items() if not choices[p].why]
    for name in matching("exclude", given.exclude, taken, others=free):
        choices[free[name]].why = CHOSEN


def _read(
    taken: Mapping[str, Choice],
    free: Collection[str],
    modules: fused.Modules,
    given: Patterns,
) -> None:
    """Set how matrices are stored, as modules show it, their blocks and their steps."""
    turned = matching("transposed", given.transposed, taken, others=free)
    splits = values_of(taken, given.split or {}, argument="split")
    steps = values_of(taken, given.ns_steps_for or {}, argument="ns_steps_for")
    for name, choice in taken.items():
        is_flat = choice.view.flat
        is_turned = fused.is_stored_transposed(name, modules) and not is_flat
        if is_turned or name in turned:
            choice.view = replace(choice.view, transposed=True)
        rows, _ = choice.view.matrix
        if name in splits:
            choice.split = fused.row_split(splits[name], name, rows)
        elif not is_flat:
            choice.split = fused.known_split(name, rows, modules)
        choice.steps = steps.get(name, 0)


def _groups(choices: Mapping[torch.Tensor, Choice], matrix_optimizer: str) -> list[dict[str, Any]]:
    """A group for each given one, and after these AdamW's parts of those that hold both."""
    with_muon = {each.group for each in choices.values() if not each.why}
    groups: dict[tuple[bool, int], dict[str, Any]] = {}
    for p, each in choices.items():
        is_second = bool(each.why) and each.group in with_muon
        # Megatron-FSDP's fully_shard_optimizer reads the first key as the parameters
        empty = {"params": [], **each.options_for(ADAMW if each.why else matrix_optimizer)}
        groups.setdefault((is_second, each.group), empty)["params"].append(p)
    return [groups[key] for key in sorted(groups)]


def _check_shape(p: torch.Tensor, choice: Choice) -> None:
    """Raise a UserError for what Muon cannot read as a matrix or a stack."""
    # without a name or group nothing tells a stack from its shape
    is_said = choice.is_named or choice.options.get(OPTIMIZER)
    is_stack = is_said and may_be_stack(choice.name, p.shape)
    if not p.numel() or not (p.ndim == 2 or is_stack):
        raise UserError(
            f"{choice.name} has shape {tuple(p.shape)}; Muon takes matrices and, by name, stacks"
            " (..., m, n): pass model.named_parameters(), name it in flatten= if it is a"
            " convolution or in stacks=, or put it into a group with optimizer='adamw'"
        )
