"""Models that both Megatron and Hugging Face have: `to_config` for export, `to_flags` for import.

Megatron describes a model by the arguments of a run, Hugging Face by config.json. A setting without
a counterpart on the other side is refused by its flag or its key.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from megatron_muon.errors import UserError
from megatron_muon.settings import flag_of

GPT2, LLAMA, QWEN2, QWEN3 = "gpt2", "llama", "qwen2", "qwen3"
MIXTRAL, QWEN3_MOE = "mixtral", "qwen3_moe"
KINDS = (GPT2, LLAMA, QWEN2, QWEN3, MIXTRAL, QWEN3_MOE)
"""Values of `model_type` in config.json."""

_LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""The constants of megatron-core's `RotaryEmbedding._apply_scaling`."""

_GELU = {True: "gelu_new", False: "gelu"}
"""GELU with and without --bias-gelu-fusion, whose kernel uses the tanh approximation."""

_KEYS = {
    "num_layers": ("num_hidden_layers", "n_layer"),
    "hidden_size": ("hidden_size", "n_embd"),
    "ffn_hidden_size": ("intermediate_size", "n_inner"),
    "num_attention_heads": ("num_attention_heads", "n_head"),
    "kv_channels": ("head_dim", ""),
    "max_position_embeddings": ("max_position_embeddings", "n_positions"),
    "norm_epsilon": ("rms_norm_eps", "layer_norm_epsilon"),
    "init_method_std": ("initializer_range", "initializer_range"),
    "hidden_dropout": ("", "resid_pdrop"),
    "attention_dropout": ("attention_dropout", "attn_pdrop"),
    "vocab_size": ("vocab_size", "vocab_size"),
}
"""Settings by their flags, and the equivalent keys of models like Llama and of GPT-2."""

_SAYS_NOTHING = """
    architectures model_type torch_dtype dtype transformers_version use_cache pretraining_tp
    bos_token_id eos_token_id pad_token_id _name_or_path task_specific_params n_ctx
    id2label label2id _num_labels router_aux_loss_coef output_router_logits
    layer_types max_window_layers is_llama_config max_sequence_length
    summary_type summary_use_proj summary_activation summary_first_dropout summary_proj_to_labels
"""
"""Keys of config.json that do not change results, or that repeat others."""

_OTHER_WEIGHTS = """
    experimental_attention_variant linear_attention_freq mtp_num_layers spec yaml_cfg
    hybrid_layer_pattern hybrid_override_pattern moe_latent_size moe_mlp_glu_interleave_size
    heterogeneous_layers_config_path heterogeneous_layers_config_encoded_json
    moe_shared_expert_gate multi_latent_attention moe_shared_expert_intermediate_size
"""

_OTHER_RESULTS = """
    qk_l2_norm attention_output_gate rotary_interleaved use_mup
    apply_residual_connection_post_layernorm layernorm_zero_centered_gamma
    squared_relu quick_geglu activation_func_clamp_value
    window_size window_attn_skip_freq no_rope_freq rotary_seq_len_interpolation_factor
    moe_router_pre_softmax moe_router_enable_expert_bias moe_apply_probs_on_input
    moe_router_force_load_balancing moe_router_force_biased moe_router_topk_scaling_factor
    moe_router_num_groups moe_router_group_topk moe_expert_capacity_factor
"""

_OFF = (None, False)

NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys([*_OTHER_WEIGHTS.split(), *_OTHER_RESULTS.split()], _OFF),
    "softmax_type": ("vanilla",),
    "rotary_percent": (1.0,),
    "glu_linear_offset": (0.0,),
    "moe_layer_freq": (1, None),
    "moe_router_score_function": ("softmax",),
}
"""Values of settings that no config.json has, with which the model computes the same."""


def to_config(args: argparse.Namespace, *, vocab: int | None = None) -> dict[str, Any]:
    """The content of config.json, without dtype and token ids, of a run with these arguments.

    Raises:
        UserError: a setting has no counterpart; names the flag.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = _model_type(args)
    ffn = (args.num_experts and args.moe_ffn_hidden_size) or args.ffn_hidden_size
    values = {
        **vars(args),
        "ffn_hidden_size": ffn,
        "kv_channels": args.kv_channels or args.hidden_size // args.num_attention_heads,
        "norm_epsilon": args.layernorm_epsilon,
        "vocab_size": vocab or args.vocab_size or args.padded_vocab_size,
    }
    config = {
        "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]],
        "model_type": kind,
        "tie_word_embeddings": not args.untie_embeddings_and_output_weights,
    }
    for name, keys in _KEYS.items():
        if key := keys[kind == GPT2]:
            config[key] = values[name]
    if kind == GPT2:
        return config | {
            "activation_function": _GELU[bool(args.bias_gelu_fusion)],
            "embd_pdrop": args.hidden_dropout,
        }
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    scaling = {"rope_type": "llama3", "factor": args.rope_scaling_factor, **_LLAMA3_ROPE}
    config |= {
        "num_key_value_heads": groups,
        "hidden_act": "silu",
        "rope_theta": float(args.rotary_base),
        "rope_scaling": scaling if args.use_rope_scaling else None,
    }
    bias, experts, topk = args.add_bias_linear, args.num_experts, args.moe_router_topk
    return (
        config
        | {
            LLAMA: {"attention_bias": bias, "mlp_bias": bias},
            QWEN2: {"use_sliding_window": False},
            QWEN3: {"attention_bias": False, "use_sliding_window": False},
            MIXTRAL: {
                "num_local_experts": experts,
                "num_experts_per_tok": topk,
                "sliding_window": None,
            },
            QWEN3_MOE: {
                "num_experts": experts,
                "num_experts_per_tok": topk,
                "moe_intermediate_size": ffn,
                "norm_topk_prob": True,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
                "attention_bias": False,
                "use_sliding_window": False,
            },
        }[kind]
    )


def _model_type(args: argparse.Namespace) -> str:
    style = (args.normalization, args.position_embedding_type, bool(args.swiglu))
    if style == ("LayerNorm", "learned_absolute", False):
        kind = GPT2
    elif args.num_experts:
        kind = QWEN3_MOE if args.qk_layernorm else MIXTRAL
    elif args.qk_layernorm:
        kind = QWEN3
    else:
        kind = QWEN2 if args.add_qkv_bias and not args.add_bias_linear else LLAMA
    neutral = dict(NEUTRAL)
    if kind == GPT2:
        neutral |= dict.fromkeys(("group_query_attention", "qk_layernorm", "num_experts"), _OFF)
        neutral["add_bias_linear"] = (True,)
    if kind in (MIXTRAL, QWEN3, QWEN3_MOE):
        neutral |= dict.fromkeys(("add_bias_linear", "add_qkv_bias"), _OFF)
    if kind in (GPT2, QWEN2):
        neutral["kv_channels"] = (None, args.hidden_size / args.num_attention_heads)
    refused = []
    for name, values in neutral.items():
        value = getattr(args, name, values[0])
        if value not in values:
            refused.append(f"{flag_of(name)} {value}")
    if kind != GPT2 and style != ("RMSNorm", "rope", True):
        refused.append(
            "--normalization {} with --position-embedding-type {} with --swiglu {}".format(*style)
        )
    if args.num_experts and args.moe_router_load_balancing_type in ("sinkhorn", ["sinkhorn"]):
        refused.append("--moe-router-load-balancing-type sinkhorn")
    if refused:
        raise UserError(
            "no architecture of Hugging Face that export supports (GPT-2, Llama, Qwen 2 and 3,"
            " Mixtral, Qwen 3 MoE) has " + "; ".join(refused)
        )
    return kind


def to_flags(config: Mapping[str, Any]) -> dict[str, Any]:
    """The flags of Megatron, as MODEL_ARGS, that build the model of a complete config.json.

    `check_nothing_is_lost` checks afterwards that flags describe all of it.

    Raises:
        UserError: the model's type is unknown.
    """
    # but for a sliding window the same
    kind = LLAMA if config["model_type"] == "mistral" else config["model_type"]
    if kind not in KINDS:
        raise UserError(
            f"config.json describes a model of type {kind}; import supports"
            f" {', '.join([*KINDS, 'mistral'])}"
        )
    flags: dict[str, Any] = {}
    for name, keys in _KEYS.items():
        flags[flag_of(name)] = config.get(keys[kind == GPT2])
    hidden, heads = flags["--hidden-size"], flags["--num-attention-heads"]
    ffn = config.get("moe_intermediate_size") or flags["--ffn-hidden-size"] or 4 * hidden
    flags |= {"--ffn-hidden-size": ffn, "--kv-channels": flags["--kv-channels"] or hidden // heads}
    flags["--hidden-dropout"] = flags["--hidden-dropout"] or 0.0
    groups = config.get("num_key_value_heads") or heads
    if groups != heads:
        flags |= {"--group-query-attention": True, "--num-query-groups": groups}
    if kind == GPT2:
        flags |= {"--normalization": "LayerNorm", "--position-embedding-type": "learned_absolute"}
    else:
        rope = config.get("rope_parameters") or {**config, **(config.get("rope_scaling") or {})}
        base = float(rope["rope_theta"])
        flags |= {
            "--normalization": "RMSNorm",
            "--swiglu": True,
            "--position-embedding-type": "rope",
        }
        flags["--rotary-base"] = int(base) if base.is_integer() else base
        if rope.get("factor") is not None:
            flags |= {"--use-rope-scaling": True, "--rope-scaling-factor": rope["factor"]}
    if experts := config.get("num_local_experts") or config.get("num_experts"):
        flags |= {"--num-experts": experts, "--moe-router-topk": config["num_experts_per_tok"]}
        flags |= {"--moe-ffn-hidden-size": ffn, "--moe-router-load-balancing-type": "aux_loss"}
    has_bias = kind == GPT2 or (kind == LLAMA and config.get("attention_bias"))
    bare = {
        "--disable-bias-linear": not has_bias,
        "--add-qkv-bias": kind == QWEN2,
        "--qk-layernorm": kind in (QWEN3, QWEN3_MOE),
        "--no-bias-gelu-fusion": kind == GPT2 and config["activation_function"] == _GELU[False],
        "--untie-embeddings-and-output-weights": not config["tie_word_embeddings"],
    }
    return flags | {flag: True for flag, given in bare.items() if given}


def check_nothing_is_lost(config: Mapping[str, Any], args: argparse.Namespace) -> None:
    """Raise a UserError that names the keys of config.json that its arguments do not describe."""
    from transformers import AutoConfig

    ours = to_config(args)
    kept = AutoConfig.for_model(ours.pop("model_type"), **ours).to_dict()
    nothing: tuple[Any, ...] = (None, False, 0, [])
    derived = ("n_inner", "head_dim")  # where they are null
    said = {key: value for key, value in config.items() if key not in _SAYS_NOTHING.split()}
    if config["model_type"] == QWEN3_MOE:
        said.pop("intermediate_size", None)  # of dense layers, of which there are none
    lost = [
        f"{key} {value}"
        for key, value in said.items()
        if value != kept.get(key)
        and (value not in nothing or (kept.get(key) not in nothing and key not in derived))
    ]
    if lost:
        raise UserError(f"config.json describes what Megatron has no flag for: {', '.join(lost)}")
