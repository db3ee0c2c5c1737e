"""What Muon refuses in either of two places: on the command line, and in a config that a script has built.

Plain values in, so that the command line can ask before torch is imported.
"""

from __future__ import annotations

from typing import Any, NoReturn

from megatron_muon.errors import UserError
from megatron_muon.megatron.flags.fields import MuonSettings

ADAPTIVE = ("adaptive_muon_moment2_method", "adaptive_muon_beta2", "adaptive_muon_eps")
"""Settings of adaptive Muon alone."""


def check_features(config: Any, model_config: Any, *, main_params_dtype: str) -> None:
    """Check what of megatron-core's other features is on and does not work with Muon under Megatron-FSDP.

    Args:
        config: parsed flags, or an OptimizerConfig.
        model_config: parsed flags, or a TransformerConfig.
        main_params_dtype: `--megatron-fsdp-main-params-dtype`.

    Raises:
        UserError: names the flag and the reason.
    """
    if config.fp16:
        raise UserError(f"--fp16 is not supported with --optimizer {config.optimizer}; use --bf16, or neither for fp32")
    if config.use_precision_aware_optimizer:
        raise UserError(
            f"--use-precision-aware-optimizer is not supported with --optimizer {config.optimizer}; leave it out"
        )
    if main_params_dtype != "fp32":
        raise UserError(
            f"--megatron-fsdp-main-params-dtype {main_params_dtype} is not supported with --optimizer "
            f"{config.optimizer}, whose momentum and main weights are fp32; leave it out"
        )
    if config.optimizer_cpu_offload:
        raise UserError(
            f"--optimizer-cpu-offload is not supported with --optimizer {config.optimizer}; use --muon-offload cpu"
        )
    if config.optimizer_cuda_graph:
        raise UserError(
            f"--optimizer-cuda-graph is not supported with --optimizer {config.optimizer}: its step reads the gradient "
            "norm on the host, which ends a capture; leave it out"
        )
    older = getattr(model_config, "cuda_graph_scope_deprecated", None)  # flags have it until they are validated
    graphs = [model_config.cuda_graph_impl]
    for scopes in (model_config.cuda_graph_modules, older):
        graphs += scopes if isinstance(scopes, list) else [scopes]
    if "full_iteration" in graphs:
        raise UserError(
            f"--cuda-graph-impl full_iteration is not supported with --optimizer {config.optimizer}: a replayed "
            "iteration runs no Python, so Muon cannot see whether gradients are reduced; use local "
            "or transformer_engine"
        )
    for flag, on in (
        ("--qk-clip", model_config.qk_clip),
        ("--log-max-attention-logit", model_config.log_max_attention_logit),
    ):
        if on:
            raise UserError(
                f"{flag} is not supported with --optimizer {config.optimizer}: Megatron-FSDP gathers weights from "
                "copies of its own and overwrites what is clipped in the model; leave it out"
            )


def check_heeded(config: Any, strategy: str, *, gated: bool) -> None:
    """Check that strategy, exchange and model pass none of the settings over.

    Args:
        config: parsed flags, or a MuonOptimizerConfig.
        strategy: `--data-parallel-sharding-strategy`.
        gated: the model's MLPs have a gate (`--swiglu`).

    Raises:
        UserError: names the flag that would have no effect, and why.
    """
    if strategy == "no_shard" and not config.muon_share_replicated:
        why = (
            "--data-parallel-sharding-strategy no_shard exchanges nothing, and plain Muon is megatron-core's own there"
        )
        unheeded = {
            "--muon-ns": config.muon_ns != "auto" and config.optimizer == "muon",
            "--muon-exchange": config.muon_exchange != "owner",
            "--muon-exchange-dtype": config.muon_exchange_dtype != "auto",
        }
    else:
        why = "--muon-exchange allgather gathers fp32, matrix by matrix"
        gathers = config.muon_exchange == "allgather" and not config.muon_share_replicated
        unheeded = {
            "--muon-exchange-dtype": gathers and config.muon_exchange_dtype == "bf16",
            "--muon-exchange-buffer-mb": gathers
            and config.muon_exchange_buffer_mb != MuonSettings.muon_exchange_buffer_mb,
        }
    if flag := next((flag for flag, is_given in unheeded.items() if is_given), None):
        raise UserError(f"{flag} has no effect here: {why}; leave it out")
    if config.muon_split_gated_mlp and not gated:
        raise UserError("--muon-split-gated-mlp has no gate to split without --swiglu; add it or leave the flag out")


def refuse_adaptive_settings(config: Any) -> None:
    """Refuse settings of adaptive Muon in a run of another optimizer.

    Raises:
        UserError: names the flag.
    """
    for name in ADAPTIVE:
        if getattr(config, name) != getattr(MuonSettings, name):
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{flag} needs --optimizer adaptive_muon; add it or leave {flag} out")


def check_share(strategy: str, *, exchange: str, tensor_parallel: int, tp_mode: str) -> None:
    """Check that `--muon-share-replicated` has replicated matrices to share, each of them one rank's by itself.

    Args:
        strategy: `--data-parallel-sharding-strategy`.
        exchange: `--muon-exchange`.
        tensor_parallel: the largest tensor parallel size, that of experts included.
        tp_mode: `--muon-tp-mode`.

    Raises:
        UserError: a sharded strategy, the all-gather exchange, or a mode in which tensor-parallel ranks orthogonalise
            together.
    """
    if strategy != "no_shard":
        raise UserError(
            f"--muon-share-replicated is for --data-parallel-sharding-strategy no_shard: {strategy} shares the work "
            "already (--muon-exchange owner); leave the flag out"
        )
    if exchange != "owner":
        raise UserError(
            f"--muon-exchange {exchange} has no rows to exchange with --muon-share-replicated: owners broadcast "
            "their updates; leave one of the two flags out"
        )
    if tensor_parallel > 1 and tp_mode != "blockwise":
        raise UserError(
            f"--muon-tp-mode {tp_mode} is not supported with --muon-share-replicated and tensor parallel size "
            f"{tensor_parallel}; use --muon-tp-mode blockwise, or leave --muon-share-replicated out"
        )


def refuse_layer_wise(asked: str) -> NoReturn:
    """Refuse megatron-core's layer-wise distributed Muon together with Megatron-FSDP.

    Args:
        asked: the flag or setting that asks for it.

    Raises:
        UserError: always.
    """
    raise UserError(
        f"{asked} is megatron-core's layer-wise Muon, which deals whole layers out to ranks; Megatron-FSDP cuts them "
        "into rows by then, and dealing out rows would orthogonalise parts of matrices. The owner scheme of "
        "--optimizer muon --use-megatron-fsdp replaces it: every matrix has one owner there too"
    )


def check_dump(strategy: str) -> None:
    """Check that there is a layout to dump.

    Raises:
        UserError: under `no_shard` every rank holds whole matrices.
    """
    if strategy == "no_shard":
        raise UserError(
            "--muon-dump-layout has nothing to write with --data-parallel-sharding-strategy no_shard: every rank holds "
            "whole matrices; use optim, optim_grads or optim_grads_params, or leave the flag out"
        )


def check_heads(*, split_qkv: bool, split_heads: bool) -> None:
    """Check that heads are not to be blocks of a matrix that is to stay whole.

    Raises:
        UserError: `--muon-split-heads` with `--muon-no-split-qkv`.
    """
    if split_heads and not split_qkv:
        raise UserError(
            "--muon-split-heads and --muon-no-split-qkv contradict each other: heads are finer blocks than query, key "
            "and value; leave one of the two flags out"
        )


def check_blocks(strategy: str, *, split_qkv: bool, split_heads: bool, tensor_parallel: int, tp_mode: str) -> None:
    """Check that the settings that say what a block is go together.

    Args:
        strategy: `--data-parallel-sharding-strategy`.
        split_qkv: False with `--muon-no-split-qkv`.
        split_heads: `--muon-split-heads`.
        tensor_parallel: the tensor parallel size.
        tp_mode: `--muon-tp-mode`.

    Raises:
        UserError: heads alone without QKV split, or where megatron-core's own Muon would join the heads of several
            tensor-parallel ranks into one block.
    """
    check_heads(split_qkv=split_qkv, split_heads=split_heads)
    if split_heads and strategy == "no_shard" and tensor_parallel > 1 and tp_mode != "blockwise":
        raise UserError(
            f"--muon-tp-mode {tp_mode} is not supported with --muon-split-heads, no_shard and tensor parallel size "
            f"{tensor_parallel}: every head lies whole on one rank; use --muon-tp-mode blockwise"
        )


def check_adaptive(method: str, *, strategy: str, tensor_parallel: int, tp_mode: str) -> None:
    """Check the settings of `--optimizer adaptive_muon`.

    Args:
        method: `--adaptive-muon-moment2-method`.
        strategy: `--data-parallel-sharding-strategy`.
        tensor_parallel: the largest tensor parallel size, that of experts included.
        tp_mode: `--muon-tp-mode`.

    Raises:
        UserError: a second moment that is not sharded here, or replicas whose tensor-parallel ranks would have to
            orthogonalise together.
    """
    if strategy == "no_shard" and tensor_parallel > 1 and tp_mode != "blockwise":
        raise UserError(
            f"--muon-tp-mode {tp_mode} is not supported with --optimizer adaptive_muon, no_shard and tensor parallel "
            f"size {tensor_parallel}; use --muon-tp-mode blockwise, or optim, optim_grads or optim_grads_params"
        )
    if method not in ("adamuon", "normuon"):
        raise UserError(
            f"--adaptive-muon-moment2-method {method} is not supported with --use-megatron-fsdp; use adamuon or normuon"
        )


def check_async_save(*, device: str, persistent_worker: bool) -> None:
    """Check that `--async-save` would do what it says.

    Raises:
        UserError: on a CPU the worker would share the tensors that training changes; without the worker megatron-core
            0.19 saves in the foreground after a warning.
    """
    if device == "cpu":
        raise UserError(
            "--async-save does not work on the CPU, where the saving process would share the tensors that training "
            "changes; leave it out, and --use-persistent-ckpt-worker too"
        )
    if not persistent_worker:
        raise UserError(
            "--async-save does nothing without --use-persistent-ckpt-worker: megatron-core would save in the "
            "foreground; add that flag, or leave --async-save out"
        )
