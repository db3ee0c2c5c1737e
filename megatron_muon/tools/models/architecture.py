"""The models that Megatron and Hugging Face both have: one table for export and import.

`Architecture` says what one is, `KINDS` how config.json describes it, `_FLAGS` how Megatron's command line does. What
has no counterpart on the other side is refused by its key or its flag.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from megatron_muon.errors import UserError

GPT2, LLAMA, QWEN2, QWEN3, MIXTRAL, QWEN3_MOE = "gpt2", "llama", "qwen2", "qwen3", "mixtral", "qwen3_moe"
"""What config.json calls them: its `model_type`."""

_MISTRAL = "mistral"
"""Llama under another name, but for a sliding window."""

_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The constants of megatron-core's `RotaryEmbedding._apply_scaling`."""

_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh")
"""One function under two names."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A GPT. `hidden`, `ffn`, `head_dim` are widths; `rows` is `vocab` padded, as Megatron's embedding has them.

    Attributes:
        gated: RMSNorm, SwiGLU and rotary positions, as Llama; else LayerNorm, GELU and learned positions, as GPT-2.
        groups: heads of keys and values.
        linear_bias: linear layers have a bias; `qkv_bias`: the projection to query, key and value does.
        qk_norm: an RMSNorm over each head of query and key.
        experts: in every layer, of which each token takes `topk`; 0 for a dense model.
        tanh_gelu: GELU by its tanh approximation, as megatron-core's fused kernel computes it.
        rope_scaling: the factor of Llama 3.1's scaling of rotary frequencies, None without.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    head_dim: int
    vocab: int
    rows: int
    positions: int
    norm_eps: float
    tied: bool
    gated: bool
    linear_bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    topk: int = 0
    rope_base: float = 10000.0
    rope_scaling: float | None = None
    tanh_gelu: bool = False
    init_std: float = 0.02
    dropout: float = 0.0
    attention_dropout: float = 0.0

    @property
    def model_type(self) -> str:
        """Its name in config.json."""
        if not self.gated:
            return GPT2
        if self.experts:
            return QWEN3_MOE if self.qk_norm else MIXTRAL
        if self.qk_norm:
            return QWEN3
        return QWEN2 if self.qkv_bias and not self.linear_bias else LLAMA

    @property
    def activation(self) -> str:
        """As config.json names it."""
        return "silu" if self.gated else _TANH_GELU[0] if self.tanh_gelu else "gelu"

    @property
    def rope(self) -> dict[str, Any] | None:
        """`rope_scaling` as config.json has it."""
        factor = self.rope_scaling
        return None if factor is None else {"rope_type": "llama3", "factor": factor, **_LLAMA3_ROPE}


class Kind(NamedTuple):
    """One `model_type`: its class in transformers, the field of each key of config.json, and keys of one value only."""

    model_class: str
    keys: Mapping[str, str]
    constants: Mapping[str, Any]


_COMMON = {"vocab_size": "vocab", "tie_word_embeddings": "tied", "initializer_range": "init_std"}
_GPT2_KEYS = _COMMON | {
    "n_positions": "positions",
    "n_embd": "hidden",
    "n_layer": "layers",
    "n_head": "heads",
    "n_inner": "ffn",
    "activation_function": "activation",
    "layer_norm_epsilon": "norm_eps",
    "resid_pdrop": "dropout",
    "embd_pdrop": "dropout",
    "attn_pdrop": "attention_dropout",
}
_LLAMA_KEYS = _COMMON | {
    "hidden_size": "hidden",
    "intermediate_size": "ffn",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "groups",
    "head_dim": "head_dim",
    "hidden_act": "activation",
    "max_position_embeddings": "positions",
    "rms_norm_eps": "norm_eps",
    "rope_theta": "rope_base",
    "rope_scaling": "rope",
    "attention_dropout": "attention_dropout",
}
_NO_WINDOW = {"use_sliding_window": False}
_SPARSE = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}

KINDS = {
    GPT2: Kind("GPT2LMHeadModel", _GPT2_KEYS, {}),
    LLAMA: Kind("LlamaForCausalLM", _LLAMA_KEYS | {"attention_bias": "linear_bias", "mlp_bias": "linear_bias"}, {}),
    QWEN2: Kind("Qwen2ForCausalLM", _LLAMA_KEYS, _NO_WINDOW),
    QWEN3: Kind("Qwen3ForCausalLM", _LLAMA_KEYS, {"attention_bias": False, **_NO_WINDOW}),
    MIXTRAL: Kind(
        "MixtralForCausalLM",
        _LLAMA_KEYS | {"num_local_experts": "experts", "num_experts_per_tok": "topk"},
        {"sliding_window": None},
    ),
    QWEN3_MOE: Kind(
        "Qwen3MoeForCausalLM",
        _LLAMA_KEYS | {"num_experts": "experts", "num_experts_per_tok": "topk", "moe_intermediate_size": "ffn"},
        {**_SPARSE, "attention_bias": False, **_NO_WINDOW},
    ),
}
"""All model types; order and names of keys are those that transformers 4 and 5 read."""

_SAYS_NOTHING = {
    "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "use_cache", "pretraining_tp",
    "bos_token_id", "eos_token_id", "pad_token_id", "_name_or_path", "task_specific_params", "n_ctx", "id2label",
    "label2id", "_num_labels", "router_aux_loss_coef", "output_router_logits", "layer_types", "max_window_layers",
    "is_llama_config", "max_sequence_length", "summary_type", "summary_use_proj", "summary_activation",
    "summary_first_dropout", "summary_proj_to_labels",
}  # fmt: skip
"""Keys of config.json that do not change what a model computes, or that others say again."""


def to_config(model: Architecture) -> dict[str, Any]:
    """The content of config.json but for dtype and token ids."""
    kind = KINDS[model.model_type]
    said = {key: getattr(model, field) for key, field in kind.keys.items()}
    return {"architectures": [kind.model_class], "model_type": model.model_type, **said, **kind.constants}


def from_config(config: Mapping[str, Any], *, rows: int) -> Architecture:
    """The architecture of a config.json with all defaults (`PretrainedConfig.to_dict()`); `rows` of the embedding.

    Raises:
        UserError: Megatron has no flag for something of it, by its key.
    """
    name = LLAMA if config["model_type"] == _MISTRAL else config["model_type"]
    if name not in KINDS:
        known = ", ".join([*KINDS, _MISTRAL])
        raise UserError(f"config.json describes a model of type {config['model_type']}; import knows {known}")
    said = {field.name for field in fields(Architecture)}
    rope = config.get("rope_parameters") or {**config, **(config.get("rope_scaling") or {})}
    found = {of: config[key] for key, of in KINDS[name].keys.items() if of in said and key in config}
    bias = name == GPT2 or (name == LLAMA and bool(config.get("attention_bias")))
    found |= {
        "ffn": found["ffn"] or 4 * found["hidden"],
        "groups": found.get("groups") or found["heads"],
        "head_dim": found.get("head_dim") or found["hidden"] // found["heads"],
        "experts": config.get("num_local_experts") or config.get("num_experts") or 0,
        "linear_bias": bias,
        "qkv_bias": bias or name == QWEN2,
    }
    if name == GPT2:
        found["tanh_gelu"] = config["activation_function"] in _TANH_GELU
    else:
        found |= {"rope_base": float(rope["rope_theta"]), "rope_scaling": rope.get("factor")}
    model = Architecture(rows=rows, gated=name != GPT2, qk_norm=name in (QWEN3, QWEN3_MOE), **found)
    _refuse_what_is_lost(config, model)
    if model.topk == 1:
        raise UserError("config.json has num_experts_per_tok 1; megatron-core's router needs 2 or more here")
    return model


def _refuse_what_is_lost(config: Mapping[str, Any], model: Architecture) -> None:
    """Refuses a config.json that says more than an `Architecture` can: the two are compared key by key."""
    from transformers import AutoConfig

    ours = to_config(model)
    kept = AutoConfig.for_model(ours["model_type"], **{k: v for k, v in ours.items() if k != "model_type"}).to_dict()
    nothing: tuple[Any, ...] = (None, False, 0, [])
    follow = ("n_inner", "head_dim")  # from others, where they are null
    said = {key: value for key, value in config.items() if key not in _SAYS_NOTHING}
    if config["model_type"] == QWEN3_MOE:
        said.pop("intermediate_size", None)  # of dense layers, of which there are none
    if said.get("activation_function") in _TANH_GELU:
        said["activation_function"] = kept["activation_function"]
    lost = [
        f"{key} {value}"
        for key, value in said.items()
        if value != kept.get(key) and (value not in nothing or (kept.get(key) not in nothing and key not in follow))
    ]
    if lost:
        raise UserError(f"config.json describes what Megatron has no flag for: {', '.join(lost)}")


_FLAGS = {
    "layers": "--num-layers",
    "hidden": "--hidden-size",
    "ffn": "--ffn-hidden-size",
    "heads": "--num-attention-heads",
    "head_dim": "--kv-channels",
    "positions": "--max-position-embeddings",
    "norm_eps": "--norm-epsilon",
    "init_std": "--init-method-std",
    "dropout": "--hidden-dropout",
    "attention_dropout": "--attention-dropout",
    "vocab": "--vocab-size",
}
"""Flags with the value of a field."""

_DESTINATIONS = {"--norm-epsilon": "layernorm_epsilon", "--apply-layernorm-1p": "layernorm_zero_centered_gamma"}
"""Flags whose attribute has another name."""

_OTHER_WEIGHTS = (
    "experimental_attention_variant", "linear_attention_freq", "mtp_num_layers", "spec", "yaml_cfg",
    "hybrid_layer_pattern", "hybrid_override_pattern", "moe_latent_size", "moe_mlp_glu_interleave_size",
    "heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json", "moe_shared_expert_gate",
    "multi_latent_attention",
)  # fmt: skip
"""Settings with which a model has weights that nothing here knows how to write."""

_OTHER_RESULTS = (
    "qk_l2_norm", "attention_output_gate", "rotary_interleaved", "use_mup",
    "apply_residual_connection_post_layernorm", "layernorm_zero_centered_gamma", "squared_relu", "quick_geglu",
    "moe_router_pre_softmax", "moe_router_enable_expert_bias", "moe_apply_probs_on_input",
    "moe_router_force_load_balancing", "moe_router_force_biased", "window_size", "window_attn_skip_freq",
    "no_rope_freq", "activation_func_clamp_value", "rotary_seq_len_interpolation_factor",
    "moe_shared_expert_intermediate_size", "moe_router_topk_scaling_factor", "moe_router_num_groups",
    "moe_router_group_topk", "moe_expert_capacity_factor",
)  # fmt: skip

NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys((*_OTHER_WEIGHTS, *_OTHER_RESULTS), (None, False)),
    "softmax_type": ("vanilla",),
    "rotary_percent": (1.0,),
    "glu_linear_offset": (0.0,),
    "moe_layer_freq": (1, None),
    "moe_router_score_function": ("softmax",),
}
"""Settings that change what a model computes and that `Architecture` does not have, with the values that do not."""


def from_args(args: argparse.Namespace, *, vocab: int | None = None) -> Architecture:
    """The architecture of a run with these validated arguments; `vocab` tokens where the arguments do not say it.

    Raises:
        UserError: something of it has no counterpart among the model types of config.json, by the flag's name.
    """
    refused = _given(args, NEUTRAL)
    style = (args.normalization, args.position_embedding_type, bool(args.swiglu))
    gated = style == ("RMSNorm", "rope", True)
    if not gated and style != ("LayerNorm", "learned_absolute", False):
        refused.append("--normalization {} with --position-embedding-type {} with --swiglu {}".format(*style))
    experts = args.num_experts or 0
    if experts and getattr(args, "moe_router_load_balancing_type", None) in ("sinkhorn", ["sinkhorn"]):
        refused.append("--moe-router-load-balancing-type sinkhorn")
    fields: dict[str, Any] = {
        field: getattr(args, _DESTINATIONS.get(flag, flag.removeprefix("--").replace("-", "_")), None)
        for field, flag in _FLAGS.items()
    }
    fields |= {
        "ffn": (getattr(args, "moe_ffn_hidden_size", None) if experts else None) or args.ffn_hidden_size,
        "groups": (args.num_query_groups if args.group_query_attention else None) or args.num_attention_heads,
        "head_dim": args.kv_channels or args.hidden_size // args.num_attention_heads,
        "vocab": vocab or getattr(args, "vocab_size", None) or args.padded_vocab_size,
    }
    model = Architecture(
        **fields,
        rows=args.padded_vocab_size,
        tied=not args.untie_embeddings_and_output_weights,
        gated=gated,
        linear_bias=args.add_bias_linear,
        qkv_bias=args.add_bias_linear or args.add_qkv_bias,
        qk_norm=args.qk_layernorm,
        experts=experts,
        topk=args.moe_router_topk if experts else 0,
        rope_base=float(args.rotary_base),
        rope_scaling=args.rope_scaling_factor if args.use_rope_scaling else None,
        tanh_gelu=not gated and bool(args.bias_gelu_fusion),
    )
    if refused := refused + _without_key(model):
        raise UserError(
            "no architecture of Hugging Face that export knows (GPT-2, Llama, Qwen 2 and 3, Mixtral, Qwen 3 MoE) has "
            + "; ".join(refused)
        )
    return model


def check_named(args: argparse.Namespace) -> None:
    """Refuses, by the flag's name, a run's model whose weights have names in torch_dist that are not known here."""
    if given := _given(args, _OTHER_WEIGHTS):
        raise UserError(f"export to torch_dist does not know the weights of a model with {'; '.join(given)}")


def _given(args: argparse.Namespace, settings: Iterable[str]) -> list[str]:
    """The settings that have none of their neutral values, as flags."""
    flags = {name: flag for flag, name in _DESTINATIONS.items()}
    given = [name for name in settings if getattr(args, name, NEUTRAL[name][0]) not in NEUTRAL[name]]
    return [f"{flags.get(name, '--' + name.replace('_', '-'))} {getattr(args, name)}" for name in given]


def _without_key(model: Architecture) -> list[str]:
    """What its own config.json has no key for, by Megatron's flags."""
    kind, is_gpt2 = model.model_type, model.model_type == GPT2
    width = model.head_dim * model.heads
    cases = {
        f"LayerNorm with --num-query-groups {model.groups}": is_gpt2 and model.groups != model.heads,
        "LayerNorm with --qk-layernorm": is_gpt2 and model.qk_norm,
        "LayerNorm with --num-experts": is_gpt2 and model.experts,
        "biases (--add-qkv-bias, or no --disable-bias-linear) with --num-experts or --qk-layernorm": (
            kind in (MIXTRAL, QWEN3_MOE, QWEN3) and (model.linear_bias or model.qkv_bias)
        ),
        f"--kv-channels {model.head_dim} with {model.heads} heads of a hidden size of {model.hidden}": (
            (kind in (GPT2, QWEN2) and width != model.hidden)
            or (kind == LLAMA and model.hidden % model.heads)  # transformers refuses to load it
        ),
    }
    return [what for what, is_so in cases.items() if is_so]


def to_flags(model: Architecture) -> dict[str, Any]:
    """The flags of Megatron's command line that build it, as MODEL_ARGS of an experiment file."""
    flags: dict[str, Any] = {flag: getattr(model, field) for field, flag in _FLAGS.items()}
    if model.groups != model.heads:
        flags |= {"--group-query-attention": True, "--num-query-groups": model.groups}
    if model.gated:
        flags |= {"--normalization": "RMSNorm", "--swiglu": True, "--position-embedding-type": "rope"}
        flags["--rotary-base"] = int(model.rope_base) if model.rope_base.is_integer() else model.rope_base
    else:
        flags |= {"--normalization": "LayerNorm", "--position-embedding-type": "learned_absolute"}
    if model.rope_scaling is not None:
        flags |= {"--use-rope-scaling": True, "--rope-scaling-factor": model.rope_scaling}
    if model.experts:
        flags |= {"--num-experts": model.experts, "--moe-router-topk": model.topk, "--moe-ffn-hidden-size": model.ffn}
        flags["--moe-router-load-balancing-type"] = "aux_loss"
    bare = {
        "--disable-bias-linear": not model.linear_bias,
        "--add-qkv-bias": model.qkv_bias and not model.linear_bias,
        "--qk-layernorm": model.qk_norm,
        "--no-bias-gelu-fusion": not model.gated and not model.tanh_gelu,
        "--untie-embeddings-and-output-weights": not model.tied,
    }
    return flags | {flag: True for flag, given in bare.items() if given}
