"""Muons with the recurrences, names of state and order of parameters of other libraries, in fp32.

They are written from these libraries' descriptions, for `momentum_from` to be compared with going
on in them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

LR = 0.02
ADAM_LR = 3e-3
DECAY = 0.1
MU = 0.9
BETAS = (0.9, 0.95)
COEFFICIENTS = (3.4445, -4.775, 2.0315)

Named = Sequence[tuple[str, nn.Parameter]]


def orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """Five Newton-Schulz steps."""
    x = matrix / matrix.norm()
    if x.shape[0] > x.shape[1]:
        return orthogonalized(matrix.mT).mT
    a, b, c = COEFFICIENTS
    for _ in range(5):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x


def adam_update(first: torch.Tensor, second: torch.Tensor, p: Any, step: int) -> torch.Tensor:
    """Adam's update, of moments that are changed in place."""
    first.lerp_(p.grad, 1 - BETAS[0])
    second.lerp_(p.grad.square(), 1 - BETAS[1])
    denominator = (second / (1 - BETAS[1] ** step)).sqrt() + 1e-8
    return first / (1 - BETAS[0] ** step) / denominator


class SumMuon(torch.optim.Optimizer):
    """As dion's: momentum is a sum, without Nesterov, and updates have the size of AdamW's.

    Without `counts_on_device` only groups count steps, as its earlier versions.
    """

    def __init__(self, matrices: Named, others: Named, *, counts_on_device: bool = True) -> None:
        groups = [
            {"params": [p for _, p in matrices], "algorithm": "muon"},
            {"params": [p for _, p in others], "algorithm": "adamw"},
        ]
        super().__init__(groups, {"mu": MU, "step": 0})
        for group in self.param_groups:
            for p in group["params"]:
                slots = self.state[p]
                slots["momentum"] = torch.zeros_like(p)
                if group["algorithm"] == "adamw":
                    slots["variance"] = torch.zeros_like(p)
                    if counts_on_device:
                        slots["step_dev"] = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] += 1
            for p in group["params"]:
                slots = self.state[p]
                momentum = slots["momentum"]
                if group["algorithm"] == "muon":
                    momentum.mul_(MU).add_(p.grad)
                    scale = 0.2 * math.sqrt(max(p.shape))
                    p.mul_(1 - LR * DECAY).sub_(orthogonalized(momentum), alpha=LR * scale)
                else:
                    if "step_dev" in slots:
                        slots["step_dev"] += 1
                    update = adam_update(momentum, slots["variance"], p, group["step"])
                    p.sub_(update, alpha=ADAM_LR)


class SortedMuon(torch.optim.Optimizer):
    """As DeepSpeed's `MuonWithAuxAdam`: an average, Nesterov, and matrices sorted by shape."""

    def __init__(self, matrices: Named, others: Named) -> None:
        by_shape = sorted((p for _, p in matrices), key=lambda p: p.shape, reverse=True)
        groups = [
            {"params": [p for _, p in others], "use_muon": False, "betas": BETAS},
            {"params": by_shape, "use_muon": True, "momentum": MU, "ns_method": "standard"},
        ]
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                slots = self.state[p]
                if group["use_muon"]:
                    momentum = slots.setdefault("momentum_buffer", torch.zeros_like(p))
                    momentum.lerp_(p.grad, 1 - MU)
                    update = orthogonalized(p.grad.lerp(momentum, MU))
                    rows, cols = p.shape
                    scale = math.sqrt(max(1, rows / cols))
                    p.mul_(1 - LR * DECAY).sub_(update, alpha=LR * scale)
                else:
                    slots.setdefault("exp_avg", torch.zeros_like(p))
                    slots.setdefault("exp_avg_sq", torch.zeros_like(p))
                    slots["step"] = slots.get("step", 0) + 1
                    moments = slots["exp_avg"], slots["exp_avg_sq"]
                    p.sub_(adam_update(*moments, p, slots["step"]), alpha=ADAM_LR)


class Other(NamedTuple):
    """How a library's optimizers are made, its convention, and the same settings of ours."""

    make: Callable[[Named, Named], Sequence[torch.optim.Optimizer]]
    convention: str
    settings: dict[str, Any]


def of_torch(matrices: Named, others: Named) -> list[torch.optim.Optimizer]:
    muon = torch.optim.Muon(
        [p for _, p in matrices], lr=LR, weight_decay=DECAY, momentum=MU, eps=1e-30
    )
    adamw = torch.optim.AdamW([p for _, p in others], lr=ADAM_LR, betas=BETAS, weight_decay=0.0)
    return [muon, adamw]


def of_torch_with_names(matrices: Named, others: Named) -> list[torch.optim.Optimizer]:
    muon = torch.optim.Muon(matrices, lr=LR, weight_decay=DECAY, momentum=MU, eps=1e-30)
    adamw = torch.optim.AdamW(others[::-1], lr=ADAM_LR, betas=BETAS, weight_decay=0.0)
    return [muon, adamw]


SETTINGS: dict[str, Any] = {
    "lr": LR,
    "adamw_lr": ADAM_LR,
    "weight_decay": DECAY,
    "adamw_weight_decay": 0.0,
    "adamw_betas": BETAS,
    "momentum": MU,
    "fp32_matmul_prec": "highest",
}
OF_DION = {**SETTINGS, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"}

OTHERS = {
    "torch": Other(of_torch, "ema", SETTINGS),
    "torch, named": Other(of_torch_with_names, "ema", SETTINGS),
    "dion": Other(lambda *named: [SumMuon(*named)], "sum", OF_DION),
    "dion, early": Other(lambda *named: [SumMuon(*named, counts_on_device=False)], "sum", OF_DION),
    "deepspeed": Other(lambda *named: [SortedMuon(*named)], "ema", SETTINGS),
}
