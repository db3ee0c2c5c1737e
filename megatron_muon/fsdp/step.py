"""AdamW's step on other parameters than matrices, and the matrices' step as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.adamw import adamw

from megatron_muon.errors import UserError
from megatron_muon.fsdp.parameter_groups import decays
from megatron_muon.fsdp.read_numbers import ON_DEVICE, as_float, stays_on_device
from megatron_muon.ranges import number_of
from megatron_muon.shards import local_part


def make_state(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """AdamW's state of a parameter before its first step, sharded as it is."""
    return {
        "step": torch.zeros((), dtype=torch.float32),
        "exp_avg": torch.zeros_like(parameter.detach()),
        "exp_avg_sq": torch.zeros_like(parameter.detach()),
    }


def adamw_numbers(group: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a group as floats, by torch's names; a UserError unless each is finite."""
    numbers = {name: as_float(name, group[name]) for name in ("lr", "weight_decay", "eps")}
    for name, beta in zip(("beta1", "beta2"), group["betas"], strict=True):
        numbers[name] = as_float("betas", beta)
    return numbers


def step_adamw(
    group: Mapping[str, Any],
    numbers: Mapping[str, Any],
    state: Mapping[torch.Tensor, dict[str, Any]],
    *,
    counts_empty: bool,
) -> None:
    """A step of a parameter group with its `adamw_numbers`.

    Steps are counted alike on all ranks, for empty shards too; `counts_empty` if these have no
    gradients, as under Megatron-FSDP.
    """
    for has_decay in (True, False):
        members = []
        for p in group["params"]:
            has_gradient = p.grad is not None or (counts_empty and not local_part(p).numel())
            if has_gradient and decays(group, p) is has_decay:
                members.append(p)
        states = [state[p] for p in members]
        gradients = [
            local_part(
                p if p.grad is None else p.grad,
            ).to(p.dtype)
            for p in members
        ]
        adamw(
            [local_part(p) for p in members],
            gradients,
            [local_part(slots["exp_avg"]) for slots in states],
            [local_part(slots["exp_avg_sq"]) for slots in states],
            [],
            [slots["step"] for slots in states],
            foreach=True,
            amsgrad=False,
            maximize=False,
            **(numbers if has_decay else {**numbers, "weight_decay": 0.0}),
        )


_EAGER_STEPS = 2
"""Steps before the capture: the first makes connections and caches."""

_NUMBERS = ("lr", "weight_decay", "momentum", "beta2", "eps")
"""Numbers of a group that a captured step reads."""


def put_on_device(groups: Sequence[dict[str, Any]], device: torch.device) -> None:
    """Make learning rate and decay of groups fp32 tensors on the device, for schedulers to fill.

    A decay of zero stays a number, as no operation reads it.
    """
    for group in groups:
        for name in ON_DEVICE:
            if name == "lr" or group[name]:
                group[name] = torch.tensor(
                    float(group[name]),
                    dtype=torch.float32,
                    device=device,
                )


class CapturedStep:
    """Runs two steps, captures the third as a CUDA graph, and replays it from then on.

    It has run on one GPU, with FSDP2 and NCCL on one rank (docs/gpu.md). Tests replay recorded
    operations on a processor.

    A graph works on the memory that the captured step worked on; `put_on_device` makes numbers of
    groups part of it.
    """

    def __init__(
        self,
        enqueue: Callable[[], None],
        look: Callable[[], None],
        parameters: Iterable[torch.Tensor],
        groups: Sequence[dict[str, Any]],
    ) -> None:
        self._enqueue = enqueue
        self._look = look
        self._groups = groups
        self._held = [parameter for parameter in parameters if local_part(parameter).numel()]
        self._steps = 0
        self._graph: Any = None
        self._captured: list[Any] = []

    def __call__(self) -> None:
        """One step.

        Raises:
            UserError: a gradient, a learning rate or a decay is missing, or in another tensor than
                when the step was captured.
        """
        self._steps += 1
        if self._steps <= _EAGER_STEPS:
            self._enqueue()
            return
        inputs = self._inputs()
        if None in inputs or (self._graph is not None and inputs != self._captured):
            raise UserError(
                "cuda_graph=True needs gradients, lr and weight_decay in the same tensors in every"
                " step, and the same momentum; call optimizer.zero_grad(set_to_none=False) and"
                " group['lr'].fill_(value), or leave cuda_graph out"
            )
        if self._graph is None:
            self._look()  # copies from the host cannot be captured
            graph: Any = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._enqueue()
            self._graph = graph
            self._captured = inputs
        self._graph.replay()

    def _inputs(self) -> list[Any]:
        """Addresses of tensors that the step reads, None for a missing gradient, and numbers."""
        inputs: list[Any] = []
        for p in self._held:
            inputs.append(None if p.grad is None else local_part(p.grad).data_ptr())
        device = self._held[0].device
        for group in self._groups:
            for name in _NUMBERS:
                value = group.get(name)
                if stays_on_device(value, name, device):
                    inputs.append(value.data_ptr())
                else:
                    inputs.append(("number", number_of(value)))
        return inputs
