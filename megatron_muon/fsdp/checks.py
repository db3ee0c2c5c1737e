"""What `Muon` refuses: settings that differ between ranks, parameters it was not made for, some gradients, a scaler.

Settings are compared before the first collective, which may hang or abort where they differ,
through the store by which the ranks found each other: a few small requests from each rank, with a
time limit that no backend has to keep.
"""

from __future__ import annotations

import hashlib
import json
import reprlib
import sys
import warnings
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.tensor import DTensor

from megatron_muon.core.errors import UserError
from megatron_muon.core.numbers import number_of
from megatron_muon.fsdp.foreign import refuse_foreign
from megatron_muon.fsdp.step import local_parts

TIME_LIMIT = timedelta(minutes=5)
"""How long a rank waits for the others to make their Muon; some may still be reading a model."""

_OF_RANKS = ("params", "process_group", "offload_dir", "muon_offload_dir")
"""What may differ: objects of each process, and a directory of each node."""


def compare_settings(
    settings: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], ranks: Sequence[int]
) -> None:
    """Compare settings, and those of parameter groups, between ranks. Collective over these.

    A UserError on every rank with the first setting that differs and both values, or the ranks that
    do not answer.
    """
    if len(ranks) < 2 or dist.get_backend() == "fake":
        return
    shared = dict(settings)
    for number, group in enumerate(groups):
        shared |= {
            f"{name} of parameter group {number}": group[name]
            for name in group
            if name not in _OF_RANKS
        }
    mine = {
        name: _shown(each)
        for name, each in shared.items()
        if name not in _OF_RANKS and not callable(each)
    }
    rank, key = dist.get_rank(), hashlib.sha256(repr(list(ranks)).encode()).hexdigest()[:16]
    store = c10d.PrefixStore(f"megatron_muon/{key}", c10d._get_default_store())
    store = c10d.PrefixStore(str(store.add(f"made on {rank}", 1)), store)  # a Muon after the other
    try:
        if rank == ranks[0]:
            store.set("settings", json.dumps(mine))
        store.wait(["settings"], TIME_LIMIT)
        first = json.loads(store.get("settings"))
        for name in dict.fromkeys([*first, *mine]):
            one, two = (values.get(name, "not set") for values in (first, mine))
            if one != two:
                store.set(
                    "difference", f"{name} is {one} on rank {ranks[0]} and {two} on rank {rank}"
                )
                break
        store.set(f"rank {rank}", "")
        if store.add("ranks", 1) == len(ranks):
            store.set("all", "")
        store.wait(["all"], TIME_LIMIT)
    except RuntimeError as error:
        absent = [other for other in ranks if not store.check([f"rank {other}"]) and other != rank]
        raise UserError(
            f"rank {rank} has waited {TIME_LIMIT.total_seconds():g} s for ranks"
            f" {reprlib.repr(absent)} to make this Muon; make it on each of the ranks"
            f" {reprlib.repr(list(ranks))}, with the same share_replicated, process_group and"
            " offload"
        ) from error
    if store.check(["difference"]):
        raise UserError(f"{store.get('difference').decode()}; give every rank the same settings")


def _shown(value: Any) -> str:
    return repr(number_of(value))


def placement_of(parameter: torch.Tensor) -> tuple[Any, ...]:
    """Where a parameter lies and what it holds: this rank's shape, dtype, device and placements."""
    if isinstance(parameter, DTensor):
        return (
            parameter._local_tensor.shape,
            parameter.dtype,
            parameter.device,
            parameter._spec.placements,
        )
    return parameter.shape, parameter.dtype, parameter.device, ()


def _shown_placement(placement: tuple[Any, ...]) -> str:
    shape, dtype, device, placements = placement
    return f"{tuple(shape)} in {dtype} on {device}" + (
        f" as {', '.join(map(str, placements))}" if placements else ""
    )


def check_parameters(
    placed: Sequence[tuple[torch.Tensor, tuple[Any, ...]]],
    names: Mapping[torch.Tensor, str],
    frozen: Sequence[torch.Tensor],
) -> None:
    """Have gradients sharded as their parameters are; under tensor parallelism they may be partial sums.

    `placed` has where the matrices lay when the optimizer was made, `frozen` what needed no
    gradient then. A UserError where parameters were sharded, cast, moved or thawed since, or where
    a gradient is sparse.
    """
    for p, was in placed:
        if (now := placement_of(p)) != was:
            refuse_foreign([(names[p], p, False)])
            before, after = _shown_placement(was), _shown_placement(now)
            raise UserError(
                f"{names[p]} was {before} when the optimizer was made and is {after} now; make the"
                " optimizer after the model is sharded, of its dtype and on its device"
            )
    for p, name in names.items():
        gradient = p.grad
        if gradient is None:
            continue
        if gradient.layout != torch.strided:
            raise UserError(
                f"the gradient of {name} is sparse ({gradient.layout}); Muon and AdamW here take"
                " dense ones: make its module with sparse=False"
            )
        if (
            not isinstance(gradient, DTensor)
            or not isinstance(p, DTensor)
            or gradient._spec is p._spec
        ):
            continue
        if gradient.placements != p.placements:
            p.grad = gradient.redistribute(placements=p.placements)
    for p in frozen:
        if p.requires_grad:
            raise UserError(
                f"{names[p]} was frozen when the optimizer was made, so it has no state and would"
                " not train; make the optimizer while all that will train requires a gradient, and"
                " freeze afterwards"
            )


def find_orphans(members: Sequence[torch.Tensor], names: Mapping[torch.Tensor, str]) -> None:
    """Find parameters without a gradient at the first step that the model, sharded since, may have replaced.

    A UserError where none has a gradient and none is sharded: no other rank waits for this one
    then. Beside sharded ones a warning, as some rank may have no use for a parameter in a step.
    """
    plain = [p for p in members if p.requires_grad and p.numel() and not isinstance(p, DTensor)]
    orphans = [p for p in plain if p.grad is None]
    if not orphans:
        return
    name = names[orphans[0]]
    if hasattr(orphans[0], "main_grad"):
        raise UserError(
            f"{name} has its gradient in main_grad, as under Megatron's DistributedDataParallel,"
            " and not in grad; use Megatron-FSDP with megatron_muon.get_megatron_muon_optimizer"
        )
    remedy = (
        "if the model was sharded (fully_shard) after the optimizer was made, make the optimizer"
        " after that"
    )
    if any(isinstance(p, DTensor) for p in members):
        warnings.warn(
            f"{name} is not sharded as others are, and has no gradient at the first step; {remedy}",
            stacklevel=4,
        )
    elif len(orphans) == len(plain):
        raise UserError(
            f"{name} has no gradient at the first step, and no other parameter has one; {remedy},"
            " else call backward() first"
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


class NoScaler:
    """What torch.amp.GradScaler looks for before its step: a UserError. Lightning reads it without a scaler: False."""

    def __get__(self, optimizer: object, owner: type) -> bool:
        if sys._getframe(1).f_globals.get("__name__") == torch.amp.grad_scaler.__name__:
            raise UserError(
                "GradScaler is for fp16, which Muon does not support: with parameters on several"
                " meshes it can skip a step on one rank alone, and the others wait; train in bf16"
                " without it (torch.autocast with torch.bfloat16; bf16=True in transformers,"
                " precision='bf16-mixed' in Lightning)"
            )
        return False
