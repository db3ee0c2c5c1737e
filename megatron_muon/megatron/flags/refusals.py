"""The table of refused settings, for the command line and for scripts alike.

A rule is a condition and a message, with settings as in str.format: `{0.lr}`. All rules that apply
are reported, one line each. They read plain values, so the command line can check them before torch
is imported. What megatron-core refuses itself, and what fails in the first step anyway, is not
repeated here.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Any

from megatron_muon.errors import UserError
from megatron_muon.megatron.flags.named_optimizer import LION, MEGATRONS, is_class
from megatron_muon.proven import check_iteration, check_steps_for
from megatron_muon.ranges import check_number
from megatron_muon.settings import (
    MuonSettings,
    choices_of,
    default_of,
    flag_of,
    iteration_of,
    steps_for,
    word_as_flags,
)

ITERATION = {
    "muon_momentum": (0.9, 0.95),
    "muon_nesterov": (False,),
    "muon_scale_mode": ("spectral",),
    "muon_fp32_matmul_prec": ("medium",),
    "muon_coefficient_type": ("quintic",),
    "muon_num_ns_steps": (5,),
    "muon_extra_scale_factor": (1.0,),
}
"""Megatron's settings of Muon's update, with their defaults as flags and in a config."""

FIELDS = tuple(field.name for field in fields(MuonSettings))
ADAPTIVE = tuple(name for name in FIELDS if name.startswith("adaptive_muon_"))
OF_OFFLOAD = (
    "muon_offload_dir",
    "muon_offload_state",
    "muon_offload_fraction",
    "muon_offload_buffer_mb",
    "muon_ns_device",
)
OF_AUDITS = ("muon_audit_interval", "muon_audit_action")
OF_EXCHANGE = (
    "matrix_optimizer_args",
    "muon_exchange",
    "muon_exchange_dtype",
    "muon_exchange_buffer_mb",
    "muon_free_buffers",
    "muon_offload",
    "muon_cautious_weight_decay",
    *OF_AUDITS,
)
OF_MUON = (
    "muon_team_size",
    "muon_ns",
    "muon_ns_steps_for",
    "muon_matrices",
    "muon_hyperball",
    "muon_share_replicated",
    "muon_momentum_dtype",
    *OF_OFFLOAD,
)
OF_OWN_EXCHANGE = (
    "muon_ns",
    "muon_ns_steps_for",
    "muon_offload",
    *OF_OFFLOAD,
    *OF_AUDITS,
    "muon_momentum_dtype",
)

DECAYS = ("weight_decay", "start_weight_decay", "end_weight_decay")
"""A script's config has only the first."""

NEEDS_MUON = "needs --optimizer muon --use-megatron-fsdp; add them or leave it out"

CONFLICTS = {
    "Muon under Megatron-FSDP": (
        "--use-precision-aware-optimizer",
        "--megatron-fsdp-main-params-dtype",
        "--optimizer-cpu-offload",
        # Its step reads the gradient norm on the host, and a replayed iteration runs no Python.
        "--optimizer-cuda-graph",
        "--cuda-graph-impl full_iteration",
        "--megatron-fsdp-version 2",
        "--data-parallel-random-init",  # 0.19 broadcasts DTensors
        "--muon-use-syrk",  # symmetric products are chosen by size
    ),
    # Every rank holds whole matrices: there is nothing to shard.
    "--data-parallel-sharding-strategy no_shard": ("--num-distributed-optimizer-instances",),
    # The first two would change the norms that it keeps.
    "--muon-hyperball": (
        "--muon-cautious-weight-decay",
        "--qk-clip",
        "--optimizer adaptive_muon",
    ),
    "--muon-cautious-weight-decay": ("--weight-decay 0", "decoupled_weight_decay=False"),
    # These normalize after what would be scaled.
    "--qk-clip": ("--qk-layernorm", "--qk-l2-norm"),
    "--muon-split-heads": ("--muon-no-split-qkv",),
    # it splits QKV only
    "--muon-matrices upstream": ("--muon-split-gated-mlp", "--muon-split-heads"),
    # These need main weights between steps, or are untested with it.
    "--muon-offload-state all": (
        "--optimizer adaptive_muon",
        "--data-parallel-sharding-strategy no_shard",
        "--muon-ns-device cpu",
        "decoupled_weight_decay=False",
        "--qk-clip",
        "--muon-hyperball",
        "--fp8-format",
        "--fp4-format",
        "--async-save",
        "--log-params-norm",
        "--save-params-interval",
        "--check-weight-hash-across-dp-replicas-interval",
    ),
}
"""Settings that do not work together, or have no effect together; see `_conditions`."""

type Rules = Iterator[tuple[Any, str]]


class CheckedRun:
    """A run's settings: parsed flags, or the fields of a script's configs, as attributes.

    `has_model`: a script has built the model, so the settings include its sizes, and Muon is to
    train it.
    """

    def __init__(self, values: Any, *, on_cpu: bool, has_model: bool = False) -> None:
        self.values = values
        self.on_cpu = on_cpu
        self.has_model = has_model
        self.is_ours = values.optimizer not in MEGATRONS or has_model
        self.is_class = is_class(values.optimizer)
        self.is_adaptive = values.optimizer == "adaptive_muon"
        # Every rank holds whole matrices; plain Muon with repeated work is megatron-core's own.
        self.replicated = values.data_parallel_sharding_strategy == "no_shard"
        self.repeated = self.replicated and not values.muon_share_replicated
        is_plain = values.optimizer == "muon" and not values.muon_hyperball
        self.is_megatrons_own = self.repeated and is_plain

    def __getattr__(self, name: str) -> Any:
        return getattr(self.values, name)

    def get(self, name: str) -> Any:
        """A setting that scripts may not have; then None."""
        return getattr(self.values, name, None)

    def given(self, names: Iterable[str]) -> list[str]:
        """The flags among these settings of this package that are not at their default.

        No audits are no request, so that one file of settings serves all strategies.
        """
        values = {name: getattr(self.values, name) for name in names}
        if values.get("muon_audit_interval") == 0:
            del values["muon_audit_interval"]
        return [flag_of(name) for name, value in values.items() if value != default_of(name)]

    @property
    def pattern(self) -> Any:
        """The layers of a hybrid model, by either of their flags."""
        return self.hybrid_layer_pattern or self.hybrid_override_pattern

    @property
    def largest_tp(self) -> int:
        """The larger tensor parallel size, of dense layers or of experts."""
        return int(max(self.tensor_model_parallel_size, self.expert_tensor_parallel_size or 1))


@word_as_flags()
def check(run: CheckedRun, *, is_training: bool = False) -> None:
    """Raise a `UserError` with a line for every rule that applies.

    Numbers out of range are an error of their own. `is_training`: a run of pretrain_gpt.py, for
    which Megatron's own flags are checked too.
    """
    lines = [message.format(run) for applies, message in _rules(run, is_training) if applies]
    if lines:
        raise UserError("\n".join(lines))


def _rules(run: CheckedRun, is_training: bool) -> Rules:
    if is_training:
        yield from _of_megatron(run)
    yield from _of_optimizer(run)
    if not (run.use_megatron_fsdp and run.is_ours):
        yield from _without_muon(run)
        return
    for name in FIELDS:  # argparse refuses these by itself
        value, choices = getattr(run, name), choices_of(name)
        is_unknown = choices and value not in choices
        others = ", ".join(choices)
        yield is_unknown, f"{flag_of(name)} {{0.{name}}} does not exist; use {others}"
    if run.qk_clip:
        for name in ("qk_clip_alpha", "qk_clip_threshold"):
            check_number(name, getattr(run, name))
    if run.is_class:
        yield from _of_class(run)
        return
    yield (
        bool(run.matrix_optimizer_args),
        "--matrix-optimizer-args needs --optimizer soap or --matrix-optimizer NAME; leave it out",
    )
    check_iteration(iteration_of(run))
    check_steps_for(iteration_of(run), steps_for(run))
    yield from _conflicts(run)
    yield from _without_effect(run)
    yield from _blocks(run)
    if not run.is_megatrons_own:
        yield from _offload(run)


def _of_megatron(run: CheckedRun) -> Rules:
    """Megatron's flags that do nothing, or something else, in a run."""
    yield (
        run.pattern,
        "--hybrid-layer-pattern {0.pattern} makes a hybrid model, which a run does not train; leave"
        " it out",
    )
    # The saving process would share the tensors that training changes.
    yield (
        run.async_save and run.on_cpu,
        "--async-save does not work on the CPU; leave it out",
    )


def _of_optimizer(run: CheckedRun) -> Rules:
    under_fsdp = run.use_megatron_fsdp
    # The mesh is made of all ranks.
    yield (
        under_fsdp and run.pipeline_model_parallel_size > 1,
        "--pipeline-model-parallel-size {0.pipeline_model_parallel_size} does not work with"
        " --use-megatron-fsdp; use 1",
    )
    yield (
        run.fp16 and run.is_ours,
        "--fp16 is not supported with --optimizer {0.optimizer}; use --bf16, or fp32",
    )
    layer_wise = run.optimizer == "dist_muon" or run.get("use_layer_wise_distributed_optimizer")
    yield (
        under_fsdp and layer_wise,
        "--optimizer dist_muon, megatron-core's layer-wise Muon, does not work on Megatron-FSDP's"
        " shards; use muon",
    )
    yield (
        run.is_ours and run.matrix_optimizer not in (None, run.optimizer),
        "--matrix-optimizer {0.matrix_optimizer} and --optimizer {0.optimizer} name two optimizers"
        " for matrices; in a config set optimizer alone",
    )
    for flag in run.given(ADAPTIVE):
        needs = f"{flag} needs --optimizer adaptive_muon; add it or leave {flag} out"
        yield not run.is_adaptive, needs


def _of_class(run: CheckedRun) -> Rules:
    """Settings of Muon in a run with another optimizer for matrices."""
    for name, defaults in ITERATION.items():
        yield (
            getattr(run, name) not in defaults,
            f"{flag_of(name)} {{0.{name}}} is for Muon, not for {{0.optimizer}}; leave it out",
        )
    for flag in run.given(OF_MUON):
        yield True, f"{flag} is for Muon, not for {{0.optimizer}}; leave it out"
    yield (
        run.muon_offload == "nvme",
        "--muon-offload nvme does not work for the state of {0.optimizer}; use cpu or none",
    )
    yield (
        run.muon_tp_mode == "blockwise" and run.largest_tp > 1,
        "--muon-tp-mode blockwise does not work with {0.optimizer}, which needs whole matrices; use"
        " duplicated",
    )
    yield (
        run.replicated and run.largest_tp > 1,
        "no_shard with tensor parallel size {0.largest_tp} does not work with {0.optimizer}: no"
        " rank has whole matrices; use optim, optim_grads or optim_grads_params",
    )
    yield (
        run.get("decoupled_weight_decay") is False,
        "decoupled_weight_decay=False does not work with {0.optimizer}; leave it out",
    )
    if run.optimizer == LION:
        for flag in run.given(OF_EXCHANGE):
            yield True, f"{flag} has no effect here: lion exchanges nothing; leave it out"
    yield from _conflicts(run)
    yield from _without_effect(run)


def _without_muon(run: CheckedRun) -> Rules:
    for flag in run.given(name for name in FIELDS if name not in ADAPTIVE):
        yield True, f"{flag} {NEEDS_MUON}"


def _conflicts(run: CheckedRun) -> Rules:
    special = _conditions(run)

    def is_on(setting: str) -> Any:
        if setting in special:
            return special[setting]
        flag, _, word = setting.partition(" ")
        value = run.get(flag[2:].replace("-", "_"))
        return str(value) == word if word else value

    for one, others in CONFLICTS.items():
        for other in others:
            both = is_on(one) and is_on(other)
            yield both, f"{other} does not work with {one}; leave one of the two out"
    for name in DECAYS:
        flag, decay = flag_of(name), run.get(name)
        message = f"{flag} {decay} does not work with --muon-hyperball; use {flag} 0"
        yield run.muon_hyperball and decay, message


def _conditions(run: CheckedRun) -> dict[str, Any]:
    """Settings of `CONFLICTS` that a run has on other conditions than that the flag is given."""
    main_params = str(run.megatron_fsdp_main_params_dtype).removeprefix("torch.")
    scope = run.get("cuda_graph_scope_deprecated")
    graphs = f"{run.cuda_graph_impl} {run.cuda_graph_modules} {scope}"
    # Latent attention normalizes before the projections that make the heads.
    normalizes_heads = not run.multi_latent_attention
    return {
        "Muon under Megatron-FSDP": True,
        "--megatron-fsdp-main-params-dtype": main_params not in ("fp32", "float32"),
        "--cuda-graph-impl full_iteration": re.search(r"\bfull_iteration\b", graphs),
        "--num-distributed-optimizer-instances": run.num_distributed_optimizer_instances > 1,
        "--weight-decay 0": not (run.muon_hyperball or any(run.get(name) for name in DECAYS)),
        "decoupled_weight_decay=False": run.get("decoupled_weight_decay") is False,
        "--qk-layernorm": run.qk_layernorm and normalizes_heads,
        "--qk-l2-norm": run.qk_l2_norm and normalizes_heads,
        "--muon-no-split-qkv": not run.muon_split_qkv,
        "--fp8-format": run.fp8,
        "--fp4-format": run.fp4,
    }


def _without_effect(run: CheckedRun) -> Rules:
    """Settings that the strategy or the exchange ignores."""
    for flag in run.given(OF_OWN_EXCHANGE):
        yield (
            run.is_megatrons_own,
            f"{flag} has no effect here: no_shard exchanges nothing, and plain Muon is"
            " megatron-core's own there; use optim, optim_grads or optim_grads_params, or"
            " --muon-share-replicated",
        )
    ignored: list[str] = []
    why = ""
    if run.repeated:
        why = "no_shard exchanges nothing"
        ignored = run.given(("muon_exchange", "muon_exchange_dtype", "muon_team_size"))
    elif run.replicated:
        why = "--muon-share-replicated gives every matrix one owner, which broadcasts its update"
        ignored = run.given(("muon_exchange", "muon_team_size"))
    elif run.muon_share_replicated:
        why = "it is for no_shard, and other strategies share the work already"
        ignored = ["--muon-share-replicated"]
    elif run.muon_exchange == "allgather":
        why = "--muon-exchange allgather gathers fp32, matrix by matrix, on every rank"
        ignored = run.given(("muon_exchange_buffer_mb", "muon_team_size"))
        if run.muon_exchange_dtype == "bf16":
            ignored.append("--muon-exchange-dtype")
    for flag in ignored:
        yield True, f"{flag} has no effect here: {why}; leave it out"


def _blocks(run: CheckedRun) -> Rules:
    """Blocks that do not exist, or that no rank holds whole."""
    yield (
        needs_whole_updates(run) and run.muon_team_size not in ("auto", "1"),
        "--muon-team-size {0.muon_team_size}: NorMuon needs whole updates; use --muon-team-size 1",
    )
    dense = run.tensor_model_parallel_size
    is_cut = run.replicated and run.muon_tp_mode != "blockwise"
    cut = {
        "--muon-share-replicated": run.muon_share_replicated and run.largest_tp > 1,
        "--muon-hyperball": run.muon_hyperball and run.largest_tp > 1,
        "--optimizer adaptive_muon": run.is_adaptive and run.largest_tp > 1,
        "--muon-split-heads": run.muon_split_heads and dense > 1,
    }
    for flag, is_on in cut.items():
        yield (
            is_cut and is_on,
            f"--muon-tp-mode {run.muon_tp_mode} is not supported with {flag}, no_shard and tensor"
            " parallel size {0.largest_tp}; use --muon-tp-mode blockwise, or optim, optim_grads or"
            " optim_grads_params",
        )
    if run.has_model and not run.multi_latent_attention:
        none_whole = run.replicated or run.muon_tp_mode == "blockwise"
        yield (
            none_whole and run.muon_split_qkv and run.num_query_groups < dense,
            "--num-query-groups {0.num_query_groups} is less than --tensor-model-parallel-size"
            " {0.tensor_model_parallel_size}: no rank's part of the QKV matrix holds a whole group"
            " to split; use --muon-tp-mode duplicated with optim, optim_grads or"
            " optim_grads_params, or --muon-no-split-qkv",
        )


def _offload(run: CheckedRun) -> Rules:
    yield (
        run.muon_offload == "nvme" and not run.muon_offload_dir,
        "--muon-offload nvme needs --muon-offload-dir DIR, a directory on a fast local disk",
    )
    for flag in run.given(OF_OFFLOAD):
        places = ("nvme",) if flag == "--muon-offload-dir" else ("cpu", "nvme")
        needs = f"{flag} needs --muon-offload {' or '.join(places)}; change that, or leave it out"
        yield run.muon_offload not in places, needs
    yield (
        run.muon_ns_device == "cpu" and run.is_adaptive and not run.on_cpu,
        "--muon-ns-device cpu is not supported with --optimizer adaptive_muon; use accelerator, or"
        " leave it out",
    )


def has_transformer_engine() -> bool:
    """True if Transformer Engine is installed."""
    return importlib.util.find_spec("transformer_engine") is not None


def logits_flag(model: Any) -> str | None:
    """The flag that needs attention logits, of parsed flags or a TransformerConfig."""
    if model.qk_clip:
        return "--qk-clip"
    return "--log-max-attention-logit" if model.log_max_attention_logit else None


def needs_whole_updates(settings: Any) -> bool:
    """True if parsed flags or a config select NorMuon, for which no teams are formed."""
    is_adaptive = settings.optimizer == "adaptive_muon"
    return bool(is_adaptive and settings.adaptive_muon_moment2_method == "normuon")
