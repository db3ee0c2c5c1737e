"""megatron-core's TensorParallelMuon on the replicated DTensors of Megatron-FSDP's `no_shard` strategy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon

from megatron_muon.core.layout import RowSplit
from megatron_muon.core.optimizer import MOMENTUM
from megatron_muon.core.orthogonalize import largest_magnitude, unit_factor
from megatron_muon.core.probe import SILENT, Probe
from megatron_muon.core.rows import local_rows, sharded_like
from megatron_muon.core.rules.decay import aligned


def give_blocks(parameter: torch.Tensor, split: RowSplit) -> None:
    """Have ReplicatedMuon orthogonalise the blocks of `parameter` alone.

    TensorParallelMuon splits rows into repetitions of `qkv_split_shapes`, as many as there are; that is a RowSplit.
    """
    parameter.qkv_split_shapes = list(split.parts)  # type: ignore[attr-defined]


def has_blocks(parameter: torch.Tensor) -> bool:
    """Whether `give_blocks` gave this parameter more than one block."""
    return len(getattr(parameter, "qkv_split_shapes", ())) > 1


class ReplicatedMuon(TensorParallelMuon):
    """TensorParallelMuon whose parameters, gradients and momentum are replicated DTensors, to the last bit.

    A matrix whose update is not finite keeps its weights. `names` and `cautious` are as for ShardedMuon.
    """

    def __init__(self, *args: Any, names: Mapping[torch.Tensor, str], cautious: bool = False, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._names = names
        self._cautious = cautious
        self.probe: Probe = SILENT
        self._finite = torch.tensor(True)
        self._decay = 0.0
        self._skipped: dict[torch.Tensor, torch.Tensor] = {}

    def skipped_updates(self) -> dict[str, int]:
        """As `ShardedMuon.skipped_updates`."""
        counts = {self._names[parameter]: int(count) for parameter, count in self._skipped.items()}
        self._skipped.clear()
        return {name: count for name, count in counts.items() if count}

    def _apply_weight_decay_inplace(self, p: torch.Tensor, grad: torch.Tensor, lr: float, weight_decay: float) -> None:
        """Leave decoupled decay to `pre_weight_update_fn_inplace`, where the update is known."""
        if self.weight_decay_method == "decoupled":
            self._decay = -weight_decay * lr
        else:
            super()._apply_weight_decay_inplace(p, grad, lr, weight_decay)

    def pre_weight_update_fn_inplace(self, p: torch.Tensor, update: torch.Tensor) -> None:
        """Decay the weights where the update is finite, and count where it is not."""
        rows = local_rows(p)
        if self._decay:
            decays = self._finite & aligned(rows, local_rows(update)) if self._cautious else self._finite
            rows.add_(torch.where(decays, rows, 0.0), alpha=self._decay)
        skipped = (~self._finite).int()
        self._skipped[p] = self._skipped[p] + skipped if p in self._skipped else skipped

    def initialize_state(self) -> None:
        """Give every parameter its momentum of zeros, also those that never get a gradient."""
        for group in self.param_groups:
            self._init_group(group, skip_non_grad_params=False)

    def orthogonalize(self, p: torch.Tensor, grad: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """The scaled update of `grad`, 2D `(rows, cols)` or a 3D stack of experts, a DTensor as `grad` is."""
        with self.probe.phase("orthogonalize"):
            update = self._orthogonalize_rows(p, local_rows(grad), **kwargs)
        self.probe.updates([update])
        self.probe.momentum([0], [local_rows(self.state[p][MOMENTUM])], self.replicas)
        return sharded_like(grad, update)

    def _orthogonalize_rows(self, p: torch.Tensor, rows: torch.Tensor, /, **kwargs: Any) -> torch.Tensor:
        """The scaled update, zero where it is not finite."""
        largest = largest_magnitude(rows)
        if self.tp_mode != "blockwise" and getattr(p, "tensor_model_parallel", False):
            tp_group = self.pg_collection.expt_tp if getattr(p, "expert_tp", False) else self.pg_collection.tp
            if tp_group.size() > 1:
                dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=tp_group)
        update = super().orthogonalize(p, rows * unit_factor(largest), **kwargs)
        self._finite = update.sum().isfinite()
        return torch.where(self._finite, update, 0.0)

    def replicas(self, index: int) -> int:
        """How many ranks hold these matrices alike."""
        experts = any(getattr(p, "expert_tp", False) for group in self.param_groups for p in group["params"])
        group: dist.ProcessGroup = self.pg_collection.expt_dp if experts else self.pg_collection.dp_cp
        return group.size()
