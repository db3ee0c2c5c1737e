"""Builds the Muon of some parameter groups: its class, ranks, exchange and store.

`factory` selects the groups and reports; this module constructs. Where every rank holds whole
matrices (`no_shard`) the work is repeated, or shared with `--muon-share-replicated`; otherwise
matrices are sharded and exchanged.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from megatron_muon.core.layout import replicated_layout
from megatron_muon.core.methods.method import Method
from megatron_muon.core.methods.newton_schulz import NewtonSchulz
from megatron_muon.core.methods.owner import OwnerMethod
from megatron_muon.core.methods.rehearsal import approve
from megatron_muon.core.passes import COUPLED, DECOUPLED, largest_magnitude, unit_factor
from megatron_muon.core.probe import SILENT, Probe
from megatron_muon.core.rows import MOMENTUM
from megatron_muon.core.rules.cautious import aligned
from megatron_muon.core.rules.held import Held
from megatron_muon.fsdp.assembly import Beside, Variant, make_part
from megatron_muon.fsdp.part import ViewedParameter, view_parameters
from megatron_muon.matrices.cuts import layout_of
from megatron_muon.matrices.views import Matrices
from megatron_muon.megatron.flags.named_optimizer import is_class
from megatron_muon.megatron.matrix_optimizer import candidate_of
from megatron_muon.megatron.model import matrices as mp
from megatron_muon.megatron.muon_config import MuonOptimizerConfig
from megatron_muon.megatron.sharded_muon import ShardedMuon
from megatron_muon.megatron.upstream import ProcessGroupCollection, TensorParallelMuon
from megatron_muon.settings import iteration_of
from megatron_muon.shards import local_part, sharded_like

_HOST = torch.device("cpu")


def build_muon(
    groups: list[dict[str, Any]],
    config: MuonOptimizerConfig,
    ddp_config: Any,
    pg_collection: ProcessGroupCollection,
    names: Mapping[torch.Tensor, str],
    beside: Beside,
    *,
    is_expert: bool,
) -> tuple[torch.optim.Optimizer, dict[torch.Tensor, Matrices]]:
    """The Muon of `groups`, all dense or all experts, and their matrices. Collective.

    Adaptive Muon is this package's own everywhere: TensorParallelAdaptiveMuon of megatron-core 0.19
    ends its first step in an AttributeError with emerging-optimizers 0.3, which has moved the scale
    behind the second moment. So is MuonHyperball, which megatron-core does not have.
    """
    parameters = [parameter for member in groups for parameter in member["params"]]
    # Matrices are whole on every rank, or whole over data-parallel, or also tensor-parallel ranks.
    is_replicated = ddp_config.data_parallel_sharding_strategy == "no_shard"
    over_tp = not is_replicated and config.muon_tp_mode != "blockwise"
    matrices = {p: mp.matrices_of(names[p], p, config, over_tp=over_tp) for p in parameters}
    is_ours = config.optimizer != "muon" or config.muon_hyperball
    if is_replicated and not (config.muon_share_replicated or is_ours):
        return ReplicatedMuon(groups, config, pg_collection, names, matrices), matrices
    group: dist.ProcessGroup = pg_collection.expt_dp if is_expert else pg_collection.dp_cp
    if is_replicated:
        layout, mine = replicated_layout(itertools.chain(*matrices.values()), group.size())
    else:
        if over_tp:
            group = mp.matrix_group(group, pg_collection.expt_tp if is_expert else pg_collection.tp)
        remedy = "start all ranks with the same flags and software"
        layout, mine = layout_of(matrices, group, remedy=remedy)
    device = parameters[0].device
    held = Held(layout, group, device, mine, replicated=is_replicated, over_tp=over_tp)
    if device.type != "cpu" and config.muon_ns_device == "cpu":
        device = torch.device("cpu")
        beside = replace(beside, group=mp.over_gloo(group))
    viewed = view_parameters(matrices, mine)
    return make_muon(groups, viewed, held, config, beside, device), matrices


def make_muon(
    groups: list[dict[str, Any]],
    viewed: Sequence[ViewedParameter],
    held: Held,
    config: MuonOptimizerConfig,
    beside: Beside,
    device: torch.device,
) -> ShardedMuon:
    """The Muon of parameters whose layout is known. Collective.

    `groups` are in the order of the layout; momentum and iteration are on `device`.
    """
    adaptive = config.optimizer == "adaptive_muon"
    method = method_of(config, device)
    variant = Variant(
        config.adaptive_muon_moment2_method if adaptive else None,
        nesterov=config.muon_nesterov,
        decay=DECOUPLED if config.decoupled_weight_decay else COUPLED,
    )
    part = make_part(viewed, held, config, method, variant, beside)
    defaults = {"lr": config.lr, "weight_decay": config.weight_decay}
    if part.has_momentum:
        defaults["momentum"] = config.muon_momentum
    return ShardedMuon(groups, part, defaults)


def method_of(config: MuonOptimizerConfig, device: torch.device = _HOST) -> Method:
    """The computation on whole blocks: Newton-Schulz, or a class that the config names.

    Raises:
        SettingError: the class cannot be used.
    """
    if is_class(config.optimizer):
        on_host = config.muon_offload == "cpu"
        return OwnerMethod(approve(candidate_of(config)), device, keeps_on_host=on_host)
    return NewtonSchulz(
        iteration_of(config),
        scale_mode=config.muon_scale_mode,
        extra_scale_factor=config.muon_extra_scale_factor,
        scaled=config.optimizer != "adaptive_muon",
        device=device,
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
        matrices: Mapping[torch.Tensor, Matrices],
    ) -> None:
        for parameter, several in matrices.items():
            # TensorParallelMuon splits rows into repetitions of these parts, as a RowSplit does.
            parts = [part for matrix in several for part in matrix.split.parts]
            parameter.qkv_split_shapes = parts  # type: ignore[attr-defined]
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

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        parameter: torch.Tensor = self.param_groups[0]["params"][0]
        return parameter.device

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
        rows = local_part(p)
        if self._decay:
            decays = self._finite
            if self._cautious:
                decays = decays & aligned(rows, local_part(update))
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
            update = self._orthogonalize_rows(p, local_part(grad).flatten(0, -2), **kwargs)
        self.probe.updates([0], [update], self.replicas)
        self.probe.momentum([0], [local_part(self.state[p][MOMENTUM])], self.replicas)
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
