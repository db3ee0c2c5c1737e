"""Builds the Muon of some parameter groups: which class, on which ranks, with which exchange and store.

`factory` selects the groups and reports; this module constructs. Where every rank holds whole matrices (`no_shard`)
the work is repeated, or shared with `--muon-share-replicated`; otherwise matrices are sharded and exchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_muon.core.assignment import Unmet
from megatron_muon.core.exchange import OWNER
from megatron_muon.core.layout import Layout, replicated
from megatron_muon.core.optimizer import ShardedMuon
from megatron_muon.core.orthogonalize import Orthogonalizer
from megatron_muon.core.plan import Plan
from megatron_muon.core.rules.rule import Held
from megatron_muon.fsdp.build import make_parts
from megatron_muon.megatron.layout_file import dump_layout
from megatron_muon.megatron.main_weights import MainWeights, keep_matrix_weights
from megatron_muon.megatron.model import parameters as mp
from megatron_muon.megatron.replicated_muon import ReplicatedMuon, give_blocks, has_blocks
from megatron_muon.megatron.settings import MuonOptimizerConfig
from megatron_muon.offload.run import OffloadRun
from megatron_muon.settings import iteration_of


@dataclass
class MuonBuilder:
    """Builds the Muon of `groups`, which are dense parameters or, over their own ranks, experts."""

    groups: list[dict[str, Any]]
    config: MuonOptimizerConfig
    model_chunks: Sequence[Any]
    pg_collection: ProcessGroupCollection
    names: Mapping[torch.Tensor, str]
    is_expert: bool
    plan: Plan | None = None  # once there is one, or made before
    unmet: Mapping[str, Unmet] | None = None  # settings that the ranks cannot have, of the owner scheme
    scratch: torch.Tensor | None = None  # buffers of another Muon, which steps before or after this one

    def __post_init__(self) -> None:
        config = self.config
        self.parameters = [parameter for member in self.groups for parameter in member["params"]]
        # Either every rank holds whole matrices, or `over_tp` they are whole over tensor-parallel ranks too.
        self.is_replicated = self.model_chunks[0].ddp_config.data_parallel_sharding_strategy == "no_shard"
        self.over_tp = not self.is_replicated and config.muon_tp_mode != "blockwise"
        self.splits = [mp.block_split(parameter, config, over_tp=self.over_tp) for parameter in self.parameters]
        pgs = self.pg_collection
        self.group: dist.ProcessGroup = pgs.expt_dp if self.is_expert else pgs.dp_cp

    def build(self, offload: OffloadRun | None, weights: MainWeights | None = None) -> torch.optim.Optimizer:
        """The Muon, whose momentum `offload` keeps elsewhere or in another format than fp32. Collective.

        With `weights`, which has the main weights, `offload` keeps these too.

        Adaptive Muon is this package's own everywhere: TensorParallelAdaptiveMuon of megatron-core 0.19 ends its first
        step in an AttributeError with emerging-optimizers 0.3, which has moved the scale behind the second moment. So
        is MuonHyperball, which megatron-core does not have.
        """
        config = self.config
        adaptive = config.optimizer == "adaptive_muon"
        if self.is_replicated and not (config.muon_share_replicated or adaptive or config.muon_hyperball):
            return self._plain()
        self._locate()
        orthogonalizer = Orthogonalizer(
            iteration_of(config),
            scale_mode=config.muon_scale_mode,
            extra_scale_factor=config.muon_extra_scale_factor,
            scaled=not adaptive,
            device=self.device,
        )
        held = Held(
            self.layout,
            self.group,
            self.parameters[0].device,
            experts=[mp.experts_in(parameter) for parameter in self.parameters],
            columns=None if self.is_replicated else [(start, count) for _, _, start, count in self.rectangles],
            replicated=self.is_replicated,
            over_tp=self.over_tp,
        )
        parts = make_parts(
            held,
            config,
            orthogonalizer,
            moment2=config.adaptive_muon_moment2_method if adaptive else None,
            nesterov=config.muon_nesterov,
            decoupled=config.decoupled_weight_decay,
            offload=offload,
            group=self.compute_group,
            plan=self.plan,
            scratch=self.scratch,
        )
        self.plan = parts.exchange.plan
        if parts.exchange.scheme == OWNER:
            self.unmet = parts.exchange.unmet
        outside = None
        if weights is not None and offload is not None and parts.store is not None:
            outside = keep_matrix_weights(weights, offload, self.parameters, parts.store)
        defaults = {"lr": config.lr, "momentum": config.muon_momentum, "weight_decay": config.weight_decay}
        muon = ShardedMuon(
            self.groups, parts.exchange, parts.rules,
            defaults=defaults, names=self.names, store=parts.store, weights=outside,
        )  # fmt: skip
        if config.muon_dump_layout is not None and dist.get_rank() == 0:
            ranks = dist.get_process_group_ranks(self.group)
            dump_layout(config.muon_dump_layout, self.layout, ranks, is_expert=self.is_expert)
        return muon

    def _plain(self) -> ReplicatedMuon:
        """Plain Muon: every rank orthogonalises all matrices, by megatron-core's own class."""
        config = self.config
        for parameter, split in zip(self.parameters, self.splits, strict=True):
            give_blocks(parameter, split)
        muon = ReplicatedMuon(
            self.groups,
            names=self.names,
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
            pg_collection=self.pg_collection,
            tp_mode=config.muon_tp_mode,
        )
        muon.initialize_state()
        return muon

    def _locate(self) -> None:
        """Settle who holds which part of the matrices, and where momentum and the iteration compute. Collective."""
        self.device = self.parameters[0].device
        if self.over_tp:
            tensor_parallel = self.pg_collection.expt_tp if self.is_expert else self.pg_collection.tp
            self.group = mp.matrix_group(self.group, tensor_parallel)
        if self.is_replicated:
            ranks = self.group.size()
            matrices = (
                replicated(self.names[p], mp.matrix_shape(p, over_tp=False), ranks, split, mp.ns_steps(p))
                for p, split in zip(self.parameters, self.splits, strict=True)
            )
            self.layout = Layout(ranks, tuple(matrices))
        else:
            self.layout, self.rectangles = mp.layout_of(
                self.parameters, self.names, self.model_chunks, self.splits, self.group, over_tp=self.over_tp
            )
        self.compute_group = self.group
        if self.device.type != "cpu" and self.config.muon_ns_device == "cpu":
            self.device, self.compute_group = torch.device("cpu"), mp.over_gloo(self.group)
