"""State of the scalar optimizers from the start, on every rank, for shards without rows too.

Saving an fsdp_dtensor checkpoint runs collectives key by key, so ranks whose keys differ wait for each other for ever.
torch's AdamW makes state at the first gradient and none for empty shards.
"""

from __future__ import annotations

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer


def initialize_scalar_state(wrapped: MegatronOptimizer) -> None:
    """Create the state of a wrapped scalar optimizer now.

    megatron-core's own initialisation leaves out torch AdamW's `step` (0.19 makes it with a first optimizer step, which
    a resumed run must not take).
    """
    inner = wrapped.optimizer
    wrapped.init_state_fn(inner, wrapped.config)
    if isinstance(inner, (torch.optim.Adam, torch.optim.AdamW)):
        for group in inner.param_groups:
            on_device = group.get("capturable") or group.get("fused")
            for parameter in group["params"]:
                inner.state[parameter].setdefault(
                    "step",
                    torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu"),
                )
