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

from megatron_muon.core.layout import RowSplit
from megatron_muon.errors import UserError
from megatron_muon.fsdp import fused
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
from megatron_muon.fsdp.roles import CONVOLUTION, roles_of, why_not_muon
from megatron_muon.fsdp.table import Row, blocks, table
from megatron_muon.fsdp.views import View
from megatron_muon.patterns import matching, values_of

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
        view: how Muon reads it, if it takes it.
        why: the reason for AdamW; empty for Muon.
        split: the blocks of a matrix that holds several.
    """

    name: str
    view: View
    why: str = ""
    split: RowSplit | None = None

    def described(self) -> list[str]:
        """Notes for the table."""
        if self.why:
            return [self.why]
        fusing = blocks(self.split) if self.split else fused.note_of(self.name)
        return [self.view.described(), fusing]


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
    def views(self) -> dict[torch.Tensor, View]:
        """How Muon reads each of its parameters."""
        return {p: choice.view for p, choice in self.choices.items() if not choice.why}

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
            optimizer = group[OPTIMIZER]
            for p in group["params"]:
                choice = self.choices[p]
                notes = choice.described()
                if optimizer == ADAMW and not decays(group, p):
                    notes.append("no weight decay")
                rows.append(
                    Row(
                        optimizer,
                        choice.name,
                        p.shape,
                        "; ".join(filter(None, notes)),
                    ),
                )
        return table(rows, frozen=len(self.frozen), full=full)


def warn_of_stacks(selection: Selection) -> None:
    """Warn if AdamW takes more elements of possible stacks than Muon takes, unless requested."""
    stacks: dict[str, int] = {}
    for p, choice in selection.choices.items():
        if choice.why in ("", BY_GROUP, BY_NAME, CONVOLUTION):
            continue
        if _may_be_stack(choice.name, p) and min(p.shape[-2:]) > _LARGEST_KERNEL:
            stacks[choice.name] = p.numel()
    elements = sum(stacks.values())
    if elements > sum(p.numel() for p in selection.views):
        warnings.warn(
            f"AdamW takes {elements:,} elements of parameters that may be stacks of matrices, more"
            f" than Muon takes of all; the first is {next(iter(stacks))}: name them in stacks= or"
            " exclude=",
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
    is_model = isinstance(params, nn.Module)
    modules = dict(params.named_modules()) if is_model else {}
    roles = roles_of(params) if is_model else {}
    given = read_parameters(params)
    trained = [each for each in given if each.parameter.requires_grad]
    named = {each.name: each for each in trained if each.name}
    free = {name: each.parameter for name, each in named.items() if not each.optimizer}
    possible = [name for name, each in named.items() if each.parameter.ndim > 2]
    flat = values_of(possible, flatten or {}, argument="flatten", others=named)
    read_as = {name for name in flat if flat[name]}
    read_as.update(matching("stacks", stacks, possible, others=named))
    reasons = _reasons(free, matrices, exclude, read_as, roles)
    choices: dict[torch.Tensor, Choice] = {}
    for each in trained:
        why = reasons.get(each.name, BY_GROUP if each.optimizer == ADAMW else "")
        if not why and each.name not in read_as:
            _check_shape(each)
        view = View(
            tuple(each.parameter.shape),
            flat=flat.get(each.name, False),
        )
        choices[each.parameter] = Choice(each.label, view, why)
    taken = {choice.name: choice for choice in choices.values() if not choice.why}
    for name in matching("transposed", transposed, taken, others=free):
        taken[name].view = replace(taken[name].view, transposed=True)
    _read_blocks(taken, modules, split or {})
    frozen = {each.parameter: each.label for each in given if not each.parameter.requires_grad}
    return Selection(_groups(trained, choices), choices, frozen)


def _reasons(
    free: Mapping[str, torch.Tensor],
    matrices: Sequence[str] | Predicate | None,
    exclude: Sequence[str],
    read_as: set[str],
    roles: Mapping[str, str],
) -> dict[str, str]:
    """Why AdamW takes parameters about which their groups say nothing; empty for Muon's."""
    reasons = {}
    for name, p in free.items():
        is_named = name in read_as
        reasons[name] = why_not_muon(
            name,
            p,
            is_named=is_named,
            role=roles.get(name, ""),
        )
    if matrices is not None:
        included = _included(free, matrices, read_as)
        for name, why in reasons.items():
            reasons[name] = "" if name in included else why or "not among matrices"
    possible = [name for name, why in reasons.items() if not why]
    excluded = matching("exclude", exclude, possible, others=free)
    return reasons | dict.fromkeys(excluded, BY_NAME)


def _included(
    free: Mapping[str, torch.Tensor], matrices: Sequence[str] | Predicate, read_as: set[str]
) -> Collection[str]:
    """The names that `matrices=` finds."""
    if callable(matrices):
        return [name for name, p in free.items() if matrices(name, p)]
    possible = []
    for name, p in free.items():
        if name in read_as or p.ndim == 2 or _may_be_stack(name, p):
            possible.append(name)
    return matching("matrices", matrices, possible, others=free)


def _may_be_stack(name: str, parameter: torch.Tensor) -> bool:
    """True if a parameter can be a stack of matrices.

    A convolution is recognized by its name, or by a small kernel with equal sides.
    """
    if parameter.ndim < 3 or "conv" in name.lower():
        return False
    rows, cols = parameter.shape[-2:]
    is_kernel = parameter.ndim > 3 and rows == cols <= _LARGEST_KERNEL
    return min(rows, cols) > 1 and not is_kernel


def _read_blocks(
    taken: Mapping[str, Choice], modules: fused.Modules, split: Mapping[str, fused.Split]
) -> None:
    """Take from modules how weights are stored and how their rows divide; `split=` comes last."""
    if not taken:
        raise UserError(
            "no parameter that needs a gradient is a matrix for Muon; name some in matrices=, or"
            " use torch.optim.AdamW"
        )
    given = values_of(taken, split, argument="split")
    for name, choice in taken.items():
        if fused.is_stored_transposed(name, modules) and not choice.view.flat:
            choice.view = replace(choice.view, transposed=True)
        rows, _ = choice.view.matrix
        if name in given:
            choice.split = fused.row_split(given[name], name, rows)
        elif not choice.view.flat:
            choice.split = fused.known_split(name, rows, modules)


def _groups(
    trained: Sequence[Given], choices: Mapping[torch.Tensor, Choice]
) -> list[dict[str, Any]]:
    """A group for each given one, and after these AdamW's parts of those that hold both."""
    groups: dict[tuple[int, str], dict[str, Any]] = {}
    for each in trained:
        key = each.group, ADAMW if choices[each.parameter].why else MUON
        if key not in groups:
            groups[key] = _group(each.options, key[1])
        groups[key]["params"].append(each.parameter)
    second = {(number, ADAMW) for number, optimizer in groups if optimizer == MUON}
    return [groups[key] for key in sorted(groups, key=second.__contains__)]


def _group(options: Mapping[str, Any], optimizer: str) -> dict[str, Any]:
    """A group of one optimizer with the settings of a given group that concern it."""
    group = {name: value for name, value in options.items() if name not in FOR_OTHER[optimizer]}
    if optimizer == ADAMW:
        group.setdefault(DECAY_VECTORS, "weight_decay" in options)
    return {**group, "params": [], OPTIMIZER: optimizer}


def _check_shape(given: Given) -> None:
    """Raise a UserError for what Muon cannot read as a matrix or a stack."""
    p = given.parameter
    # without a name or group nothing tells a stack from its shape
    is_said = given.name or given.optimizer
    is_stack = is_said and _may_be_stack(given.label, p)
    if not p.numel() or not (p.ndim == 2 or is_stack):
        raise UserError(
            f"{given.label} has shape {tuple(p.shape)}; Muon takes matrices and, by name, stacks"
            " (..., m, n): pass model.named_parameters(), name it in flatten= if it is a"
            " convolution or in stacks=, or put it into a group with optimizer='adamw'"
        )
