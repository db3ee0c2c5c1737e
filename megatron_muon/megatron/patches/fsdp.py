"""Corrections of gradients in Megatron-FSDP of megatron-core 0.19, for any optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from megatron_muon.megatron.upstream import GradReducePipeline, MegatronFSDP, ParamAndGradBuffer
from megatron_muon.patching import Patches
from megatron_muon.ranks import reduce_scatter_single


def patch_megatron_fsdp(patches: Patches | None = None) -> None:
    """Correct how Megatron-FSDP of megatron-core 0.19 reduces gradients, for any optimizer.

    A custom training loop calls this before its first backward pass; this package's optimizer calls
    it itself, and a second call does nothing. `patches` records the replacements; with None they
    stay until the process ends. Raises a RuntimeError, with nothing patched, where this
    megatron-core is not as expected.
    """
    if hasattr(ParamAndGradBuffer.reduce_scatter_gradients, "__wrapped__"):
        return
    patches = Patches() if patches is None else patches
    reduce_without_frozen(patches)
    scale_gradients_once(patches)
    reduce_over_instances(patches)


mend_megatron_fsdp = patch_megatron_fsdp  # the former name


def reduce_without_frozen(patches: Patches) -> None:
    """Let the `optim` strategy train a model with frozen parameters, which have no gradient buffer.

    0.19's reduce_scatter_gradients fails on the missing buffers; all_reduce_gradients, for
    `no_shard`, leaves them out.
    """

    @patches.around(ParamAndGradBuffer, "reduce_scatter_gradients")
    def reduce_scatter_gradients(
        reduce: Callable[..., None], self: Any, async_op: bool = True
    ) -> None:
        all_groups = self.parameter_groups
        self.parameter_groups = [
            group for group in all_groups if group.main_grad_buffer is not None
        ]
        try:
            reduce(self, async_op=async_op)
        finally:
            self.parameter_groups = all_groups


def scale_gradients_once(patches: Patches) -> None:
    """Average every gradient exactly once.

    Where instances of the distributed optimizer share its state too (outer `optim`), 0.19 reduces
    in a buffer without the factor of the average (_create_hfsdp_helper_buffer): the result is a
    sum, and clipping is wrong by the number of ranks.

    Where a data-parallel group has one rank, such as the experts' group when expert parallelism
    takes all ranks, 0.19 reduces an unsharded buffer after each micro-batch under `optim_grads` and
    `optim_grads_params`, and multiplies all of it by the factor every time
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
    """Give helper buffers their factors; take those of single-rank buffers away and return them."""
    config = buffer.ddp_config
    strategy = config.data_parallel_sharding_strategy
    # `average_in_collective` uses no factor.
    is_scaled = strategy in ("optim_grads", "optim_grads_params")
    is_scaled = is_scaled and not config.average_in_collective
    lone = []
    for group in buffer.parameter_groups:
        gradients = group.main_grad_buffer
        helper = group.hfsdp_helper_gbuf
        if helper is not None and gradients is not None:
            helper.gradient_scaling_factor = gradients.gradient_scaling_factor
        reduced = helper or gradients
        if not is_scaled or reduced is None or reduced.is_data_distributed:
            continue
        if reduced.gradient_scaling_factor is not None:
            lone.append((gradients, reduced.gradient_scaling_factor))
            reduced.gradient_scaling_factor = None
    return lone


def reduce_over_instances(patches: Patches) -> None:
    """Let instances of the distributed optimizer (HSDP) reduce gradients together in each step.

    0.19 does so in the backward pass of the last micro-batch, which it recognizes only by the
    `no_sync` context of `--overlap-grad-reduce`. Here the end of the reduction makes up for it.
    """

    @patches.around(GradReducePipeline, "reduce_gradients")
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
        is_done = getattr(pipeline, "reduced_over_instances", False)
        pipeline.reduced_over_instances = False
        if self.dist_index.use_hybrid_fsdp and not is_done:
            _reduce_over_instances(self)


def _reduce_over_instances(fsdp: Any) -> None:
    """Sum what each instance has reduced; gradients already carry the factor of their average."""
    config = fsdp.ddp_config
    group = fsdp.dist_index.get_outer_fsdp_group()
    operation = dist.ReduceOp.AVG if config.average_in_collective else dist.ReduceOp.SUM
    for bucket, parameters in enumerate(fsdp.param_and_grad_buffer.parameter_groups):
        gradients = parameters.main_grad_buffer
        if gradients is None:
            continue
        within = fsdp.grad_reduce_pipeline.get_fsdp_buffer(bucket)
        if config.outer_dp_sharding_strategy == "no_shard":
            dist.all_reduce(within.get_shard_from_local_buffer(), op=operation, group=group)
        else:
            shard = gradients.get_shard_from_local_buffer()
            reduce_scatter_single(shard, within.data, operation, group)
