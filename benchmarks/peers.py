"""Other implementations: DeepSpeed's ZeRO-3 Muon, and the iteration of megatron-core's Muon.

A real DeepSpeed engine holds the benchmark's weights, its backward delivers the benchmark's
gradients, and its `step()` is timed. As of DeepSpeed 0.19.8 that call has all of Muon's work and
nothing of forward or backward: backward averages gradients and leaves each rank its partition;
`DeepSpeedZeroOptimizer_Stage3.step` gathers gradients and momentum, runs momentum and Newton-Schulz
on every N-th matrix, N being the ranks, gathers updates and momentum, and applies them. A step uses
its gradients up, so `prepare()` runs an untimed forward and backward before each. CPU over gloo.

Differences from `owner`, apart from the scheme:

- Everything travels in the dtype of the model, fp32 here.
- Newton-Schulz has 5 steps and Keller Jordan's coefficients, in bf16 whatever `--ns-dtype` is.
- A qkv matrix is one block of `(3H, H)`, not three of `(H, H)`: that is fewer operations.
- A step also takes the norm of the update, which ZeRO-3 cannot leave out.
- Buffers that it keeps from step to step, up to 256 MiB, are not in `peak_extra_bytes`.

DeepSpeed compiles its kernels in the first step, which is part of the warm-up.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, override

import torch
from emerging_optimizers import utils as eo_utils
from emerging_optimizers.orthogonalized_optimizers import muon_utils

from megatron_muon.core.methods.method import Work
from megatron_muon.core.methods.newton_schulz import NewtonSchulz
from megatron_muon.core.slices import BlockKind


class _Matrices(torch.nn.Module):
    """Holds matrices; outputs a scalar whose gradients with respect to them are those given."""

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        super().__init__()
        parameters = (torch.nn.Parameter(weight.clone()) for weight in weights)
        self.matrices = torch.nn.ParameterList(parameters)

    def forward(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        both = zip(self.matrices, gradients, strict=True)
        return torch.stack([(matrix * gradient).sum() for matrix, gradient in both]).sum()


class DeepSpeedMuon:
    """A ZeRO-3 engine with DeepSpeed's Muon, used as `prepare()`, `step()`, `prepare()`, ...

    Both calls are collective. The constructor needs torch's process group. Weights and gradients
    are whole matrices `(rows, cols)`, fp32, the same on every rank; decay is decoupled, and
    Nesterov's look-ahead is always on.
    """

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        lr: float,
        momentum: float,
        weight_decay: float,
    ) -> None:
        os.environ["DS_ACCELERATOR"] = "cpu"  # read once, when deepspeed is imported
        import deepspeed

        # One compiled function serves every shape; beyond torch's limit it would run uncompiled.
        torch._dynamo.config.recompile_limit = 64
        self._gradients = tuple(gradients)
        elements = sum(weight.numel() for weight in weights)
        muon = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "Muon", "params": muon | {"ns_method": "standard"}},
            "zero_optimization": {
                "stage": 3,
                "reduce_scatter": False,  # Muon refuses it
                # the buffer of this size is allocated at the start
                "reduce_bucket_size": min(elements, 500_000_000),
                # no parameter stays whole between steps, else a step would end with gathering it
                "stage3_param_persistence_threshold": 0,
            },
            "gradient_clipping": 0.0,  # by default it clips the norm of all updates together to 1
            "steps_per_print": 2**31,
        }
        self.engine: Any = deepspeed.initialize(model=_Matrices(weights), config=config)[0]

    def prepare(self) -> None:
        """Brings the gradients to where backward leaves them."""
        self.engine.backward(self.engine(self._gradients))

    def step(self) -> None:
        """One step of Muon, and nothing else."""
        self.engine.step()


class UpstreamNewtonSchulz(NewtonSchulz):
    """Orthogonalizes blocks as megatron-core's Muon does, one after the other; checks no update.

    Source: megatron.core.optimizer.emerging_optimizers.TensorParallelMuon, which calls
    emerging-optimizers' iteration.
    """

    @override
    def run(
        self,
        stack: torch.Tensor,
        kind: BlockKind,
        factors: torch.Tensor,
        work: Work,
        **options: Any,
    ) -> torch.Tensor:
        """Orthogonalize blocks that no team cuts."""
        iteration = self.iteration
        for block in stack:
            with eo_utils.fp32_matmul_precision(iteration.precision):
                orthogonal = muon_utils.newton_schulz(
                    block,
                    steps=iteration.steps,
                    coefficient_type=iteration.coefficient_type,
                )
            torch.mul(orthogonal, kind.scale, out=block)
        return stack
