"""megatron-core's TensorParallelMuon on the replicated DTensors of Megatron-FSDP's `no_shard` strategy.

Every rank holds whole matrices, so nothing is exchanged: the class only shows the local tensor to the base class's
orthogonalisation, and keeps its result independent of the momentum's magnitude.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon
from torch.distributed.tensor import DTensor

from megatron_muon.optim.blocks import RowSplit
from megatron_muon.optim.orthogonalize import unit_magnitude_exponent
from megatron_muon.optim.sharded_muon import local_rows


def give_blocks(parameter: torch.Tensor, split: RowSplit) -> None:
    """Have ReplicatedMuon orthogonalise the blocks of `parameter` alone, by upstream's mechanism for QKV.

    TensorParallelMuon splits rows into repetitions of `qkv_split_shapes`, as many as there are; that is a RowSplit.
    """
    parameter.qkv_split_shapes = list(split.parts)  # type: ignore[attr-defined]


def has_blocks(parameter: torch.Tensor) -> bool:
    """Whether `give_blocks` gave this parameter more than one block."""
    return len(getattr(parameter, "qkv_split_shapes", ())) > 1


class ReplicatedMuon(TensorParallelMuon):
    """TensorParallelMuon whose parameters, gradients and momentum are replicated DTensors."""

    def initialize_state(self) -> None:
        """Give every parameter its momentum of zeros, also those that never get a gradient."""
        for group in self.param_groups:
            self._init_group(group, skip_non_grad_params=False)

    def orthogonalize(self, p: torch.Tensor, grad: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """The scaled update of `grad`, 2D `(rows, cols)` or a 3D stack of experts, a DTensor as `grad` is.

        The power of two is common to the ranks that share a matrix by tensor parallelism.
        """
        momentum = local_rows(grad)
        exponent = unit_magnitude_exponent(momentum)
        if self.tp_mode != "blockwise" and getattr(p, "tensor_model_parallel", False):
            tp_group = self.pg_collection.expt_tp if getattr(p, "expert_tp", False) else self.pg_collection.tp
            if tp_group.size() > 1:
                dist.all_reduce(exponent, op=dist.ReduceOp.MAX, group=tp_group)
        update = super().orthogonalize(p, torch.ldexp(momentum, -exponent), **kwargs)
        if isinstance(grad, DTensor):
            return DTensor.from_local(
                update.view(grad._local_tensor.shape),
                grad.device_mesh,
                grad.placements,
                run_check=False,
                shape=grad.shape,
                stride=grad.stride(),
            )
        return update.view(grad.shape)  # type: ignore[no-any-return]
