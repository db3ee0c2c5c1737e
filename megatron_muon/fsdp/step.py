"""The parts of a step of `Muon` that are not the core's: AdamW on the rest, and the matrices' step as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from megatron_muon.core.errors import UserError
from megatron_muon.core.group_numbers import as_float, stays_on_device
from megatron_muon.core.numbers import number_of
from megatron_muon.core.rows import local_rows
from megatron_muon.fsdp.selection import decays


def make_state(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """The state of a parameter before its first step, sharded as it is."""
    return {
        "step": torch.zeros((), dtype=torch.float32),
        "exp_avg": torch.zeros_like(parameter.detach()),
        "exp_avg_sq": torch.zeros_like(parameter.detach()),
    }


def adamw_numbers(group: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a parameter group as floats, by torch's names; a UserError for what is not one finite number."""
    numbers = {
        name: as_float(f"{name} of a parameter group", group[name])
        for name in ("lr", "weight_decay", "eps")
    }
    beta1, beta2 = (as_float("betas of a parameter group", beta) for beta in group["betas"])
    return {**numbers, "beta1": beta1, "beta2": beta2}


def step_adamw(
    group: Mapping[str, Any],
    numbers: Mapping[str, float],
    state: Mapping[torch.Tensor, dict[str, Any]],
    *,
    counts_empty: bool,
) -> None:
    """A step of a parameter group by its `adamw_numbers`; steps are counted alike on all ranks, for empty shards too.

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
            [
                gradient.to(p.dtype)
                for gradient, p in zip(local_parts([p.grad for p in some]), some, strict=True)
            ],
            local_parts([slots["exp_avg"] for slots in states]),
            local_parts([slots["exp_avg_sq"] for slots in states]),
            [],
            [slots["step"] for slots in states],
            foreach=True,
            amsgrad=False,
            beta1=numbers["beta1"],
            beta2=numbers["beta2"],
            lr=numbers["lr"],
            weight_decay=numbers["weight_decay"] if decay else 0.0,
            eps=numbers["eps"],
            maximize=False,
        )


def local_parts(tensors: Sequence[Any]) -> list[torch.Tensor]:
    """What this rank has of each, in the shape that it has there."""
    return [tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in tensors]


_BEFORE = 2
"""Steps that run as they are: the first makes connections and caches, the second is like all others."""

_NUMBERS = ("lr", "weight_decay", "momentum", "beta2", "eps")
"""Numbers of a group that a captured step works with."""


def put_on_device(groups: Sequence[dict[str, Any]], device: torch.device) -> None:
    """Make learning rate and decay of the groups tensors, fp32 on the device, for schedulers to fill.

    A decay of zero stays a number, as no operation reads it.
    """
    for group in groups:
        for name in ("lr", "weight_decay")[: 1 + bool(group["weight_decay"])]:
            group[name] = torch.tensor(float(group[name]), dtype=torch.float32, device=device)


class CapturedStep:
    """Runs a step of these parameters twice as it is, then captures it as a CUDA graph, and from then on replays it.

    It has run on one GPU, with FSDP2 and NCCL on one rank (docs/gpu.md). Tests replay recorded
    operations on a processor.

    A graph works on the memory that the captured step worked on; `put_on_device` makes numbers of
    groups part of it.
    """

    def __init__(
        self,
        enqueue: Callable[[], None],
        parameters: Sequence[torch.Tensor],
        groups: Sequence[dict[str, Any]],
    ) -> None:
        self._enqueue, self._groups = enqueue, groups
        self._held = [parameter for parameter in parameters if local_rows(parameter).numel()]
        self._steps = 0
        self._graph: Any = None
        self._captured: list[Any] = []

    def __call__(self) -> None:
        """One step.

        Raises:
            UserError: a gradient, a learning rate or a decay is missing, or is not where the
                captured step has it.
        """
        self._steps += 1
        if self._steps <= _BEFORE:
            self._enqueue()
            return
        fixed = self._fixed()
        if None in fixed or (self._graph is not None and fixed != self._captured):
            raise UserError(
                "cuda_graph=True needs gradients, lr and weight_decay in the same tensors in every"
                " step, and the same momentum; call optimizer.zero_grad(set_to_none=False) and"
                " group['lr'].fill_(value), or leave cuda_graph out"
            )
        if self._graph is None:
            graph: Any = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._enqueue()
            self._graph, self._captured = graph, fixed
        self._graph.replay()

    def _fixed(self) -> list[Any]:
        """The addresses of what the step reads; None of a gradient that is missing; a number as it is captured."""
        fixed: list[Any] = [
            None if p.grad is None else local_rows(p.grad).data_ptr() for p in self._held
        ]
        for group in self._groups:
            for name in _NUMBERS:
                value = group.get(name)
                if stays_on_device(value, name, self._held[0].device):
                    fixed.append(value.data_ptr())
                else:
                    fixed.append(("number", number_of(value)))
        return fixed
