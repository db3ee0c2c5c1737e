"""`Sharded`: any optimizer of whole matrices for any PyTorch model, and AdamW for the rest."""

from __future__ import annotations

import inspect
from typing import Any, override

import torch

from megatron_muon.core.methods.candidate import find
from megatron_muon.core.methods.owner import OwnerMethod
from megatron_muon.core.methods.rehearsal import approve
from megatron_muon.errors import SettingError
from megatron_muon.fsdp.muon import Muon
from megatron_muon.fsdp.options import word_as_arguments

SHARED = (
    "matrices",
    "exclude",
    "flatten",
    "stacks",
    "transposed",
    "split",
    "adamw_lr",
    "adamw_betas",
    "adamw_eps",
    "adamw_weight_decay",
    "exchange",
    "exchange_buffer_mb",
    "exchange_dtype",
    "free_buffers",
    "process_group",
    "cautious_weight_decay",
    "offload",
    "metrics_interval",
    "audit_interval",
    "audit_action",
)
"""Arguments with the meaning that they have for `Muon`; others are the class's."""


class Sharded(Muon):
    """A class of optimizers, unmodified, for the matrices inside a network; AdamW for the rest.

        optimizer = megatron_muon.Sharded("soap", model, lr=3e-3, use_kl_shampoo=True)

    Each block is optimized by its owner, which has the state. Selection of parameters, learning
    rates, decay, checkpoints and skipped gradients are those of `Muon`.

    Args:
        optimizer: a name of emerging-optimizers, such as "soap", "rekls", "polargrad", "mop" or
            "psgd_pro"; "module:Class"; or a class of `torch.optim.Optimizer` for matrices, whose
            update depends on gradients alone.
        params: as for `Muon`.
        lr: learning rate of matrices.
        weight_decay: decay per unit of learning rate, decoupled.
        settings: arguments named in `SHARED`, as for `Muon`, and arguments of the class. With
            `offload="cpu"` its state is in host memory between steps; `exchange_dtype="bf16"`
            rounds gradients and updates on their way.

    Raises:
        TypeError: `params` holds no tensors.
        UserError: the class reads weights or cannot be tried, or as for `Muon`.
    """

    def __init__(
        self,
        optimizer: str | type[torch.optim.Optimizer],
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        **settings: Any,
    ) -> None:
        given = {}
        for name, parameter in inspect.signature(Muon.__init__).parameters.items():
            if name not in ("self", "params"):
                given[name] = (
                    settings.pop(name) if name in settings and name in SHARED else parameter.default
                )
        given |= {"lr": lr, "weight_decay": weight_decay}
        with word_as_arguments():
            self._keeps_on_host = _keeps_on_host(given.pop("offload"))
            self._candidate = approve(find(optimizer, settings))
        self.matrix_optimizer = self._candidate.name
        given |= {"offload": "none", "optimizer": self.matrix_optimizer, "arguments": settings}
        self._set_up(params, given)

    @override
    def _method(self, device: torch.device) -> OwnerMethod:
        return OwnerMethod(self._candidate, device, keeps_on_host=self._keeps_on_host)


def _keeps_on_host(offload: str) -> bool:
    if offload not in ("none", "cpu"):
        raise SettingError(
            "muon_offload", offload, "does not work for an optimizer's state", "use cpu or none"
        )
    return offload == "cpu"
