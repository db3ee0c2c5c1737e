"""The matrices of a config's model and the owners of their rows in each shard, without ranks.

megatron-core validates the config and builds the model on the meta device, Megatron-FSDP's own
functions put its parameters into buckets, and `matrices/cuts.py` cuts these, as in a run.
megatron-core's local layers replace Transformer Engine's: they have the same matrices in the same
order, and norms come after the matrices in a bucket.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_muon.core.layout import Layout
from megatron_muon.errors import UserError, quiet_imports
from megatron_muon.megatron import prepare
from megatron_muon.megatron.checkpoint.from_ddp import settle_matrices
from megatron_muon.megatron.flags import command_line as arguments
from megatron_muon.megatron.flags.config_file import given_flags, load_config, merge
from megatron_muon.megatron.flags.named_optimizer import LION, MEGATRONS, is_class
from megatron_muon.megatron.model import matrices as mp
from megatron_muon.megatron.model.gpt import LOCAL_LAYERS, gpt_config
from megatron_muon.megatron.model.matrices import muon_matrices, restore_attributes, tag_for_muon
from megatron_muon.megatron.muon_config import MuonOptimizerConfig, check_supported, with_settings
from megatron_muon.megatron.upstream import (
    AttnBackend,
    LocalSpecProvider,
    ProcessGroupCollection,
    SequentialMLP,
    installed,
    training,
)
from megatron_muon.megatron.upstream import mcore_fsdp_adapter as adapter
from megatron_muon.megatron.upstream import parallel_state as mpu
from megatron_muon.megatron.upstream import param_and_grad_buffer as buffers
from megatron_muon.patching import Patches
from megatron_muon.ranks import say
from megatron_muon.settings import AUTO, UPSTREAM, steps_for
from megatron_muon.tools.plan.estimate import Group
from megatron_muon.tools.plan.planned_cuts import PieceHolders, bucket_shards

_PLANNED = {
    "data_parallel_sharding_strategy": ("optim", "optim_grads", "optim_grads_params"),
    "outer_dp_sharding_strategy": ("no_shard",),
    "hybrid_layer_pattern": (None,),
    "pipeline_model_parallel_size": (1,),
}
"""Values of settings that can be planned."""

_NO_EXCHANGE = f"--optimizer {LION} exchanges nothing, so there is nothing to plan; leave it out"


class _Environment(dict[str, str]):
    """An environment in which an unset variable expands to itself."""

    def __missing__(self, name: str) -> str:
        return f"${{{name}}}"


def read_model(
    path: Path, world_size: int, flags: Sequence[str] = (), *, device: str = "cuda"
) -> tuple[MuonOptimizerConfig, list[Group], float]:
    """A config's Muon settings, the matrices of its model, dense ones first, and other elements.

    The last are those of the scalar optimizer on a rank. `flags` override the file's. Paths may
    have placeholders, batches any size, data and tokenizer may be missing. `device`, "cuda" or
    "cpu", is that of the run.

    Raises:
        UserError: such a run is refused, or its strategy cannot be planned.
    """
    args = _arguments(path, world_size, flags, device)
    settings = with_settings(args)
    with prepare.explained():
        return settings, *_groups(args, settings)


def _arguments(
    path: Path, world_size: int, flags: Sequence[str], device: str
) -> argparse.Namespace:
    """Validated arguments for a model of local layers."""
    parser = arguments.build_parser()
    config = load_config(path, _Environment(os.environ), overridden=given_flags(flags))
    line = [*merge(config, flags), "--use-megatron-fsdp"]
    if arguments.parse(parser, line).optimizer in MEGATRONS:
        line += ["--optimizer", "muon"]
    args = arguments.parse(
        parser, (*arguments.missing_defaults(parser, line, device=device), *line)
    )
    if args.optimizer == LION:
        raise UserError(_NO_EXCHANGE)
    for name, planned in _PLANNED.items():
        value = getattr(args, name)
        if value not in planned:
            flag = "--" + name.replace("_", "-")
            raise UserError(f"{path}: {flag} {value} cannot be planned")
    given = {word.partition("=")[0] for word in line}
    if device == "cuda" and "--transformer-impl" not in given:
        args.transformer_impl = "transformer_engine"
    args.moe_grouped_gemm = args.moe_grouped_gemm and args.transformer_impl == "transformer_engine"
    vars(args).update(LOCAL_LAYERS)
    args.rank = 0
    args.world_size = world_size
    args.global_batch_size = None
    args.rampup_batch_size = None
    args._is_global_batch_size_explicitly_specified = False
    args.micro_batch_size = args.micro_batch_size or 1
    args.save = None
    settle_matrices(args)
    if args.load is not None and args.muon_matrices == AUTO and not is_class(args.optimizer):
        say(
            f"megatron-muon: note: --load {args.load} has no checkpoint here, which could choose"
            " other matrices; planned with --muon-matrices ours"
        )
    prepare.complete(args)
    return args


@contextlib.contextmanager
def groups_on_paper(args: argparse.Namespace) -> Iterator[ProcessGroupCollection]:
    """megatron-core's process groups of rank 0 of `args.world_size`, on paper; none may exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers a backend

    torch.distributed.init_process_group(
        "fake", rank=0, world_size=args.world_size, store=FakeStore()
    )
    try:
        with Patches() as changes:
            # thousands of groups of other ranks
            changes.around(mpu, "create_group")(
                lambda create, ranks, **settings: create(ranks, **settings) if 0 in ranks else None
            )
            mpu.initialize_model_parallel(
                args.tensor_model_parallel_size,
                context_parallel_size=args.context_parallel_size,
                expert_model_parallel_size=args.expert_model_parallel_size,
                expert_tensor_parallel_size=args.expert_tensor_parallel_size,
                num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
                create_gloo_process_groups=False,
            )
        yield ProcessGroupCollection.use_mpu_process_groups()
    finally:
        mpu.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def build_on_meta(args: argparse.Namespace, groups: ProcessGroupCollection) -> Any:
    """The model of these validated flags, for its parameters alone, in the dtype of training.

    megatron-core's local layers stand in for those of Transformer Engine.
    """
    config = gpt_config(args)
    config.transformer.use_cpu_initialization = True
    config.transformer.perform_initialization = False
    config.attention_backend = AttnBackend.auto
    with Patches() as changes, torch.device("meta"):
        changes.replace(LocalSpecProvider, "core_attention", lambda _provider: torch.nn.Identity)
        model = config.get_builder_cls()(config).build_model(groups, True, True)
    return model.bfloat16() if args.bf16 else model


def _groups(args: argparse.Namespace, settings: MuonOptimizerConfig) -> tuple[list[Group], float]:
    with groups_on_paper(args) as groups, quiet_imports():
        model = build_on_meta(args, groups)
        judge = installed().WRAPPER.__new__(installed().WRAPPER)
        judge._annotate_tensor_parallelism(model)
        if args.moe_grouped_gemm:
            group_experts(model)
        model.ddp_config = ddp_config = training.get_megatron_ddp_config(args)
        check_supported(settings, [model])
        size = sum(parameter.numel() for parameter in model.parameters())
        bucket_size = training.resolve_ddp_bucket_size(
            ddp_config, groups.dp_cp, args.overlap_grad_reduce, size
        )
        starts = in_buckets(model, groups, ddp_config, bucket_size)
        make_whole(model, groups)
        kinds = {
            "dense": (groups.intra_dp_cp.size(), groups.tp.size(), 1),
            "experts": (groups.intra_expt_dp.size(), groups.expt_tp.size(), groups.ep.size()),
        }
    restore_attributes([model])
    tag_for_muon(
        [model],
        exclude=settings.muon_exclude,
        steps_for=steps_for(settings),
        like_upstream=settings.muon_matrices == UPSTREAM,
    )
    over_tp = settings.muon_tp_mode != "blockwise"
    instances = args.num_distributed_optimizer_instances
    names = muon_matrices([model])
    planned: list[Group] = []
    others = 0.0
    for kind, (ranks, tensor, expert) in kinds.items():
        parts = tensor if over_tp else 1
        # Tensor-parallel ranks are consecutive; instances are far apart.
        grid = np.arange(instances * ranks * parts).reshape(instances, ranks, parts)
        holders = PieceHolders(grid)
        matrices = []
        for parameter in model.parameters():
            if not parameter.requires_grad or _kind(parameter) != kind:
                continue
            if parameter not in names:
                others += parameter.orig_param.numel() / ranks
                continue
            (matrix,) = mp.matrices_of(names[parameter], parameter, settings, over_tp=over_tp)
            part = mp.view_of(parameter, over_tp=False).matrix
            shards = bucket_shards(*starts[parameter.orig_param], part, matrix.shape, holders)
            matrices.append(replace(matrix, shards=shards))
        if matrices or kind == "dense":
            layout = Layout(ranks * parts * instances, tuple(matrices))
            planned.append(Group(kind, layout, expert * tensor // parts, parts))
    return planned, others


def _kind(parameter: torch.Tensor) -> str:
    """The kind of a parameter's group, by megatron-core's mark."""
    return "dense" if getattr(parameter, "allreduce", True) is True else "experts"


def group_experts(model: torch.nn.Module) -> None:
    """Arrange each layer's experts as TEGroupedMLP does: first all projections linear_fc1."""
    for experts in list(model.modules()):
        if not isinstance(experts, SequentialMLP):
            continue
        for name in ("linear_fc1", "linear_fc2"):
            grouped = torch.nn.Module()
            for number, expert in enumerate(experts.local_experts):
                for kind, parameter in getattr(expert, name).named_parameters(recurse=False):
                    grouped.register_parameter(f"{kind}{number}", parameter)
            experts.add_module(name, grouped)
        del experts.local_experts


def in_buckets(
    model: torch.nn.Module, groups: ProcessGroupCollection, ddp_config: Any, bucket_size: int | None
) -> dict[torch.Tensor, tuple[int, int]]:
    """The start of each trained matrix in its bucket, and the bucket's elements on a rank."""
    strategy = ddp_config.data_parallel_sharding_strategy
    units = []
    if strategy in installed().CUT_BY_LAYER:
        units = [adapter.TransformerLayer, adapter.MoETransformerLayer]
    policy = buffers.BucketingPolicy(bucket_size, units, strategy)
    starts = {}
    for bucket in buffers._get_parameter_groups(model, policy, {})[0]:
        group = groups.intra_expt_dp if bucket.is_expert_param else groups.intra_dp_cp
        items, _, first = buffers.build_data_parallel_buffer_index(
            [parameter.shape for parameter in bucket.params],
            data_parallel_rank=0,
            data_parallel_world_size=group.size(),
            is_data_distributed=True,
            ddp_config=ddp_config,
            chunk_size_factor=bucket.chunk_size_factor,
        )
        for number, parameter in enumerate(bucket.params):
            if parameter.ndim > 1:
                starts[parameter] = items[number].global_data_index, first.size
    return starts


def make_whole(model: torch.nn.Module, groups: ProcessGroupCollection) -> None:
    """Replace each parameter by one of the full tensor-parallel shape, as the optimizer sees it.

    As with Megatron-FSDP's DTensors, `orig_param` is the rank's part, which records the dimension
    that tensor parallelism cuts.
    """
    made: dict[torch.Tensor, torch.nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, part in list(module.named_parameters(recurse=False)):
            if part not in made:
                group = groups.expt_tp if ".experts." in f"{path}.{name}" else groups.tp
                made[part] = _whole(part, group.size())
            module.register_parameter(name, made[part])


def _whole(part: torch.Tensor, tensor_ranks: int) -> torch.nn.Parameter:
    shape = list(part.shape)
    cut_dim = {"column": 0, "row": 1}.get(getattr(part, "_tensor_parallel_mode", ""))
    if cut_dim is not None and cut_dim < len(shape):
        shape[cut_dim] *= tensor_ranks
    whole = torch.nn.Parameter(part.new_empty(shape), requires_grad=part.requires_grad)
    whole.__dict__.update(part.__dict__, orig_param=part)
    return whole
