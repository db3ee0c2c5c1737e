"""State of the scalar optimizers from the start, on every rank, for shards without rows too.

Saving an fsdp_dtensor checkpoint runs collectives key by key, so ranks whose keys differ wait for each other for ever.
torch's AdamW makes state at the first gradient and none for empty shards.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron_muon.core.optimizer import local_rows


def initialize_scalar_state(wrapped: MegatronOptimizer) -> None:
    """Create the state of a wrapped scalar optimizer now.

    megatron-core's own initialisation leaves out the step counter (0.19 makes it with a first optimizer step, which a
    resumed run must not take): torch's AdamW has one for each parameter, the FusedAdam of Transformer Engine and Apex
    one for each group. Without it a resumed run would not ask the checkpoint for it and count from 0 again.
    """
    inner = wrapped.optimizer
    wrapped.init_state_fn(inner, wrapped.config)
    if isinstance(inner, (torch.optim.Adam, torch.optim.AdamW)):
        for group in inner.param_groups:
            on_device = group.get("capturable") or group.get("fused")
            for parameter in group["params"]:
                step = torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu")
                inner.state[parameter].setdefault("step", step)
    elif type(inner).__name__ == "FusedAdam":
        for group in inner.param_groups:
            if group["params"] and "step" not in group:
                device = group["params"][0].device
                capturable = getattr(inner, "capturable", False)
                group["step"] = torch.zeros(1, dtype=torch.int, device=device) if capturable else 0


def step_over_empty_shards(inner: torch.optim.Optimizer) -> None:
    """Let an optimizer step over shards without rows too, so that their step counters agree on every rank.

    Megatron-FSDP sets no gradient there. A checkpoint keeps one counter for a parameter, and the rank that writes it
    may well be one without rows. Only torch's optimizers count so; the FusedAdam of Transformer Engine and Apex counts
    steps of groups, and its kernel is not launched for what precedes an empty tensor at a group's end.
    """
    if not isinstance(inner, (torch.optim.Adam, torch.optim.AdamW)):
        return

    def give_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None and local_rows(parameter).numel() == 0:
                    parameter.grad = torch.zeros_like(parameter.detach())

    inner.register_step_pre_hook(give_gradients)
