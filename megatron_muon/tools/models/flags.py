"""An `Architecture` in Megatron's flags, and back. Flags without a counterpart are refused by name."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from megatron_muon.errors import UserError
from megatron_muon.tools.models.architecture import GPT2, LLAMA, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE, Architecture

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

_OTHER_WEIGHTS: dict[str, tuple[Any, ...]] = dict.fromkeys(
    (
        *("experimental_attention_variant", "linear_attention_freq", "mtp_num_layers", "spec", "yaml_cfg"),
        *("hybrid_layer_pattern", "hybrid_override_pattern", "moe_latent_size", "moe_mlp_glu_interleave_size"),
        *("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json", "moe_shared_expert_gate"),
        "multi_latent_attention",
    ),
    (None, False),
)
"""Settings with which a model has weights that nothing here knows how to write, with the values that leave them out."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    **_OTHER_WEIGHTS,
    **dict.fromkeys(
        (
            *("qk_l2_norm", "attention_output_gate", "rotary_interleaved", "use_mup"),
            *("apply_residual_connection_post_layernorm", "layernorm_zero_centered_gamma", "squared_relu"),
            *("quick_geglu", "moe_router_pre_softmax", "moe_router_enable_expert_bias", "moe_apply_probs_on_input"),
            *("moe_router_force_load_balancing", "moe_router_force_biased", "window_size", "window_attn_skip_freq"),
            *("no_rope_freq", "activation_func_clamp_value", "rotary_seq_len_interpolation_factor"),
            *("moe_shared_expert_intermediate_size", "moe_router_topk_scaling_factor", "moe_router_num_groups"),
            *("moe_router_group_topk", "moe_expert_capacity_factor"),
        ),
        (None, False),
    ),
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


def _given(args: argparse.Namespace, table: Mapping[str, tuple[Any, ...]]) -> list[str]:
    """The settings of a table that have none of its values, as flags."""
    flags = {name: flag for flag, name in _DESTINATIONS.items()}
    return [
        f"{flags.get(name, '--' + name.replace('_', '-'))} {getattr(args, name)}"
        for name, neutral in table.items()
        if getattr(args, name, neutral[0]) not in neutral
    ]


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
