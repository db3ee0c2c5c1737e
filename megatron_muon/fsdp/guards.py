"""Checks of `Muon`: settings between ranks, parameters that changed, gradients."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megatron_muon.errors import UserError
from megatron_muon.fsdp.selection import Selection
from megatron_muon.matrices.agreement import check_agreement
from megatron_muon.ranges import number_of
from megatron_muon.ranks import numbers_of_all_ranks
from megatron_muon.shards import local_part

_OF_RANKS = ("params ", "process_group", "offload_dir", "muon_offload_dir")
"""Starts of settings that may differ: objects of each process, and a directory of each node."""


_PLAIN = (bool, int, float, str, tuple, type(None))


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
        values |= {f"{name} of parameter group {number}": group[name] for name in group}
    shown = {}
    for name, value in values.items():
        if isinstance(value, dict):  # of a class, which may be given objects of each process
            value = {key: each for key, each in value.items() if isinstance(each, _PLAIN)}
        if not name.startswith(_OF_RANKS) and not callable(value):
            shown[name] = repr(number_of(value))
    check_agreement(shown, ranks, "give every rank the same settings")


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


def check_parameters(
    placed: Mapping[torch.Tensor, tuple[Any, ...]],
    selection: Selection,
) -> None:
    """Check parameters before a step, and shard their gradients as they are sharded.

    Under tensor parallelism gradients may be partial sums. `placed` has the placements when the
    optimizer was made. Raises a UserError for parameters that were sharded, cast, moved or thawed
    since, and for sparse gradients.
    """
    for p, was in placed.items():
        now = placement_of(p)
        if now != was:
            name = selection.choices[p].name
            raise UserError(
                f"{name} was {was} when the optimizer was made and is {now} now; make"
                " the optimizer after the model is sharded, of its dtype and on its device"
            )
    for p, choice in selection.choices.items():
        gradient = p.grad
        if gradient is None:
            continue
        if gradient.layout != torch.strided:
            raise UserError(
                f"the gradient of {choice.name} is sparse; make its module with sparse=False"
            )
        if not isinstance(gradient, DTensor) or not isinstance(p, DTensor):
            continue
        if gradient.placements != p.placements:
            p.grad = gradient.redistribute(placements=p.placements)
    for p, name in selection.frozen.items():
        if p.requires_grad:
            raise UserError(
                f"{name} was frozen when the optimizer was made, so it would not train; make the"
                " optimizer while all that will train requires a gradient, and freeze afterwards"
            )


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
    """True if gradients are zero or missing on every rank of `group`. Collective."""
    gradients = [local_part(p.grad) for p in parameters if p.grad is not None]
    is_any = any(gradient.any() for gradient in gradients)
    return not any(map(any, numbers_of_all_ranks([is_any], group)))
