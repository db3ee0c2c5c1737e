"""Checks of `Muon`: settings between ranks, parameters that changed, gradients, a scaler.

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
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.tensor import DTensor

from megatron_muon.core.numbers import number_of
from megatron_muon.core.user_errors import UserError
from megatron_muon.fsdp.foreign import refuse_foreign
from megatron_muon.fsdp.selection import Selection
from megatron_muon.fsdp.step import local_part

TIME_LIMIT = timedelta(minutes=5)
"""How long a rank waits for the others to make their Muon; some may still be reading a model."""

_OF_RANKS = ("params", "process_group", "offload_dir", "muon_offload_dir")
"""Settings that may differ: objects of each process, and a directory of each node."""


def compare_settings(
    settings: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    ranks: Sequence[int],
) -> None:
    """Compare settings, and those of parameter groups, between ranks. Collective over these.

    Raises a UserError on every rank with the first setting that differs and both values, or with
    the ranks that do not answer.
    """
    if len(ranks) < 2 or dist.get_backend() == "fake":
        return
    mine = dict(_comparable(settings, groups))
    rank = dist.get_rank()
    key = hashlib.sha256(repr(list(ranks)).encode()).hexdigest()[:16]
    store = c10d.PrefixStore(f"megatron_muon/{key}", c10d._get_default_store())
    made_before = store.add(f"made on {rank}", 1)
    store = c10d.PrefixStore(str(made_before), store)
    try:
        if rank == ranks[0]:
            store.set("settings", json.dumps(mine))
        store.wait(["settings"], TIME_LIMIT)
        first = json.loads(store.get("settings"))
        for name in [*first, *mine]:
            one = first.get(name, "not set")
            two = mine.get(name, "not set")
            if one != two:
                text = f"{name} is {one} on rank {ranks[0]} and {two} on rank {rank}"
                store.set("difference", text)
                break
        store.set(f"rank {rank}", "")
        if store.add("ranks", 1) == len(ranks):
            store.set("all", "")
        store.wait(["all"], TIME_LIMIT)
    except RuntimeError as error:
        others = [other for other in ranks if other != rank]
        absent = [other for other in others if not store.check([f"rank {other}"])]
        raise UserError(
            f"rank {rank} has waited {TIME_LIMIT.total_seconds():g} s for ranks"
            f" {reprlib.repr(absent)} to make this Muon; make it on each of the ranks"
            f" {reprlib.repr(list(ranks))}, with the same share_replicated, process_group and"
            " offload"
        ) from error
    if store.check(["difference"]):
        raise UserError(f"{store.get('difference').decode()}; give every rank the same settings")


def _comparable(
    settings: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, str]]:
    """The settings that must be equal, as text."""
    for name, value in settings.items():
        if name not in _OF_RANKS and not callable(value):
            yield name, repr(number_of(value))
    for number, group in enumerate(groups):
        for name, value in group.items():
            if name not in _OF_RANKS and not callable(value):
                yield f"{name} of parameter group {number}", repr(number_of(value))


def placement_of(parameter: torch.Tensor) -> tuple[Any, ...]:
    """This rank's shape of a parameter, its dtype, device and placements."""
    local = local_part(parameter)
    placements = parameter.placements if isinstance(parameter, DTensor) else ()
    return local.shape, parameter.dtype, parameter.device, placements


def _described(placement: tuple[Any, ...]) -> str:
    shape, dtype, device, placements = placement
    text = f"{tuple(shape)} in {dtype} on {device}"
    return f"{text} as {', '.join(map(str, placements))}" if placements else text


def check_parameters(placed: Mapping[torch.Tensor, tuple[Any, ...]], selection: Selection) -> None:
    """Check parameters before a step, and shard their gradients as they are sharded.

    Under tensor parallelism gradients may be partial sums. `placed` has the placements when the
    optimizer was made. Raises a UserError for parameters that were sharded, cast, moved or thawed
    since, and for sparse gradients.
    """
    for p, was in placed.items():
        now = placement_of(p)
        if now != was:
            name = selection.name(p)
            refuse_foreign([(name, p, False)])
            raise UserError(
                f"{name} was {_described(was)} when the optimizer was made and is"
                f" {_described(now)} now; make the optimizer after the model is sharded, of its"
                " dtype and on its device"
            )
    for p, choice in selection.choices.items():
        if p.grad is not None:
            _check_gradient(p, p.grad, choice.name)
    for p, name in selection.frozen.items():
        if p.requires_grad:
            raise UserError(
                f"{name} was frozen when the optimizer was made, so it has no state and would"
                " not train; make the optimizer while all that will train requires a gradient, and"
                " freeze afterwards"
            )


def _check_gradient(p: torch.Tensor, gradient: torch.Tensor, name: str) -> None:
    if gradient.layout != torch.strided:
        raise UserError(
            f"the gradient of {name} is sparse ({gradient.layout}); Muon and AdamW here take"
            " dense ones: make its module with sparse=False"
        )
    if not isinstance(gradient, DTensor) or not isinstance(p, DTensor):
        return
    if gradient._spec is not p._spec and gradient.placements != p.placements:
        p.grad = gradient.redistribute(placements=p.placements)


def check_orphans(members: Sequence[torch.Tensor], selection: Selection) -> None:
    """Look for parameters without a gradient at the first step, which the model may have replaced.

    Raises a UserError if none has a gradient and none is sharded: no other rank waits for this one
    then. If some are sharded, a warning: a step may not need every parameter.
    """
    trained = [p for p in members if p.requires_grad and p.numel()]
    plain = [p for p in trained if not isinstance(p, DTensor)]
    orphans = [p for p in plain if p.grad is None]
    if not orphans:
        return
    name = selection.name(orphans[0])
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
    """Whether there are gradients, all zero on every rank of `group`. Collective."""
    largest = -torch.ones((), device=parameters[0].device)
    for p in parameters:
        if p.grad is not None and local_part(p.grad).numel():
            largest = torch.maximum(largest, local_part(p.grad).abs().max().float())
    if group.size() > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return bool(largest == 0)


class NoScaler:
    """Refuses torch.amp.GradScaler, which reads this attribute before its step.

    Lightning reads it without a scaler: False.
    """

    def __get__(self, optimizer: object, owner: type) -> bool:
        if sys._getframe(1).f_globals.get("__name__") == torch.amp.grad_scaler.__name__:
            raise UserError(
                "GradScaler is for fp16, which Muon does not support: with parameters on several"
                " meshes it can skip a step on one rank alone, and the others wait; train in bf16"
                " without it (torch.autocast with torch.bfloat16; bf16=True in transformers,"
                " precision='bf16-mixed' in Lightning)"
            )
        return False
