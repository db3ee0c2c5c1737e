"""Picks the optimizers for a Megatron model under Megatron-FSDP for `--optimizer muon` and `adaptive_muon`.

2D weights go to Muon, everything else to the scalar optimizer. Muon is megatron-core's TensorParallelMuon where every
rank holds whole matrices (`no_shard`) and the ZeRO-sharded Muon otherwise, or where the ranks share the work; dense
parameters use the dp_cp group, experts the expt_dp group.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import (
    _get_megatron_optimizer_based_on_param_groups,
    _get_param_groups,
    get_standard_config_overrides,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.grad_scaler import ConstantGradScaler
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig, ParamKey, ParamPredicate
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_muon.core.adaptive import AdaMuon, NorMuon
from megatron_muon.core.blocks import RowSplit
from megatron_muon.core.exchange import AllGatherExchange, LocalExchange, OwnerExchange, SharedExchange
from megatron_muon.core.exchange.owner import Batch, BatchMaker
from megatron_muon.core.exchange.steps import Exchange
from megatron_muon.core.layout import BlockedLayout, Layout
from megatron_muon.core.neurons import NeuronMoments, NormalizedBatch
from megatron_muon.core.optimizer import ShardedMuon
from megatron_muon.core.orthogonalize import Orthogonalizer
from megatron_muon.core.plan import make_plan
from megatron_muon.errors import UserError
from megatron_muon.megatron.chained import MuonChainedOptimizer
from megatron_muon.megatron.layout_file import dump_layout
from megatron_muon.megatron.model import parameters as mp
from megatron_muon.megatron.model.table import parameter_table
from megatron_muon.megatron.replicated_muon import ReplicatedMuon, give_blocks, has_blocks
from megatron_muon.megatron.scalar_state import initialize_scalar_state, step_over_empty_shards
from megatron_muon.megatron.settings import MuonOptimizerConfig, block_settings, check_supported, with_own_settings
from megatron_muon.megatron.state_report import state_report
from megatron_muon.offload import rates
from megatron_muon.offload.codecs import codec_of
from megatron_muon.offload.run import OffloadRun, held_shards


def get_megatron_muon_optimizer(
    config: OptimizerConfig,
    model_chunks: Sequence[Any],
    config_overrides: dict[ParamKey, Any] | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> MuonChainedOptimizer:
    """The optimizer for model chunks wrapped in Megatron-FSDP.

    Args:
        config: megatron-core's optimizer config; a `MuonOptimizerConfig` also carries this package's settings.
        model_chunks: the model, each chunk a megatron-core FullyShardedDataParallel.
        config_overrides: settings for subsets of parameters, as megatron-core's `get_megatron_optimizer` takes them.
        pg_collection: process groups; None takes those of megatron-core's parallel state.

    Raises:
        UserError: a setting that Muon under Megatron-FSDP does not support.
    """
    config = with_own_settings(config)
    check_supported(config, model_chunks)
    if pg_collection is None:
        pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    mp.restore_attributes(model_chunks)
    mp.tag_for_muon(model_chunks, exclude=config.muon_exclude)
    names = mp.parameter_names(model_chunks)

    groups = _get_param_groups(model_chunks, config, _overrides(config, config_overrides))
    offload = _offload_run(config)
    optimizers = []
    for is_expert in (False, True):
        ours = [group for group in groups if group["is_expert_parallel"] is is_expert and group["params"]]
        if muon_groups := [group for group in ours if "optimizer" not in group]:
            inner = _muon(config, model_chunks, muon_groups, pg_collection, names, is_expert=is_expert, offload=offload)
            optimizers.append(_wrap(inner, config, model_chunks, pg_collection, is_expert=is_expert))
        if scalar_groups := [group for group in ours if "optimizer" in group]:
            optimizers.append(_scalar(config, model_chunks, scalar_groups, pg_collection, is_expert=is_expert))
    if config.muon_dump_layout is not None and not any("optimizer" not in group for group in groups):
        raise UserError(
            "--muon-dump-layout has nothing to write: no trainable parameter is a matrix for Muon; leave it out"
        )
    if not optimizers:
        raise UserError("the model has no trainable parameter on this rank; unfreeze at least one")
    if dist.get_rank() == 0:
        print(parameter_table(groups, names, full=config.muon_log_params), flush=True)
    chain = MuonChainedOptimizer(optimizers, metrics_interval=config.muon_metrics_interval)
    report = state_report(chain)
    if dist.get_rank() == 0:
        print(report, flush=True)
    return chain


def _offload_run(config: MuonOptimizerConfig) -> OffloadRun | None:
    """What keeps momentum elsewhere, or in another format, than as fp32 on the device."""
    if config.muon_offload == "none" and config.muon_momentum_dtype == "fp32":
        return None
    return OffloadRun(
        config.muon_offload,
        config.muon_momentum_dtype,
        fraction=config.muon_offload_fraction,
        directory=config.muon_offload_dir,
        buffer_mb=config.muon_offload_buffer_mb,
        keep=config.muon_offload_keep,
        iteration=config.muon_offload_iteration,
        save=config.muon_offload_save,
    )


def _overrides(config: MuonOptimizerConfig, given: dict[ParamKey, Any] | None) -> dict[ParamKey, Any]:
    """Route non-matrices to the scalar optimizer and give matrices Muon's learning rates, beside what was given."""
    overrides = dict(get_standard_config_overrides(config) if given is None else given)
    scalar = ParamPredicate(name="not_a_muon_matrix", fn=lambda p: not mp.is_muon_matrix(p))
    overrides[ParamKey(predicate=scalar)] = {"optimizer": config.muon_scalar_optimizer}
    rates = {"max_lr": config.muon_lr, "min_lr": config.muon_min_lr}
    if chosen := {name: rate for name, rate in rates.items() if rate is not None}:
        overrides[ParamKey(predicate=ParamPredicate(name="muon_matrix", fn=mp.is_muon_matrix))] = chosen
    return overrides


def _muon(
    config: MuonOptimizerConfig,
    model_chunks: Sequence[Any],
    groups: list[dict[str, Any]],
    pg_collection: ProcessGroupCollection,
    names: dict[torch.Tensor, str],
    *,
    is_expert: bool,
    offload: OffloadRun | None,
) -> torch.optim.Optimizer:
    """Muon on `groups`: plain where matrices are whole on every rank, sharded or shared otherwise.

    Adaptive Muon is this package's own everywhere: TensorParallelAdaptiveMuon of megatron-core 0.19 ends its first step
    in an AttributeError with emerging-optimizers 0.3, which has moved the scale behind the second moment.
    """
    replicated = model_chunks[0].ddp_config.data_parallel_sharding_strategy == "no_shard"
    adaptive = config.optimizer == "adaptive_muon"
    if replicated and not config.muon_share_replicated and not adaptive:
        return _replicated(config, groups, pg_collection, names)
    matrices = [parameter for member in groups for parameter in member["params"]]
    group = pg_collection.expt_dp if is_expert else pg_collection.dp_cp
    over_tp = not replicated and config.muon_tp_mode != "blockwise"
    if over_tp:
        group = mp.matrix_group(group, pg_collection.expt_tp if is_expert else pg_collection.tp)
    rectangles: dict[torch.Tensor, tuple[int, int, int, int]] = {}
    if replicated:
        layout = mp.replicated_layout(matrices, names, group)
    else:
        rectangles = mp.local_rectangles(model_chunks)
        layout = mp.layout_of(matrices, names, rectangles, group, over_tp=over_tp)
    splits = [mp.block_split(parameter, block_settings(config), over_tp=over_tp) for parameter in matrices]
    orthogonalizer = Orthogonalizer(
        coefficient_type=config.muon_coefficient_type,
        num_steps=config.muon_num_ns_steps,
        scale_mode=config.muon_scale_mode,
        extra_scale_factor=config.muon_extra_scale_factor,
        matmul_precision=config.muon_fp32_matmul_prec,
        method=config.muon_ns,
        scaled=not adaptive,
        device=matrices[0].device,
    )
    shapes = [matrix.shape for matrix in layout.matrices]
    held = held_shards(layout, group.rank(), replicated=replicated)
    compute_device, exchange_group = matrices[0].device, group
    if config.muon_offload != "none" and compute_device.type != "cpu":
        flops = sum(orthogonalizer.flops(shape, split) for shape, split in zip(shapes, splits, strict=True))
        elements = sum(rows * cols for rows, cols in shapes)
        if _on_cpu(
            config, orthogonalizer, flops=flops / group.size(), elements=elements / group.size(), device=compute_device
        ):
            compute_device, exchange_group = torch.device("cpu"), mp.over_gloo(group)
            orthogonalizer = dataclasses.replace(orthogonalizer, device=compute_device)
    settings: dict[str, Any] = {
        "lr": config.lr,
        "momentum": config.muon_momentum,
        "nesterov": config.muon_nesterov,
        "weight_decay": config.weight_decay,
        "decoupled_weight_decay": config.decoupled_weight_decay,
        "names": names,
    }
    if compute_device != matrices[0].device:
        settings["compute_device"] = compute_device
    if offload is not None:
        group_of = [number for number, member in enumerate(groups) for _ in member["params"]]
        part = "experts" if is_expert else "dense"
        settings["store"] = lambda _: offload.make_store(held, group_of, kind=part, device=compute_device)
    kind: type[ShardedMuon] = ShardedMuon
    neurons: NeuronMoments | None = None
    if adaptive:
        kind, second = _second_moment(
            config,
            matrices,
            layout,
            splits,
            orthogonalizer,
            group,
            replicated=replicated,
            over_tp=over_tp,
            rectangles=rectangles,
        )
        neurons = second.get("neurons")
        settings |= second

    def batches(indices: Sequence[int]) -> Batch:
        batch = orthogonalizer.batch([shapes[i] for i in indices], [splits[i] for i in indices])
        return batch if neurons is None else NormalizedBatch(batch, indices, neurons.normalize)

    def update(index: int, matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        whole_update, finite = orthogonalizer(matrix, splits[index])
        if neurons is not None:
            neurons.normalize(index, whole_update, finite[0])
        return whole_update, finite

    def exchange(_: Sequence[torch.Tensor]) -> Exchange:
        if replicated and not config.muon_share_replicated:
            buffer_bytes = int(config.muon_exchange_buffer_mb * 2**20)
            return LocalExchange(layout, batches, buffer_bytes=buffer_bytes, device=compute_device)
        if config.muon_exchange == "allgather" and not replicated:
            return AllGatherExchange(layout, exchange_group, update, device=compute_device)
        sender = SharedExchange if replicated else OwnerExchange
        return _planned_exchange(
            sender, config, layout, splits, exchange_group, orthogonalizer, batches, device=compute_device
        )

    muon = kind(groups, exchange, **settings)
    muon.orthogonalizer = orthogonalizer
    if config.muon_dump_layout is not None and dist.get_rank() == 0:
        blocks = tuple((split.groups, split.parts) for split in splits)
        dump_layout(config.muon_dump_layout, BlockedLayout(layout, blocks), is_expert=is_expert)
    return muon


def _on_cpu(
    config: MuonOptimizerConfig, orthogonalizer: Orthogonalizer, *, flops: float, elements: float, device: torch.device
) -> bool:
    """Whether the CPU of a machine with an accelerator orthogonalises. Collective where rates have to be measured.

    Args:
        config: says so, or says "auto".
        orthogonalizer: the iteration.
        flops: of a rank's share of the iteration.
        elements: of a rank's share of the matrices.
        device: the accelerator.
    """
    if config.muon_ns_device != "auto" or config.optimizer == "adaptive_muon":
        return config.muon_ns_device == rates.CPU
    row = codec_of(config.muon_momentum_dtype).record_bytes(1, 1024) / 1024
    chosen = rates.faster_device(
        rates.measure(device, orthogonalizer.dtype),
        flops=flops,
        momentum_bytes=row * elements * config.muon_offload_fraction,
        gradient_bytes=4 * elements,
    )
    if dist.get_rank() == 0:
        print(f"megatron-muon: --muon-ns-device auto: Newton-Schulz runs on the {chosen}", flush=True)
    return chosen == rates.CPU


def _second_moment(
    config: MuonOptimizerConfig,
    matrices: Sequence[torch.Tensor],
    layout: Layout,
    splits: Sequence[RowSplit],
    orthogonalizer: Orthogonalizer,
    group: dist.ProcessGroup,
    *,
    replicated: bool,
    over_tp: bool,
    rectangles: Mapping[torch.Tensor, tuple[int, int, int, int]],
) -> tuple[type[ShardedMuon], dict[str, Any]]:
    """The adaptive Muon that the config asks for, and its settings beside those of ShardedMuon."""
    device = matrices[0].device
    scales = [
        orthogonalizer.row_scales(matrix.shape, split).to(device)
        for matrix, split in zip(layout.matrices, splits, strict=True)
    ]
    settings: dict[str, Any] = {"beta2": config.adaptive_muon_beta2, "eps": config.adaptive_muon_eps}
    if config.adaptive_muon_moment2_method == "normuon":
        settings["neurons"] = NeuronMoments(
            layout,
            [mp.experts_in(parameter) for parameter in matrices],
            group,
            scales,
            columns=[
                (0, matrix.shape[1]) if replicated else (rectangles[p][2] % matrix.shape[1], rectangles[p][3])
                for p, matrix in zip(matrices, layout.matrices, strict=True)
            ],
            replicated=replicated,
            everywhere=not config.muon_share_replicated if replicated else config.muon_exchange == "allgather",
            device=device,
        )
        return NorMuon, {**settings, "over_tp": over_tp}
    if not replicated:
        shards = [matrix.shard_of(group.rank()) for matrix in layout.matrices]
        scales = [
            factors[:0] if shard is None else factors[shard.row_start : shard.row_start + shard.rows]
            for factors, shard in zip(scales, shards, strict=True)
        ]
    return AdaMuon, {**settings, "scales": scales}


def _replicated(
    config: MuonOptimizerConfig,
    groups: list[dict[str, Any]],
    pg_collection: ProcessGroupCollection,
    names: dict[torch.Tensor, str],
) -> ReplicatedMuon:
    """Plain Muon: every rank orthogonalises all matrices."""
    for parameter in (parameter for member in groups for parameter in member["params"]):
        give_blocks(parameter, mp.block_split(parameter, block_settings(config), over_tp=False))
    muon = ReplicatedMuon(
        groups,
        lr=config.lr,
        momentum=config.muon_momentum,
        nesterov=config.muon_nesterov,
        weight_decay=config.weight_decay,
        use_decoupled_weight_decay=config.decoupled_weight_decay,
        split_qkv=True,
        is_qkv_fn=has_blocks,
        fp32_matmul_prec=config.muon_fp32_matmul_prec,
        coefficient_type=config.muon_coefficient_type,
        num_ns_steps=config.muon_num_ns_steps,
        scale_mode=config.muon_scale_mode,
        extra_scale_factor=config.muon_extra_scale_factor,
        pg_collection=pg_collection,
        tp_mode=config.muon_tp_mode,
        names=names,
    )
    muon.initialize_state()
    return muon


def _planned_exchange(
    kind: type[OwnerExchange] | type[SharedExchange],
    config: MuonOptimizerConfig,
    layout: Layout,
    splits: Sequence[RowSplit],
    group: dist.ProcessGroup,
    orthogonalizer: Orthogonalizer,
    batches: BatchMaker,
    *,
    device: torch.device,
) -> Exchange:
    """Plan the layout and make the exchange that carries the plan out."""
    auto = orthogonalizer.dtype if config.muon_exchange_dtype == "auto" else None
    wire_dtype = auto or (torch.bfloat16 if config.muon_exchange_dtype == "bf16" else torch.float32)
    shapes = [matrix.shape for matrix in layout.matrices]
    plan = make_plan(
        layout,
        [orthogonalizer.flops(shape, split) for shape, split in zip(shapes, splits, strict=True)],
        buffer_bytes=int(config.muon_exchange_buffer_mb * 2**20),
        element_bytes=wire_dtype.itemsize,
    )
    if plan.oversized and group.rank() == 0:
        largest = max(plan.oversized, key=lambda index: layout.matrices[index].numel)
        print(
            f"megatron-muon: {len(plan.oversized)} of {len(shapes)} matrices do not fit --muon-exchange-buffer-mb "
            f"{config.muon_exchange_buffer_mb:g}; waves are as large as {layout.matrices[largest].name} needs, "
            f"{plan.buffer_bytes(wire_dtype.itemsize) / 2**20:,.0f} MiB on a rank",
            flush=True,
        )
    owned = [index for index, owner in enumerate(plan.owners) if owner == group.rank()]
    kinds = orthogonalizer.warm_up(block for index in owned for block in splits[index].block_shapes(shapes[index][1]))
    if kinds and group.rank() == 0:
        print(f"megatron-muon: the symmetric kernel is tuned for {kinds} sizes of blocks", flush=True)
    return kind(plan, group, batches, wire_dtype=wire_dtype, device=device)


def _wrap(
    inner: torch.optim.Optimizer,
    config: MuonOptimizerConfig,
    model_chunks: Sequence[Any],
    pg_collection: ProcessGroupCollection,
    *,
    is_expert: bool,
) -> MegatronOptimizer:
    """megatron-core's DistributedOptimizer around a Muon: norms, clipping, loss scale and checkpoints."""
    wrapped = DistributedOptimizer(
        inner,
        config,
        ConstantGradScaler(config.loss_scale) if config.loss_scale else None,
        lambda optimizer, config=None: optimizer.initialize_state(),
        model_chunks=list(model_chunks),
        per_model_buffers=None,
        data_parallel_group=None,
        data_parallel_group_gloo=None,
        data_parallel_group_idx=None,
        distributed_optimizer_instance_id=0,
    )
    wrapped.grad_stats_parallel_group = _grad_stats_group(model_chunks, pg_collection, is_expert=is_expert)
    wrapped.tp_group = pg_collection.tp
    wrapped.expert_tp_group = getattr(pg_collection, "expt_tp", pg_collection.tp)
    return wrapped


def _scalar(
    config: MuonOptimizerConfig,
    model_chunks: Sequence[Any],
    groups: list[dict[str, Any]],
    pg_collection: ProcessGroupCollection,
    *,
    is_expert: bool,
) -> MegatronOptimizer:
    """megatron-core's own optimizer for what Muon does not take, with state from the start."""
    scalar_config = copy.copy(config)
    scalar_config.optimizer = config.muon_scalar_optimizer
    wrapped = _get_megatron_optimizer_based_on_param_groups(
        config=scalar_config,
        model_chunks=list(model_chunks),
        param_groups=groups,
        intra_dist_opt_group=_grad_stats_group(model_chunks, pg_collection, is_expert=is_expert),
        pg_collection=pg_collection,
    )
    wrapped.config = config  # a chain's members share one config
    initialize_scalar_state(wrapped)
    step_over_empty_shards(wrapped.optimizer)
    return wrapped


def _grad_stats_group(
    model_chunks: Sequence[Any], pg_collection: ProcessGroupCollection, *, is_expert: bool
) -> dist.ProcessGroup:
    """The group over which gradient norms and zero counts add up.

    Shards add up over all ranks of the optimizer instance, and over all instances where these share them too. Under
    no_shard the data-parallel ranks hold the same gradients, so only model-parallel ranks add: for experts that
    includes the ranks with other experts.
    """
    ddp_config = model_chunks[0].ddp_config
    group: dist.ProcessGroup = pg_collection.intra_dist_opt
    if ddp_config.data_parallel_sharding_strategy == "no_shard":
        group = pg_collection.tp_ep_pp if is_expert else pg_collection.mp
    elif ddp_config.num_distributed_optimizer_instances > 1 and ddp_config.outer_dp_sharding_strategy != "no_shard":
        assert dist.group.WORLD is not None
        group = dist.group.WORLD  # 0.19's norm stays within the instance; pipeline stages there are none
    return group
