"""What `Muon` refuses before a step: parameters that it was not made for, and gradients that it cannot take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megatron_muon.core.errors import UserError
from megatron_muon.fsdp import shards
from megatron_muon.fsdp.adamw import local_parts


def check_parameters(
    placed: Sequence[tuple[torch.Tensor, tuple[Any, ...]]],
    names: Mapping[torch.Tensor, str],
    frozen: Sequence[torch.Tensor],
) -> None:
    """Have gradients sharded as their parameters are; under tensor parallelism they may be partial sums.

    `placed` has where the matrices lay when the optimizer was made, `frozen` what needed no gradient then. A UserError
    where parameters were sharded, cast, moved or thawed since, or where a gradient is sparse.
    """
    for p, was in placed:
        if (now := shards.placement_of(p)) != was:
            before, after = shards.shown_placement(was), shards.shown_placement(now)
            raise UserError(
                f"{names[p]} was {before} when the optimizer was made and is {after} now; make the optimizer "
                "after the model is sharded, of its dtype and on its device"
            )
    for p, name in names.items():
        gradient = p.grad
        if gradient is None:
            continue
        if gradient.layout != torch.strided:
            raise UserError(
                f"the gradient of {name} is sparse ({gradient.layout}); Muon and AdamW here take dense "
                "ones: make its module with sparse=False"
            )
        if not isinstance(gradient, DTensor) or not isinstance(p, DTensor) or gradient._spec is p._spec:
            continue
        if gradient.placements != p.placements:
            p.grad = gradient.redistribute(placements=p.placements)
    for p in frozen:
        if p.requires_grad:
            raise UserError(
                f"{names[p]} was frozen when the optimizer was made, so it has no state and would not train; "
                "make the optimizer while all that will train needs a gradient, and freeze after that"
            )


def refuse_orphans(members: Sequence[torch.Tensor], names: Mapping[torch.Tensor, str], *, is_sharded: bool) -> None:
    """Refuse to step where the model, sharded after the optimizer was made, has other parameters than it."""
    trained = [p for p in members if p.requires_grad and local_parts([p])[0].numel()]
    orphans = [p for p in trained if p.grad is None]
    if len(orphans) < len(trained):
        orphans = [p for p in orphans if is_sharded and not isinstance(p, DTensor)]
    if orphans:
        alone = "" if len(orphans) < len(trained) else ", and no other parameter has one"
        raise UserError(
            f"{names[orphans[0]]} has no gradient at the first step{alone}; if the model was sharded "
            "(fully_shard) after the optimizer was made, make the optimizer after that, else call backward() first"
        )


def are_zero(parameters: Sequence[torch.Tensor], group: dist.ProcessGroup) -> bool:
    """Whether there are gradients, and all of them are zero on every rank of `group`. Collective."""
    largest = -torch.ones((), device=parameters[0].device)
    for gradient in local_parts([p.grad for p in parameters if p.grad is not None]):
        if gradient.numel():
            largest = torch.maximum(largest, gradient.abs().max().float())
    if group.size() > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return bool(largest == 0)
