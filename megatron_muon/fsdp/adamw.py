"""torch's AdamW on this rank's rows of what is not Muon's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from megatron_muon.fsdp.selection import decays


def make_state(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """The state of a parameter before its first step, sharded as it is."""
    return {
        "step": torch.zeros((), dtype=torch.float32),
        "exp_avg": torch.zeros_like(parameter.detach()),
        "exp_avg_sq": torch.zeros_like(parameter.detach()),
    }


def step_adamw(group: Mapping[str, Any], state: Mapping[torch.Tensor, dict[str, Any]], *, counts_empty: bool) -> None:
    """A step of a parameter group; the step counter goes on alike on all ranks, also for empty shards.

    `counts_empty` says that empty shards have no gradients, as under Megatron-FSDP.
    """
    members = []
    for p in group["params"]:
        if not local_parts([p])[0].numel():
            state[p]["step"] += p.grad is not None or counts_empty
        elif p.grad is not None:
            members.append(p)
    for decay in (True, False):
        some = [p for p in members if decays(group, p) is decay]
        if not some:
            continue
        states = [state[p] for p in some]
        adamw(
            local_parts(some),
            [gradient.to(p.dtype) for gradient, p in zip(local_parts([p.grad for p in some]), some, strict=True)],
            local_parts([slots["exp_avg"] for slots in states]),
            local_parts([slots["exp_avg_sq"] for slots in states]),
            [],
            [slots["step"] for slots in states],
            foreach=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"] if decay else 0.0,
            eps=group["eps"],
            maximize=False,
        )


def local_parts(tensors: Sequence[Any]) -> list[torch.Tensor]:
    """What this rank has of each, in the shape that it has there."""
    return [tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in tensors]
