"""Checks of `Muon`: settings between ranks, parameters that changed, gradients."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megatron_muon.core.numbers import number_of
from megatron_muon.core.ranks import numbers_of_all_ranks, of_all_ranks
from megatron_muon.core.user_errors import UserError
from megatron_muon.fsdp.selection import Selection
from megatron_muon.fsdp.step import local_part

_OF_RANKS = ("params", "process_group", "offload_dir", "muon_offload_dir")
"""Settings that may differ: objects of each process, and a directory of each node."""


def compare_settings(
    settings: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    ranks: Any = None,
) -> None:
    """Compare settings, and those of parameter groups, between ranks. Collective.

    Raises a UserError on every rank with the first setting that differs and both values.

    Args:
        ranks: a process group; None takes all ranks.
    """
    values = dict(settings)
    for number, group in enumerate(groups):
        for name, value in group.items():
            if name not in _OF_RANKS:
                values[f"{name} of parameter group {number}"] = value
    mine: dict[str, str] = {}
    for name, value in values.items():
        if name not in _OF_RANKS and not callable(value):
            mine[name] = repr(number_of(value))
    digest = hashlib.sha256(repr(mine).encode()).digest()
    digests = numbers_of_all_ranks([int.from_bytes(digest[:7])], ranks)
    others = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if not others:
        return
    everyone = of_all_ranks(mine, ranks)
    first = everyone[0]
    other = everyone[others[0]]
    for name in [*first, *other]:
        one = first.get(name, "not set")
        two = other.get(name, "not set")
        if one != two:
            raise UserError(
                f"{name} is {one} on rank 0 and {two} on rank {others[0]}; give every rank the same"
                " settings"
            )


class NoScaler:
    """Refuses torch.amp.GradScaler, which reads this attribute of an optimizer before its step.

    Lightning reads it without a scaler: False.
    """

    def __get__(self, optimizer: object, owner: type) -> bool:
        reader = sys._getframe(1).f_globals.get("__name__")
        if reader == torch.amp.grad_scaler.__name__:
            raise UserError(
                "GradScaler is for fp16, which Muon does not support: it can skip a step on one"
                " rank alone, and the others wait; train in bf16 without it"
            )
        return False


def placement_of(parameter: torch.Tensor) -> tuple[Any, ...]:
    """This rank's shape of a parameter, its dtype, device and placements."""
    placements = parameter.placements if isinstance(parameter, DTensor) else ()
    return local_part(parameter).shape, parameter.dtype, parameter.device, placements


def check_parameters(placed: Mapping[torch.Tensor, tuple[Any, ...]], selection: Selection) -> None:
    """Check parameters before a step, and shard their gradients as they are sharded.

    Under tensor parallelism gradients may be partial sums. `placed` has the placements when the
    optimizer was made. Raises a UserError for parameters that were sharded, cast, moved or thawed
    since, and for sparse gradients.
    """
    for p, was in placed.items():
        now = placement_of(p)
        if now != was:
            raise UserError(
                f"{selection.name(p)} was {was} when the optimizer was made and is {now} now; make"
                " the optimizer after the model is sharded, of its dtype and on its device"
            )
    for p, choice in selection.choices.items():
        if p.grad is not None:
            _check_gradient(p, p.grad, choice.name)
    for p, name in selection.frozen.items():
        if p.requires_grad:
            raise UserError(
                f"{name} was frozen when the optimizer was made, so it would not train; make the"
                " optimizer while all that will train requires a gradient, and freeze afterwards"
            )


def _check_gradient(p: torch.Tensor, gradient: torch.Tensor, name: str) -> None:
    if gradient.layout != torch.strided:
        raise UserError(f"the gradient of {name} is sparse; make its module with sparse=False")
    if not isinstance(gradient, DTensor) or not isinstance(p, DTensor):
        return
    if gradient._spec is not p._spec and gradient.placements != p.placements:
        p.grad = gradient.redistribute(placements=p.placements)


def check_first_gradients(members: Sequence[torch.Tensor]) -> None:
    """Raise a UserError if no parameter has a gradient at the first step.

    The model may have replaced them. If one is sharded, other ranks may wait for this one.
    """
    if not any(p.grad is not None or isinstance(p, DTensor) for p in members):
        raise UserError(
            "no parameter has a gradient (grad) at the first step; call backward() first, and make"
            " the optimizer after fully_shard or another wrapper has replaced parameters"
        )


def are_zero(parameters: Sequence[torch.Tensor], group: dist.ProcessGroup) -> bool:
    """True if there are gradients, all zero on every rank of `group`. Collective."""
    gradients = [local_part(p.grad) for p in parameters if p.grad is not None]
    is_any = any(bool(gradient.any()) for gradient in gradients)
    found = numbers_of_all_ranks([len(gradients), is_any], group)
    has_gradients = any(count for count, _ in found)
    return has_gradients and not any(is_other for _, is_other in found)
