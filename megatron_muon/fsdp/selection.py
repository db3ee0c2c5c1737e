"""Which parameters of a model Muon takes and which AdamW, by names, patterns and groups, and the table that says so.

Muon is for matrices inside a network. By name: a 2D parameter is one, unless it is an embedding or
an output layer, and a 3D parameter of experts is a stack of them. A shape alone says nothing, so
parameters without names must all be matrices, as for `torch.optim.Muon`, or be in a group that says
its optimizer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from megatron_muon.core.errors import UserError
from megatron_muon.core.layout import RowSplit
from megatron_muon.core.numbers import check_number, number_of
from megatron_muon.fsdp import fused
from megatron_muon.fsdp.foreign import foreign, refuse_foreign
from megatron_muon.fsdp.modules import roles_of
from megatron_muon.fsdp.names import (
    CONVOLUTION,
    EMBEDDING,
    LINEAR,
    OUTPUT,
    is_embedding,
    is_of_experts,
    is_output,
    is_table,
)
from megatron_muon.fsdp.table import FROZEN, Row, blocks, table
from megatron_muon.fsdp.views import View
from megatron_muon.patterns import matching

MUON, ADAMW = "muon", "adamw"
OPTIMIZER = "optimizer"
"""The key of a parameter group that says which of the two takes it."""

DECAY_VECTORS = "decay_vectors"
"""The key of a group of AdamW's that says whether its weight decay holds for what has fewer than two dimensions too."""

VECTOR = "vector"
"""Why a weight of one row or column is no matrix."""

BY_GROUP, BY_NAME = "its group says so", "exclude"
"""Why a parameter is AdamW's where the user has said so."""

_NUMBERS = {
    "lr": "lr",
    "weight_decay": "weight_decay",
    "momentum": "muon_momentum",
    "eps": "adam_eps",
}
"""Numbers that a group may have, with the names of their ranges."""

Rule = Callable[[str, torch.Tensor], bool]
"""Whether Muon takes the parameter of this name."""

_FOR_OTHER = {MUON: ("betas", "eps", DECAY_VECTORS), ADAMW: ("momentum",)}
"""Settings of a group that have no effect on its part of Muon, or of AdamW."""

OF_ALL = ("nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn")
"""Settings of torch.optim.Muon's groups that here hold for the whole optimizer."""

KNOWN = (*_NUMBERS, "betas", OPTIMIZER, DECAY_VECTORS)
"""Settings that a group may have."""

NOTES = (
    "name",
    "param_names",
    "initial_lr",
    "max_lr",
    "min_lr",
    "max_momentum",
    "base_momentum",
    "swa_lr",
)
"""What else a group may have: a label, and what torch's schedulers keep in it."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@dataclass
class Selection:
    """Parameter groups, each of one optimizer, without parameters that need no gradient.

    Attributes:
        groups: one for each that was given, in that order, and after these AdamW's parts of those
            that hold both.
        names: a name for each parameter.
        why: for each parameter of AdamW, the reason.
        frozen: what needs no gradient.
        views: how each parameter of Muon is read.
        roles: those of weights whose modules are known, by name.
        left_out: lines of the table for frozen parameters that are no plain numbers.
        splits: the blocks of matrices that hold several.
        known_splits: those that modules tell, where `split=` says nothing else.
        notes: for the table, of matrices that look fused, and of adapters.
        grouped: whether groups with settings of their own were given.
    """

    groups: list[dict[str, Any]] = field(default_factory=list)
    names: dict[torch.Tensor, str] = field(default_factory=dict)
    why: dict[torch.Tensor, str] = field(default_factory=dict)
    frozen: list[torch.Tensor] = field(default_factory=list)
    views: dict[torch.Tensor, View] = field(default_factory=dict)
    roles: dict[str, str] = field(default_factory=dict)
    left_out: list[Row] = field(default_factory=list)
    splits: dict[torch.Tensor, RowSplit] = field(default_factory=dict)
    known_splits: dict[torch.Tensor, RowSplit] = field(default_factory=dict)
    notes: dict[torch.Tensor, str] = field(default_factory=dict)
    grouped: bool = False

    def exchanged(
        self, before: Sequence[torch.Tensor], groups: Sequence[Mapping[str, Any]]
    ) -> Selection:
        """The same choice for `groups` that have other parameters in the places of those before."""
        pairs = list(zip(before, members_of(groups), strict=True))
        for old, new in pairs:
            _check_tensor(self.names[old], new)
        refuse_foreign((self.names[old], new, self.why.get(old) == BY_GROUP) for old, new in pairs)
        for old, new in pairs:
            if old in self.views and new.shape != old.shape:
                shapes = f"{tuple(new.shape)} in param_groups, and was {tuple(old.shape)}"
                raise UserError(
                    f"{self.names[old]} is {shapes}; Muon needs whole matrices: use fully_shard"
                    " (FSDP2)"
                )
        return replace(
            self,
            groups=[dict(group) for group in groups],
            names={new: self.names[old] for old, new in pairs},
            # those of before would keep the unsharded model in memory
            frozen=[torch.empty(0)] * len(self.frozen),
            why={new: self.why[old] for old, new in pairs if old in self.why},
            views={new: self.views[old] for old, new in pairs if old in self.views},
            splits={},
            known_splits={
                new: self.known_splits[old] for old, new in pairs if old in self.known_splits
            },
            notes={new: self.notes[old] for old, new in pairs if old in self.notes},
        )

    def resharded(self, parameters: Iterable[torch.Tensor]) -> Selection | None:
        """The same choice for Megatron-FSDP's parameters; None where they do not have the names of those before."""
        now = {_known_name(p): p for p in parameters}
        before = members_of(self.groups)
        if not all(self.names[p] in now for p in before):
            return None
        groups = [
            {**group, "params": [now[self.names[p]] for p in group["params"]]}
            for group in self.groups
        ]
        return self.exchanged(before, groups)

    def table(self, *, full: bool = False) -> str:
        """Which optimizer takes which parameters, with the reason, what is split and what has no weight decay."""
        rows = []
        for group in sorted(self.groups, key=lambda group: group[OPTIMIZER] == ADAMW):
            for p in group["params"]:
                notes = [self.why.get(p, ""), self.views[p].described() if p in self.views else ""]
                notes.append(blocks(self.splits[p]) if p in self.splits else self.notes.get(p, ""))
                if group[OPTIMIZER] == ADAMW and not decays(group, p):
                    notes.append("no weight decay")
                rows.append(
                    Row(group[OPTIMIZER], self.names[p], p.shape, "; ".join(filter(None, notes)))
                )
        return table([*rows, *self.left_out], frozen=len(self.frozen), full=full)


def members_of(groups: Iterable[Mapping[str, Any]]) -> list[torch.Tensor]:
    """The parameters of all these groups."""
    return [p for group in groups for p in group["params"]]


def decays(group: Mapping[str, Any], parameter: torch.Tensor) -> bool:
    """Whether a group's weight decay holds for this parameter of AdamW's."""
    return parameter.ndim > 1 or bool(group[DECAY_VECTORS])


def why_not_muon(
    name: str, parameter: torch.Tensor, *, is_named: bool = False, role: str = ""
) -> str:
    """Why a parameter is no matrix inside the network, or stack of these; empty where it is one.

    `is_named`: by `flatten=` or `stacks=`. `role`: that of its module, where that is known
    (`fsdp.names`).
    """
    is_stack = parameter.ndim > 2 and is_of_experts(name)
    if parameter.ndim != 2 and not is_stack and not is_named:
        return f"{parameter.ndim}D{'' if role == CONVOLUTION else _how_to_stack(name, parameter)}"
    if not parameter.numel():
        return "no elements"
    if is_named:  # a patch embedding too, which is a convolution and no table
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
    """Whether a parameter of more than two dimensions can be read as matrices one after the other.

    A convolution is recognised by its name, or by a kernel with equal sides of at most 16.
    """
    rows, cols = parameter.shape[-2:]
    is_kernel = parameter.ndim > 3 and rows == cols <= 16
    is_convolution = is_kernel or "conv" in name.lower()
    return min(rows, cols) > 1 and not is_convolution


def _how_to_stack(name: str, parameter: torch.Tensor) -> str:
    """Ends the table's line of a parameter that may be a stack of matrices, and whose name does not say so."""
    if parameter.ndim < 3 or not may_be_stack(name, parameter):
        return ""
    return f'; stacks=["{_pattern_of(name)}"] reads it as matrices'


def _pattern_of(name: str) -> str:
    """A pattern that finds this parameter in every layer: what follows the last number."""
    parts = name.removesuffix(".weight").split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[numbers[-1] + 1 :] if numbers else parts) or name


def select(
    params: Any,
    matrices: Sequence[str] | Rule | None = None,
    exclude: Sequence[str] = (),
    flatten: Mapping[str, bool] | None = None,
    transposed: Sequence[str] = (),
    stacks: Sequence[str] = (),
) -> Selection:
    """Sort parameters by optimizer.

    Args:
        params: a model, whose modules then tell more than names do; `model.named_parameters()`,
            tensors, or groups of either; a group may have `optimizer`, "muon" or "adamw", which
            decides for its parameters.
        matrices: what Muon is to take, instead of the rule by name: patterns (`matching`) or a
            `Rule` of one's own.
        exclude: such patterns of what goes to AdamW all the same.
        flatten: such patterns of what is read with all dimensions but the first as columns; False
            takes one back.
        transposed: such patterns of weights that are stored as (inputs, outputs).
        stacks: such patterns of parameters whose leading dimensions count matrices.

    Raises:
        TypeError: `params` is a module or a tensor, or holds something that is not a tensor.
        UserError: something in `params` that Muon cannot take, a pattern that matches nothing.
    """
    selection = Selection()
    modules: fused.Modules = {}
    if isinstance(params, nn.Module):
        modules, selection.roles = dict(params.named_modules()), roles_of(params)
    tensors = list(_trained(params, selection))
    refuse_foreign(
        ((selection.names[p], p, options.get(OPTIMIZER) == ADAMW) for _, p, options in tensors),
        modules,
    )
    selection.left_out = _packed_rows(selection, modules)
    if not tensors:
        raise UserError("no parameter needs a gradient; unfreeze at least one")
    flat = set[str]()
    of_more = [name for name, p, _ in tensors if name and p.ndim > 2]
    for pattern, is_flat in (flatten or {}).items():
        found = matching(
            "flatten", [pattern], of_more, others=[name for name, _, _ in tensors if name]
        )
        flat = flat.union(found) if is_flat else flat.difference(found)
    stacked = set(
        matching("stacks", stacks, of_more, others=[name for name, _, _ in tensors if name])
    )
    if both := sorted(flat & stacked):
        raise UserError(f"{both[0]} is named in flatten= and in stacks=; leave it out of one")
    by_name = {name: p for name, p, options in tensors if name and OPTIMIZER not in options}
    if matrices is None:
        named = flat | stacked
        included = {
            name
            for name, p in by_name.items()
            if not why_not_muon(name, p, is_named=name in named, role=selection.roles.get(name, ""))
        }
    elif callable(matrices):
        included = {name for name, p in by_name.items() if matrices(name, p)}
    else:
        possible = [
            name
            for name, p in by_name.items()
            if p.ndim == 2
            or name in flat
            or name in stacked
            or (p.ndim > 2 and may_be_stack(name, p))
        ]
        included = set(matching("matrices", matrices, possible, others=by_name))
    excluded = set(
        matching("exclude", exclude, [name for name in by_name if name in included], others=by_name)
    )
    parts: dict[tuple[int, str], dict[str, Any]] = {}  # of each given group Muon's, AdamW's or both
    for name, parameter, options in tensors:
        optimizer, why = options.get(OPTIMIZER), BY_GROUP
        if optimizer is None:
            optimizer = MUON if not name or name in included - excluded else ADAMW
            why = (
                why_not_muon(name, parameter, role=selection.roles.get(name, ""))
                or "not among matrices"
            )
            why = BY_NAME if name in excluded else why
        if optimizer == ADAMW:
            selection.why[parameter] = why
        else:
            is_given = bool(name) or OPTIMIZER in options  # nothing tells a stack from its shape
            if not (name in flat or name in stacked):
                _check_shape(selection.names[parameter], parameter, is_given=is_given)
            selection.views[parameter] = View(tuple(parameter.shape), flat=name in flat)
        parts.setdefault((id(options), optimizer), _part(options, optimizer))["params"].append(
            parameter
        )
    taken = {selection.names[p]: p for p in selection.views}
    for name in matching("transposed", transposed, taken, others=by_name):
        selection.views[taken[name]] = replace(selection.views[taken[name]], transposed=True)
    for name, p in taken.items():
        _read_as_modules_do(selection, name, p, modules)
    second = {
        key: part for key, part in parts.items() if key[1] == ADAMW and (key[0], MUON) in parts
    }
    selection.groups = [
        *(part for key, part in parts.items() if key not in second),
        *second.values(),
    ]
    if not selection.views:
        raise UserError(
            "no parameter is a matrix for Muon; use torch.optim.AdamW, or say with matrices= what"
            " Muon is to take"
        )
    return selection


def _packed_rows(selection: Selection, modules: fused.Modules) -> list[Row]:
    """Lines of the table for frozen parameters that are no plain numbers, such as the 4-bit base under LoRA."""
    rows = []
    for parameter in selection.frozen:
        name = selection.names[parameter]
        found = foreign(parameter, modules.get(name.rpartition(".")[0]))
        if found is not None:
            rows.append(Row(FROZEN, name, tuple(parameter.shape), found.kind))
    return rows


def _read_as_modules_do(
    selection: Selection, name: str, parameter: torch.Tensor, modules: fused.Modules
) -> None:
    """Take from a weight's module whether it is stored transposed, and how its rows divide."""
    view = selection.views[parameter]
    if view.flat:
        return
    if fused.is_stored_transposed(name, modules):
        view = selection.views[parameter] = replace(view, transposed=True)
    split = fused.known_split(name, view.matrix[0], modules)
    if split is not None:
        selection.known_splits[parameter] = split
    elif any(part.lower().startswith("lora_") for part in name.split(".")):
        selection.notes[parameter] = f"LoRA factor of rank {min(view.matrix)}"
    elif note := fused.note_of(name, view.matrix, modules):
        selection.notes[parameter] = note


def _check_shape(name: str, parameter: torch.Tensor, *, is_given: bool) -> None:
    """Refuse, by a UserError, what Muon cannot read as a matrix or a stack of them."""
    is_stack = parameter.ndim > 2 and is_given and may_be_stack(name, parameter)
    if not parameter.numel() or not (parameter.ndim == 2 or is_stack):
        raise UserError(
            f"{name} has shape {tuple(parameter.shape)}; Muon takes matrices and, by name or group,"
            " stacks (..., m, n) with m and n above 1: pass model.named_parameters(), leave it out"
            " of matrices=, name it in flatten= if it is a convolution or in stacks=, or put it"
            " into a group with optimizer='adamw'"
        )


def _part(options: Mapping[str, Any], optimizer: str) -> dict[str, Any]:
    """A parameter group of one optimizer, still empty, with the options of a given one that concern it."""
    group = {name: value for name, value in options.items() if name not in _FOR_OTHER[optimizer]}
    if optimizer == ADAMW:
        group[DECAY_VECTORS] = options.get(DECAY_VECTORS, "weight_decay" in options)
    return {**group, "params": [], OPTIMIZER: optimizer}


def splits(given: Mapping[str, fused.Split], selection: Selection) -> dict[torch.Tensor, RowSplit]:
    """The blocks of matrices that hold several: those known, then by pattern; the last pattern that matches holds."""
    found, by_name = dict(selection.known_splits), {selection.names[p]: p for p in selection.views}
    for pattern, split in given.items():
        for name in matching("split", [pattern], by_name):
            p = by_name[name]
            found[p] = fused.row_split(pattern, split, name, selection.views[p].matrix[0])
    return found


def _trained(
    params: Any, selection: Selection
) -> Iterator[tuple[str, torch.Tensor, dict[str, Any]]]:
    """Each parameter that needs a gradient, with its name, empty where it has none, and the options of its group.

    Fills in the selection's `names` and `frozen`.
    """
    if isinstance(params, torch.Tensor):
        raise TypeError(
            f"params is a {type(params).__name__}; pass the model, or model.named_parameters()"
        )
    given = list(params.named_parameters() if isinstance(params, nn.Module) else params)
    if not given:
        raise UserError(
            "params is empty; pass model.named_parameters(), which can be read only once"
        )
    taken = set[str]()
    if not any(isinstance(group, Mapping) for group in given):
        given = [{"params": given}]
    for number, group in enumerate(given):
        if not isinstance(group, Mapping) or "params" not in group:
            raise TypeError(
                f"entry {number} of params is no parameter group with 'params', as the others are"
            )
        options = {key: value for key, value in group.items() if key != "params"}
        _check_options(options, number)
        selection.grouped |= bool(options)
        if isinstance(group["params"], nn.Module):
            raise TypeError(f"parameter group {number} is of a module; pass its named_parameters()")
        members = (
            [group["params"]]
            if isinstance(group["params"], torch.Tensor)
            else list(group["params"])
        )
        if not members:
            raise UserError(f"parameter group {number} has no parameters; leave it out")
        for place, entry in enumerate(members):
            shown = (
                f"parameter {place}" if len(given) == 1 else f"group {number}, parameter {place}"
            )
            named = (
                isinstance(entry, (tuple, list)) and len(entry) == 2 and isinstance(entry[0], str)
            )
            name, parameter = entry if named else ("", entry)
            if not isinstance(parameter, torch.Tensor):
                raise TypeError(
                    f"{shown} is a {type(parameter).__name__}, not a tensor; pass"
                    " model.named_parameters()"
                )
            name = name or _known_name(parameter)
            if parameter in selection.names or (name and name in taken):
                raise UserError(
                    f"{name or shown} is given twice; pass each parameter once, by a name of"
                    " its own"
                )
            selection.names[parameter] = name or shown
            taken.add(name)
            if parameter.requires_grad:
                _check_tensor(name or shown, parameter)
                yield name, parameter, options
            else:
                selection.frozen.append(parameter)


def _check_options(options: Mapping[str, Any], number: int) -> None:
    """Refuse what has no effect on a group; what users note in groups of their own, they add once it is made."""
    optimizer = options.get(OPTIMIZER)
    for name, value in options.items():
        wrong = ""
        if name in OF_ALL:
            wrong = "which holds for the whole optimizer; pass it to Muon"
        elif name not in (*KNOWN, *NOTES):
            wrong = f"which Muon does not know; a group may have {', '.join(KNOWN)}"
        elif name == OPTIMIZER and value not in (MUON, ADAMW):
            wrong = "which does not exist; choose 'muon' or 'adamw'"
        elif name == DECAY_VECTORS and not isinstance(value, bool):
            wrong = "which is not True or False; choose one"
        elif name in _FOR_OTHER.get(str(optimizer), ()):
            wrong = f"which has no effect with optimizer={optimizer!r}; leave it out"
        if wrong:
            raise UserError(f"parameter group {number} has {name}={value!r}, {wrong}")
        if name == "betas":
            check_betas(value, "betas", f" of parameter group {number}")
        elif name in _NUMBERS:
            check_number(_NUMBERS[name], value, flag=f"{name} of parameter group {number}")


def check_betas(betas: Any, name: str, where: str = "") -> None:
    """Refuse, by a UserError that calls them `name`, what are not two numbers in a sequence, an array or a tensor."""
    has_elements = isinstance(betas, Sequence) or bool(getattr(betas, "shape", False))
    if not has_elements or len(betas) != 2:
        raise UserError(f"{name}={betas!r}{where} are not two numbers")
    for place, beta in enumerate(betas):
        check_number("adam_beta1", beta, flag=f"{name}[{place}]{where}")


def floats_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a group as floats, those of tensors as they are now."""
    numbers: dict[str, Any] = {
        name: float(number_of(group[name])) for name in _NUMBERS if name in group
    }
    if "betas" in group:
        numbers["betas"] = tuple(float(number_of(beta)) for beta in group["betas"])
    return numbers


def _check_tensor(name: str, parameter: torch.Tensor) -> None:
    if parameter.dtype not in _DTYPES:
        why = "; in fp16 updates overflow: use bf16" if parameter.dtype == torch.float16 else ""
        raise UserError(
            f"{name} is of {parameter.dtype}; Muon and AdamW here take fp32, bf16 and fp64{why}"
        )
    if parameter.layout != torch.strided:
        raise UserError(
            f"{name} is sparse ({parameter.layout}); Muon and AdamW here take dense parameters"
        )


def _known_name(parameter: torch.Tensor) -> str:
    """The name that Megatron-FSDP has for one of its parameters; empty where it is not one."""
    model = getattr(parameter, "_megatron_fsdp_model", None)
    if model is None:
        return ""
    buffer = model.param_and_grad_buffer
    name: str = buffer.param_to_name.get(getattr(parameter, "orig_param", None), "")
    return re.sub(r"^(module\.)+", "", name)
