"""The table of rules: what a run with Muon is refused, for the command line and for scripts alike.

A rule is a condition and a message; every rule that applies is reported, each in a line. The rules see plain values, so
that the command line can ask before torch is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any

from megatron_muon.core.numbers import check_number, flag_of
from megatron_muon.errors import UserError
from megatron_muon.settings import MuonSettings, choices_of, default_of, iteration_of, steps_for

MUONS = ("muon", "adaptive_muon")
"""Values of --optimizer that this package's factory serves under Megatron-FSDP."""

FIELDS = tuple(field.name for field in fields(MuonSettings))
ADAPTIVE = tuple(name for name in FIELDS if name.startswith("adaptive_muon_"))
MOMENTUM = (*(name for name in FIELDS if name.startswith("muon_offload")), "muon_ns_device", "muon_momentum_dtype")
"""Settings that say where momentum lives, and in which form."""

NO_SHARD = "--data-parallel-sharding-strategy no_shard"
SHARDING = "optim, optim_grads or optim_grads_params"
SHARED, HYPERBALL, CAUTIOUS = "--muon-share-replicated", "--muon-hyperball", "--muon-cautious-weight-decay"
CLIP, LOG = "--qk-clip", "--log-max-attention-logit"
ONE_OUT = "leave one of the two out"

type Rules = Iterator[str]
"""A table of rules: the messages of those that apply."""


@dataclass(frozen=True, kw_only=True)
class MuonRun:
    """What the rules depend on."""

    settings: Any  # parsed flags, or a MuonOptimizerConfig
    model: Any  # parsed flags, or a TransformerConfig
    ddp: Any  # parsed flags, or a DistributedDataParallelConfig
    on_cpu: bool
    has_model: bool  # a script has made the model, so `model` has its sizes and Muon is to train it

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


def tell(*checks: Callable[[], object]) -> None:
    """Makes all checks; raises one `UserError` of the lines of those that they raise."""
    lines: dict[str, None] = {}
    for check in checks:
        try:
            check()
        except UserError as error:
            lines |= dict.fromkeys(str(error).splitlines())
    if lines:
        raise UserError("\n".join(lines))


def apply(rules: Rules) -> None:
    """Raises a `UserError` with a line for every rule that applies."""
    if lines := list(rules):
        raise UserError("\n".join(lines))


def check(run: MuonRun) -> None:
    """Raises a `UserError` with a line for every rule that applies, of Muon's where the run has Muon."""
    with_muon = run.ddp.use_megatron_fsdp and (run.settings.optimizer in MUONS or run.has_model)
    of_muon = (_features, _logits, _unheeded, _offload, _offload_all, _blocks, _share, _decay)
    tables = (_optimizer, *(of_muon if with_muon else (_without_muon,)))
    checks: list[Callable[[], object]] = []
    if with_muon:
        checks.append(lambda: _check_iteration(run.settings))
    if with_muon and run.model.qk_clip:
        checks.append(lambda: _check_clip(run.model))
    tell(*checks, lambda: apply(message for table in tables for message in table(run)))


def _check_iteration(settings: Any) -> None:
    iteration_of(settings).check()
    iteration_of(settings).check_steps_for(steps_for(settings))


def _check_clip(model: Any) -> None:
    for name in ("qk_clip_alpha", "qk_clip_threshold"):
        check_number(name, getattr(model, name))


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
    if settings.fp16 and (optimizer in MUONS or run.has_model):
        yield f"--fp16 is not supported with --optimizer {optimizer}; use --bf16, or neither for fp32"
    layer_wise = "--optimizer dist_muon" if optimizer == "dist_muon" else ""
    if getattr(settings, "use_layer_wise_distributed_optimizer", False):  # flags get it when they are validated
        layer_wise = layer_wise or "use_layer_wise_distributed_optimizer=True"
    if layer_wise and under_fsdp:
        yield f"{layer_wise}, megatron-core's layer-wise Muon, does not work on Megatron-FSDP's shards; use muon"
    for flag in run.given(ADAPTIVE) if not is_adaptive else ():
        yield f"{flag} needs --optimizer adaptive_muon; add it or leave {flag} out"
    if is_adaptive and not under_fsdp:
        yield "--optimizer adaptive_muon needs --use-megatron-fsdp; add the flag, or use --optimizer muon"
    if is_adaptive and under_fsdp:
        yield from _in_parts(run, "--optimizer adaptive_muon, no_shard", f", or {SHARDING}")


def _in_parts(run: MuonRun, flags: str, otherwise: str, *, with_experts: bool = True) -> Rules:
    """The rule of replicas whose tensor-parallel parts of a matrix would be orthogonalised together."""
    size, mode = run.model.tensor_model_parallel_size, run.settings.muon_tp_mode
    if with_experts:
        size = max(size, run.model.expert_tensor_parallel_size or 1)
    if run.replicated and size > 1 and mode != "blockwise":
        mode = f"--muon-tp-mode {mode} is not supported with {flags} and tensor parallel size {size}"
        yield f"{mode}; use --muon-tp-mode blockwise{otherwise}"


def _without_muon(run: MuonRun) -> Rules:
    given = run.given(name for name in FIELDS if name not in ADAPTIVE)
    if run.settings.muon_allow_missing_state and not run.ddp.use_megatron_fsdp:
        given.append("--muon-allow-missing-state")
    for flag in given:
        yield f"{flag} needs --optimizer muon --use-megatron-fsdp; add them or leave it out"
    logits = asked(run.model)
    if run.ddp.use_megatron_fsdp and logits:  # megatron-core's clip ends in an AttributeError
        yield f"{logits} with --use-megatron-fsdp needs --optimizer muon; leave {logits} out"


def _features(run: MuonRun) -> Rules:
    """Features of megatron-core that do not work with Muon under Megatron-FSDP; and values that argparse refuses."""
    settings, model = run.settings, run.model
    for name in FIELDS:
        value, choices = getattr(settings, name), choices_of(name)
        if choices and value not in choices:
            yield f"{flag_of(name)} {value} does not exist; use {', '.join(choices)}"
    graphs = [model.cuda_graph_impl]
    older = getattr(model, "cuda_graph_scope_deprecated", None)  # flags have it until they are validated
    for scopes in (model.cuda_graph_modules, older):
        graphs += scopes if isinstance(scopes, list) else [scopes]
    main_params = str(run.ddp.megatron_fsdp_main_params_dtype).removeprefix("torch.")
    main_params = "" if main_params in ("fp32", "float32") else main_params
    host, replay = "its step reads the gradient norm on the host", "a replayed iteration runs no Python"
    for flag, is_on, rest in (
        ("--use-precision-aware-optimizer", settings.use_precision_aware_optimizer, "; leave it out"),
        (f"--megatron-fsdp-main-params-dtype {main_params}", main_params, ", which keeps fp32; leave it out"),
        ("--optimizer-cpu-offload", settings.optimizer_cpu_offload, "; use --muon-offload cpu"),
        ("--optimizer-cuda-graph", settings.optimizer_cuda_graph, f": {host}; leave it out"),
        ("--cuda-graph-impl full_iteration", "full_iteration" in graphs, f": {replay}; use local"),
    ):
        if is_on:
            yield f"{flag} is not supported with --optimizer {settings.optimizer}{rest}"
    if run.replicated and (count := run.ddp.num_distributed_optimizer_instances) > 1:
        nothing = f"--num-distributed-optimizer-instances {count} has nothing to shard with {NO_SHARD}"
        yield f"{nothing}; leave it at 1, or use {SHARDING}"


def _logits(run: MuonRun) -> Rules:
    """Attention that keeps no logits, and clipping without an effect."""
    model = run.model
    if (flag := asked(model)) is None:
        return
    graphs, variant = model.cuda_graph_impl, model.experimental_attention_variant
    backend = getattr(model.attention_backend, "name", model.attention_backend)
    # Transformer Engine's attention: of its backends cuDNN's and the unfused one return logits, and not in FP8.
    for other, is_on in (
        (f"--cuda-graph-impl {graphs}", graphs != "none"),  # a replayed layer runs no Python
        (f"--attention-backend {backend}", backend == "flash"),
        ("fp8_dot_product_attention=True", getattr(model, "fp8_dot_product_attention", False)),
        (f"--experimental-attention-variant {variant}", variant is not None),
    ):
        if is_on:
            yield f"{flag} is not supported with {other}, which keeps no logits; {ONE_OUT}"
    if flag == LOG or model.multi_latent_attention:  # which normalises before the projections that make the heads
        return
    for name in ("qk_layernorm", "qk_l2_norm"):
        if getattr(model, name):
            yield f"{CLIP} has no effect with {flag_of(name)}, which normalises after what would be scaled; {ONE_OUT}"


def _unheeded(run: MuonRun) -> Rules:
    """Flags that strategy, exchange or model pass over."""
    settings, passed_over, why = run.settings, [], ""
    if run.repeated:
        why = f"{NO_SHARD} exchanges nothing, and plain Muon is megatron-core's own there"
        method = ["muon_ns"] if run.megatrons_own else []
        passed_over = run.given([*method, "muon_exchange", "muon_exchange_dtype", "muon_team_size"])
    elif run.replicated:
        why = f"{SHARED} gives every matrix one owner, which broadcasts its update"
        passed_over = run.given(["muon_team_size"])
    elif settings.muon_exchange == "allgather" and not settings.muon_share_replicated:
        why = "--muon-exchange allgather gathers fp32, matrix by matrix, on every rank"
        dtype = ["muon_exchange_dtype"] if settings.muon_exchange_dtype == "bf16" else []
        passed_over = run.given([*dtype, "muon_exchange_buffer_mb", "muon_team_size"])
    for flag in passed_over:
        yield f"{flag} has no effect here: {why}; leave it out"
    gated = run.model.gated_linear_unit if run.has_model else run.model.swiglu
    if settings.muon_split_gated_mlp and not gated:
        yield "--muon-split-gated-mlp has no gate to split without --swiglu; add it or leave the flag out"
    if needs_whole_updates(settings) and settings.muon_team_size not in ("auto", "1"):
        yield f"--muon-team-size {settings.muon_team_size}: NorMuon needs whole updates; use --muon-team-size 1"
    if run.megatrons_own and steps_for(settings):
        yield f"--muon-ns-steps-for: with {NO_SHARD} it is megatron-core's own, of one N; use {SHARDING}, or {SHARED}"


def _offload(run: MuonRun) -> Rules:
    settings = run.settings
    if run.megatrons_own:
        for flag in run.given(MOMENTUM):
            yield f"{flag} needs momentum that this package keeps, not {NO_SHARD}; use {SHARDING}, or {SHARED}"
        return
    if settings.muon_offload == "nvme" and not settings.muon_offload_dir:
        yield "--muon-offload nvme needs --muon-offload-dir DIR, a directory on a fast local disk"
    elsewhere = ("muon_offload_state", "muon_offload_fraction", "muon_offload_buffer_mb", "muon_ns_device")
    for places, names in ((("nvme",), ("muon_offload_dir",)), (("cpu", "nvme"), elsewhere)):
        wanted = f"--muon-offload {' or '.join(places)}, and it is {settings.muon_offload}"
        for flag in run.given(names) if settings.muon_offload not in places else ():
            yield f"{flag} needs {wanted}; change that, or leave {flag} out"
    if settings.muon_ns_device == "accelerator" and run.on_cpu:
        yield "--muon-ns-device accelerator: this run has none; use --muon-ns-device cpu, or leave it out"
    if settings.muon_ns_device == "cpu" and settings.optimizer == "adaptive_muon" and not run.on_cpu:
        yield "--muon-ns-device cpu is not supported with --optimizer adaptive_muon; use accelerator, or leave it out"


def _offload_all(run: MuonRun) -> Rules:
    """With `--muon-offload-state all`, what needs main weights between steps, or was not tried with it."""
    settings, model = run.settings, run.model
    if settings.muon_offload_state != "all":
        return
    untried, in_its_way = "was not tried with it", "makes the model's weights from the main weights in its own way"
    between_steps, coupled = (
        "reads the main weights between steps",
        not getattr(settings, "decoupled_weight_decay", True),
    )
    saved, hashed = "save_params_interval", "check_weight_hash_across_dp_replicas_interval"
    for flag, is_on, why in (
        ("--optimizer adaptive_muon", settings.optimizer == "adaptive_muon", untried),
        (NO_SHARD, run.replicated, "keeps every weight on every rank"),
        ("--muon-ns-device cpu", settings.muon_ns_device == "cpu", untried),
        ("decoupled_weight_decay=False", coupled, "needs weights beside the gradients"),
        ("--fp8-format", model.fp8, in_its_way),
        ("--fp4-format", model.fp4, in_its_way),
        ("--async-save", getattr(settings, "async_save", False), untried),
        (CLIP, model.qk_clip, "scales main weights behind the step"),
        (HYPERBALL, settings.muon_hyperball, "needs weights behind the step"),
        ("--log-params-norm", getattr(settings, "log_params_norm", False), between_steps),
        (flag_of(saved), getattr(settings, saved, None) is not None, "reads the main weights after a skipped step"),
        (flag_of(hashed), getattr(settings, hashed, None) is not None, between_steps),
    ):
        if is_on:
            yield f"{flag} is not supported with --muon-offload-state all: it {why}; use --muon-offload-state momentum"


def _blocks(run: MuonRun) -> Rules:
    """Blocks that contradict each other, or that no rank holds whole."""
    settings, parallel = run.settings, run.model.tensor_model_parallel_size
    if settings.muon_split_heads:
        if not settings.muon_split_qkv:
            yield f"--muon-split-heads and --muon-no-split-qkv contradict each other; {ONE_OUT}"
        heads = ": every head lies whole on one rank"
        yield from _in_parts(run, "--muon-split-heads, no_shard", heads, with_experts=False)
    if run.has_model and not run.model.multi_latent_attention and settings.muon_split_qkv:
        groups = run.model.num_query_groups
        if (run.replicated or settings.muon_tp_mode == "blockwise") and groups < parallel:
            fewer = f"--num-query-groups {groups} is less than --tensor-model-parallel-size {parallel}"
            yield (
                f"{fewer}: no rank's part of the QKV matrix holds a whole group to split; use --muon-tp-mode "
                f"duplicated with {SHARDING}, or --muon-no-split-qkv"
            )


def _share(run: MuonRun) -> Rules:
    settings = run.settings
    if not settings.muon_share_replicated:
        return
    if not run.replicated:
        strategy = run.ddp.data_parallel_sharding_strategy
        yield f"{SHARED} is for {NO_SHARD}: {strategy} shares the work already; leave the flag out"
    if settings.muon_exchange != "owner":
        yield f"--muon-exchange {settings.muon_exchange} has no rows to exchange with {SHARED}; {ONE_OUT}"
    yield from _in_parts(run, SHARED, f", or leave {SHARED} out")


def _decay(run: MuonRun) -> Rules:
    """Cautious decay without a decay, and what does not go together with norms that are kept."""
    settings, is_cautious = run.settings, run.settings.muon_cautious_weight_decay
    names = ("weight_decay", "start_weight_decay", "end_weight_decay")  # a config of a script has only the first
    decays = [name for name in names if getattr(settings, name, None)]
    if is_cautious and not getattr(settings, "decoupled_weight_decay", True):  # which has no flag
        yield f"{CAUTIOUS} needs decoupled weight decay, and decoupled_weight_decay is False; {ONE_OUT}"
    if is_cautious and not settings.muon_hyperball and not decays:
        yield f"{CAUTIOUS} has no effect with --weight-decay 0; use 0.1, which is usual for Muon, or leave it out"
    if not settings.muon_hyperball:
        return
    if settings.optimizer == "adaptive_muon":
        yield f"{HYPERBALL} is not supported with --optimizer adaptive_muon; use --optimizer muon, or leave it out"
    if is_cautious:
        yield f"{CAUTIOUS} has no effect with {HYPERBALL}, which takes the place of decay; {ONE_OUT}"
    if run.model.qk_clip:
        yield f"{CLIP} changes the norms that {HYPERBALL} keeps; {ONE_OUT}"
    for name in decays:
        given = f"{flag_of(name)} {getattr(settings, name):g}"
        yield f"{given} has no effect with {HYPERBALL}, which keeps the norms of matrices; use --weight-decay 0"
    yield from _in_parts(run, f"{HYPERBALL}, no_shard", f", or {SHARDING}")
