"""The matrices of a config's model and the owners of their rows in each shard, without ranks.

megatron-core validates the config and builds the model on the meta device, Megatron-FSDP's own
functions put its parameters into buckets, and `fsdp/cuts.py` cuts these, as in a run.
megatron-core's local layers replace Transformer Engine's: they have the same matrices in the same
order, and norms come after the matrices in a bucket.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.distributed.fsdp import mcore_fsdp_adapter as adapter
from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as buffers
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.training import theoretical_memory_usage as formulas
from megatron.training import training

from megatron_muon.core.layout import Layout
from megatron_muon.errors import UserError, quiet_imports
from megatron_muon.fsdp.buckets import PieceHolders, bucket_shards
from megatron_muon.megatron import prepare
from megatron_muon.megatron.flags import command_line as arguments
from megatron_muon.megatron.flags.config_file import check_flags, given_flags, load_config, merge
from megatron_muon.megatron.flags.refusals import MUONS
from megatron_muon.megatron.model import gpt
from megatron_muon.megatron.model import matrices as mp
from megatron_muon.megatron.model.matrices import muon_matrices, restore_attributes, tag_for_muon
from megatron_muon.megatron.muon_config import MuonOptimizerConfig, check_supported
from megatron_muon.settings import steps_for
from megatron_muon.tools.plan.estimate import Group
from megatron_muon.tools.plan.training_step import UNITS, Parameters, TrainedModel

LOCAL = {
    "transformer_impl": "local",
    "persist_layer_norm": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "bias_gelu_fusion": False,
    "gradient_accumulation_fusion": False,
}
"""Settings of megatron-core's local layers, which need no kernel."""


_PLANNED = {
    "yaml_cfg": (None,),
    "data_parallel_sharding_strategy": ("optim", "optim_grads", UNITS),
    "outer_dp_sharding_strategy": ("no_shard",),
    "hybrid_layer_pattern": (None,),
    "pipeline_model_parallel_size": (1,),
}
"""Values of settings that can be planned."""


class _Environment(dict[str, str]):
    """An environment in which every variable exists; an unset one expands to itself."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> str:
        return f"${{{name}}}"


def read_model(
    path: Path, world_size: int, flags: Sequence[str] = (), *, device: str = "cuda"
) -> tuple[MuonOptimizerConfig, list[Group], TrainedModel]:
    """A config's Muon settings, the matrices of its model, dense ones first, and the model.

    `flags` override the file's. Paths may have placeholders, batches any size, data and tokenizer
    may be missing. `device`, "cuda" or "cpu", is that of the run.

    Raises:
        UserError: such a run is refused, or its strategy cannot be planned.
    """
    args, global_batch = _arguments(path, world_size, flags, device)
    names = {field.name for field in fields(MuonOptimizerConfig)}
    given = {name: value for name, value in vars(args).items() if name in names}
    settings = MuonOptimizerConfig(**given)
    with prepare.explained():
        groups, parameters, vocabulary = _groups(args, settings)
        # the count of operations changes its arguments
        counted = argparse.Namespace(**{**vars(args), "padded_vocab_size": vocabulary})
        model = TrainedModel(
            parameters=parameters,
            copies=args.num_distributed_optimizer_instances,
            sequence_flops=float(training.num_floating_point_operations(counted, 1)),
            sequence_length=args.seq_length,
            has_vocabulary=args.vocab_size != 1,
            global_batch=global_batch,
            micro_batch=args.micro_batch_size,
            replicas=world_size // (args.tensor_model_parallel_size * args.context_parallel_size),
            strategy=args.data_parallel_sharding_strategy,
            weight_bytes=2 if args.bf16 else 4,
            reduced_bytes=2 if args.grad_reduce_in_bf16 else 4,
            activation_bytes=_activation_bytes(counted),
        )
    return settings, groups, model


def _arguments(
    path: Path, world_size: int, flags: Sequence[str], device: str
) -> tuple[argparse.Namespace, int | None]:
    """Validated arguments for a model of local layers, and the config's global batch."""
    parser = arguments.build_parser()
    config = load_config(path, _Environment(os.environ), overridden=given_flags(flags))
    check_flags(config, parser._option_string_actions)
    line = [*merge(config, flags), "--use-megatron-fsdp"]
    if arguments.parse(parser, line).optimizer not in MUONS:
        line += ["--optimizer", "muon"]
    args = arguments.parse(
        parser, (*arguments.missing_defaults(parser, line, device=device), *line)
    )
    for name, planned in _PLANNED.items():
        value = getattr(args, name)
        if value not in planned:
            flag = "--" + name.replace("_", "-")
            raise UserError(f"{path}: {flag} {value} cannot be planned")
    given = {word.partition("=")[0] for word in line}
    if device == "cuda" and "--transformer-impl" not in given:
        args.transformer_impl = "transformer_engine"
    args.moe_grouped_gemm = args.moe_grouped_gemm and args.transformer_impl == "transformer_engine"
    global_batch: int | None = args.global_batch_size
    vars(args).update(LOCAL)
    args.rank = 0
    args.world_size = world_size
    args.global_batch_size = None
    args.rampup_batch_size = None
    args._is_global_batch_size_explicitly_specified = False
    args.micro_batch_size = args.micro_batch_size or 1
    args.save = None
    prepare.complete(args)
    return args, global_batch


def _activation_bytes(args: argparse.Namespace) -> float:
    """Bytes of a micro-batch's activations on a rank, by Megatron's report of theoretical memory.

    The report counts in bf16 and one MLP. It does not support full recomputation, which keeps one
    layer's activations and the inputs of all layers, 2 bytes an element
    (https://arxiv.org/abs/2205.05198, section 5).
    """
    rank_args = argparse.Namespace(**vars(args))
    rank_args.seq_length = args.seq_length // args.context_parallel_size
    if args.num_experts:  # evenly loaded
        ffn = (args.moe_ffn_hidden_size or args.ffn_hidden_size) * args.moe_router_topk
        ffn += args.moe_shared_expert_intermediate_size or 0
        rank_args.ffn_hidden_size = max(args.ffn_hidden_size, ffn)
    inputs = 0.0
    if args.recompute_granularity == "full":
        shards = args.tensor_model_parallel_size if args.sequence_parallel else 1
        elements = rank_args.seq_length * args.micro_batch_size * args.hidden_size
        inputs = 2 * elements * args.num_layers / shards
        rank_args.num_layers = 1
    formula = formulas.compute_activation_memory_without_sp
    if args.sequence_parallel and args.recompute_granularity == "selective":
        formula = formulas.compute_activation_memory
    in_bf16 = float(formula(rank_args, None) + inputs)
    return in_bf16 if args.bf16 else 2 * in_bf16


def _groups(
    args: argparse.Namespace, settings: MuonOptimizerConfig
) -> tuple[list[Group], tuple[Parameters, ...], int]:
    with gpt.groups_on_paper(args) as groups, quiet_imports():
        model = gpt.build_on_meta(args, groups)
        judge = adapter.FullyShardedDataParallel.__new__(adapter.FullyShardedDataParallel)
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
        vocabulary: int = model.vocab_size
        kinds = {
            "dense": (groups.intra_dp_cp.size(), groups.tp.size(), 1),
            "experts": (groups.intra_expt_dp.size(), groups.expt_tp.size(), groups.ep.size()),
        }
    restore_attributes([model])
    tag_for_muon([model], exclude=settings.muon_exclude, steps_for=steps_for(settings))
    over_tp = settings.muon_tp_mode != "blockwise"
    instances = args.num_distributed_optimizer_instances
    names = muon_matrices([model])
    planned: list[Group] = []
    counted: list[Parameters] = []
    for kind, sizes in kinds.items():
        ranks, tensor, expert = sizes
        trained = [p for p in model.parameters() if p.requires_grad and _kind(p) == kind]
        muon = [p for p in names if p.requires_grad and _kind(p) == kind]
        parts = tensor if over_tp else 1
        # Tensor-parallel ranks are consecutive; instances are far apart.
        grid = np.arange(instances * ranks * parts).reshape(instances, ranks, parts)
        holders = PieceHolders(grid)
        matrices = []
        for parameter in muon:
            matrix = mp.matrix_of(names[parameter], parameter, settings, over_tp=over_tp)
            part = mp.matrix_shape(parameter, over_tp=False)
            shards = bucket_shards(*starts[parameter.orig_param], part, matrix.shape, holders)
            matrices.append(replace(matrix, shards=shards))
        if matrices or kind == "dense":
            layout = Layout(ranks * parts * instances, tuple(matrices))
            planned.append(Group(kind, layout, expert * tensor // parts, parts))
        if trained:
            count = expert * sum(p.numel() for p in trained)
            muon_count = expert * sum(p.numel() for p in muon)
            counted.append(Parameters(count, muon_count, expert * tensor, ranks))
    return planned, tuple(counted), vocabulary


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
    units = [adapter.TransformerLayer, adapter.MoETransformerLayer]
    strategy = ddp_config.data_parallel_sharding_strategy
    policy = buffers.BucketingPolicy(bucket_size, units if strategy == UNITS else [], strategy)
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
