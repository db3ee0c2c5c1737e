"""Builds the Muon of some parameter groups: its class, ranks, exchange and store.

`factory` selects the groups and reports; this module constructs. Where every rank holds whole
matrices (`no_shard`) the work is repeated, or shared with `--muon-share-replicated`; otherwise
matrices are sharded and exchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_muon.core.layout import Layout, Matrix, everywhere
from megatron_muon.core.optimizer import MOMENTUM, ShardedMuon
from megatron_muon.core.orthogonalize import Orthogonalizer, largest_magnitude, unit_factor
from megatron_muon.core.plan import Plan
from megatron_muon.core.probe import SILENT, Probe
from megatron_muon.core.rows import local_rows, sharded_like
from megatron_muon.core.rules.plain import aligned
from megatron_muon.core.rules.rule import Held
from megatron_muon.fsdp.assembly import make_parts
from megatron_muon.fsdp.cuts import layout_of
from megatron_muon.megatron.main_weights import MainWeights
from megatron_muon.megatron.model import matrices as mp
from megatron_muon.megatron.muon_config import MuonOptimizerConfig
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
    """The Muon of `groups`, all dense or all experts, and their matrices. Collective.

    `offload`, `weights` and `scratch` are as for `make_muon`.

    Adaptive Muon is this package's own everywhere: TensorParallelAdaptiveMuon of megatron-core 0.19
    ends its first step in an AttributeError with emerging-optimizers 0.3, which has moved the scale
    behind the second moment. So is MuonHyperball, which megatron-core does not have.
    """
    parameters = [parameter for member in groups for parameter in member["params"]]
    # Matrices are whole on every rank, or whole over data-parallel, or also tensor-parallel ranks.
    is_replicated = ddp_config.data_parallel_sharding_strategy == "no_shard"
    over_tp = not is_replicated and config.muon_tp_mode != "blockwise"
    matrices = {p: mp.matrix_of(names[p], p, config, over_tp=over_tp) for p in parameters}
    is_ours = config.optimizer == "adaptive_muon" or config.muon_hyperball
    if is_replicated and not (config.muon_share_replicated or is_ours):
        return ReplicatedMuon(groups, config, pg_collection, names, matrices), matrices
    group: dist.ProcessGroup = pg_collection.expt_dp if is_expert else pg_collection.dp_cp
    mine = None
    if is_replicated:
        ranks = group.size()
        whole = [replace(m, shards=everywhere(m.shape, ranks)) for m in matrices.values()]
        layout = Layout(ranks, tuple(whole))
    else:
        if over_tp:
            group = mp.matrix_group(group, pg_collection.expt_tp if is_expert else pg_collection.tp)
        layout, mine = layout_of(
            {p: [one] for p, one in matrices.items()},
            group,
            remedy="start all ranks with the same flags and software",
        )
    device = parameters[0].device
    held = Held(
        layout,
        group,
        device,
        experts=[mp.experts_in(parameter) for parameter in parameters],
        rectangles=mine,
        replicated=is_replicated,
        over_tp=over_tp,
    )
    elsewhere: dict[str, Any] = {}
    if device.type != "cpu" and config.muon_ns_device == "cpu":
        elsewhere = {"device": torch.device("cpu"), "group": mp.over_gloo(group)}
    muon = make_muon(
        groups, held, config, names, offload=offload, weights=weights, scratch=scratch, **elsewhere
    )
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

    `groups` are in the order of the layout. `weights` has the main weights, which `offload` keeps
    too. `device` and `group`, of the same ranks, are for momentum and iteration, if they compute
    elsewhere than the weights; the rest is as for `make_parts`.
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
        outside = weights.keep_beside(store, offload, parameters)
    return ShardedMuon(
        groups,
        exchange,
        rules,
        defaults={
            "lr": config.lr,
            "momentum": config.muon_momentum,
            "weight_decay": config.weight_decay,
        },
        names=names,
        store=store,
        weights=outside,
    )


class ReplicatedMuon(TensorParallelMuon):
    """megatron-core's TensorParallelMuon on `no_shard`'s replicated DTensors, to the last bit.

    Every rank orthogonalizes all matrices. One whose update is not finite keeps its weights.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        config: MuonOptimizerConfig,
        pg_collection: ProcessGroupCollection,
        names: Mapping[torch.Tensor, str],
        matrices: Mapping[torch.Tensor, Matrix],
    ) -> None:
        for parameter, matrix in matrices.items():
            # TensorParallelMuon splits rows into repetitions of these parts, as a RowSplit does.
            parameter.qkv_split_shapes = list(matrix.split.parts)  # type: ignore[attr-defined]
        super().__init__(
            groups,
            lr=config.lr,
            momentum=config.muon_momentum,
            nesterov=config.muon_nesterov,
            weight_decay=config.weight_decay,
            use_decoupled_weight_decay=config.decoupled_weight_decay,
            split_qkv=True,
            is_qkv_fn=lambda parameter: len(parameter.qkv_split_shapes) > 1,
            fp32_matmul_prec=config.muon_fp32_matmul_prec,
            coefficient_type=config.muon_coefficient_type,
            num_ns_steps=config.muon_num_ns_steps,
            scale_mode=config.muon_scale_mode,
            extra_scale_factor=config.muon_extra_scale_factor,
            pg_collection=pg_collection,
            tp_mode=config.muon_tp_mode,
        )
        self._names = names
        self._cautious = config.muon_cautious_weight_decay
        self.probe: Probe = SILENT
        self._finite = torch.tensor(True)
        self._decay = 0.0
        self._skipped: dict[torch.Tensor, torch.Tensor] = {}
        self.initialize_state()

    def skipped_updates(self) -> dict[str, int]:
        """As `ShardedMuon.skipped_updates`."""
        counts = {self._names[parameter]: int(count) for parameter, count in self._skipped.items()}
        self._skipped.clear()
        return {name: count for name, count in counts.items() if count}

    def _apply_weight_decay_inplace(
        self, p: torch.Tensor, grad: torch.Tensor, lr: float, weight_decay: float
    ) -> None:
        """Leave decoupled decay to `pre_weight_update_fn_inplace`, where the update is known."""
        if self.weight_decay_method == "decoupled":
            self._decay = -weight_decay * lr
        else:
            super()._apply_weight_decay_inplace(p, grad, lr, weight_decay)

    def pre_weight_update_fn_inplace(self, p: torch.Tensor, update: torch.Tensor) -> None:
        """Decay the weights where the update is finite, and count where it is not."""
        rows = local_rows(p)
        if self._decay:
            decays = self._finite
            if self._cautious:
                decays = decays & aligned(rows, local_rows(update))
            rows.add_(torch.where(decays, rows, 0.0), alpha=self._decay)
        skipped = (~self._finite).int()
        self._skipped[p] = self._skipped[p] + skipped if p in self._skipped else skipped

    def initialize_state(self) -> None:
        """Give every parameter its momentum of zeros, also those that never get a gradient."""
        for group in self.param_groups:
            self._init_group(group, skip_non_grad_params=False)

    def orthogonalize(self, p: torch.Tensor, grad: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """The scaled update of `grad`, `(rows, cols)` or a stack of experts, sharded like it."""
        with self.probe.phase("orthogonalize"):
            update = self._orthogonalize_rows(p, local_rows(grad), **kwargs)
        self.probe.updates([0], [update], self.replicas)
        self.probe.momentum([0], [local_rows(self.state[p][MOMENTUM])], self.replicas)
        return sharded_like(grad, update)

    def _orthogonalize_rows(
        self, p: torch.Tensor, rows: torch.Tensor, /, **kwargs: Any
    ) -> torch.Tensor:
        """The scaled update, zero where it is not finite."""
        largest = largest_magnitude(rows)
        if self.tp_mode != "blockwise" and getattr(p, "tensor_model_parallel", False):
            is_expert = getattr(p, "expert_tp", False)
            group = self.pg_collection.expt_tp if is_expert else self.pg_collection.tp
            if group.size() > 1:
                dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        update = super().orthogonalize(p, rows * unit_factor(largest), **kwargs)
        self._finite = update.sum().isfinite()
        return torch.where(self._finite, update, 0.0)

    def replicas(self, index: int) -> int:
        """The number of ranks that hold these matrices."""
        parameter = next(p for group in self.param_groups for p in group["params"])
        is_expert = getattr(parameter, "expert_tp", False)
        group = self.pg_collection.expt_dp if is_expert else self.pg_collection.dp_cp
        return int(group.size())
