"""Builds the Muon of some parameter groups: which class, on which ranks, with which exchange and store.

`factory` selects the groups and reports; this module constructs. Where every rank holds whole matrices (`no_shard`)
the work is repeated, or shared with `--muon-share-replicated`; otherwise matrices are sharded and exchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_muon.core.adaptive import SECOND_MOMENTS, Holding, SecondMoment
from megatron_muon.core.cost import Iteration
from megatron_muon.core.exchange import AllGatherExchange, LocalExchange, OwnerExchange, SharedExchange
from megatron_muon.core.exchange.steps import Batch, Exchange
from megatron_muon.core.layout import Layout
from megatron_muon.core.optimizer import ShardedMuon
from megatron_muon.core.orthogonalize import Orthogonalizer
from megatron_muon.core.plan import DIGEST_LENGTH, Plan, make_plan
from megatron_muon.megatron.layout_file import dump_layout
from megatron_muon.megatron.model import parameters as mp
from megatron_muon.megatron.replicated_muon import ReplicatedMuon, give_blocks, has_blocks
from megatron_muon.megatron.settings import MuonOptimizerConfig, block_settings
from megatron_muon.offload.run import OffloadRun


@dataclass(frozen=True)
class Members:
    """The matrices of one Muon and the ranks that hold them.

    Attributes:
        parameters: in the order of their groups.
        group_of: the number of each parameter's group.
        layout: who holds which rectangle of each, and its blocks.
        group: the ranks of the layout; with `over_tp` tensor-parallel ones too, over which matrices are whole.
        replicated: every rank holds whole matrices.
        rectangles: what this rank holds of each sharded matrix, see `parameters.local_rectangles`.
    """

    parameters: Sequence[torch.Tensor]
    group_of: Sequence[int]
    layout: Layout
    group: dist.ProcessGroup
    replicated: bool
    over_tp: bool
    rectangles: Mapping[torch.Tensor, tuple[int, int, int, int]]

    @property
    def device(self) -> torch.device:
        """Where the parameters lie."""
        return self.parameters[0].device


@dataclass
class MuonBuilder:
    """Builds the Muons of a model.

    Attributes:
        offload: keeps momentum elsewhere, or in another format, than as fp32 on the device.
        digests: of the plans that were made, dense parameters first.
    """

    config: MuonOptimizerConfig
    model_chunks: Sequence[Any]
    pg_collection: ProcessGroupCollection
    names: Mapping[torch.Tensor, str]
    offload: OffloadRun | None
    digests: list[str] = field(default_factory=list)

    def build(self, groups: list[dict[str, Any]], *, is_expert: bool) -> torch.optim.Optimizer:
        """The Muon of `groups`, which are dense parameters or experts. Collective.

        Adaptive Muon is this package's own everywhere: TensorParallelAdaptiveMuon of megatron-core 0.19 ends its first
        step in an AttributeError with emerging-optimizers 0.3, which has moved the scale behind the second moment.
        """
        config = self.config
        adaptive = config.optimizer == "adaptive_muon"
        if self._replicated and not config.muon_share_replicated and not adaptive:
            return self._plain(groups)
        members = self._members(groups, is_expert=is_expert)
        device, group = members.device, members.group
        if device.type != "cpu" and config.muon_ns_device == "cpu":  # momentum and iteration compute on the host
            device, group = torch.device("cpu"), mp.over_gloo(group)
        orthogonalizer = Orthogonalizer(
            Iteration(
                config.muon_coefficient_type, config.muon_num_ns_steps, config.muon_fp32_matmul_prec, config.muon_ns
            ),
            scale_mode=config.muon_scale_mode,
            extra_scale_factor=config.muon_extra_scale_factor,
            scaled=not adaptive,
            device=device,
        )
        moment = self._second_moment(members, orthogonalizer) if adaptive else None
        store = None
        if self.offload is not None:
            rank, part = members.group.rank(), "experts" if is_expert else "dense"
            store = self.offload.make_store(members.layout, rank, members.group_of, kind=part, device=device)
        muon = ShardedMuon(
            groups,
            self._exchange(members, orthogonalizer, moment, group=group, device=device),
            decoupled_weight_decay=config.decoupled_weight_decay,
            **self._common,
            moment=moment,
            store=store,
            compute_device=device if device != members.device else None,
        )
        if config.muon_dump_layout is not None and dist.get_rank() == 0:
            dump_layout(config.muon_dump_layout, members.layout, is_expert=is_expert)
        return muon

    @property
    def _common(self) -> dict[str, Any]:
        """What every Muon is given."""
        config = self.config
        return {
            "lr": config.lr,
            "momentum": config.muon_momentum,
            "nesterov": config.muon_nesterov,
            "weight_decay": config.weight_decay,
            "names": self.names,
        }

    @property
    def _replicated(self) -> bool:
        strategy: str = self.model_chunks[0].ddp_config.data_parallel_sharding_strategy
        return strategy == "no_shard"

    def _members(self, groups: list[dict[str, Any]], *, is_expert: bool) -> Members:
        """The matrices of `groups`: dense ones over the dp_cp group, experts over expt_dp. Collective."""
        parameters = [parameter for member in groups for parameter in member["params"]]
        group = self.pg_collection.expt_dp if is_expert else self.pg_collection.dp_cp
        over_tp = not self._replicated and self.config.muon_tp_mode != "blockwise"
        if over_tp:
            group = mp.matrix_group(group, self.pg_collection.expt_tp if is_expert else self.pg_collection.tp)
        rectangles: dict[torch.Tensor, tuple[int, int, int, int]] = {}
        if self._replicated:
            layout = mp.replicated_layout(parameters, self.names, group, block_settings(self.config))
        else:
            rectangles = mp.local_rectangles(self.model_chunks)
            blocks = block_settings(self.config)
            layout = mp.layout_of(parameters, self.names, rectangles, group, blocks, over_tp=over_tp)
        return Members(
            parameters=parameters,
            group_of=[number for number, member in enumerate(groups) for _ in member["params"]],
            layout=layout,
            group=group,
            replicated=self._replicated,
            over_tp=over_tp,
            rectangles=rectangles,
        )

    def _second_moment(self, members: Members, orthogonalizer: Orthogonalizer) -> SecondMoment:
        """What the adaptive Muon that the config asks for adds."""
        config, matrices = self.config, members.layout.matrices
        columns = [(0, matrix.shape[1]) for matrix in matrices]
        if not members.replicated:
            held = [members.rectangles[parameter] for parameter in members.parameters]
            columns = [(start % cols, count) for (_, _, start, count), (_, cols) in zip(held, columns, strict=True)]
        repeated = not config.muon_share_replicated if members.replicated else config.muon_exchange == "allgather"
        holding = Holding(
            members.layout,
            members.group,
            scales=[orthogonalizer.row_scales(matrix).to(members.device) for matrix in matrices],
            experts=[mp.experts_in(parameter) for parameter in members.parameters],
            columns=columns,
            replicated=members.replicated,
            repeated=repeated,
            over_tp=members.over_tp,
        )
        kind = SECOND_MOMENTS[config.adaptive_muon_moment2_method]
        return kind(holding, beta2=config.adaptive_muon_beta2, eps=config.adaptive_muon_eps)

    def _exchange(
        self,
        members: Members,
        orthogonalizer: Orthogonalizer,
        moment: SecondMoment | None,
        *,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> Exchange:
        """What makes the matrices whole."""
        config, layout = self.config, members.layout

        def batches(indices: Sequence[int]) -> Batch:
            normalize = None if moment is None else moment.normalizer(indices)
            return orthogonalizer.batch([layout.matrices[i] for i in indices], normalize)

        if members.replicated and not config.muon_share_replicated:
            return LocalExchange(layout, group, batches, buffer_bytes=self._buffer_bytes, device=device)
        if config.muon_exchange == "allgather" and not members.replicated:
            return AllGatherExchange(layout, group, batches, device=device)
        auto = orthogonalizer.dtype if config.muon_exchange_dtype == "auto" else None
        wire_dtype = auto or (torch.bfloat16 if config.muon_exchange_dtype == "bf16" else torch.float32)
        plan = self._plan(members, orthogonalizer, wire_dtype)
        kind = SharedExchange if members.replicated else OwnerExchange
        return kind(plan, group, batches, wire_dtype=wire_dtype, device=device)

    @property
    def _buffer_bytes(self) -> int:
        return int(self.config.muon_exchange_buffer_mb * 2**20)

    def _plan(self, members: Members, orthogonalizer: Orthogonalizer, wire_dtype: torch.dtype) -> Plan:
        """Owners and waves, the same on every rank; the symmetric kernel is tuned for this rank's blocks."""
        matrices, rank = members.layout.matrices, members.group.rank()
        plan = make_plan(
            members.layout,
            [orthogonalizer.flops(matrix) for matrix in matrices],
            buffer_bytes=self._buffer_bytes,
            element_bytes=wire_dtype.itemsize,
        )
        if plan.oversized and rank == 0:
            largest = max((matrices[index] for index in plan.oversized), key=lambda matrix: matrix.numel)
            print(
                f"megatron-muon: {len(plan.oversized)} of {len(matrices)} matrices do not fit "
                f"--muon-exchange-buffer-mb {self.config.muon_exchange_buffer_mb:g}; waves are as large as "
                f"{largest.name} needs, {plan.buffer_bytes(wire_dtype.itemsize) / 2**20:,.0f} MiB on a rank",
                flush=True,
            )
        digest = plan.digest()
        require_same_plan(digest, members.group, members.device)
        self.digests.append(digest)
        owned = (matrix for matrix, owner in zip(matrices, plan.owners, strict=True) if owner == rank)
        blocks = (block for matrix in owned for block in matrix.blocks)
        if (kinds := orthogonalizer.warm_up(blocks)) and rank == 0:
            print(f"megatron-muon: the symmetric kernel is tuned for {kinds} sizes of blocks", flush=True)
        return plan

    def _plain(self, groups: list[dict[str, Any]]) -> ReplicatedMuon:
        """Plain Muon: every rank orthogonalises all matrices, by megatron-core's own class."""
        config = self.config
        for parameter in (parameter for member in groups for parameter in member["params"]):
            give_blocks(parameter, mp.block_split(parameter, block_settings(config), over_tp=False))
        muon = ReplicatedMuon(
            groups,
            **self._common,
            use_decoupled_weight_decay=config.decoupled_weight_decay,
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


def require_same_plan(digest: str, group: dist.ProcessGroup, device: torch.device) -> None:
    """Raise a RuntimeError on ranks of a group that have made different plans, before they exchange. Collective."""
    mine = torch.tensor([int(digest, 16)], dtype=torch.int64, device=device)
    everyone = mine.new_empty(group.size())
    dist.all_gather_into_tensor(everyone, mine, group=group)
    found = [f"{value:0{DIGEST_LENGTH}x}" for value in everyone.tolist()]
    other = next((rank for rank, value in enumerate(found) if value != found[0]), None)
    if other is not None:
        raise RuntimeError(
            f"rank 0 of the group has plan {found[0]} and rank {other} has {found[other]}: they would wait for each "
            "other; start all ranks with the same flags, software and devices"
        )
