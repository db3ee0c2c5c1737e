"""The table of rules: what a run with Muon is refused, for the command line and for scripts alike.

A rule is a condition and a message; every rule that applies is reported, each in a line. The rules
see plain values, so that the command line can ask before torch is imported. What megatron-core
refuses itself, and what fails in the first step anyway, is not repeated here.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any

from megatron_muon.core.numbers import check_number
from megatron_muon.errors import UserError
from megatron_muon.settings import (
    MuonSettings,
    choices_of,
    default_of,
    flag_of,
    iteration_of,
    steps_for,
    word_as_flags,
)

MUONS = ("muon", "adaptive_muon")
"""Values of --optimizer that this package's factory serves under Megatron-FSDP."""

FIELDS = tuple(field.name for field in fields(MuonSettings))
ADAPTIVE = tuple(name for name in FIELDS if name.startswith("adaptive_muon_"))
MOMENTUM = (
    *(name for name in FIELDS if name.startswith("muon_offload")),
    "muon_ns_device",
    "muon_momentum_dtype",
)
"""Settings that say where momentum lives, and in which form."""

NO_SHARD = "--data-parallel-sharding-strategy no_shard"
SHARDING = "optim, optim_grads or optim_grads_params"
SHARED, HYPERBALL, CAUTIOUS = (
    "--muon-share-replicated",
    "--muon-hyperball",
    "--muon-cautious-weight-decay",
)
ADAPTIVE_MUON, NS_ON_CPU = "--optimizer adaptive_muon", "--muon-ns-device cpu"
CLIP, LOG = "--qk-clip", "--log-max-attention-logit"
COUPLED = "decoupled_weight_decay=False"
# a config of a script has only the first
DECAYS = ("weight_decay", "start_weight_decay", "end_weight_decay")
NO_LOGITS = (
    *("--cuda-graph-impl", "--attention-backend flash", "fp8_dot_product_attention=True"),
    "--experimental-attention-variant",
)
"""Attention that keeps no logits: a replayed layer runs no Python, and others' kernels return none."""

OF_FLAGS = (
    *("--async-save", "--log-params-norm", "--save-params-interval"),
    "--check-weight-hash-across-dp-replicas-interval",
)
"""Settings of `CONFLICTS` that a config of a script does not have."""

CONFLICTS = {
    "Muon under Megatron-FSDP": (
        *(
            "--use-precision-aware-optimizer",
            "--megatron-fsdp-main-params-dtype",
            "--optimizer-cpu-offload",
        ),
        # Its step reads the gradient norm on the host, and a replayed iteration runs no Python.
        *("--optimizer-cuda-graph", "--cuda-graph-impl full_iteration"),
    ),
    # nothing to shard: every rank holds whole matrices
    NO_SHARD: ("--num-distributed-optimizer-instances",),
    # the first two would change the norms that it keeps
    HYPERBALL: (CAUTIOUS, CLIP, ADAPTIVE_MUON),
    CAUTIOUS: ("--weight-decay 0", COUPLED),
    # the last two normalise after what would be scaled
    CLIP: (*NO_LOGITS, "--qk-layernorm", "--qk-l2-norm"),
    LOG: NO_LOGITS,
    "--muon-split-heads": ("--muon-no-split-qkv",),
    # these need main weights between steps, or were not tried with it
    "--muon-offload-state all": (
        *(
            ADAPTIVE_MUON,
            NO_SHARD,
            NS_ON_CPU,
            COUPLED,
            CLIP,
            HYPERBALL,
            "--fp8-format",
            "--fp4-format",
        ),
        *OF_FLAGS,
    ),
}
"""Settings with those that do not work, or have no effect, beside them; `_in_use` knows which a run has."""

type Rules = Iterator[tuple[Any, str]]
"""Conditions, each with the message of where it holds."""


@dataclass(frozen=True, kw_only=True)
class MuonRun:
    """What the rules depend on."""

    # parsed flags; of a script all fields of its optimizer's, the model's and Megatron-FSDP's
    # config
    values: Any
    on_cpu: bool
    # a script has made the model, so `values` has its sizes and Muon is to train it
    has_model: bool

    @property
    def replicated(self) -> bool:
        """Every rank holds whole matrices."""
        return bool(self.values.data_parallel_sharding_strategy == "no_shard")

    @property
    def repeated(self) -> bool:
        """Replicas without shared work."""
        return self.replicated and not self.values.muon_share_replicated

    @property
    def megatrons_own(self) -> bool:
        """Plain Muon of replicas without shared work is megatron-core's own."""
        return self.repeated and self.values.optimizer == "muon" and not self.values.muon_hyperball

    def given(self, *names: str) -> list[str]:
        """The flags among these of this package's settings that are not at their default."""
        return [flag_of(name) for name in names if getattr(self.values, name) != default_of(name)]


@word_as_flags()
def refuse(rules: Iterable[tuple[Any, str]]) -> None:
    """Raise a `UserError` with a line for every rule that applies."""
    if lines := [message for applies, message in rules if applies]:
        raise UserError("\n".join(lines))


def muon_rules(run: MuonRun) -> Rules:
    """The rules of a run, those of Muon where it has Muon; a UserError for numbers that are out of range."""
    values = run.values
    yield from _optimizer(run)
    if not (values.use_megatron_fsdp and (values.optimizer in MUONS or run.has_model)):
        yield from _without_muon(run)
        return
    iteration_of(values).check()
    iteration_of(values).check_steps_for(steps_for(values))
    for name in ("qk_clip_alpha", "qk_clip_threshold") if values.qk_clip else ():
        check_number(name, getattr(values, name))
    for name in FIELDS:  # argparse refuses them by itself
        value, choices = getattr(values, name), choices_of(name)
        yield (
            choices and value not in choices,
            f"{flag_of(name)} {value} does not exist; use {', '.join(choices)}",
        )
    on = _in_use(values)
    for one, others in CONFLICTS.items():
        for other in others:
            yield (
                on[one] and on[other],
                f"{other} does not work with {one}; leave one of the two out",
            )
    for name in DECAYS if values.muon_hyperball else ():
        decay = getattr(values, name, None)
        yield (
            decay,
            f"{flag_of(name)} {decay} does not work with {HYPERBALL}; use {flag_of(name)} 0",
        )
    for table in (_without_effect, _blocks, _offload):
        yield from table(run)


def asked(model: Any) -> str | None:
    """The flag that needs attention logits, of parsed flags or a TransformerConfig."""
    if model.qk_clip:
        return CLIP
    return LOG if model.log_max_attention_logit else None


def needs_whole_updates(settings: Any) -> bool:
    """Whether parsed flags or a MuonOptimizerConfig ask for NorMuon, with which no teams are formed."""
    return bool(
        settings.optimizer == "adaptive_muon" and settings.adaptive_muon_moment2_method == "normuon"
    )


def _optimizer(run: MuonRun) -> Rules:
    values, under_fsdp, optimizer = run.values, run.values.use_megatron_fsdp, run.values.optimizer
    is_adaptive, with_muon = optimizer == "adaptive_muon", optimizer in MUONS or run.has_model
    pipeline = values.pipeline_model_parallel_size  # the mesh is made of all ranks
    without = (
        f"--pipeline-model-parallel-size {pipeline} does not work with --use-megatron-fsdp; use 1"
    )
    yield under_fsdp and pipeline > 1, without
    layer_wise = optimizer == "dist_muon" or getattr(
        values, "use_layer_wise_distributed_optimizer", False
    )
    yield (
        values.fp16 and with_muon,
        f"--fp16 is not supported with --optimizer {optimizer}; use --bf16, or fp32",
    )
    shards = (
        "--optimizer dist_muon, megatron-core's layer-wise Muon, does not work on Megatron-FSDP's"
        " shards; use muon"
    )
    yield layer_wise and under_fsdp, shards
    yield (
        is_adaptive and not under_fsdp,
        f"{ADAPTIVE_MUON} needs --use-megatron-fsdp; add it, or use --optimizer muon",
    )
    for flag in run.given(*ADAPTIVE):
        yield not is_adaptive, f"{flag} needs {ADAPTIVE_MUON}; add it or leave {flag} out"


def _without_muon(run: MuonRun) -> Rules:
    under_fsdp, logits = run.values.use_megatron_fsdp, asked(run.values)
    for flag in run.given(*(name for name in FIELDS if name not in ADAPTIVE)):
        yield True, f"{flag} needs --optimizer muon --use-megatron-fsdp; add them or leave it out"
    missing = "--muon-allow-missing-state needs --use-megatron-fsdp; add it or leave the flag out"
    yield not under_fsdp and getattr(run.values, "muon_allow_missing_state", False), missing
    # With Adam megatron-core's clip ends in an AttributeError.
    needs = f"{logits} with --use-megatron-fsdp needs --optimizer muon; leave {logits} out"
    yield under_fsdp and logits, needs


def _in_use(values: Any) -> dict[str, Any]:
    """Which settings of `CONFLICTS` a run has: unless it says more here, the flag is there, or has that value."""
    graphs = (
        values.cuda_graph_impl,
        values.cuda_graph_modules,
        getattr(values, "cuda_graph_scope_deprecated", None),
    )
    # which normalises before the projections that make the heads
    normalises = not values.multi_latent_attention
    main_params = str(values.megatron_fsdp_main_params_dtype).removeprefix("torch.")
    in_use = {
        "Muon under Megatron-FSDP": True,
        "--megatron-fsdp-main-params-dtype": main_params not in ("fp32", "float32"),
        "--cuda-graph-impl full_iteration": re.search(r"\bfull_iteration\b", str(graphs)),
        "--cuda-graph-impl": values.cuda_graph_impl != "none",
        "--num-distributed-optimizer-instances": values.num_distributed_optimizer_instances > 1,
        "--weight-decay 0": not any(
            getattr(values, name, None) for name in (*DECAYS, "muon_hyperball")
        ),
        COUPLED: not getattr(values, "decoupled_weight_decay", True),  # which has no flag
        LOG: asked(values) == LOG,
        "--attention-backend flash": (
            getattr(values.attention_backend, "name", values.attention_backend) == "flash"
        ),
        "fp8_dot_product_attention=True": getattr(values, "fp8_dot_product_attention", False),
        "--qk-layernorm": values.qk_layernorm and normalises,
        "--qk-l2-norm": values.qk_l2_norm and normalises,
        "--muon-no-split-qkv": not values.muon_split_qkv,
        "--fp8-format": values.fp8,
        "--fp4-format": values.fp4,
        **{flag: getattr(values, flag[2:].replace("-", "_"), None) for flag in OF_FLAGS},
    }
    for setting in {*CONFLICTS, *itertools.chain(*CONFLICTS.values())} - in_use.keys():
        flag, _, word = setting.partition(" ")
        value = getattr(values, flag[2:].replace("-", "_"))
        in_use[setting] = value == word if word else value
    return in_use


def _without_effect(run: MuonRun) -> Rules:
    """Flags that strategy and exchange pass over."""
    values, passed_over, why = run.values, list[str](), ""
    if run.repeated:
        why = f"{NO_SHARD} exchanges nothing, and plain Muon is megatron-core's own there"
        passed_over = run.given("muon_exchange", "muon_exchange_dtype", "muon_team_size")
        for flag in (
            run.given("muon_ns", "muon_ns_steps_for", *MOMENTUM) if run.megatrons_own else ()
        ):
            yield True, f"{flag} has no effect here: {why}; use {SHARDING}, or {SHARED}"
    elif run.replicated:
        why = f"{SHARED} gives every matrix one owner, which broadcasts its update"
        passed_over = run.given("muon_exchange", "muon_team_size")
    elif values.muon_share_replicated:
        why, passed_over = (
            "it is for no_shard, and other strategies share the work already",
            [SHARED],
        )
    elif values.muon_exchange == "allgather":
        why = "--muon-exchange allgather gathers fp32, matrix by matrix, on every rank"
        dtype = ("muon_exchange_dtype",) if values.muon_exchange_dtype == "bf16" else ()
        passed_over = run.given("muon_exchange_buffer_mb", "muon_team_size", *dtype)
    for flag in passed_over:
        yield True, f"{flag} has no effect here: {why}; leave it out"
    size = values.muon_team_size
    whole = f"--muon-team-size {size}: NorMuon needs whole updates; use --muon-team-size 1"
    yield needs_whole_updates(values) and size not in ("auto", "1"), whole


def _blocks(run: MuonRun) -> Rules:
    """Blocks that are not there, that no rank holds whole, or that tensor-parallel replicas have in parts."""
    values, mode = run.values, run.values.muon_tp_mode
    gated = values.gated_linear_unit if run.has_model else values.swiglu
    no_gate = (
        "--muon-split-gated-mlp has no gate to split without --swiglu; add it or leave the flag out"
    )
    yield values.muon_split_gated_mlp and not gated, no_gate
    dense = values.tensor_model_parallel_size
    largest = max(dense, values.expert_tensor_parallel_size or 1)
    for flag, is_on, size in (
        (SHARED, values.muon_share_replicated, largest),
        (HYPERBALL, values.muon_hyperball, largest),
        (ADAPTIVE_MUON, values.optimizer == "adaptive_muon", largest),
        ("--muon-split-heads", values.muon_split_heads, dense),
    ):
        together = (
            f"--muon-tp-mode {mode} is not supported with {flag}, no_shard and tensor parallel size"
            f" {size}"
        )
        in_parts = run.replicated and size > 1 and mode != "blockwise"
        yield is_on and in_parts, f"{together}; use --muon-tp-mode blockwise, or {SHARDING}"
    if run.has_model and not values.multi_latent_attention and values.muon_split_qkv:
        fewer = (
            f"--num-query-groups {values.num_query_groups} is less than"
            f" --tensor-model-parallel-size {dense}"
        )
        none_whole = (run.replicated or mode == "blockwise") and values.num_query_groups < dense
        duplicated = f"use --muon-tp-mode duplicated with {SHARDING}, or --muon-no-split-qkv"
        yield (
            none_whole,
            f"{fewer}: no rank's part of the QKV matrix holds a whole group to split; {duplicated}",
        )


def _offload(run: MuonRun) -> Rules:
    """Flags of state elsewhere that lack what they are about."""
    values = run.values
    if run.megatrons_own:
        return
    no_directory = (
        "--muon-offload nvme needs --muon-offload-dir DIR, a directory on a fast local disk"
    )
    yield values.muon_offload == "nvme" and not values.muon_offload_dir, no_directory
    elsewhere = (
        "muon_offload_state",
        "muon_offload_fraction",
        "muon_offload_buffer_mb",
        "muon_ns_device",
    )
    for places, names in ((("nvme",), ("muon_offload_dir",)), (("cpu", "nvme"), elsewhere)):
        for flag in run.given(*names):
            needs = (
                f"{flag} needs --muon-offload {' or '.join(places)}, and it is"
                f" {values.muon_offload}"
            )
            yield values.muon_offload not in places, f"{needs}; change that, or leave {flag} out"
    no_accelerator = (
        "--muon-ns-device accelerator: this run has none; use --muon-ns-device cpu, or leave it out"
    )
    yield values.muon_ns_device == "accelerator" and run.on_cpu, no_accelerator
    adaptive = (
        f"{NS_ON_CPU} is not supported with {ADAPTIVE_MUON}; use accelerator, or leave it out"
    )
    on_other_device = values.muon_ns_device == "cpu" and not run.on_cpu
    yield on_other_device and values.optimizer == "adaptive_muon", adaptive
