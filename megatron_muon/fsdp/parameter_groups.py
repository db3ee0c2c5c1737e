"""Parameters as users give them: a model, named tensors or groups, and the settings of groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, override

import torch
from torch import nn

from megatron_muon.errors import UserError
from megatron_muon.matrices.fused import note_of
from megatron_muon.matrices.table import IN_GROUP
from megatron_muon.matrices.views import Matrices, View
from megatron_muon.ranges import check_number
from megatron_muon.shards import local_part

MUON = "muon"
ADAMW = "adamw"
OPTIMIZER = "optimizer"
"""The key of a parameter group for the optimizer that takes it."""

DECAY_VECTORS = "decay_vectors"
"""The key of an AdamW group: weight decay also for parameters of fewer than two dimensions."""

_NUMBERS = {
    "lr": "lr",
    "weight_decay": "weight_decay",
    "momentum": "muon_momentum",
    "eps": "adam_eps",
}
"""Numbers that a group may have, with the settings whose ranges hold for them."""

_OF_ADAMW = ("betas", "eps", DECAY_VECTORS)
_OF_MUON = ("momentum",)

KNOWN = (*_NUMBERS, "betas", OPTIMIZER, DECAY_VECTORS)
"""Settings that a group may have."""

_NOTES = {
    "name",
    "param_names",
    "initial_lr",
    "max_lr",
    "min_lr",
    "max_momentum",
    "base_momentum",
    "swa_lr",
}
"""Other keys that a group may have: labels, and notes of torch's schedulers."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float64)

_MARKS = {
    "_is_flat_param": "a FlatParameter of FSDP1",
    "_fsdp_flattened": "a shard of FSDP1",
    "ds_id": "partitioned by DeepSpeed's ZeRO-3",
    "_mfsdp_parameter_group": "sharded by the experimental Megatron-FSDP",
}
"""Attributes of parameters that other libraries have flattened or cut. Reading one as a matrix, or
leaving it to AdamW because it has one dimension, would train something else than requested."""

_READABLE = {"DTensor", "FakeTensor", "FunctionalTensor", "WeightWithDynamicFloat8CastTensor"}
"""Subclasses that torch dispatches to, and whose elements are plain numbers; the last one is
torchao's, for training with float8 all-gathers."""

_REMEDY = "Muon needs whole matrices of plain numbers: use fully_shard (FSDP2), or freeze it"


@dataclass(kw_only=True)
class Choice(Matrices):
    """A parameter as the user gave it, its optimizer, and how Muon reads it.

    Attributes:
        name: as given, else its place, for messages.
        is_named: the user gave the name.
        group: the number of its group.
        options: settings of the group.
        why: the reason for AdamW; empty for Muon.
    """

    is_named: bool
    group: int
    options: dict[str, Any]
    why: str = ""

    def options_for(self, optimizer: str) -> dict[str, Any]:
        """The settings of the group that concern this optimizer."""
        options = {**self.options, OPTIMIZER: optimizer}
        if optimizer == ADAMW:
            options.setdefault(DECAY_VECTORS, "weight_decay" in options)
        without = without_effect(optimizer)
        return {name: value for name, value in options.items() if name not in without}

    @override
    def note(self) -> str:
        if self.why:
            return self.why
        doubt = "" if self.split else note_of(self.name)
        return "; ".join(filter(None, [super().note(), doubt]))


def without_effect(optimizer: str | None) -> tuple[str, ...]:
    """Settings of a group that have no effect on an optimizer's part of it."""
    if optimizer is None:
        return ()
    if optimizer == ADAMW:
        return _OF_MUON
    return _OF_ADAMW if optimizer == MUON else (*_OF_ADAMW, *_OF_MUON)


def read_parameters(params: Any, matrix_optimizer: str = MUON) -> dict[torch.Tensor, Choice]:
    """All parameters of a model, of named tensors, of tensors, or of groups of either.

    Raises a TypeError for what is not a parameter, and a UserError for one that Muon cannot take.
    """
    entries = list(params.named_parameters() if isinstance(params, nn.Module) else params)
    if not entries:
        raise UserError(
            "params is empty; pass model.named_parameters(), which can be read only once"
        )
    if not any(isinstance(entry, Mapping) for entry in entries):
        entries = [{"params": entries}]
    found: dict[torch.Tensor, Choice] = {}
    names = set[str]()
    for number, group in enumerate(entries):
        options = _options(group, number, matrix_optimizer)
        members = group["params"]
        if isinstance(members, torch.Tensor):
            members = [members]
        for index, member in enumerate(members):
            given, parameter = member if isinstance(member, tuple) else ("", member)
            if not isinstance(parameter, torch.Tensor):
                kind = type(parameter).__name__
                raise TypeError(
                    f"a parameter is a {kind}, not a tensor; pass model.named_parameters()"
                )
            name = given or f"group {number}, parameter {index}"
            if parameter in found or name in names:
                raise UserError(
                    f"{name} is given twice; pass each parameter once, by a name of its own"
                )
            if parameter.requires_grad:
                check_tensor(name, parameter)
            names.add(name)
            found[parameter] = Choice(
                name=name,
                view=View(tuple(parameter.shape)),
                is_named=bool(given),
                group=number,
                options=options,
                why=IN_GROUP if options.get(OPTIMIZER) == ADAMW else "",
            )
    return found


def _options(group: Mapping[str, Any], number: int, matrix_optimizer: str) -> dict[str, Any]:
    """The settings of a group; a UserError for one without effect."""
    options = {name: value for name, value in group.items() if name != "params"}
    optimizer = options.get(OPTIMIZER)
    if optimizer not in (None, matrix_optimizer, ADAMW):
        raise UserError(
            f"parameter group {number} has optimizer={optimizer!r}; choose"
            f" {matrix_optimizer!r} or {ADAMW!r}"
        )
    nowhere = set(without_effect(matrix_optimizer)) & set(without_effect(ADAMW))
    known = [name for name in KNOWN if name not in {*without_effect(optimizer), *nowhere}]
    for name, value in options.items():
        if name not in known and name not in _NOTES:
            raise UserError(
                f"parameter group {number} has {name}={value!r}, which has no effect; it may have"
                f" {', '.join(known)}"
            )
        check_range(name, value, name, f" of parameter group {number}")
    return options


def check_range(kind: str, value: Any, setting: str, place: str = "") -> None:
    """Raise a UserError for a number out of the range of its `kind`; None is not checked."""
    if kind == "betas":
        for number, beta in enumerate(value):
            check_number("adam_beta1", beta, setting=f"{setting}[{number}]{place}")
    elif kind in _NUMBERS and value is not None:
        check_number(_NUMBERS[kind], value, setting=setting + place)


def check_tensor(name: str, parameter: torch.Tensor) -> None:
    """Raise a UserError for a parameter that neither optimizer can read."""
    for mark, kind in _MARKS.items():
        if getattr(parameter, mark, None) is not None:
            raise UserError(f"{name} is {kind}; {_REMEDY}")
    local = local_part(parameter)
    dispatches = type(local).__torch_dispatch__ != torch.Tensor.__torch_dispatch__
    if dispatches and type(local).__name__ not in _READABLE:
        raise UserError(f"{name} is a {type(local).__name__}; {_REMEDY}")
    dtype = parameter.dtype
    if dtype not in _DTYPES or parameter.layout != torch.strided:
        raise UserError(
            f"{name} is of {dtype}, {parameter.layout}; Muon and AdamW here take dense fp32, bf16"
            " and fp64: use bf16, or freeze it"
        )


def members_of(groups: Iterable[Mapping[str, Any]]) -> list[torch.Tensor]:
    """The parameters of all these groups."""
    return [p for group in groups for p in group["params"]]


def decays(group: Mapping[str, Any], parameter: torch.Tensor) -> bool:
    """True if an AdamW group's weight decay holds for this parameter."""
    return parameter.ndim > 1 or bool(group[DECAY_VECTORS])
