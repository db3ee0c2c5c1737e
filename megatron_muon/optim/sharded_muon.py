"""Muon on ZeRO-sharded matrices.

Each rank keeps the momentum of its own rows; an exchange makes matrices whole for orthogonalisation and brings the
update's rows back. The exchange sets the pace: it asks for rows wave by wave, and hands updates over as they come, so
that memory is bounded by its buffer. The phases for a wave are: decay, momentum, look-ahead, exchange (which
orthogonalises), apply. Gradient reduction, clipping and installing weights belong to the chained optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from megatron_muon.exchange.steps import Exchange

ParamGroups = list[dict[str, Any]]


def local_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The rows of `tensor` that this rank holds, without a copy: a DTensor's local tensor, or the tensor itself.

    Of a stack `(experts, rows, cols)` they are the rows of the experts that it holds, one below the other.
    """
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.view(local.shape[:-1].numel(), local.shape[-1]) if local.ndim == 3 else local


class ShardedMuon(torch.optim.Optimizer):
    """Muon whose parameters are row shards of matrices, or with `SharedExchange` whole replicas.

    The update of a matrix depends on its gradient alone, never on how many ranks hold it. State is one
    `momentum_buffer` for each parameter, fp32, of the shard's shape; it exists from construction on every rank, also
    for empty shards.

    Args:
        params: parameter groups; every parameter is 2D, or 3D for a stack of matrices, a DTensor or a plain tensor, and
            takes part on every rank.
        exchange: builds the exchange for the parameters in their order.
        lr: learning rate.
        momentum: the exponential moving average keeps this share of the old momentum.
        nesterov: look ahead by mixing the gradient with the new momentum.
        weight_decay: decay rate, per unit of learning rate.
        decoupled_weight_decay: shrink the weights (True, AdamW's way) or add the decay to the gradient.
        names: a name for each parameter, for messages.

    Raises:
        ValueError: a hyper-parameter is out of range or a parameter is neither 2D nor 3D.
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
            if parameter.ndim not in (2, 3):
                raise ValueError(
                    f"{names[parameter]}: Muon takes 2D parameters and 3D stacks of them, "
                    f"got shape {tuple(parameter.shape)}"
                )
        self.initialize_state()
        self._matrices = self._parameters()
        self._group_of = [number for number, group in enumerate(self.param_groups) for _ in group["params"]]
        self.exchange = exchange(self._matrices)

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
        self._require_gradients()
        self.exchange.run(self._advance, self._apply)

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _require_gradients(self) -> None:
        for parameter in self._parameters():
            if parameter.grad is None and local_rows(parameter).numel():
                raise RuntimeError(
                    f"{self._names[parameter]} has no gradient at the optimizer step; was finish_grad_sync() called?"
                )

    def _by_group(self, indices: Sequence[int]) -> Iterator[tuple[dict[str, Any], list[torch.Tensor], list[int]]]:
        """The groups of these matrices, each with its parameters and their places in `indices`."""
        groups: dict[int, list[int]] = {}
        for place, index in enumerate(indices):
            groups.setdefault(self._group_of[index], []).append(place)
        for group, places in groups.items():
            yield self.param_groups[group], [self._matrices[indices[place]] for place in places], places

    def _advance(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """Decay, momentum and look-ahead: this rank's rows of what is orthogonalised of each matrix, fp32.

        Without Nesterov they are the momentum itself, which the caller must not change.
        """
        ahead: list[torch.Tensor] = [torch.empty(0)] * len(indices)
        for group, parameters, places in self._by_group(indices):
            gradients = self._decay(group, parameters)
            momentum = [local_rows(self.state[parameter]["momentum_buffer"]) for parameter in parameters]
            torch._foreach_lerp_(momentum, gradients, 1.0 - group["momentum"])
            if self.nesterov:
                momentum = list(torch._foreach_lerp(gradients, momentum, group["momentum"]))
            for place, rows in zip(places, momentum, strict=True):
                ahead[place] = rows
        return ahead

    def _decay(self, group: dict[str, Any], parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's rows of the gradients, fp32; shrinks the weights, or adds the decay to the gradients."""
        gradients = [local_rows(parameter.grad).float() for parameter in parameters]  # type: ignore[arg-type]
        if group["weight_decay"]:
            weights = [local_rows(parameter) for parameter in parameters]
            if self.decoupled_weight_decay:
                # Written as emerging-optimizers does, so that no_shard agrees to the last bit.
                torch._foreach_add_(weights, weights, alpha=-group["weight_decay"] * group["lr"])
            else:
                gradients = list(torch._foreach_add(gradients, weights, alpha=group["weight_decay"]))
        return gradients

    def _apply(self, indices: Sequence[int], updates: Sequence[torch.Tensor]) -> None:
        """weight <- weight - lr * update, on this rank's rows."""
        for group, parameters, places in self._by_group(indices):
            weights = [local_rows(parameter) for parameter in parameters]
            torch._foreach_add_(weights, [updates[place] for place in places], alpha=-group["lr"])
