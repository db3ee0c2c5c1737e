"""The table of rules: what a run with Muon is refused, for the command line and for scripts alike.

A rule is a condition and a message; every rule that applies is reported, each in a line. The rules see plain values, so
that the command line can ask before torch is imported. What megatron-core refuses itself, and what fails in the first
step anyway, is not repeated here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
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
ADAPTIVE_MUON, NS_ON_CPU = "--optimizer adaptive_muon", "--muon-ns-device cpu"
CLIP, LOG = "--qk-clip", "--log-max-attention-logit"
NO_DECAY, COUPLED = "--weight-decay 0", "decoupled_weight_decay=False"
DECAYS = ("weight_decay", "start_weight_decay", "end_weight_decay")  # a config of a script has only the first
INSTANCES = "--num-distributed-optimizer-instances"
STATE_ELSEWHERE = "--muon-offload-state all"
NO_LOGITS = (
    *("--cuda-graph-impl", "--attention-backend flash", "fp8_dot_product_attention=True"),
    "--experimental-attention-variant",
)
"""Attention that keeps no logits: a replayed layer runs no Python, and others' kernels return none."""

CONFLICTS = {
    "Muon under Megatron-FSDP": (
        *("--use-precision-aware-optimizer", "--megatron-fsdp-main-params-dtype", "--optimizer-cpu-offload"),
        # Its step reads the gradient norm on the host, and a replayed iteration runs no Python.
        *("--optimizer-cuda-graph", "--cuda-graph-impl full_iteration"),
    ),
    NO_SHARD: (INSTANCES,),  # there is nothing to shard, and every rank holds whole matrices
    HYPERBALL: (CAUTIOUS, CLIP, ADAPTIVE_MUON),  # the first two would change the norms that it keeps
    CAUTIOUS: (NO_DECAY, COUPLED),
    CLIP: (*NO_LOGITS, "--qk-layernorm", "--qk-l2-norm"),  # the last two normalise after what would be scaled
    LOG: NO_LOGITS,
    "--muon-split-heads": ("--muon-no-split-qkv",),
    STATE_ELSEWHERE: (  # these need main weights between steps, or were not tried with it
        *(ADAPTIVE_MUON, NO_SHARD, NS_ON_CPU, COUPLED, CLIP, HYPERBALL, "--fp8-format", "--fp4-format", "--async-save"),
        *("--log-params-norm", "--save-params-interval", "--check-weight-hash-across-dp-replicas-interval"),
    ),
}
"""Settings with those that do not work, or have no effect, beside them."""

type Rules = Iterator[tuple[Any, str]]
"""Conditions, each with the message of where it holds."""


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

    def given(self, *names: str) -> list[str]:
        """The flags among these of this package's settings that are not at their default."""
        return [flag_of(name) for name in names if getattr(self.settings, name) != default_of(name)]


def refuse(rules: Iterable[tuple[Any, str]]) -> None:
    """Raise a `UserError` with a line for every rule that applies."""
    if lines := [message for applies, message in rules if applies]:
        raise UserError("\n".join(lines))


def muon_rules(run: MuonRun) -> Rules:
    """The rules of a run, those of Muon where it has Muon; a UserError for numbers that are out of range."""
    yield from _optimizer(run)
    if not (run.ddp.use_megatron_fsdp and (run.settings.optimizer in MUONS or run.has_model)):
        yield from _without_muon(run)
        return
    iteration_of(run.settings).check()
    iteration_of(run.settings).check_steps_for(steps_for(run.settings))
    for name in ("qk_clip_alpha", "qk_clip_threshold") if run.model.qk_clip else ():
        check_number(name, getattr(run.model, name))
    for name in FIELDS:  # argparse refuses them by itself
        value, choices = getattr(run.settings, name), choices_of(name)
        yield choices and value not in choices, f"{flag_of(name)} {value} does not exist; use {', '.join(choices)}"
    on = _settings_in_use(run)
    for one, others in CONFLICTS.items():
        for other in others:
            yield on.get(one, True) and on[other], f"{other} does not work with {one}; leave one of the two out"
    for name in DECAYS if run.settings.muon_hyperball else ():
        decay = getattr(run.settings, name, None)
        yield decay, f"{flag_of(name)} {decay} does not work with {HYPERBALL}; use {flag_of(name)} 0"
    for table in (_without_effect, _blocks, _offload):
        yield from table(run)


def asked(model: Any) -> str | None:
    """The flag that needs attention logits, of parsed flags or a TransformerConfig."""
    if model.qk_clip:
        return CLIP
    return LOG if model.log_max_attention_logit else None


def needs_whole_updates(settings: Any) -> bool:
    """Whether parsed flags or a MuonOptimizerConfig ask for NorMuon, with which no teams are formed."""
    return bool(settings.optimizer == "adaptive_muon" and settings.adaptive_muon_moment2_method == "normuon")


def _optimizer(run: MuonRun) -> Rules:
    settings, under_fsdp, optimizer = run.settings, run.ddp.use_megatron_fsdp, run.settings.optimizer
    is_adaptive, with_muon = optimizer == "adaptive_muon", optimizer in MUONS or run.has_model
    layer_wise = optimizer == "dist_muon" or getattr(settings, "use_layer_wise_distributed_optimizer", False)
    yield settings.fp16 and with_muon, f"--fp16 is not supported with --optimizer {optimizer}; use --bf16, or fp32"
    shards = "--optimizer dist_muon, megatron-core's layer-wise Muon, does not work on Megatron-FSDP's shards; use muon"
    yield layer_wise and under_fsdp, shards
    yield is_adaptive and not under_fsdp, f"{ADAPTIVE_MUON} needs --use-megatron-fsdp; add it, or use --optimizer muon"
    for flag in run.given(*ADAPTIVE):
        yield not is_adaptive, f"{flag} needs {ADAPTIVE_MUON}; add it or leave {flag} out"


def _without_muon(run: MuonRun) -> Rules:
    for flag in run.given(*(name for name in FIELDS if name not in ADAPTIVE)):
        yield True, f"{flag} needs --optimizer muon --use-megatron-fsdp; add them or leave it out"
    missing = "--muon-allow-missing-state needs --use-megatron-fsdp; add it or leave the flag out"
    yield not run.ddp.use_megatron_fsdp and getattr(run.settings, "muon_allow_missing_state", False), missing
    logits = asked(run.model)  # with Adam megatron-core's clip ends in an AttributeError
    needs = f"{logits} with --use-megatron-fsdp needs --optimizer muon; leave {logits} out"
    yield run.ddp.use_megatron_fsdp and logits, needs


def _settings_in_use(run: MuonRun) -> dict[str, bool]:
    """Which settings of `CONFLICTS` a run has."""
    settings, model, ddp = run.settings, run.model, run.ddp
    scopes = (model.cuda_graph_impl, model.cuda_graph_modules, getattr(model, "cuda_graph_scope_deprecated", None))
    main_params = str(ddp.megatron_fsdp_main_params_dtype).removeprefix("torch.")
    decays = any(getattr(settings, name, None) for name in DECAYS)
    of_flags = ["async_save", "log_params_norm", "save_params_interval"]
    of_flags.append("check_weight_hash_across_dp_replicas_interval")
    in_use = {
        "--use-precision-aware-optimizer": settings.use_precision_aware_optimizer,
        "--megatron-fsdp-main-params-dtype": main_params not in ("fp32", "float32"),
        "--optimizer-cpu-offload": settings.optimizer_cpu_offload,
        "--optimizer-cuda-graph": settings.optimizer_cuda_graph,
        "--cuda-graph-impl full_iteration": re.search(r"\bfull_iteration\b", str(scopes)),
        NO_SHARD: run.replicated,
        INSTANCES: ddp.num_distributed_optimizer_instances > 1,
        HYPERBALL: settings.muon_hyperball,
        NO_DECAY: not decays and not settings.muon_hyperball,
        COUPLED: not getattr(settings, "decoupled_weight_decay", True),  # which has no flag
        CAUTIOUS: settings.muon_cautious_weight_decay,
        CLIP: model.qk_clip,
        LOG: asked(model) == LOG,
        "--cuda-graph-impl": model.cuda_graph_impl != "none",
        "--attention-backend flash": getattr(model.attention_backend, "name", model.attention_backend) == "flash",
        "fp8_dot_product_attention=True": getattr(model, "fp8_dot_product_attention", False),
        "--experimental-attention-variant": model.experimental_attention_variant,
        # Latent attention normalises before the projections that make the heads.
        "--qk-layernorm": model.qk_layernorm and not model.multi_latent_attention,
        "--qk-l2-norm": model.qk_l2_norm and not model.multi_latent_attention,
        ADAPTIVE_MUON: settings.optimizer == "adaptive_muon",
        "--muon-split-heads": settings.muon_split_heads,
        "--muon-no-split-qkv": not settings.muon_split_qkv,
        STATE_ELSEWHERE: settings.muon_offload_state == "all",
        NS_ON_CPU: settings.muon_ns_device == "cpu",
        "--fp8-format": model.fp8,
        "--fp4-format": model.fp4,
        **{flag_of(name): getattr(settings, name, None) for name in of_flags},
    }
    return {name: bool(value) for name, value in in_use.items()}


def _without_effect(run: MuonRun) -> Rules:
    """Flags that strategy and exchange pass over."""
    settings, passed_over, why = run.settings, list[str](), ""
    if run.repeated:
        why = f"{NO_SHARD} exchanges nothing, and plain Muon is megatron-core's own there"
        passed_over = run.given("muon_exchange", "muon_exchange_dtype", "muon_team_size")
        for flag in run.given("muon_ns", "muon_ns_steps_for", *MOMENTUM) if run.megatrons_own else ():
            yield True, f"{flag} has no effect here: {why}; use {SHARDING}, or {SHARED}"
    elif run.replicated:
        why = f"{SHARED} gives every matrix one owner, which broadcasts its update"
        passed_over = run.given("muon_exchange", "muon_team_size")
    elif settings.muon_share_replicated:
        why, passed_over = "it is for no_shard, and other strategies share the work already", [SHARED]
    elif settings.muon_exchange == "allgather":
        why = "--muon-exchange allgather gathers fp32, matrix by matrix, on every rank"
        dtype = ("muon_exchange_dtype",) if settings.muon_exchange_dtype == "bf16" else ()
        passed_over = run.given("muon_exchange_buffer_mb", "muon_team_size", *dtype)
    for flag in passed_over:
        yield True, f"{flag} has no effect here: {why}; leave it out"
    size = settings.muon_team_size
    whole = f"--muon-team-size {size}: NorMuon needs whole updates; use --muon-team-size 1"
    yield needs_whole_updates(settings) and size not in ("auto", "1"), whole


def _blocks(run: MuonRun) -> Rules:
    """Blocks that are not there, that no rank holds whole, or that tensor-parallel replicas have in parts."""
    settings, model, mode = run.settings, run.model, run.settings.muon_tp_mode
    gated = model.gated_linear_unit if run.has_model else model.swiglu
    no_gate = "--muon-split-gated-mlp has no gate to split without --swiglu; add it or leave the flag out"
    yield settings.muon_split_gated_mlp and not gated, no_gate
    dense = model.tensor_model_parallel_size
    largest = max(dense, model.expert_tensor_parallel_size or 1)
    for flag, is_on, size in (
        (SHARED, settings.muon_share_replicated, largest),
        (HYPERBALL, settings.muon_hyperball, largest),
        (ADAPTIVE_MUON, settings.optimizer == "adaptive_muon", largest),
        ("--muon-split-heads", settings.muon_split_heads, dense),
    ):
        together = f"--muon-tp-mode {mode} is not supported with {flag}, no_shard and tensor parallel size {size}"
        in_parts = run.replicated and size > 1 and mode != "blockwise"
        yield is_on and in_parts, f"{together}; use --muon-tp-mode blockwise, or {SHARDING}"
    if run.has_model and not model.multi_latent_attention and settings.muon_split_qkv:
        fewer = f"--num-query-groups {model.num_query_groups} is less than --tensor-model-parallel-size {dense}"
        none_whole = (run.replicated or mode == "blockwise") and model.num_query_groups < dense
        duplicated = f"use --muon-tp-mode duplicated with {SHARDING}, or --muon-no-split-qkv"
        yield none_whole, f"{fewer}: no rank's part of the QKV matrix holds a whole group to split; {duplicated}"


def _offload(run: MuonRun) -> Rules:
    """Flags of state elsewhere that lack what they are about."""
    settings = run.settings
    if run.megatrons_own:
        return
    no_directory = "--muon-offload nvme needs --muon-offload-dir DIR, a directory on a fast local disk"
    yield settings.muon_offload == "nvme" and not settings.muon_offload_dir, no_directory
    elsewhere = ("muon_offload_state", "muon_offload_fraction", "muon_offload_buffer_mb", "muon_ns_device")
    for places, names in ((("nvme",), ("muon_offload_dir",)), (("cpu", "nvme"), elsewhere)):
        for flag in run.given(*names):
            needs = f"{flag} needs --muon-offload {' or '.join(places)}, and it is {settings.muon_offload}"
            yield settings.muon_offload not in places, f"{needs}; change that, or leave {flag} out"
    no_accelerator = "--muon-ns-device accelerator: this run has none; use --muon-ns-device cpu, or leave it out"
    yield settings.muon_ns_device == "accelerator" and run.on_cpu, no_accelerator
    adaptive = f"{NS_ON_CPU} is not supported with {ADAPTIVE_MUON}; use accelerator, or leave it out"
    on_other_device = settings.muon_ns_device == "cpu" and not run.on_cpu
    yield on_other_device and settings.optimizer == "adaptive_muon", adaptive
