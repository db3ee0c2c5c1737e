"""Builds the Muon of some parameter groups: which class, on which ranks, with which exchange and store.

`factory` selects the groups and reports; this module constructs. Where every rank holds whole matrices (`no_shard`)
the work is repeated, or shared with `--muon-share-replicated`; otherwise matrices are sharded and exchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_muon.core.layout import Layout, Matrix, everywhere
from megatron_muon.core.optimizer import ShardedMuon
from megatron_muon.core.orthogonalize import Orthogonalizer
from megatron_muon.core.plan import Plan
from megatron_muon.core.rules.rule import Held
from megatron_muon.fsdp.build import make_parts
from megatron_muon.fsdp.shards import layout_of
from megatron_muon.megatron.main_weights import MainWeights, keep_matrix_weights
from megatron_muon.megatron.model import parameters as mp
from megatron_muon.megatron.replicated_muon import ReplicatedMuon, give_blocks, has_blocks
from megatron_muon.megatron.settings import MuonOptimizerConfig
from megatron_muon.offload.run import OffloadRun
from megatron_muon.settings import iteration_of


def build_muon(
    groups: list[dict[str, Any]],
    config: MuonOptimizerConfig,
    ddp_config: Any,
    pg_collection: ProcessGroupCollection,
    names: Mapping[torch.Tensor, str],
    *,
    is_expert: bool,
    offload: OffloadRun | None,
    weights: MainWeights | None,
    scratch: torch.Tensor | None,
) -> tuple[torch.optim.Optimizer, dict[torch.Tensor, Matrix]]:
    """The Muon of `groups`, dense parameters or, over their own ranks, experts; and their matrices. Collective.

    `offload`, `weights` and `scratch` are as for `make_muon`.

    Adaptive Muon is this package's own everywhere: TensorParallelAdaptiveMuon of megatron-core 0.19 ends its first
    step in an AttributeError with emerging-optimizers 0.3, which has moved the scale behind the second moment. So is
    MuonHyperball, which megatron-core does not have.
    """
    parameters = [parameter for member in groups for parameter in member["params"]]
    # Either every rank holds whole matrices, or `over_tp` they are whole over tensor-parallel ranks too.
    is_replicated = ddp_config.data_parallel_sharding_strategy == "no_shard"
    over_tp = not is_replicated and config.muon_tp_mode != "blockwise"
    matrices = {p: mp.matrix_of(names[p], p, config, over_tp=over_tp) for p in parameters}
    own = config.muon_share_replicated or config.optimizer == "adaptive_muon" or config.muon_hyperball
    if is_replicated and not own:
        return _plain(groups, config, pg_collection, names, matrices), matrices
    group: dist.ProcessGroup = pg_collection.expt_dp if is_expert else pg_collection.dp_cp
    columns = None
    if is_replicated:
        ranks = group.size()
        cut = (replace(each, shards=everywhere(each.shape, ranks)) for each in matrices.values())
        layout = Layout(ranks, tuple(cut))
    else:
        if over_tp:
            group = mp.matrix_group(group, pg_collection.expt_tp if is_expert else pg_collection.tp)
        layout, mine = layout_of(matrices, group, remedy="start all ranks with the same flags and software")
        columns = [(start, count) for _, _, start, count in mine]
    device = parameters[0].device
    held = Held(
        layout,
        group,
        device,
        experts=[mp.experts_in(parameter) for parameter in parameters],
        columns=columns,
        replicated=is_replicated,
        over_tp=over_tp,
    )
    elsewhere: dict[str, Any] = {}
    if device.type != "cpu" and config.muon_ns_device == "cpu":
        elsewhere = {"device": torch.device("cpu"), "group": mp.over_gloo(group)}
    muon = make_muon(groups, held, config, names, offload=offload, weights=weights, scratch=scratch, **elsewhere)
    return muon, matrices


def make_muon(
    groups: list[dict[str, Any]],
    held: Held,
    config: MuonOptimizerConfig,
    names: Mapping[torch.Tensor, str],
    *,
    offload: OffloadRun | None,
    weights: MainWeights | None = None,
    plan: Plan | None = None,
    scratch: torch.Tensor | None = None,
    device: torch.device | None = None,
    group: dist.ProcessGroup | None = None,
) -> ShardedMuon:
    """The Muon of parameters whose layout is known. Collective.

    `groups` are in the order of the layout. `weights` has the main weights, which `offload` keeps too. `device` and
    `group`, of the same ranks, say where momentum and iteration compute, if elsewhere than the weights; all else is as
    for `make_parts`.
    """
    adaptive = config.optimizer == "adaptive_muon"
    orthogonalizer = Orthogonalizer(
        iteration_of(config),
        scale_mode=config.muon_scale_mode,
        extra_scale_factor=config.muon_extra_scale_factor,
        scaled=not adaptive,
        device=device or held.device,
    )
    exchange, rules, store = make_parts(
        held,
        config,
        orthogonalizer,
        moment2=config.adaptive_muon_moment2_method if adaptive else None,
        nesterov=config.muon_nesterov,
        decoupled=config.decoupled_weight_decay,
        offload=offload,
        group=group,
        plan=plan,
        scratch=scratch,
    )
    outside = None
    if weights is not None and offload is not None and store is not None:
        parameters = [parameter for member in groups for parameter in member["params"]]
        outside = keep_matrix_weights(weights, offload, parameters, store)
    defaults = {"lr": config.lr, "momentum": config.muon_momentum, "weight_decay": config.weight_decay}
    return ShardedMuon(groups, exchange, rules, defaults=defaults, names=names, store=store, weights=outside)


def _plain(
    groups: list[dict[str, Any]],
    config: MuonOptimizerConfig,
    pg_collection: ProcessGroupCollection,
    names: Mapping[torch.Tensor, str],
    matrices: Mapping[torch.Tensor, Matrix],
) -> ReplicatedMuon:
    """Plain Muon: every rank orthogonalises all matrices, by megatron-core's own class."""
    for parameter, matrix in matrices.items():
        give_blocks(parameter, matrix.split)
    muon = ReplicatedMuon(
        groups,
        names=names,
        lr=config.lr,
        momentum=config.muon_momentum,
        nesterov=config.muon_nesterov,
        weight_decay=config.weight_decay,
        use_decoupled_weight_decay=config.decoupled_weight_decay,
        cautious=config.muon_cautious_weight_decay,
        split_qkv=True,
        is_qkv_fn=has_blocks,
        fp32_matmul_prec=config.muon_fp32_matmul_prec,
        coefficient_type=config.muon_coefficient_type,
        num_ns_steps=config.muon_num_ns_steps,
        scale_mode=config.muon_scale_mode,
        extra_scale_factor=config.muon_extra_scale_factor,
        pg_collection=pg_collection,
        tp_mode=config.muon_tp_mode,
    )
    muon.initialize_state()
    return muon
