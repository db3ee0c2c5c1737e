"""The matrices of a config's model and who holds which of their rows, without ranks.

megatron-core validates the config and builds the model on the meta device, Megatron-FSDP's own
functions put its parameters into buckets, and `fsdp/cuts.py` cuts these, as in a run.
megatron-core's local layers stand for Transformer Engine's: they have the same matrices in the same
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
from megatron_muon.tools.plan.training_step import UNITS, Model, Parameters

LOCAL = {
    "transformer_impl": "local",
    "persist_layer_norm": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "bias_gelu_fusion": False,
    "gradient_accumulation_fusion": False,
}
"""Settings of megatron-core's local layers, which need no kernel."""


class _Environment(dict[str, str]):
    """An environment in which every variable exists; one that is not set stands for itself."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> str:
        return f"${{{name}}}"


def read_model(
    path: Path, world_size: int, flags: Sequence[str] = (), *, device: str = "cuda"
) -> tuple[MuonOptimizerConfig, list[Group], Model]:
    """A config's Muon settings, the matrices of its model over some ranks (dense ones, then experts), and the model.

    `flags` win over the file's. Paths may have placeholders, batches any size, data and tokenizer
    may be missing. `device`, "cuda" or "cpu", is where the run is to be.

    Raises:
        UserError: a run with this model, these sizes and Muon is refused, or its strategy cannot be
            planned.
    """
    args, global_batch = _arguments(path, world_size, flags, device)
    names = {field.name for field in fields(MuonOptimizerConfig)}
    settings = MuonOptimizerConfig(
        **{name: value for name, value in vars(args).items() if name in names}
    )
    with prepare.explained():
        groups, parameters, vocabulary = _groups(args, settings)
        # which the count changes
        counted = argparse.Namespace(**{**vars(args), "padded_vocab_size": vocabulary})
        model = Model(
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
    """Validated arguments for a model of local layers, and the config's global batch, which need not fit."""
    parser = arguments.build_parser()
    config = load_config(path, _Environment(os.environ), overridden=given_flags(flags))
    check_flags(config, parser._option_string_actions)
    line = [*merge(config, flags), "--use-megatron-fsdp"]
    if arguments.parse(parser, line).optimizer not in MUONS:
        line += ["--optimizer", "muon"]
    args = arguments.parse(
        parser, (*arguments.missing_defaults(parser, line, device=device), *line)
    )
    for flag, value, planned in (
        ("--yaml-cfg", args.yaml_cfg, (None,)),
        (
            "--data-parallel-sharding-strategy",
            args.data_parallel_sharding_strategy,
            ("optim", "optim_grads", UNITS),
        ),
        ("--outer-dp-sharding-strategy", args.outer_dp_sharding_strategy, ("no_shard",)),
        ("--hybrid-layer-pattern", args.hybrid_layer_pattern, (None,)),
        ("--pipeline-model-parallel-size", args.pipeline_model_parallel_size, (1,)),
    ):
        if value not in planned:
            raise UserError(f"{path}: {flag} {value} cannot be planned")
    args.rank, args.world_size = 0, world_size
    if device == "cuda" and not any(
        word.partition("=")[0] == "--transformer-impl" for word in line
    ):
        args.transformer_impl = "transformer_engine"
    args.moe_grouped_gemm = args.moe_grouped_gemm and args.transformer_impl == "transformer_engine"
    vars(args).update(LOCAL)
    global_batch, args.global_batch_size, args.rampup_batch_size = (
        args.global_batch_size,
        None,
        None,
    )
    args.micro_batch_size = args.micro_batch_size or 1
    args.save, args._is_global_batch_size_explicitly_specified = None, False
    prepare.complete(args)
    return args, global_batch


def _activation_bytes(args: argparse.Namespace) -> float:
    """Of a micro-batch on a rank, by Megatron's report of theoretical memory, which counts in bf16 and one MLP.

    With full recomputation, which it does not know: one layer's, and the inputs of all, 2 bytes an
    element (https://arxiv.org/abs/2205.05198, section 5).
    """
    of_rank = argparse.Namespace(
        **{**vars(args), "seq_length": args.seq_length // args.context_parallel_size}
    )
    if args.num_experts:  # of a token, evenly
        of_token = (args.moe_ffn_hidden_size or args.ffn_hidden_size) * args.moe_router_topk
        of_rank.ffn_hidden_size = max(
            args.ffn_hidden_size, of_token + (args.moe_shared_expert_intermediate_size or 0)
        )
    inputs = 0.0
    if args.recompute_granularity == "full":
        cut = args.tensor_model_parallel_size if args.sequence_parallel else 1
        inputs = (
            2
            * of_rank.seq_length
            * args.micro_batch_size
            * args.hidden_size
            * args.num_layers
            / cut
        )
        of_rank.num_layers = 1
    selective = args.sequence_parallel and args.recompute_granularity == "selective"
    formula = (
        formulas.compute_activation_memory
        if selective
        else formulas.compute_activation_memory_without_sp
    )
    return float(formula(of_rank, None) + inputs) * (1 if args.bf16 else 2)


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
    over_tp, instances = (
        settings.muon_tp_mode != "blockwise",
        args.num_distributed_optimizer_instances,
    )
    planned, counted, names = [], [], muon_matrices([model])
    for kind, (ranks, tensor, expert) in kinds.items():
        # As megatron-core tells its groups apart.
        trained, muon = (
            [
                p
                for p in some
                if p.requires_grad and getattr(p, "allreduce", True) is (kind == "dense")
            ]
            for some in (model.parameters(), names)
        )
        parts = tensor if over_tp else 1
        # Tensor-parallel ranks lie together, instances apart.
        holders = PieceHolders(
            np.arange(instances * ranks * parts).reshape(instances, ranks, parts)
        )
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
            count, of_muon = (expert * sum(p.numel() for p in some) for some in (trained, muon))
            counted.append(Parameters(count, of_muon, expert * tensor, ranks))
    return planned, tuple(counted), vocabulary


def group_experts(model: torch.nn.Module) -> None:
    """Arrange each layer's experts as TEGroupedMLP does: all first projections before all second ones."""
    for module in model.modules():
        for experts in (child for child in module.children() if isinstance(child, SequentialMLP)):
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
    """Where each trained matrix begins in its bucket, and the size of the bucket's pieces, one a data-parallel rank."""
    units = [adapter.TransformerLayer, adapter.MoETransformerLayer]
    strategy = ddp_config.data_parallel_sharding_strategy
    policy = buffers.BucketingPolicy(bucket_size, units if strategy == UNITS else [], strategy)
    starts = {}
    for bucket in buffers._get_parameter_groups(model, policy, {})[0]:
        items, _, first = buffers.build_data_parallel_buffer_index(
            [parameter.shape for parameter in bucket.params],
            data_parallel_rank=0,
            data_parallel_world_size=(
                groups.intra_expt_dp if bucket.is_expert_param else groups.intra_dp_cp
            ).size(),
            is_data_distributed=True,
            ddp_config=ddp_config,
            chunk_size_factor=bucket.chunk_size_factor,
        )
        for number, parameter in enumerate(bucket.params):
            if parameter.ndim > 1:
                starts[parameter] = items[number].global_data_index, first.size
    return starts


def make_whole(model: torch.nn.Module, groups: ProcessGroupCollection) -> None:
    """Replace each parameter by what the optimizer sees: one of the shape that all tensor-parallel ranks hold.

    As with Megatron-FSDP's DTensors, `orig_param` is the rank's part, on which the dimension that
    is cut is noted.
    """
    made: dict[torch.Tensor, torch.nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, part in list(module.named_parameters(recurse=False)):
            if part not in made:
                shape = list(part.shape)
                cut_along = {"column": 0, "row": 1}.get(getattr(part, "_tensor_parallel_mode", ""))
                if cut_along is not None and cut_along < len(shape):
                    shape[cut_along] *= (
                        groups.expt_tp if ".experts." in f"{path}.{name}" else groups.tp
                    ).size()
                whole = torch.nn.Parameter(part.new_empty(shape), requires_grad=part.requires_grad)
                whole.__dict__.update(part.__dict__, orig_param=part)
                made[part] = whole
            module.register_parameter(name, made[part])
