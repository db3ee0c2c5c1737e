"""What a run with Muon is refused, said once for the command line and for a config that a script has built.

The rules see plain values (`MuonRun`), so that the command line can ask before torch is imported.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_origin

from megatron_muon.core.numbers import flag_of
from megatron_muon.errors import Reasons, UserError
from megatron_muon.megatron.flags.logits import asked, check_logits
from megatron_muon.settings import MuonSettings, default_of, iteration_of, steps_for

MUONS = ("muon", "adaptive_muon")
"""Values of --optimizer that this package's factory serves under Megatron-FSDP."""

FIELDS = tuple(field.name for field in fields(MuonSettings))
ADAPTIVE = tuple(name for name in FIELDS if name.startswith("adaptive_muon_"))
MOMENTUM = (*(name for name in FIELDS if name.startswith("muon_offload")), "muon_ns_device", "muon_momentum_dtype")
"""Settings that say where momentum lives, and in which form."""

NO_SHARD = "--data-parallel-sharding-strategy no_shard"
SHARDING = "optim, optim_grads or optim_grads_params"


@dataclass(frozen=True, kw_only=True)
class MuonRun:
    """What the rules depend on.

    Attributes:
        settings: parsed flags, or a MuonOptimizerConfig.
        model: parsed flags, or a TransformerConfig.
        ddp: parsed flags, or a DistributedDataParallelConfig.
        has_model: a script has made the model, so `model` has its sizes and Muon is to train it.
    """

    settings: Any
    model: Any
    ddp: Any
    on_cpu: bool
    has_model: bool

    @property
    def replicated(self) -> bool:
        """Every rank holds whole matrices."""
        return bool(self.ddp.data_parallel_sharding_strategy == "no_shard")

    @property
    def repeated(self) -> bool:
        """Replicas without shared work."""
        return self.replicated and not self.settings.muon_share_replicated

    @property
    def megatrons_own(self) -> bool:
        """Plain Muon of replicas without shared work is megatron-core's own."""
        return self.repeated and self.settings.optimizer == "muon" and not self.settings.muon_hyperball

    def given(self, names: Iterable[str]) -> list[str]:
        """The flags among these of this package's settings that are not at their default."""
        return [flag_of(name) for name in names if getattr(self.settings, name) != default_of(name)]


def check(run: MuonRun) -> None:
    """Refuse what a run asks of Muon in vain, or of this package without Muon; of independent rules each in a line."""
    with_muon = run.ddp.use_megatron_fsdp and (run.settings.optimizer in MUONS or run.has_model)
    of_muon = (_choices, _features, _logits, _heeded, _teams, _proven, _offload, _offload_all, _blocks, _share)
    rules = (*of_muon, _cautious, _hyperball) if with_muon else (_nothing_of_muon,)
    reasons = Reasons()
    for rule in (_precision, _layer_wise, _adaptive, *rules):
        with reasons:
            rule(run)
    reasons.tell()


def _precision(run: MuonRun) -> None:
    optimizer = run.settings.optimizer
    if run.settings.fp16 and (optimizer in MUONS or run.has_model):
        raise UserError(f"--fp16 is not supported with --optimizer {optimizer}; use --bf16, or neither for fp32")


def _layer_wise(run: MuonRun) -> None:
    asked = "--optimizer dist_muon" if run.settings.optimizer == "dist_muon" else ""
    if getattr(run.settings, "use_layer_wise_distributed_optimizer", False):  # flags get it when they are validated
        asked = asked or "use_layer_wise_distributed_optimizer=True"
    if asked and run.ddp.use_megatron_fsdp:
        raise UserError(
            f"{asked} is megatron-core's layer-wise Muon, which deals whole layers out to ranks; Megatron-FSDP cuts "
            "them into rows by then, and dealing out rows would orthogonalise parts of matrices. The owner scheme of "
            "--optimizer muon --use-megatron-fsdp replaces it: every matrix has one owner there too"
        )


def _adaptive(run: MuonRun) -> None:
    if run.settings.optimizer != "adaptive_muon":
        for flag in run.given(ADAPTIVE):
            raise UserError(f"{flag} needs --optimizer adaptive_muon; add it or leave {flag} out")
    elif not run.ddp.use_megatron_fsdp:
        raise UserError(
            "--optimizer adaptive_muon needs --use-megatron-fsdp: megatron-core 0.19's own class fails in its first "
            "step with emerging-optimizers 0.3; add the flag, or use --optimizer muon"
        )
    else:
        _refuse_parts(run, "--optimizer adaptive_muon, no_shard", f", or {SHARDING}")


def _refuse_parts(run: MuonRun, flags: str, otherwise: str, *, with_experts: bool = True) -> None:
    """Refuse replicas whose tensor-parallel parts of a matrix would be orthogonalised together."""
    size = run.model.tensor_model_parallel_size
    if with_experts:
        size = max(size, run.model.expert_tensor_parallel_size or 1)
    if run.replicated and size > 1 and run.settings.muon_tp_mode != "blockwise":
        raise UserError(
            f"--muon-tp-mode {run.settings.muon_tp_mode} is not supported with {flags} and tensor parallel size "
            f"{size}; use --muon-tp-mode blockwise{otherwise}"
        )


def _nothing_of_muon(run: MuonRun) -> None:
    """Refuse flags that only this package's Muon heeds in a run of another optimizer."""
    given = run.given(name for name in FIELDS if name not in ADAPTIVE)
    if run.settings.muon_allow_missing_state and not run.ddp.use_megatron_fsdp:
        given.append("--muon-allow-missing-state")
    for flag in given:
        raise UserError(f"{flag} needs --optimizer muon --use-megatron-fsdp; add them or leave it out")
    if run.ddp.use_megatron_fsdp and (logits := asked(run.model)):
        raise UserError(
            f"{logits} with --use-megatron-fsdp needs --optimizer muon: megatron-core's own clip looks for layers "
            f"where Megatron-FSDP does not keep them; leave {logits} out"
        )


def _choices(run: MuonRun) -> None:
    """Refuse what argparse refuses on the command line."""
    for field in fields(MuonSettings):
        value, choices = getattr(run.settings, field.name), get_args(field.type)
        if get_origin(field.type) is Literal and value not in choices:
            raise UserError(f"{flag_of(field.name)} {value} does not exist; use {', '.join(choices)}")


def _features(run: MuonRun) -> None:
    """Refuse features of megatron-core that do not work with Muon under Megatron-FSDP."""
    settings, model = run.settings, run.model
    graphs = [model.cuda_graph_impl]
    older = getattr(model, "cuda_graph_scope_deprecated", None)  # flags have it until they are validated
    for scopes in (model.cuda_graph_modules, older):
        graphs += scopes if isinstance(scopes, list) else [scopes]
    main_params = str(run.ddp.megatron_fsdp_main_params_dtype).removeprefix("torch.")
    on_host = "its step reads the gradient norm on the host, which ends a capture"
    unseen = "a replayed iteration runs no Python, so Muon cannot see whether gradients are reduced"
    for flag, is_on, why in (
        ("--use-precision-aware-optimizer", settings.use_precision_aware_optimizer, "; leave it out"),
        (
            f"--megatron-fsdp-main-params-dtype {main_params}",
            main_params not in ("fp32", "float32"),
            ", whose momentum and main weights are fp32; leave it out",
        ),
        ("--optimizer-cpu-offload", settings.optimizer_cpu_offload, "; use --muon-offload cpu"),
        ("--optimizer-cuda-graph", settings.optimizer_cuda_graph, f": {on_host}; leave it out"),
        (
            "--cuda-graph-impl full_iteration",
            "full_iteration" in graphs,
            f": {unseen}; use local or transformer_engine",
        ),
    ):
        if is_on:
            raise UserError(f"{flag} is not supported with --optimizer {settings.optimizer}{why}")
    if run.replicated and (instances := run.ddp.num_distributed_optimizer_instances) > 1:
        raise UserError(
            f"--num-distributed-optimizer-instances {instances} has nothing to shard with {NO_SHARD}; leave it at 1, "
            f"or use {SHARDING}"
        )


def _logits(run: MuonRun) -> None:
    check_logits(run.model)


def _heeded(run: MuonRun) -> None:
    """Refuse flags that strategy, exchange or model pass over."""
    settings, passed_over, why = run.settings, [], ""
    if run.repeated:
        why = f"{NO_SHARD} exchanges nothing, and plain Muon is megatron-core's own there"
        method = ["muon_ns"] if run.megatrons_own else []
        passed_over = run.given([*method, "muon_exchange", "muon_exchange_dtype", "muon_team_size"])
    elif run.replicated:
        why = "--muon-share-replicated gives every matrix one owner, which broadcasts its update"
        passed_over = run.given(["muon_team_size"])
    elif settings.muon_exchange == "allgather" and not settings.muon_share_replicated:
        why = "--muon-exchange allgather gathers fp32, matrix by matrix, on every rank"
        dtype = ["muon_exchange_dtype"] if settings.muon_exchange_dtype == "bf16" else []
        passed_over = run.given([*dtype, "muon_exchange_buffer_mb", "muon_team_size"])
    for flag in passed_over:
        raise UserError(f"{flag} has no effect here: {why}; leave it out")
    gated = run.model.gated_linear_unit if run.has_model else run.model.swiglu
    if settings.muon_split_gated_mlp and not gated:
        raise UserError("--muon-split-gated-mlp has no gate to split without --swiglu; add it or leave the flag out")
    if run.replicated and settings.muon_dump_layout is not None:
        raise UserError(
            f"--muon-dump-layout has nothing to write with {NO_SHARD}: every rank holds whole matrices; use "
            f"{SHARDING}, or leave the flag out"
        )


def _teams(run: MuonRun) -> None:
    """Refuse teams where an owner needs whole updates."""
    settings = run.settings
    if needs_whole_updates(settings) and settings.muon_team_size not in ("auto", "1"):
        raise UserError(
            f"--muon-team-size {settings.muon_team_size}: NorMuon keeps the norm of a whole update, which no rank of a "
            "team has; use --muon-team-size 1, or --adaptive-muon-moment2-method adamuon"
        )


def needs_whole_updates(settings: Any) -> bool:
    """Whether parsed flags or a MuonOptimizerConfig ask for NorMuon, with which no teams are formed."""
    return bool(settings.optimizer == "adaptive_muon" and settings.adaptive_muon_moment2_method == "normuon")


def _proven(run: MuonRun) -> None:
    """Refuse iterations that are not proven, and steps by matrix where megatron-core's Muon has one number for all."""
    iteration = iteration_of(run.settings)
    iteration.check()
    asked = steps_for(run.settings)
    iteration.check_steps_for(asked)
    if asked and run.megatrons_own and run.settings.optimizer == "muon":
        raise UserError(
            f"--muon-ns-steps-for needs this package's Muon: with {NO_SHARD} it is megatron-core's own, which has one "
            f"number of steps; use {SHARDING}, or --muon-share-replicated"
        )


def _offload(run: MuonRun) -> None:
    """Refuse flags that say where momentum lives and do not go together."""
    settings = run.settings
    if run.megatrons_own:
        for flag in run.given(MOMENTUM):
            raise UserError(
                f"{flag} needs momentum that this package keeps: with {NO_SHARD} Muon is megatron-core's own; use "
                f"{SHARDING}, or --muon-share-replicated"
            )
    if settings.muon_offload == "nvme" and not settings.muon_offload_dir:
        raise UserError("--muon-offload nvme needs --muon-offload-dir DIR, a directory on a fast local disk")
    elsewhere = ("muon_offload_state", "muon_offload_fraction", "muon_offload_buffer_mb", "muon_ns_device")
    for places, names in ((("nvme",), ("muon_offload_dir",)), (("cpu", "nvme"), elsewhere)):
        for flag in run.given(names) if settings.muon_offload not in places else ():
            raise UserError(
                f"{flag} needs --muon-offload {' or '.join(places)}, and it is {settings.muon_offload}; change that, "
                f"or leave {flag} out"
            )
    if settings.muon_ns_device == "accelerator" and run.on_cpu:
        raise UserError("--muon-ns-device accelerator: this run has none; use --muon-ns-device cpu, or leave it out")
    if settings.muon_ns_device == "cpu" and settings.optimizer == "adaptive_muon" and not run.on_cpu:
        raise UserError(
            "--muon-ns-device cpu is not supported with --optimizer adaptive_muon, whose second moment stays on the "
            "GPU; use --muon-ns-device accelerator, or leave it out"
        )


def _offload_all(run: MuonRun) -> None:
    """Refuse, with `--muon-offload-state all`, what needs main weights between steps, or was not tried with it."""
    settings, model = run.settings, run.model
    if settings.muon_offload_state != "all":
        return
    for flag, is_on, why in (
        ("--optimizer adaptive_muon", settings.optimizer == "adaptive_muon", "was not tried with it"),
        (NO_SHARD, run.replicated, "keeps every weight on every rank"),
        ("--muon-ns-device cpu", settings.muon_ns_device == "cpu", "was not tried with it"),
        (
            "decoupled_weight_decay=False",
            not getattr(settings, "decoupled_weight_decay", True),
            "needs weights beside the gradients",
        ),
        ("--fp8-format", bool(model.fp8), "makes the model's weights from the main weights in a way of its own"),
        ("--fp4-format", bool(model.fp4), "makes the model's weights from the main weights in a way of its own"),
        ("--async-save", getattr(settings, "async_save", False), "was not tried with it"),
        ("--qk-clip", model.qk_clip, "scales main weights behind the step"),
        ("--muon-hyperball", settings.muon_hyperball, "needs weights behind the step"),
        ("--log-params-norm", getattr(settings, "log_params_norm", False), "reads the main weights between steps"),
        (
            "--save-params-interval",
            getattr(settings, "save_params_interval", None) is not None,
            "reads the main weights after a skipped step",
        ),
        (
            "--check-weight-hash-across-dp-replicas-interval",
            getattr(settings, "check_weight_hash_across_dp_replicas_interval", None) is not None,
            "reads the main weights between steps",
        ),
    ):
        if is_on:
            raise UserError(
                f"{flag} is not supported with --muon-offload-state all: it {why}; use --muon-offload-state momentum"
            )


def _blocks(run: MuonRun) -> None:
    """Refuse blocks that contradict each other, or that no rank holds whole."""
    settings, tensor_parallel = run.settings, run.model.tensor_model_parallel_size
    if settings.muon_split_heads and not settings.muon_split_qkv:
        raise UserError(
            "--muon-split-heads and --muon-no-split-qkv contradict each other: heads are finer blocks than query, key "
            "and value; leave one of the two flags out"
        )
    if settings.muon_split_heads:
        _refuse_parts(run, "--muon-split-heads, no_shard", ": every head lies whole on one rank", with_experts=False)
    if not run.has_model or run.model.multi_latent_attention or not settings.muon_split_qkv:
        return
    in_parts = run.replicated or settings.muon_tp_mode == "blockwise"
    if in_parts and (groups := run.model.num_query_groups) < tensor_parallel:
        raise UserError(
            f"--num-query-groups {groups} is less than --tensor-model-parallel-size {tensor_parallel}: no rank's part "
            f"of the QKV matrix holds a whole group to split; use --muon-tp-mode duplicated with {SHARDING}, or "
            "--muon-no-split-qkv"
        )


def _share(run: MuonRun) -> None:
    """Refuse `--muon-share-replicated` without replicas, or where tensor-parallel ranks orthogonalise together."""
    settings = run.settings
    if not settings.muon_share_replicated:
        return
    if not run.replicated:
        raise UserError(
            f"--muon-share-replicated is for {NO_SHARD}: {run.ddp.data_parallel_sharding_strategy} shares the work "
            "already (--muon-exchange owner); leave the flag out"
        )
    if settings.muon_exchange != "owner":
        raise UserError(
            f"--muon-exchange {settings.muon_exchange} has no rows to exchange with --muon-share-replicated: owners "
            "broadcast their updates; leave one of the two flags out"
        )
    _refuse_parts(run, "--muon-share-replicated", ", or leave --muon-share-replicated out")


def _cautious(run: MuonRun) -> None:
    """Refuse cautious decay where there is no decay that could be."""
    settings = run.settings
    if not settings.muon_cautious_weight_decay:
        return
    if not getattr(settings, "decoupled_weight_decay", True):  # which has no flag
        raise UserError(
            "--muon-cautious-weight-decay needs decoupled weight decay, and decoupled_weight_decay is False; decay in "
            "the gradient has no sign of its own: leave one of the two out"
        )
    if not settings.muon_hyperball and not _decays(settings):
        raise UserError(
            "--muon-cautious-weight-decay has no effect with --weight-decay 0; use --weight-decay 0.1, which is usual "
            "for Muon, or leave it out"
        )


def _hyperball(run: MuonRun) -> None:
    """Refuse what does not go together with norms that are kept."""
    settings = run.settings
    if not settings.muon_hyperball:
        return
    if settings.optimizer == "adaptive_muon":
        raise UserError(
            "--muon-hyperball is not supported with --optimizer adaptive_muon; use --optimizer muon, or leave it out"
        )
    if settings.muon_cautious_weight_decay:
        raise UserError(
            "--muon-cautious-weight-decay has no effect with --muon-hyperball, which takes the place of decay; leave "
            "one of the two flags out"
        )
    if run.model.qk_clip:
        raise UserError("--qk-clip changes the norms that --muon-hyperball keeps; leave one of the two flags out")
    for name in _decays(settings):
        raise UserError(
            f"{flag_of(name)} {getattr(settings, name):g} has no effect with --muon-hyperball, which keeps the norms "
            "that decay would shrink; use --weight-decay 0"
        )
    _refuse_parts(run, "--muon-hyperball, no_shard", f", or {SHARDING}")


def _decays(settings: Any) -> list[str]:
    """The settings by which weights decay, at some time of a schedule; a config of a script has only the first."""
    names = ("weight_decay", "start_weight_decay", "end_weight_decay")
    return [name for name in names if getattr(settings, name, None)]
