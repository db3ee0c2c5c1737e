"""Muon and its variants on whole matrices, by the classes of emerging-optimizers.

Audits of a run, and tests, compare a step on shards with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from emerging_optimizers.orthogonalized_optimizers import AdaptiveMuon, Muon, MuonHyperball
from torch import Tensor
from torch.optim import Optimizer


class SplitMuon(Muon):
    """Orthogonalizes blocks of rows separately: a parameter has their indices in `row_blocks`."""

    def orthogonalize(self, p: Tensor, grad: Tensor, **_group: Any) -> Tensor:
        """The scaled update of each block."""
        update = torch.empty_like(grad)
        for rows in p.row_blocks:  # type: ignore[attr-defined]
            update[rows] = self.scaled_orthogonalize_fn(grad[rows])
        return update


class SplitAdaptiveMuon(AdaptiveMuon):
    """Orthogonalizes blocks of rows separately, and scales each by its own shape."""

    def orthogonalize(self, p: Tensor, grad: Tensor, **_group: Any) -> Tensor:
        """The unscaled update of each block."""
        self.blocks = p.row_blocks  # type: ignore[attr-defined]
        return SplitMuon.orthogonalize(self, p, grad)

    def _apply_muon_scale(self, update: Tensor, size_out: int, size_in: int) -> Tensor:
        for rows in self.blocks:
            update[rows] = super()._apply_muon_scale(update[rows], len(update[rows]), size_in)
        return update


class SplitHyperball(SplitMuon, MuonHyperball):
    """MuonHyperball that orthogonalizes blocks of rows separately."""


class _Cautious:
    """Decays where weight and update have the same sign (https://arxiv.org/abs/2510.12402)."""

    param_groups: list[dict[str, Any]]

    def _apply_weight_decay_inplace(self, *_args: Any) -> None:
        """Nothing yet: the update is not known."""

    def pre_weight_update_fn_inplace(self, p: Tensor, update: Tensor) -> None:
        for group in self.param_groups:
            if any(p is member for member in group["params"]):
                decay = group["lr"] * group["weight_decay"]
                p.sub_(torch.where(update * p >= 0.0, p, 0.0), alpha=decay)


class CautiousMuon(_Cautious, SplitMuon):
    """Muon with cautious decay."""


class CautiousAdaptiveMuon(_Cautious, SplitAdaptiveMuon):
    """Adaptive Muon with cautious decay."""


def muon_on(
    matrices: Sequence[Tensor],
    variants: Sequence[str],
    second_moment: dict[str, float],
    **common: Any,
) -> Optimizer:
    """Muon, or the variant whose rules are `variants`, for matrices with `row_blocks`.

    `second_moment` has `beta2` and `eps`; `common` are arguments of emerging-optimizers' Muon.
    """
    for moment2 in ("adamuon", "normuon"):
        if moment2 in variants:
            adaptive = CautiousAdaptiveMuon if "cautious" in variants else SplitAdaptiveMuon
            return adaptive(matrices, **common, moment2_method=moment2, **second_moment)
    if "hyperball" in variants:
        return SplitHyperball(matrices, **common)
    return (CautiousMuon if "cautious" in variants else SplitMuon)(matrices, **common)
