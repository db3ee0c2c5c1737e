"""Corrections of gradients in Megatron-FSDP of megatron-core 0.19, for any optimizer, one function each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp import MegatronFSDP
from megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer import (
    GradReducePipeline,
    ParamAndGradBuffer,
)

from megatron_muon.core.ranks import reduce_scatter_single
from megatron_muon.patching import Patches


def patch_megatron_fsdp(patches: Patches | None = None) -> None:
    """Correct what Megatron-FSDP of megatron-core 0.19 does to gradients, for any optimizer; twice is once.

    For a training loop of one's own, before its first backward pass; this package's optimizer does
    it by itself. `patches` records what is replaced; None leaves it in place until the process
    ends. A RuntimeError, with nothing patched, where this megatron-core is not as expected.
    """
    if hasattr(ParamAndGradBuffer.reduce_scatter_gradients, "__wrapped__"):
        return
    patches = Patches() if patches is None else patches
    reduce_without_frozen(patches)
    scale_gradients_once(patches)
    reduce_over_instances(patches)


def reduce_without_frozen(patches: Patches) -> None:
    """Let the `optim` strategy train a model with frozen parameters, which have no gradient buffer.

    0.19's reduce_scatter_gradients fails on the missing ones; all_reduce_gradients, for `no_shard`,
    leaves them out.
    """

    @patches.around(ParamAndGradBuffer, "reduce_scatter_gradients", takes=["async_op"])
    def reduce_scatter_gradients(
        reduce: Callable[..., None], self: Any, async_op: bool = True
    ) -> None:
        everything = self.parameter_groups
        self.parameter_groups = [
            group for group in everything if group.main_grad_buffer is not None
        ]
        try:
            reduce(self, async_op=async_op)
        finally:
            self.parameter_groups = everything


def scale_gradients_once(patches: Patches) -> None:
    """Let every gradient be averaged, and once, by the factors of the buffers in which it is reduced.

    Where instances of the distributed optimizer share its state too (outer `optim`), 0.19 reduces
    in a buffer without the factor of the average (_create_hfsdp_helper_buffer): sums come out, and
    clipping is wrong by the number of ranks.

    Where a data-parallel group has one rank, as that of the experts when expert parallelism takes
    all ranks, 0.19 reduces an unsharded buffer after each micro-batch under `optim_grads` and
    `optim_grads_params`, and every time multiplies all of it by the factor
    (gradient_reduce_preprocessing). Here the factor waits until the reduction is finished.
    """

    @patches.around(GradReducePipeline, "reduce_gradients")
    def with_factors(reduce: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        if not hasattr(self.buffer, "lone_gradients"):  # before its first gradient
            self.buffer.lone_gradients = _lone_gradients(self.buffer)
        reduce(self, *args, **kwargs)

    @patches.around(MegatronFSDP, "attach_grad_to_optimizer_state")
    def average(attach: Callable[..., None], self: Any) -> None:
        for gradients, factor in getattr(self.param_and_grad_buffer, "lone_gradients", ()):
            gradients.data.mul_(factor)
        attach(self)


def _lone_gradients(buffer: Any) -> list[tuple[Any, float]]:
    """Give the helpers of a buffer their factors, and take those of lone ranks away: gradients, and what they lack."""
    found, config = [], buffer.ddp_config
    sharded = config.data_parallel_sharding_strategy in ("optim_grads", "optim_grads_params")
    sharded = sharded and not config.average_in_collective  # whose average takes no factor
    for group in buffer.parameter_groups:
        gradients, helper = group.main_grad_buffer, group.hfsdp_helper_gbuf
        if helper is not None and gradients is not None:
            helper.gradient_scaling_factor = gradients.gradient_scaling_factor
        reduced = helper or gradients
        lone = sharded and reduced is not None and not reduced.is_data_distributed
        if lone and reduced.gradient_scaling_factor is not None:
            found.append((gradients, reduced.gradient_scaling_factor))
            reduced.gradient_scaling_factor = None
    return found


def reduce_over_instances(patches: Patches) -> None:
    """Let several instances of the distributed optimizer (HSDP) reduce gradients among themselves in every step.

    0.19 does so in the backward pass of the last micro-batch, and only the `no_sync` context of
    `--overlap-grad-reduce` says which that is. Here the rest is done when the reduction is
    finished.
    """

    @patches.around(
        GradReducePipeline, "reduce_gradients", takes=["params", "outer_fsdp_group_grad_reduce"]
    )
    def note(
        reduce: Callable[..., None], self: Any, params: Any, *args: Any, **kwargs: Any
    ) -> None:
        reduce(self, params, *args, **kwargs)
        if kwargs.get("outer_fsdp_group_grad_reduce", False):
            self.reduced_over_instances = True

    @patches.around(MegatronFSDP, "synchronize_gradient_reduce")
    def catch_up(synchronize: Callable[..., None], self: Any) -> None:
        synchronize(self)
        pipeline = self.grad_reduce_pipeline
        done, pipeline.reduced_over_instances = (
            getattr(pipeline, "reduced_over_instances", False),
            False,
        )
        if done or not self.dist_index.use_hybrid_fsdp:
            return
        # Sum what each instance has reduced within itself; gradients carry the factor of their
        # average already.
        config, group = self.ddp_config, self.dist_index.get_outer_fsdp_group()
        operation = dist.ReduceOp.AVG if config.average_in_collective else dist.ReduceOp.SUM
        for bucket, parameters in enumerate(self.param_and_grad_buffer.parameter_groups):
            if (gradients := parameters.main_grad_buffer) is None:
                continue
            within = pipeline.get_fsdp_buffer(bucket)
            if config.outer_dp_sharding_strategy == "no_shard":
                dist.all_reduce(within.get_shard_from_local_buffer(), op=operation, group=group)
            else:
                shard = gradients.get_shard_from_local_buffer()
                reduce_scatter_single(shard, within.data, operation, group)
