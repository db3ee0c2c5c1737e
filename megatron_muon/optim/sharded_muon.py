"""Muon on ZeRO-sharded matrices.

Each rank keeps the momentum of its own rows; an exchange makes matrices whole for orthogonalisation and brings the
update's rows back. The phases of a step are: decay, momentum, look-ahead, exchange (which orthogonalises), apply.
Gradient reduction, clipping and installing weights belong to the chained optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor

ParamGroups = list[dict[str, Any]]


class Exchange(Protocol):
    """Makes matrices whole, has them orthogonalised, and brings the update's rows back."""

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's rows of each matrix's scaled update, from its rows of what is to be orthogonalised."""


def local_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The rows of `tensor` that this rank holds, without a copy: a DTensor's local tensor, or the tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class ShardedMuon(torch.optim.Optimizer):
    """Muon whose parameters are row shards of matrices.

    The update of a matrix depends on its gradient alone, never on how many ranks hold it. State is one
    `momentum_buffer` for each parameter, fp32, of the shard's shape; it exists from construction on every rank, also
    for empty shards.

    Args:
        params: parameter groups; every parameter is 2D, a DTensor or a plain tensor, and takes part on every rank.
        exchange: builds the exchange for the parameters in their order.
        lr: learning rate.
        momentum: the exponential moving average keeps this share of the old momentum.
        nesterov: look ahead by mixing the gradient with the new momentum.
        weight_decay: decay rate, per unit of learning rate.
        decoupled_weight_decay: shrink the weights (True, AdamW's way) or add the decay to the gradient.
        names: a name for each parameter, for messages.

    Raises:
        ValueError: a hyper-parameter is out of range or a parameter is not 2D.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        exchange: Callable[[Sequence[torch.Tensor]], Exchange],
        *,
        lr: float,
        momentum: float,
        nesterov: bool,
        weight_decay: float,
        decoupled_weight_decay: bool,
        names: dict[torch.Tensor, str],
    ) -> None:
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"--muon-momentum must be in [0, 1), got {momentum}")
        super().__init__(list(params), {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.nesterov = nesterov
        self.decoupled_weight_decay = decoupled_weight_decay
        self._names = names
        for parameter in self._parameters():
            if parameter.ndim != 2:
                raise ValueError(f"{names[parameter]}: Muon takes 2D parameters, got shape {tuple(parameter.shape)}")
        self.initialize_state()
        self.exchange = exchange(self._parameters())

    def initialize_state(self) -> None:
        """Give every parameter that has none its momentum of zeros, on every rank alike."""
        for parameter in self._parameters():
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter.detach(), dtype=torch.float32)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every matrix from its gradient.

        Raises:
            RuntimeError: a shard with rows has no gradient.
        """
        if closure is not None:
            raise ValueError("Muon takes no closure")
        gradients = self._gradients()
        self._decay(gradients)
        self._accumulate(gradients)
        inputs = self._look_ahead(gradients)
        self._apply(self.exchange.run(inputs))

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _held(self, group: dict[str, Any]) -> list[torch.Tensor]:
        """The group's parameters of which this rank holds rows: elementwise work has nothing to do for the others."""
        return [parameter for parameter in group["params"] if local_rows(parameter).numel()]

    def _gradients(self) -> dict[torch.Tensor, torch.Tensor]:
        """This rank's rows of each gradient, fp32."""
        gradients = {}
        for group in self.param_groups:
            for parameter in self._held(group):
                if parameter.grad is None:
                    raise RuntimeError(
                        f"{self._names[parameter]} has no gradient at the optimizer step; "
                        "was finish_grad_sync() called?"
                    )
                gradients[parameter] = local_rows(parameter.grad).float()
        return gradients

    def _decay(self, gradients: dict[torch.Tensor, torch.Tensor]) -> None:
        """Shrink the weights, or add the decay to the gradients."""
        for group in self.param_groups:
            parameters = self._held(group)
            if not parameters or not group["weight_decay"]:
                continue
            weights = [local_rows(parameter) for parameter in parameters]
            if self.decoupled_weight_decay:
                # Written as emerging-optimizers does, so that no_shard agrees to the last bit.
                torch._foreach_add_(weights, weights, alpha=-group["weight_decay"] * group["lr"])
            else:
                for parameter, weight in zip(parameters, weights, strict=True):
                    gradients[parameter] = gradients[parameter].add(weight, alpha=group["weight_decay"])

    def _accumulate(self, gradients: dict[torch.Tensor, torch.Tensor]) -> None:
        """Momentum as a moving average of gradients, elementwise on this rank's rows."""
        for group in self.param_groups:
            if parameters := self._held(group):
                torch._foreach_lerp_(
                    self._momentum(parameters), [gradients[p] for p in parameters], 1.0 - group["momentum"]
                )

    def _look_ahead(self, gradients: dict[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
        """What is orthogonalised: the momentum, or with Nesterov the gradient moved towards it."""
        ahead = {parameter: local_rows(self.state[parameter]["momentum_buffer"]) for parameter in self._parameters()}
        if self.nesterov:
            for group in self.param_groups:
                if parameters := self._held(group):
                    moved = torch._foreach_lerp(
                        [gradients[p] for p in parameters], self._momentum(parameters), group["momentum"]
                    )
                    ahead.update(zip(parameters, moved, strict=True))
        return list(ahead.values())

    def _apply(self, updates: Sequence[torch.Tensor]) -> None:
        """weight <- weight - lr * update, on this rank's rows."""
        update_of = dict(zip(self._parameters(), updates, strict=True))
        for group in self.param_groups:
            parameters = self._held(group)
            if parameters:
                weights = [local_rows(parameter) for parameter in parameters]
                torch._foreach_add_(weights, [update_of[p] for p in parameters], alpha=-group["lr"])

    def _momentum(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [local_rows(self.state[parameter]["momentum_buffer"]) for parameter in parameters]
