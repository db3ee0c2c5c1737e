"""Adam as Transformer Engine and Apex keep its state; theirs need a GPU."""

from __future__ import annotations

from typing import Any

import torch


class FusedAdam(torch.optim.Optimizer):
    """AdamW that counts the steps of a group, and leaves out what has no gradient."""

    capturable = False

    def __init__(
        self,
        params: Any,
        *,
        lr: float,
        weight_decay: float = 0.0,
        betas: Any = (0.9, 0.99),
        eps: float = 1e-8,
        **_: Any,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps}
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            (beta1, beta2), count = group["betas"], group["step"]
            for parameter in (p for p in group["params"] if p.grad is not None):
                state, gradient = self.state[parameter], parameter.grad
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                state["exp_avg"].lerp_(gradient, 1 - beta1)
                # new memory
                state["exp_avg_sq"] = (
                    state["exp_avg_sq"] * beta2 + (1 - beta2) * gradient * gradient
                )
                rms = state["exp_avg_sq"].div(1 - beta2**count).sqrt_().add_(group["eps"])
                parameter.addcdiv_(
                    state["exp_avg"],
                    rms,
                    value=-group["lr"] / (1 - beta1**count),
                )
