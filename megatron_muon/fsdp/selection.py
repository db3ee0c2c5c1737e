"""Which parameters of a model Muon takes and which AdamW, by names, patterns and groups.

Muon is for matrices inside a network. By name: a 2D parameter is one, unless it is an embedding or
an output layer, and a 3D parameter of experts is a stack of them. A shape alone says nothing, so
parameters without names must all be matrices, as for `torch.optim.Muon`, or be in a group that says
its optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from megatron_muon.core.layout import RowSplit
from megatron_muon.core.user_errors import UserError
from megatron_muon.fsdp import fused
from megatron_muon.fsdp.foreign import refuse_foreign
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
    name_in_megatron_fsdp,
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

Predicate = Callable[[str, torch.Tensor], bool]
"""Whether Muon takes the parameter of this name."""


@dataclass
class Choice:
    """The optimizer of a parameter, and how Muon reads it.

    Attributes:
        why: the reason for AdamW; empty for Muon.
        role: the role of its module, if known.
        view: how Muon reads it; None for AdamW.
        split: the blocks of a matrix that holds several.
        note: for the table, of matrices that look fused, and of adapters.
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
        grouped: whether groups with settings of their own were given.
    """

    groups: list[dict[str, Any]] = field(default_factory=list)
    choices: dict[torch.Tensor, Choice] = field(default_factory=dict)
    frozen: dict[torch.Tensor, str] = field(default_factory=dict)
    grouped: bool = False

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

    def exchanged(
        self,
        before: Sequence[torch.Tensor],
        groups: Sequence[Mapping[str, Any]],
    ) -> Selection:
        """The same choices for `groups` with other parameters in the places of those before."""
        pairs = list(zip(before, members_of(groups), strict=True))
        chosen = [(new, self.choices[old]) for old, new in pairs]
        for new, choice in chosen:
            check_tensor(choice.name, new)
        refuse_foreign((choice.name, new, choice.why == BY_GROUP) for new, choice in chosen)
        for old, new in pairs:
            if self.choices[old].view is not None and new.shape != old.shape:
                raise UserError(
                    f"{self.name(old)} is {tuple(new.shape)} in param_groups, and was"
                    f" {tuple(old.shape)}; Muon needs whole matrices: use fully_shard (FSDP2)"
                )
        # the frozen tensors of before would keep the unsharded model in memory
        frozen = {torch.empty(0): name for name in self.frozen.values()}
        return Selection([dict(group) for group in groups], dict(chosen), frozen, self.grouped)

    def resharded(self, parameters: Iterable[torch.Tensor]) -> Selection | None:
        """The same choices for Megatron-FSDP's parameters; None if their names differ."""
        now = {name_in_megatron_fsdp(p): p for p in parameters}
        before = members_of(self.groups)
        if not all(self.name(p) in now for p in before):
            return None
        groups = []
        for group in self.groups:
            members = [now[self.name(p)] for p in group["params"]]
            groups.append({**group, "params": members})
        return self.exchanged(before, groups)

    def table(self, *, full: bool = False) -> str:
        """Which optimizer takes which parameters, why, what is split and what does not decay."""
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
        hint = "" if role == CONVOLUTION else _stacks_hint(name, parameter)
        return f"{parameter.ndim}D{hint}"
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
    """Whether a parameter of more than two dimensions can be a stack of matrices.

    A convolution is recognized by its name, or by a kernel with equal sides of at most 16.
    """
    rows, cols = parameter.shape[-2:]
    is_kernel = parameter.ndim > 3 and rows == cols <= 16
    is_convolution = is_kernel or "conv" in name.lower()
    return min(rows, cols) > 1 and not is_convolution


def _stacks_hint(name: str, parameter: torch.Tensor) -> str:
    """How to have a possible stack read as matrices; the pattern finds it in every layer."""
    if parameter.ndim < 3 or not may_be_stack(name, parameter):
        return ""
    parts = name.removesuffix(".weight").split(".")
    while any(part.isdigit() for part in parts[:-1]):
        parts.pop(0)
    return f'; stacks=["{".".join(parts)}"] reads it as matrices'


def select(
    params: Any,
    matrices: Sequence[str] | Predicate | None = None,
    exclude: Sequence[str] = (),
    flatten: Mapping[str, bool] | None = None,
    transposed: Sequence[str] = (),
    stacks: Sequence[str] = (),
    split: Mapping[str, fused.Split] | None = None,
) -> Selection:
    """Sort parameters by optimizer; arguments are those of `Muon`.

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
    refuse_foreign(
        ((each.label, each.parameter, each.optimizer == ADAMW) for each in trained), modules
    )
    if not trained:
        raise UserError("no parameter needs a gradient; unfreeze at least one")
    flat, stacked = _read_as(trained, flatten or {}, stacks)
    free = [each for each in trained if each.name and each.optimizer is None]
    by_name = {each.name: each for each in free}
    included = _included(by_name.values(), matrices, flat | stacked, roles)
    excluded = matching("exclude", exclude, included, others=by_name)
    selection = Selection(grouped=any(each.options for each in given))
    frozen = [each for each in given if not each.parameter.requires_grad]
    selection.frozen = {each.parameter: each.label for each in frozen}
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
    taken = {each.name: each for each in selection.choices.values() if each.view is not None}
    if not taken:
        raise UserError(
            "no parameter is a matrix for Muon; use torch.optim.AdamW, or say with matrices= what"
            " Muon is to take"
        )
    for name in matching("transposed", transposed, taken, others=by_name):
        taken[name].view = replace(_view(taken[name]), transposed=True)
    for choice in taken.values():
        _read_by_module(choice, modules)
    for pattern, parts in (split or {}).items():
        for name in matching("split", [pattern], taken):
            rows = _view(taken[name]).matrix[0]
            taken[name].split = fused.row_split(pattern, parts, name, rows)
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
    if both := sorted(flat & stacked):
        raise UserError(f"{both[0]} is named in flatten= and in stacks=; leave it out of one")
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
    parts: dict[tuple[int, str], dict[str, Any]] = {}
    for each in trained:
        optimizer = ADAMW if choices[each.parameter].view is None else MUON
        key = each.group, optimizer
        if key not in parts:
            parts[key] = _empty_group(each.options, optimizer)
        parts[key]["params"].append(each.parameter)
    first = list[dict[str, Any]]()
    second = list[dict[str, Any]]()
    for (number, optimizer), group in parts.items():
        is_second = optimizer == ADAMW and (number, MUON) in parts
        (second if is_second else first).append(group)
    return first + second


def _empty_group(options: Mapping[str, Any], optimizer: str) -> dict[str, Any]:
    """A group of one optimizer with the settings of a given group that concern it."""
    group = {name: value for name, value in options.items() if name not in FOR_OTHER[optimizer]}
    if optimizer == ADAMW:
        group[DECAY_VECTORS] = options.get(DECAY_VECTORS, "weight_decay" in options)
    return {**group, "params": [], OPTIMIZER: optimizer}


def _view(choice: Choice) -> View:
    assert choice.view is not None
    return choice.view


def _read_by_module(choice: Choice, modules: fused.Modules) -> None:
    """Take from a weight's module whether it is stored transposed, and how its rows divide."""
    if _view(choice).flat:
        return
    if fused.is_stored_transposed(choice.name, modules):
        choice.view = replace(_view(choice), transposed=True)
    rows, cols = _view(choice).matrix
    choice.split = fused.known_split(choice.name, rows, modules)
    if any(part.lower().startswith("lora_") for part in choice.name.split(".")):
        choice.note = f"LoRA factor of rank {min(rows, cols)}"
    else:
        choice.note = fused.note_of(choice.name, modules)


def _check_shape(given: Given) -> None:
    """Raise a UserError for what Muon cannot read as a matrix or a stack."""
    p = given.parameter
    # without a name or group nothing tells a stack from its shape
    is_said = bool(given.name) or given.optimizer is not None
    is_stack = p.ndim > 2 and is_said and may_be_stack(given.label, p)
    if not p.numel() or not (p.ndim == 2 or is_stack):
        raise UserError(
            f"{given.label} has shape {tuple(p.shape)}; Muon takes matrices and, by name or group,"
            " stacks (..., m, n) with m and n above 1: pass model.named_parameters(), leave it out"
            " of matrices=, name it in flatten= if it is a convolution or in stacks=, or put it"
            " into a group with optimizer='adamw'"
        )
