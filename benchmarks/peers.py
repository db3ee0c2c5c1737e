"""Other implementations on the same matrices: DeepSpeed's, and below it the iteration of megatron-core's Muon.

DeepSpeed's ZeRO-3 Muon is a method of `python -m benchmarks.step`.

A real engine holds the benchmark's weights, its backward delivers the benchmark's gradients, and
its `step()` is timed. As of DeepSpeed 0.19.8 that call has all of Muon's work and nothing of
forward or backward: backward averages gradients and leaves each rank its partition;
`DeepSpeedZeroOptimizer_Stage3.step` gathers gradients and momentum, runs momentum and Newton-Schulz
on every N-th matrix, N being the ranks, gathers updates and momentum, and applies them. A step uses
its gradients up, so `prepare()` runs a forward and a backward before each, outside the time. CPU
over gloo only.

What differs from `owner`, beyond the scheme:

- Everything travels in the dtype of the model, fp32 here.
- Newton-Schulz has 5 steps and Keller Jordan's coefficients. "standard" runs in bf16 whatever
  `--ns-dtype` says; "gram", DeepSpeed's default, in fp16 where oneDNN multiplies in it, else in
  fp32. The figures' `ns_dtype` says which.
- A qkv matrix is one block of `(3H, H)`, not three of `(H, H)`: that is fewer operations.
- A step also takes the norm of the update, which ZeRO-3 cannot leave out. Its scalars are not in
  the bytes.
- Buffers that it keeps from step to step, up to 256 MiB, are not in `peak_extra_bytes`.

DeepSpeed compiles its kernels at the first step (a C++ compiler is needed), which belongs to the
warm-up.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, override

import torch
import torch.distributed as dist
from emerging_optimizers import utils as eo_utils
from emerging_optimizers.orthogonalized_optimizers import muon_utils

from megatron_muon.core.collectives import TeamGroup
from megatron_muon.core.newton_schulz import Work
from megatron_muon.core.orthogonalize import Orthogonalizer
from megatron_muon.core.probe import SILENT, PhaseTimer, Probe
from megatron_muon.core.slices import BlockKind
from megatron_muon.patching import Patches

NS_METHODS = {"deepspeed": "standard", "deepspeed-gram": "gram"}
"""The `ns_method` of each peer's name. "standard" is first: it is the faster on CPU, and bf16 as the other methods."""

_PHASES = {
    "_partitioned_buffers_all_gather": "gather_wait",
    # without what is within it: the updates' all-gather and copies
    "_muon_update_sub_group": "scatter_wait",
    "_optimizer_step": "apply",
}
_GATHERS = ("all_gather", "all_gather_into_tensor")
_COMPILATIONS = 64


class _Matrices(torch.nn.Module):
    """Holds matrices; its output is a scalar whose gradient with respect to each of them is the one given."""

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.matrices = torch.nn.ParameterList(
            torch.nn.Parameter(weight.clone()) for weight in weights
        )

    def forward(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        products = [
            (matrix * gradient).sum()
            for matrix, gradient in zip(self.matrices, gradients, strict=True)
        ]
        return torch.stack(products).sum()


class DeepSpeedMuon:
    """A ZeRO-3 engine with DeepSpeed's Muon, to be used as `prepare()`, `step()`, `prepare()`, ...

    Both are collective. Making one imports DeepSpeed, on torch's process group, which must exist.

    Args:
        weights, gradients: whole matrices `(rows, cols)`, fp32, the same on every rank.
        ns_method: "standard" or "gram".
        momentum: Muon's beta; Nesterov's look-ahead is always on.
        weight_decay: decoupled.
    """

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        *,
        ns_method: str,
        lr: float,
        momentum: float,
        weight_decay: float,
    ) -> None:
        os.environ["DS_ACCELERATOR"] = "cpu"  # read once, when deepspeed is imported
        import deepspeed
        from deepspeed.runtime.zero.muon.original_muon import ns_compute_dtype

        # One compiled function serves every shape and both methods; beyond torch's limit of 8 it
        # would run uncompiled.
        torch._dynamo.config.recompile_limit = max(
            torch._dynamo.config.recompile_limit, _COMPILATIONS
        )
        self._gradients = tuple(gradients)
        elements = sum(weight.numel() for weight in weights)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {
                "type": "Muon",
                "params": {
                    "lr": lr,
                    "momentum": momentum,
                    "weight_decay": weight_decay,
                    "ns_method": ns_method,
                },
            },
            "zero_optimization": {
                "stage": 3,
                "reduce_scatter": False,  # Muon refuses it
                # DeepSpeed's 5e8 elements, or all there are: the buffer of that size is allocated
                # at the start.
                "reduce_bucket_size": min(elements, 500_000_000),
                # No parameter stays whole between steps, else a step would end with gathering
                # those.
                "stage3_param_persistence_threshold": 0,
            },
            "gradient_clipping": 0.0,  # by default it clips the norm of all updates together to 1
            "steps_per_print": 2**31,
        }
        self._engine: Any = deepspeed.initialize(model=_Matrices(weights), config=config)[0]
        self.ns_dtype: torch.dtype = ns_compute_dtype(ns_method)

    def prepare(self) -> None:
        """Brings the gradients to where backward leaves them."""
        self._engine.backward(self._engine(self._gradients))

    def step(self) -> None:
        """One step of Muon, and nothing else."""
        self._engine.step()

    def attach(self, timer: PhaseTimer) -> Patches:
        """Time the phases of the step and count what its all-gathers bring, until the result's `undo()`.

        Momentum counts as `orthogonalize`.

        Raises:
            RuntimeError: a method that makes a phase is gone.
        """
        from deepspeed.comm import comm
        from deepspeed.runtime.zero.muon import original_muon

        patches = Patches()
        for name, phase in _PHASES.items():
            patches.wrap(self._engine.optimizer, name, functools.partial(timed, timer, phase))
        patches.wrap(original_muon, "muon_update", functools.partial(timed, timer, "orthogonalize"))
        for name in _GATHERS:
            patches.wrap(comm.cdb, name, functools.partial(_counted, timer))
        return patches


def timed(timer: PhaseTimer, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, with its time added to `phase`."""

    def timed_call(*args: Any, **kwargs: Any) -> Any:
        with timer.phase(phase):
            return call(*args, **kwargs)

    return timed_call


def _counted(timer: PhaseTimer, call: Callable[..., Any]) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        # deepspeed.comm passes names; what this rank sends is of the size that each other rank
        # sends.
        sent: torch.Tensor = kwargs["tensor"] if "tensor" in kwargs else kwargs["input_tensor"]
        timer.received((dist.get_world_size(kwargs.get("group")) - 1) * sent.nbytes)
        return call(*args, **kwargs)

    return counted


class UpstreamOrthogonalizer(Orthogonalizer):
    """Blocks are orthogonalised as megatron-core's Muon does it, one after the other; no update is looked at.

    Source: megatron.core.optimizer.emerging_optimizers.TensorParallelMuon, which calls
    emerging-optimizers' iteration.
    """

    @override
    def orthogonalize_stack(
        self,
        stack: torch.Tensor,
        kind: BlockKind,
        team: TeamGroup | None = None,
        probe: Probe = SILENT,
        work: Work | None = None,
    ) -> torch.Tensor:
        """As `Orthogonalizer`, for blocks that no team cuts."""
        for block in stack:
            with eo_utils.fp32_matmul_precision(self.iteration.precision):
                orthogonal = muon_utils.newton_schulz(
                    block,
                    steps=self.iteration.steps,
                    coefficient_type=self.iteration.coefficient_type,
                )
            torch.mul(orthogonal, kind.scale, out=block)
        return torch.zeros(len(stack), dtype=torch.float32, device=stack.device)
