"""What a run with Muon is refused: one table of conditions and messages, for the command line and for scripts alike.

The rules see plain values (`MuonRun`), so that the command line can ask before torch is imported. Every rule that
applies is told, each in a line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_origin

from megatron_muon.core.numbers import check_number, flag_of
from megatron_muon.errors import Reasons
from megatron_muon.settings import MuonSettings, default_of, iteration_of, steps_for

MUONS = ("muon", "adaptive_muon")
"""Values of --optimizer that this package's factory serves under Megatron-FSDP."""

FIELDS = tuple(field.name for field in fields(MuonSettings))
ADAPTIVE = tuple(name for name in FIELDS if name.startswith("adaptive_muon_"))
MOMENTUM = (*(name for name in FIELDS if name.startswith("muon_offload")), "muon_ns_device", "muon_momentum_dtype")
"""Settings that say where momentum lives, and in which form."""

NO_SHARD = "--data-parallel-sharding-strategy no_shard"
SHARDING = "optim, optim_grads or optim_grads_params"
CLIP, LOG = "--qk-clip", "--log-max-attention-logit"

type Rules = Iterator[tuple[object, str]]
"""Of each rule, what makes it apply where it is true, and what is said then."""


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
    """Raises a `UserError` with a line for every rule that applies, of Muon's where the run has Muon."""
    with_muon = run.ddp.use_megatron_fsdp and (run.settings.optimizer in MUONS or run.has_model)
    reasons = Reasons()
    if with_muon:
        with reasons:
            iteration_of(run.settings).check()
            iteration_of(run.settings).check_steps_for(steps_for(run.settings))
        with reasons:
            for name in ("qk_clip_alpha", "qk_clip_threshold") if run.model.qk_clip else ():
                check_number(name, getattr(run.model, name))
    of_muon = (_features, _logits, _unheeded, _offload, _offload_all, _blocks, _share, _decay)
    for rules in (_optimizer, *(of_muon if with_muon else (_without_muon,))):
        reasons.lines += [message for applies, message in rules(run) if applies]
    reasons.tell()


def asked(model: Any) -> str | None:
    """The flag that needs attention logits, of parsed flags or a TransformerConfig."""
    if model.qk_clip:
        return CLIP
    return LOG if model.log_max_attention_logit else None


def needs_whole_updates(settings: Any) -> bool:
    """Whether parsed flags or a MuonOptimizerConfig ask for NorMuon, with which no teams are formed."""
    return bool(settings.optimizer == "adaptive_muon" and settings.adaptive_muon_moment2_method == "normuon")


def _optimizer(run: MuonRun) -> Rules:
    settings, under_fsdp = run.settings, run.ddp.use_megatron_fsdp
    optimizer, is_adaptive = settings.optimizer, settings.optimizer == "adaptive_muon"
    yield (
        settings.fp16 and (optimizer in MUONS or run.has_model),
        f"--fp16 is not supported with --optimizer {optimizer}; use --bf16, or neither for fp32",
    )
    layer_wise = "--optimizer dist_muon" if optimizer == "dist_muon" else ""
    if getattr(settings, "use_layer_wise_distributed_optimizer", False):  # flags get it when they are validated
        layer_wise = layer_wise or "use_layer_wise_distributed_optimizer=True"
    yield (
        layer_wise and under_fsdp,
        f"{layer_wise} is megatron-core's layer-wise Muon, which deals out whole layers, and Megatron-FSDP has cut "
        "them into rows by then; use --optimizer muon, whose owner scheme gives every matrix one owner too",
    )
    for flag in run.given(ADAPTIVE):
        yield not is_adaptive, f"{flag} needs --optimizer adaptive_muon; add it or leave {flag} out"
    yield (
        is_adaptive and not under_fsdp,
        "--optimizer adaptive_muon needs --use-megatron-fsdp: megatron-core 0.19's own class fails in its first step "
        "with emerging-optimizers 0.3; add the flag, or use --optimizer muon",
    )
    if is_adaptive and under_fsdp:
        yield _in_parts(run, "--optimizer adaptive_muon, no_shard", f", or {SHARDING}")


def _in_parts(run: MuonRun, flags: str, otherwise: str, *, with_experts: bool = True) -> tuple[bool, str]:
    """The rule of replicas whose tensor-parallel parts of a matrix would be orthogonalised together."""
    size, mode = run.model.tensor_model_parallel_size, run.settings.muon_tp_mode
    if with_experts:
        size = max(size, run.model.expert_tensor_parallel_size or 1)
    return run.replicated and size > 1 and mode != "blockwise", (
        f"--muon-tp-mode {mode} is not supported with {flags} and tensor parallel size {size}; use --muon-tp-mode "
        f"blockwise{otherwise}"
    )


def _without_muon(run: MuonRun) -> Rules:
    given = run.given(name for name in FIELDS if name not in ADAPTIVE)
    if run.settings.muon_allow_missing_state and not run.ddp.use_megatron_fsdp:
        given.append("--muon-allow-missing-state")
    for flag in given:
        yield True, f"{flag} needs --optimizer muon --use-megatron-fsdp; add them or leave it out"
    logits = asked(run.model)
    yield (
        run.ddp.use_megatron_fsdp and logits,
        f"{logits} with --use-megatron-fsdp needs --optimizer muon: megatron-core's own clip looks for layers where "
        f"Megatron-FSDP does not keep them; leave {logits} out",
    )


def _features(run: MuonRun) -> Rules:
    """Features of megatron-core that do not work with Muon under Megatron-FSDP; and values that argparse refuses."""
    settings, model = run.settings, run.model
    for field in fields(MuonSettings):
        value, choices = getattr(settings, field.name), get_args(field.type)
        wrong = get_origin(field.type) is Literal and value not in choices
        yield wrong, f"{flag_of(field.name)} {value} does not exist; use {', '.join(map(str, choices))}"
    unsupported = f"is not supported with --optimizer {settings.optimizer}"
    graphs = [model.cuda_graph_impl]
    older = getattr(model, "cuda_graph_scope_deprecated", None)  # flags have it until they are validated
    for scopes in (model.cuda_graph_modules, older):
        graphs += scopes if isinstance(scopes, list) else [scopes]
    yield settings.use_precision_aware_optimizer, f"--use-precision-aware-optimizer {unsupported}; leave it out"
    main_params = str(run.ddp.megatron_fsdp_main_params_dtype).removeprefix("torch.")
    yield (
        main_params not in ("fp32", "float32"),
        f"--megatron-fsdp-main-params-dtype {main_params} {unsupported}, whose momentum and main weights are fp32; "
        "leave it out",
    )
    yield settings.optimizer_cpu_offload, f"--optimizer-cpu-offload {unsupported}; use --muon-offload cpu"
    yield (
        settings.optimizer_cuda_graph,
        f"--optimizer-cuda-graph {unsupported}: its step reads the gradient norm on the host, which ends a capture; "
        "leave it out",
    )
    yield (
        "full_iteration" in graphs,
        f"--cuda-graph-impl full_iteration {unsupported}: a replayed iteration runs no Python, so Muon cannot see "
        "whether gradients are reduced; use local or transformer_engine",
    )
    instances = run.ddp.num_distributed_optimizer_instances
    yield (
        run.replicated and instances > 1,
        f"--num-distributed-optimizer-instances {instances} has nothing to shard with {NO_SHARD}; leave it at 1, or "
        f"use {SHARDING}",
    )


def _logits(run: MuonRun) -> Rules:
    """Attention that keeps no logits, and clipping without an effect."""
    model = run.model
    if (flag := asked(model)) is None:
        return
    yield (
        model.cuda_graph_impl != "none",
        f"{flag} is not supported with --cuda-graph-impl {model.cuda_graph_impl}: a replayed layer runs no Python, so "
        "its logits are not kept; leave one of the two flags out",
    )
    # Transformer Engine's attention: of its backends cuDNN's and the unfused one return logits, and not in FP8.
    yield (
        getattr(model.attention_backend, "name", model.attention_backend) == "flash",
        f"{flag} is not supported with --attention-backend flash, which returns no logits; use fused or auto",
    )
    yield (
        getattr(model, "fp8_dot_product_attention", False),  # has no flag
        f"{flag} is not supported with fp8_dot_product_attention=True, which returns no logits; leave one of the two "
        "out",
    )
    variant = model.experimental_attention_variant
    yield (
        variant is not None,
        f"{flag} is not supported with --experimental-attention-variant {variant}, which keeps no logits; leave one "
        "of the two flags out",
    )
    for name in ("qk_layernorm", "qk_l2_norm"):
        norm = f"--{name.replace('_', '-')}"
        yield (  # multi-latent attention normalises before the projections that make the heads
            flag == CLIP and not model.multi_latent_attention and getattr(model, name),
            f"{CLIP} has no effect with {norm}, which normalises queries and keys after the rows that would be "
            f"scaled; leave {CLIP} out, or {norm}",
        )


def _unheeded(run: MuonRun) -> Rules:
    """Flags that strategy, exchange or model pass over."""
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
        yield True, f"{flag} has no effect here: {why}; leave it out"
    gated = run.model.gated_linear_unit if run.has_model else run.model.swiglu
    yield (
        settings.muon_split_gated_mlp and not gated,
        "--muon-split-gated-mlp has no gate to split without --swiglu; add it or leave the flag out",
    )
    yield (
        run.replicated and settings.muon_dump_layout is not None,
        f"--muon-dump-layout has nothing to write with {NO_SHARD}: every rank holds whole matrices; use {SHARDING}, or "
        "leave the flag out",
    )
    yield (
        needs_whole_updates(settings) and settings.muon_team_size not in ("auto", "1"),
        f"--muon-team-size {settings.muon_team_size}: NorMuon keeps the norm of a whole update, which no rank of a "
        "team has; use --muon-team-size 1, or --adaptive-muon-moment2-method adamuon",
    )
    yield (
        run.megatrons_own and steps_for(settings),
        f"--muon-ns-steps-for needs this package's Muon: with {NO_SHARD} it is megatron-core's own, which has one "
        f"number of steps; use {SHARDING}, or --muon-share-replicated",
    )


def _offload(run: MuonRun) -> Rules:
    settings = run.settings
    if run.megatrons_own:
        needs = f"needs momentum that this package keeps: with {NO_SHARD} Muon is megatron-core's own; use {SHARDING}"
        for flag in run.given(MOMENTUM):
            yield True, f"{flag} {needs}, or --muon-share-replicated"
        return
    yield (
        settings.muon_offload == "nvme" and not settings.muon_offload_dir,
        "--muon-offload nvme needs --muon-offload-dir DIR, a directory on a fast local disk",
    )
    elsewhere = ("muon_offload_state", "muon_offload_fraction", "muon_offload_buffer_mb", "muon_ns_device")
    for places, names in ((("nvme",), ("muon_offload_dir",)), (("cpu", "nvme"), elsewhere)):
        wanted = f"--muon-offload {' or '.join(places)}, and it is {settings.muon_offload}"
        for flag in run.given(names):
            yield settings.muon_offload not in places, f"{flag} needs {wanted}; change that, or leave {flag} out"
    yield (
        settings.muon_ns_device == "accelerator" and run.on_cpu,
        "--muon-ns-device accelerator: this run has none; use --muon-ns-device cpu, or leave it out",
    )
    yield (
        settings.muon_ns_device == "cpu" and settings.optimizer == "adaptive_muon" and not run.on_cpu,
        "--muon-ns-device cpu is not supported with --optimizer adaptive_muon, whose second moment stays on the GPU; "
        "use --muon-ns-device accelerator, or leave it out",
    )


def _offload_all(run: MuonRun) -> Rules:
    """With `--muon-offload-state all`, what needs main weights between steps, or was not tried with it."""
    settings, model = run.settings, run.model
    if settings.muon_offload_state != "all":
        return
    own_weights = "makes the model's weights from the main weights in a way of its own"
    between_steps = "reads the main weights between steps"
    coupled = not getattr(settings, "decoupled_weight_decay", True)
    saved, hashed = "save_params_interval", "check_weight_hash_across_dp_replicas_interval"
    is_set = {name: getattr(settings, name, None) is not None for name in (saved, hashed)}
    for flag, is_on, why in (
        ("--optimizer adaptive_muon", settings.optimizer == "adaptive_muon", "was not tried with it"),
        (NO_SHARD, run.replicated, "keeps every weight on every rank"),
        ("--muon-ns-device cpu", settings.muon_ns_device == "cpu", "was not tried with it"),
        ("decoupled_weight_decay=False", coupled, "needs weights beside the gradients"),
        ("--fp8-format", model.fp8, own_weights),
        ("--fp4-format", model.fp4, own_weights),
        ("--async-save", getattr(settings, "async_save", False), "was not tried with it"),
        (CLIP, model.qk_clip, "scales main weights behind the step"),
        ("--muon-hyperball", settings.muon_hyperball, "needs weights behind the step"),
        ("--log-params-norm", getattr(settings, "log_params_norm", False), between_steps),
        (flag_of(saved), is_set[saved], "reads the main weights after a skipped step"),
        (flag_of(hashed), is_set[hashed], between_steps),
    ):
        yield (
            is_on,
            (f"{flag} is not supported with --muon-offload-state all: it {why}; use --muon-offload-state momentum"),
        )


def _blocks(run: MuonRun) -> Rules:
    """Blocks that contradict each other, or that no rank holds whole."""
    settings, tensor_parallel = run.settings, run.model.tensor_model_parallel_size
    if settings.muon_split_heads:
        yield (
            not settings.muon_split_qkv,
            "--muon-split-heads and --muon-no-split-qkv contradict each other: heads are finer blocks than query, key "
            "and value; leave one of the two flags out",
        )
        yield _in_parts(run, "--muon-split-heads, no_shard", ": every head lies whole on one rank", with_experts=False)
    if run.has_model and not run.model.multi_latent_attention and settings.muon_split_qkv:
        groups = run.model.num_query_groups
        yield (
            (run.replicated or settings.muon_tp_mode == "blockwise") and groups < tensor_parallel,
            f"--num-query-groups {groups} is less than --tensor-model-parallel-size {tensor_parallel}: no rank's part "
            f"of the QKV matrix holds a whole group to split; use --muon-tp-mode duplicated with {SHARDING}, or "
            "--muon-no-split-qkv",
        )


def _share(run: MuonRun) -> Rules:
    settings = run.settings
    if not settings.muon_share_replicated:
        return
    yield (
        not run.replicated,
        f"--muon-share-replicated is for {NO_SHARD}: {run.ddp.data_parallel_sharding_strategy} shares the work already "
        "(--muon-exchange owner); leave the flag out",
    )
    yield (
        settings.muon_exchange != "owner",
        f"--muon-exchange {settings.muon_exchange} has no rows to exchange with --muon-share-replicated: owners "
        "broadcast their updates; leave one of the two flags out",
    )
    yield _in_parts(run, "--muon-share-replicated", ", or leave --muon-share-replicated out")


def _decay(run: MuonRun) -> Rules:
    """Cautious decay without a decay, and what does not go together with norms that are kept."""
    settings, is_cautious = run.settings, run.settings.muon_cautious_weight_decay
    names = ("weight_decay", "start_weight_decay", "end_weight_decay")  # a config of a script has only the first
    decays = [name for name in names if getattr(settings, name, None)]
    yield (
        is_cautious and not getattr(settings, "decoupled_weight_decay", True),  # which has no flag
        "--muon-cautious-weight-decay needs decoupled weight decay, and decoupled_weight_decay is False; decay in the "
        "gradient has no sign of its own: leave one of the two out",
    )
    yield (
        is_cautious and not settings.muon_hyperball and not decays,
        "--muon-cautious-weight-decay has no effect with --weight-decay 0; use --weight-decay 0.1, which is usual for "
        "Muon, or leave it out",
    )
    if not settings.muon_hyperball:
        return
    yield (
        settings.optimizer == "adaptive_muon",
        "--muon-hyperball is not supported with --optimizer adaptive_muon; use --optimizer muon, or leave it out",
    )
    yield (
        is_cautious,
        "--muon-cautious-weight-decay has no effect with --muon-hyperball, which takes the place of decay; leave one "
        "of the two flags out",
    )
    yield run.model.qk_clip, f"{CLIP} changes the norms that --muon-hyperball keeps; leave one of the two flags out"
    for name in decays:
        given = f"{flag_of(name)} {getattr(settings, name):g}"
        yield (
            True,
            f"{given} has no effect with --muon-hyperball, which keeps the norms that decay would shrink; use "
            "--weight-decay 0",
        )
    yield _in_parts(run, "--muon-hyperball, no_shard", f", or {SHARDING}")
