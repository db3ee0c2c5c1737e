"""Adaptive Muon on ZeRO-sharded matrices: AdaMuon and NorMuon, a second moment after orthogonalisation.

AdaMuon's second moment is elementwise: each rank advances that of its own rows when the update's rows arrive. NorMuon
keeps one number for each row of a tall matrix and each column of a wide one, and keeps the update's norm: that takes
the whole update, so the rank that orthogonalises a matrix normalises it too, and the numbers go round once before and
once after the exchange (`core.neurons`). In either way the update does not depend on who holds what.

Source of the arithmetic, names and shapes: emerging-optimizers 0.3, AdaptiveMuon. The update is orthogonalised
unscaled, then normalised, then scaled. Second moment and norm are those of the whole parameter, as there. Where it
differs: every block is scaled by its own shape, as by plain Muon, and each expert of a stack is a matrix of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from megatron_muon.core.exchange.steps import Exchange
from megatron_muon.core.neurons import NeuronMoments
from megatron_muon.core.numbers import check_number
from megatron_muon.core.optimizer import ShardedMuon, local_rows

METHODS = ("adamuon", "normuon")
"""Second moments that this package shards. emerging-optimizers' "namo" needs norms of whole gradients besides."""

MOMENT2 = "moment2_buffer"
"""The second moment's slot of the optimizer state, upstream's name."""


class AdaptiveMuon(ShardedMuon):
    """A Muon with a second moment; its subclasses say of what.

    State is `momentum_buffer` and `moment2_buffer` for each parameter, fp32, from construction on every rank.

    Args:
        params: as for ShardedMuon.
        exchange: as for ShardedMuon.
        beta2: the second moment's exponential moving average keeps this share of the old one.
        eps: keeps the division finite.
        settings: the other settings of ShardedMuon.

    Raises:
        ValueError: a hyper-parameter is out of range, or what ShardedMuon raises.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        exchange: Exchange,
        *,
        beta2: float,
        eps: float,
        **settings: Any,
    ) -> None:
        check_number("adaptive_muon_beta2", beta2)
        check_number("adaptive_muon_eps", eps)
        super().__init__(params, exchange, **settings)
        for group in self.param_groups:
            group.setdefault("beta2", beta2)
            group.setdefault("eps", eps)

    def initialize_state(self) -> None:
        """Give every parameter that has none its momentum and second moment of zeros, on every rank alike."""
        super().initialize_state()
        for parameter in self._matrices:
            if MOMENT2 not in self.state[parameter]:
                self.state[parameter][MOMENT2] = self._new_moment(parameter)

    def _new_moment(self, parameter: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError  # the subclass says what its second moment is of


class AdaMuon(AdaptiveMuon):
    """AdaMuon (https://arxiv.org/abs/2507.11005): each element of the update over the root of its second moment.

    Args:
        scales: for each parameter, the factors `(rows, 1)` fp32 of this rank's rows, applied last.
        settings: as for AdaptiveMuon.
    """

    def __init__(self, *args: Any, scales: Sequence[torch.Tensor], **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._scales = scales

    def _new_moment(self, parameter: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(parameter.detach(), dtype=torch.float32)

    def _scaled(
        self,
        group: dict[str, Any],
        indices: Sequence[int],
        places: Sequence[int],
        updates: Sequence[torch.Tensor],
        finite: torch.Tensor,
    ) -> list[torch.Tensor]:
        """The updates over the roots of their second moments, scaled."""
        rows = [updates[place].float() for place in places]
        moments = [local_rows(self.state[self._matrices[indices[place]]][MOMENT2]) for place in places]
        shares = (finite * (1.0 - group["beta2"])).unbind()  # an update that is skipped leaves the moment alone
        torch._foreach_lerp_(moments, torch._foreach_mul(rows, rows), [shares[place] for place in places])
        roots = torch._foreach_sqrt(moments)
        torch._foreach_add_(roots, group["eps"])
        rows = list(torch._foreach_div(rows, roots))
        torch._foreach_mul_(rows, [self._scales[indices[place]] for place in places])
        return rows


class NorMuon(AdaptiveMuon):
    """NorMuon (https://arxiv.org/abs/2510.05491): each neuron's update over the root of its second moment.

    The second moment of a matrix with at least as many rows as columns has one number for each row, `(rows, 1)`,
    sharded as the rows are; that of a wider one has one for each column, `(1, cols)`, on every rank.

    Args:
        neurons: normalises whole updates within the exchange.
        over_tp: matrices are whole over tensor-parallel ranks.
        settings: as for AdaptiveMuon.
    """

    def __init__(self, *args: Any, neurons: NeuronMoments, over_tp: bool = False, **settings: Any) -> None:
        self._neurons = neurons
        self._over_tp = over_tp
        super().__init__(*args, **settings)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every matrix from its gradient."""
        moments = [local_rows(self.state[parameter][MOMENT2]) for parameter in self._matrices]
        groups = [self.param_groups[number] for number in self._group_of]
        self._neurons.collect(moments, [(group["beta2"], group["eps"]) for group in groups])
        super().step(closure)
        self._neurons.spread(moments)

    def _new_moment(self, parameter: torch.Tensor) -> torch.Tensor:
        index = next(i for i, other in enumerate(self._matrices) if other is parameter)
        return neuron_moment(parameter, by_row=self._neurons.by_row(index), over_tp=self._over_tp)


def neuron_moment(parameter: torch.Tensor, *, by_row: bool, over_tp: bool) -> torch.Tensor:
    """Zeros for one number for each row (or column) of `parameter`, fp32, a DTensor as `parameter` is.

    The dimension that is averaged over has size 1. Ranks that shard it hold the same numbers; so do tensor-parallel
    ranks with `over_tp`, and otherwise, their parts being matrices of their own, they hold one each.
    """
    gone = parameter.ndim - 1 if by_row else parameter.ndim - 2
    if not isinstance(parameter, DTensor):
        return parameter.new_zeros(_without(parameter.shape, gone), dtype=torch.float32)
    mesh, size, placements = parameter.device_mesh, 1, list(parameter.placements)
    names = mesh.mesh_dim_names or ("",) * len(placements)
    for place, placement in enumerate(placements):
        if getattr(placement, "dim", None) == gone:  # a Shard or _StridedShard
            if "tp" in names[place] and not over_tp:
                size *= mesh.size(place)
            else:
                placements[place] = Replicate()
    local = parameter._local_tensor.new_zeros(_without(parameter._local_tensor.shape, gone), dtype=torch.float32)
    shape = _without(parameter.shape, gone, size)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def _without(shape: Sequence[int], dim: int, size: int = 1) -> torch.Size:
    return torch.Size(size if place == dim else length for place, length in enumerate(shape))
