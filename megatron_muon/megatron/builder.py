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

from megatron_muon.core.adaptive import AdaMuon, NorMuon
from megatron_muon.core.blocks import RowSplit
from megatron_muon.core.exchange import AllGatherExchange, LocalExchange, OwnerExchange, SharedExchange
from megatron_muon.core.exchange.steps import Batch, Exchange
from megatron_muon.core.layout import BlockedLayout, Layout
from megatron_muon.core.neurons import NeuronMoments
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
        layout: who holds which rectangle of each.
        splits: how the rows of each make blocks.
        group: the ranks of the layout; with `over_tp` tensor-parallel ones too, over which matrices are whole.
        replicated: every rank holds whole matrices.
        rectangles: what this rank holds of each sharded matrix, see `parameters.local_rectangles`.
    """

    parameters: Sequence[torch.Tensor]
    group_of: Sequence[int]
    layout: Layout
    splits: Sequence[RowSplit]
    group: dist.ProcessGroup
    replicated: bool
    over_tp: bool
    rectangles: Mapping[torch.Tensor, tuple[int, int, int, int]]

    @property
    def device(self) -> torch.device:
        """Where the parameters lie."""
        return self.parameters[0].device

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """`(rows, cols)` of each whole matrix."""
        return [matrix.shape for matrix in self.layout.matrices]


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
            coefficient_type=config.muon_coefficient_type,
            num_steps=config.muon_num_ns_steps,
            scale_mode=config.muon_scale_mode,
            extra_scale_factor=config.muon_extra_scale_factor,
            matmul_precision=config.muon_fp32_matmul_prec,
            method=config.muon_ns,
            scaled=not adaptive,
            device=device,
        )
        kind, variant = self._variant(members, orthogonalizer) if adaptive else (ShardedMuon, {})
        store = None
        if self.offload is not None:
            rank, part = members.group.rank(), "experts" if is_expert else "dense"
            store = self.offload.make_store(members.layout, rank, members.group_of, kind=part, device=device)
        muon = kind(
            groups,
            self._exchange(members, orthogonalizer, variant.get("neurons"), group=group, device=device),
            decoupled_weight_decay=config.decoupled_weight_decay,
            **self._common,
            store=store,
            compute_device=device if device != members.device else None,
            **variant,
        )
        if config.muon_dump_layout is not None and dist.get_rank() == 0:
            blocked = BlockedLayout(members.layout, tuple(members.splits))
            dump_layout(config.muon_dump_layout, blocked, is_expert=is_expert)
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
            layout = mp.replicated_layout(parameters, self.names, group)
        else:
            rectangles = mp.local_rectangles(self.model_chunks)
            layout = mp.layout_of(parameters, self.names, rectangles, group, over_tp=over_tp)
        return Members(
            parameters=parameters,
            group_of=[number for number, member in enumerate(groups) for _ in member["params"]],
            layout=layout,
            splits=[mp.block_split(p, block_settings(self.config), over_tp=over_tp) for p in parameters],
            group=group,
            replicated=self._replicated,
            over_tp=over_tp,
            rectangles=rectangles,
        )

    def _variant(self, members: Members, orthogonalizer: Orthogonalizer) -> tuple[type[ShardedMuon], dict[str, Any]]:
        """The adaptive Muon that the config asks for, and its settings beside those of ShardedMuon."""
        config, layout, rank = self.config, members.layout, members.group.rank()
        scales = [
            orthogonalizer.row_scales(shape, split).to(members.device)
            for shape, split in zip(members.shapes, members.splits, strict=True)
        ]
        settings: dict[str, Any] = {"beta2": config.adaptive_muon_beta2, "eps": config.adaptive_muon_eps}
        if config.adaptive_muon_moment2_method == "normuon":
            columns = [(0, cols) for _, cols in members.shapes]
            if not members.replicated:
                held = [members.rectangles[parameter] for parameter in members.parameters]
                columns = [(start % cols, count) for (_, _, start, count), (_, cols) in zip(held, columns, strict=True)]
            repeated = not config.muon_share_replicated if members.replicated else config.muon_exchange == "allgather"
            settings["neurons"] = NeuronMoments(
                layout,
                [mp.experts_in(parameter) for parameter in members.parameters],
                members.group,
                scales,
                columns=columns,
                replicated=members.replicated,
                everywhere=repeated,
                device=members.device,
            )
            return NorMuon, {**settings, "over_tp": members.over_tp}
        shards = [matrix.shard_of(rank) for matrix in layout.matrices]
        scales = [
            factors[:0] if shard is None else factors[shard.row_start : shard.row_start + shard.rows]
            for factors, shard in zip(scales, shards, strict=True)
        ]
        return AdaMuon, {**settings, "scales": scales}

    def _exchange(
        self,
        members: Members,
        orthogonalizer: Orthogonalizer,
        neurons: NeuronMoments | None,
        *,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> Exchange:
        """What makes the matrices whole."""
        config, layout, shapes, splits = self.config, members.layout, members.shapes, members.splits

        def batches(indices: Sequence[int]) -> Batch:
            normalize = None if neurons is None else neurons.normalizer(indices)
            return orthogonalizer.batch([shapes[i] for i in indices], [splits[i] for i in indices], normalize)

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
        shapes, splits, rank = members.shapes, members.splits, members.group.rank()
        plan = make_plan(
            members.layout,
            [orthogonalizer.flops(shape, split) for shape, split in zip(shapes, splits, strict=True)],
            buffer_bytes=self._buffer_bytes,
            element_bytes=wire_dtype.itemsize,
        )
        if plan.oversized and rank == 0:
            largest = max(plan.oversized, key=lambda index: members.layout.matrices[index].numel)
            print(
                f"megatron-muon: {len(plan.oversized)} of {len(shapes)} matrices do not fit --muon-exchange-buffer-mb "
                f"{self.config.muon_exchange_buffer_mb:g}; waves are as large as "
                f"{members.layout.matrices[largest].name} needs, "
                f"{plan.buffer_bytes(wire_dtype.itemsize) / 2**20:,.0f} MiB on a rank",
                flush=True,
            )
        digest = plan.digest(splits)
        require_same_plan(digest, members.group, members.device)
        self.digests.append(digest)
        owned = [index for index, owner in enumerate(plan.owners) if owner == rank]
        blocks = (block for index in owned for block in splits[index].block_shapes(shapes[index][1]))
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
