"""Which parameters of a model Muon takes and which AdamW, by names, patterns and groups.

Muon is for matrices inside a network. By name: a 2D parameter is one, unless it is an embedding or
an output layer, and a 3D parameter of experts is a stack of them. A shape alone says nothing, so
parameters without names must all be matrices, as for `torch.optim.Muon`, or be in a group that says
its optimizer.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from megatron_muon.core.layout import RowSplit
from megatron_muon.core.user_errors import UserError
from megatron_muon.fsdp import fused
from megatron_muon.fsdp.modules import roles_of
from megatron_muon.fsdp.name_rules import (
    CONVOLUTION,
    EMBEDDING,
    LINEAR,
    OUTPUT,
    is_embedding,
    is_of_experts,
    is_output,
    is_table,
)
from megatron_muon.fsdp.parameter_groups import (
    ADAMW,
    DECAY_VECTORS,
    FOR_OTHER,
    MUON,
    OPTIMIZER,
    Given,
    check_tensor,
    decays,
    members_of,
    read_parameters,
)
from megatron_muon.fsdp.table import Row, blocks, table
from megatron_muon.fsdp.views import View
from megatron_muon.patterns import matching

VECTOR = "vector"
"""Why AdamW takes a weight of one row or column."""

BY_GROUP = "its group says so"
BY_NAME = "exclude"
"""Why AdamW takes a parameter where the user said so."""

_LARGEST_KERNEL = 16
"""Largest side of a convolution's kernel; parameters with larger ones count as stacks."""

Predicate = Callable[[str, torch.Tensor], bool]
"""True if Muon takes the parameter of this name."""


@dataclass
class Choice:
    """The optimizer of a parameter, and how Muon reads it.

    Attributes:
        why: the reason for AdamW; empty for Muon.
        role: the role of its module, if known.
        view: how Muon reads it; None for AdamW.
        split: the blocks of a matrix that holds several.
        note: for the table, of matrices that look fused.
    """

    name: str
    why: str = ""
    role: str = ""
    view: View | None = None
    split: RowSplit | None = None
    note: str = ""

    def described(self) -> list[str]:
        """Notes for the table."""
        if self.view is None:
            return [self.why]
        return [self.view.described(), self.note if self.split is None else blocks(self.split)]


@dataclass
class Selection:
    """Parameter groups, each of one optimizer, without parameters that need no gradient.

    Attributes:
        groups: one for each that was given, in that order, and after these AdamW's parts of those
            that hold both.
        choices: of all parameters of the groups.
        frozen: what needs no gradient, with names.
    """

    groups: list[dict[str, Any]] = field(default_factory=list)
    choices: dict[torch.Tensor, Choice] = field(default_factory=dict)
    frozen: dict[torch.Tensor, str] = field(default_factory=dict)

    @property
    def views(self) -> dict[torch.Tensor, View]:
        """How Muon reads each of its parameters."""
        views = {}
        for p, choice in self.choices.items():
            if choice.view is not None:
                views[p] = choice.view
        return views

    def name(self, parameter: torch.Tensor) -> str:
        """The name of a parameter of the groups."""
        return self.choices[parameter].name

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

    def table(self, *, full: bool = False) -> str:
        """A table of parameters: their optimizer and why, splits, and decay."""
        rows = []
        for group in sorted(self.groups, key=lambda group: group[OPTIMIZER] == ADAMW):
            for p in group["params"]:
                choice = self.choices[p]
                notes = choice.described()
                if group[OPTIMIZER] == ADAMW and not decays(group, p):
                    notes.append("no weight decay")
                note = "; ".join(filter(None, notes))
                rows.append(Row(group[OPTIMIZER], choice.name, p.shape, note))
        return table(rows, frozen=len(self.frozen), full=full)


def why_not_muon(
    name: str,
    parameter: torch.Tensor,
    *,
    is_named: bool = False,
    role: str = "",
) -> str:
    """Why a parameter is not a matrix inside the network, or a stack of these; empty if it is.

    `is_named`: by `flatten=` or `stacks=`. `role`: that of its module, if known.
    """
    is_stack = parameter.ndim > 2 and is_of_experts(name)
    if parameter.ndim != 2 and not is_stack and not is_named:
        return f"{parameter.ndim}D"
    if not parameter.numel():
        return "no elements"
    if is_named:  # a patch embedding too, which is a convolution and not a table
        return ""
    if role in (EMBEDDING, OUTPUT):
        return role
    if is_stack and 1 in parameter.shape[-2:]:
        return "vectors"
    if is_table(name):
        return "table"
    if is_output(name):
        return OUTPUT
    if role != LINEAR and is_embedding(name):
        return EMBEDDING
    return VECTOR if not is_stack and 1 in parameter.shape else ""


def may_be_stack(name: str, parameter: torch.Tensor) -> bool:
    """True if a parameter of more than two dimensions can be a stack of matrices.

    A convolution is recognized by its name, or by a small kernel with equal sides.
    """
    rows, cols = parameter.shape[-2:]
    is_kernel = parameter.ndim > 3 and rows == cols <= _LARGEST_KERNEL
    is_convolution = is_kernel or "conv" in name.lower()
    return min(rows, cols) > 1 and not is_convolution


def warn_of_stacks(selection: Selection) -> None:
    """Warn if AdamW takes more elements of possible stacks than Muon takes, unless requested."""
    stacks: dict[torch.Tensor, str] = {}
    for p, choice in selection.choices.items():
        if p.ndim < 3 or choice.role == CONVOLUTION or choice.why in ("", BY_GROUP, BY_NAME):
            continue
        if min(p.shape[-2:]) > _LARGEST_KERNEL and may_be_stack(choice.name, p):
            stacks[p] = choice.name
    elements = sum(p.numel() for p in stacks)
    if elements > sum(p.numel() for p in selection.views):
        warnings.warn(
            f"AdamW takes {elements:,} elements of parameters that may be stacks of matrices, more"
            f" than Muon takes of all; the first is {next(iter(stacks.values()))}: name them in"
            " stacks= or exclude=",
            stacklevel=3,
        )


def select(
    params: Any,
    matrices: Sequence[str] | Predicate | None = None,
    exclude: Sequence[str] = (),
    flatten: Mapping[str, bool] | None = None,
    transposed: Sequence[str] = (),
    stacks: Sequence[str] = (),
    split: Mapping[str, fused.Split] | None = None,
) -> Selection:
    """Selects the parameters that Muon takes, and as which matrices; AdamW takes the others.

    Arguments are those of `Muon`.

    Raises:
        TypeError: `params` is a tensor, or holds something that is not a tensor.
        UserError: something in `params` that Muon cannot take, a pattern that matches nothing.
    """
    modules: fused.Modules = {}
    roles: Mapping[str, str] = {}
    if isinstance(params, nn.Module):
        modules = dict(params.named_modules())
        roles = roles_of(params)
    given = read_parameters(params)
    trained = [each for each in given if each.parameter.requires_grad]
    if not trained:
        raise UserError("no parameter needs a gradient; unfreeze at least one")
    flat, stacked = _read_as(trained, flatten or {}, stacks)
    free = [each for each in trained if each.name and each.optimizer is None]
    by_name = {each.name: each for each in free}
    included = _included(by_name.values(), matrices, flat | stacked, roles)
    excluded = matching("exclude", exclude, included, others=by_name)
    frozen = [each for each in given if not each.parameter.requires_grad]
    selection = Selection(frozen={each.parameter: each.label for each in frozen})
    for each in trained:
        p = each.parameter
        choice = Choice(each.label, role=roles.get(each.name, ""))
        selection.choices[p] = choice
        takes = each.optimizer or (MUON if not each.name or each.name in included else ADAMW)
        if each.name in excluded:
            choice.why = BY_NAME
        elif takes == ADAMW:
            by_rule = why_not_muon(each.name, p, role=choice.role) or "not among matrices"
            choice.why = BY_GROUP if each.optimizer else by_rule
        else:
            if each.name not in flat | stacked:
                _check_shape(each)
            choice.view = View(tuple(p.shape), flat=each.name in flat)
    selection.groups = _groups(trained, selection.choices)
    taken: dict[str, Choice] = {}
    for choice in selection.choices.values():
        if choice.view is not None:
            taken[choice.name] = choice
    if not taken:
        raise UserError(
            "no parameter is a matrix for Muon; name some in matrices=, or use torch.optim.AdamW"
        )
    for name in matching("transposed", transposed, taken, others=by_name):
        taken[name].view = replace(_view(taken[name]), transposed=True)
    for choice in taken.values():
        _read_by_module(choice, modules)
    for pattern, parts in (split or {}).items():
        for name in matching("split", [pattern], taken):
            rows = _view(taken[name]).matrix[0]
            taken[name].split = fused.row_split(parts, name, rows)
    return selection


def _read_as(
    trained: Sequence[Given],
    flatten: Mapping[str, bool],
    stacks: Sequence[str],
) -> tuple[set[str], set[str]]:
    """The names that `flatten=` and `stacks=` find; of several patterns the last holds."""
    names = [each.name for each in trained if each.name]
    possible = [each.name for each in trained if each.name and each.parameter.ndim > 2]
    flat = set[str]()
    for pattern, is_flat in flatten.items():
        found = matching("flatten", [pattern], possible, others=names)
        flat = flat.union(found) if is_flat else flat.difference(found)
    stacked = set(matching("stacks", stacks, possible, others=names))
    return flat, stacked


def _included(
    given: Iterable[Given],
    matrices: Sequence[str] | Predicate | None,
    read_as: set[str],
    roles: Mapping[str, str],
) -> list[str]:
    """The names that Muon takes, before `exclude=`."""
    by_name = {each.name: each.parameter for each in given}
    if callable(matrices):
        return [name for name, p in by_name.items() if matrices(name, p)]
    found = []
    for name, p in by_name.items():
        is_named = name in read_as
        if matrices is None:
            role = roles.get(name, "")
            is_possible = not why_not_muon(name, p, is_named=is_named, role=role)
        else:
            is_possible = is_named or p.ndim == 2 or (p.ndim > 2 and may_be_stack(name, p))
        if is_possible:
            found.append(name)
    return found if matrices is None else matching("matrices", matrices, found, others=by_name)


def _groups(
    trained: Sequence[Given], choices: Mapping[torch.Tensor, Choice]
) -> list[dict[str, Any]]:
    """A group for each given one, and after these AdamW's parts of those that hold both."""
    first = list[dict[str, Any]]()
    second = list[dict[str, Any]]()
    for number in dict.fromkeys(each.group for each in trained):
        members = [each for each in trained if each.group == number]
        parts = []
        for optimizer in (MUON, ADAMW):
            is_muon = optimizer == MUON
            params = [m.parameter for m in members if (not choices[m.parameter].why) == is_muon]
            if params:
                parts.append(_group(members[0].options, optimizer, params))
        first.append(parts[0])
        second += parts[1:]
    return first + second


def _group(
    options: Mapping[str, Any], optimizer: str, params: list[torch.Tensor]
) -> dict[str, Any]:
    """A group of one optimizer with the settings of a given group that concern it."""
    group = {name: value for name, value in options.items() if name not in FOR_OTHER[optimizer]}
    if optimizer == ADAMW:
        group[DECAY_VECTORS] = options.get(DECAY_VECTORS, "weight_decay" in options)
    return {**group, "params": params, OPTIMIZER: optimizer}


def _view(choice: Choice) -> View:
    assert choice.view is not None
    return choice.view


def _read_by_module(choice: Choice, modules: fused.Modules) -> None:
    """Take from a weight's module whether it is stored transposed, and how its rows divide."""
    if _view(choice).flat:
        return
    if fused.is_stored_transposed(choice.name, modules):
        choice.view = replace(_view(choice), transposed=True)
    rows = _view(choice).matrix[0]
    choice.split = fused.known_split(choice.name, rows, modules)
    choice.note = fused.note_of(choice.name, modules)


def _check_shape(given: Given) -> None:
    """Raise a UserError for what Muon cannot read as a matrix or a stack."""
    p = given.parameter
    # without a name or group nothing tells a stack from its shape
    is_said = bool(given.name) or given.optimizer is not None
    is_stack = p.ndim > 2 and is_said and may_be_stack(given.label, p)
    if not p.numel() or not (p.ndim == 2 or is_stack):
        raise UserError(
            f"{given.label} has shape {tuple(p.shape)}; Muon takes matrices and, by name, stacks"
            " (..., m, n): pass model.named_parameters(), name it in flatten= if it is a"
            " convolution or in stacks=, or put it into a group with optimizer='adamw'"
        )
