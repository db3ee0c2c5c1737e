"""The settings of Muon under Megatron-FSDP, and what they do not combine with.

A run fills them from its flags, a script of one's own by name. What can be seen before torch.distributed starts is
checked on the command line too (`flags.arguments`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.optimizer.optimizer_config import OptimizerConfig

from megatron_muon.core.cost import check_proven
from megatron_muon.core.numbers import check_numbers
from megatron_muon.errors import UserError
from megatron_muon.megatron.flags.fields import MuonSettings
from megatron_muon.megatron.flags.offload_flags import check_offload
from megatron_muon.megatron.flags.refusals import (
    check_adaptive,
    check_blocks,
    check_dump,
    check_features,
    check_heeded,
    check_share,
    refuse_adaptive_settings,
    refuse_layer_wise,
)
from megatron_muon.megatron.model.fused import BlockSettings
from megatron_muon.megatron.patches.fsdp import is_mended


@dataclass
class MuonOptimizerConfig(MuonSettings, OptimizerConfig):
    """megatron-core's OptimizerConfig with this package's settings (`flags.fields`), each under its flag's name.

    Attributes:
        muon_offload_iteration: the iteration that the run goes on from, for the names of files.
        muon_offload_save: the folder that the run saves checkpoints in, by which its next start knows files of its own.
    """

    muon_offload_iteration: int = 0
    muon_offload_save: str = ""


def with_own_settings(config: OptimizerConfig) -> MuonOptimizerConfig:
    """`config` itself where it carries this package's settings, else a copy with their defaults."""
    if isinstance(config, MuonOptimizerConfig):
        return config
    values = {name: getattr(config, name) for name in OptimizerConfig.__dataclass_fields__}
    return MuonOptimizerConfig(**values)


def block_settings(config: MuonOptimizerConfig) -> BlockSettings:
    """Which fused parameters are split into blocks."""
    return BlockSettings(
        split_qkv=config.muon_split_qkv,
        split_gated_mlp=config.muon_split_gated_mlp,
        split_heads=config.muon_split_heads,
    )


def require_megatron_fsdp(model_chunks: Sequence[Any]) -> None:
    """Check that the model is wrapped in Megatron-FSDP, and that this one's gradients are right.

    Raises:
        UserError: it is not; what to do.
    """
    ddp_config = getattr(model_chunks[0], "ddp_config", None)
    if ddp_config is None or not ddp_config.use_megatron_fsdp:
        raise UserError(
            "the model is not wrapped in Megatron-FSDP; wrap it first, or use megatron-core's own optimizer"
        )
    if not is_mended():
        raise UserError(
            "Megatron-FSDP of megatron-core 0.19 gets some gradients wrong; call megatron_muon.mend_megatron_fsdp() "
            "before the model is wrapped"
        )


def check_supported(config: MuonOptimizerConfig, model_chunks: Sequence[Any]) -> None:
    """Check what Muon under Megatron-FSDP does not support.

    Raises:
        UserError: names the value and the remedy.
    """
    check_numbers(config)
    check_proven(config.muon_coefficient_type, config.muon_num_ns_steps, config.muon_fp32_matmul_prec, config.muon_ns)
    ddp_config = model_chunks[0].ddp_config
    if config.optimizer == "adaptive_muon":
        check_adaptive(
            config.adaptive_muon_moment2_method,
            strategy=ddp_config.data_parallel_sharding_strategy,
            tensor_parallel=max(
                model_chunks[0].config.tensor_model_parallel_size,
                model_chunks[0].config.expert_tensor_parallel_size or 1,
            ),
            tp_mode=config.muon_tp_mode,
        )
    else:
        refuse_adaptive_settings(config)
    strategy = ddp_config.data_parallel_sharding_strategy
    tensor_parallel = model_chunks[0].config.tensor_model_parallel_size
    model_config = model_chunks[0].config
    main_params = str(ddp_config.megatron_fsdp_main_params_dtype).removeprefix("torch.")
    check_features(config, model_config, main_params_dtype={"float32": "fp32"}.get(main_params, main_params))
    check_heeded(config, strategy, gated=model_config.gated_linear_unit)
    if config.optimizer == "dist_muon":
        refuse_layer_wise("--optimizer dist_muon")
    if config.use_layer_wise_distributed_optimizer:
        refuse_layer_wise("use_layer_wise_distributed_optimizer=True")
    if ddp_config.num_distributed_optimizer_instances > 1 and strategy == "no_shard":
        raise UserError(
            f"--num-distributed-optimizer-instances {ddp_config.num_distributed_optimizer_instances} has nothing to "
            "shard with --data-parallel-sharding-strategy no_shard; leave it at 1, or use optim, optim_grads or "
            "optim_grads_params"
        )
    groups = model_config.num_query_groups
    in_parts = strategy == "no_shard" or config.muon_tp_mode == "blockwise"
    if in_parts and config.muon_split_qkv and groups < tensor_parallel and not model_config.multi_latent_attention:
        raise UserError(
            f"--num-query-groups {groups} is less than --tensor-model-parallel-size {tensor_parallel}: no rank's part "
            "of the QKV matrix holds a whole group to split; use --muon-tp-mode duplicated with optim, optim_grads or "
            "optim_grads_params, or --muon-no-split-qkv"
        )
    plain = strategy == "no_shard" and config.optimizer == "muon" and not config.muon_share_replicated
    check_offload(config, on_cpu=next(model_chunks[0].parameters()).device.type == "cpu", plain=plain)
    if config.muon_exchange not in ("owner", "allgather"):
        raise UserError(f"--muon-exchange {config.muon_exchange} does not exist; use owner or allgather")
    if config.muon_share_replicated:
        largest = max(tensor_parallel, model_chunks[0].config.expert_tensor_parallel_size or 1)
        check_share(strategy, exchange=config.muon_exchange, tensor_parallel=largest, tp_mode=config.muon_tp_mode)
    if config.muon_dump_layout is not None:
        check_dump(strategy)
    check_blocks(
        strategy,
        split_qkv=config.muon_split_qkv,
        split_heads=config.muon_split_heads,
        tensor_parallel=tensor_parallel,
        tp_mode=config.muon_tp_mode,
    )
