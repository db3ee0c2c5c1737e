"""What a GPT is, between Megatron's flags (here) and Hugging Face's config.json (`hf_config`).

What `Architecture` cannot say has no counterpart on the other side, and is refused by name.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_muon.errors import UserError

GPT2, LLAMA, QWEN2, QWEN3, MIXTRAL, QWEN3_MOE = "gpt2", "llama", "qwen2", "qwen3", "mixtral", "qwen3_moe"
"""What config.json calls them: its `model_type`."""

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

_NEUTRAL: dict[str, tuple[Any, ...]] = {
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
"""Settings that change what a model computes and that `Architecture` has no words for, with the values that do not."""

_FLAGS = {"layernorm_zero_centered_gamma": "--apply-layernorm-1p"}
"""Settings whose flag has another name."""


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
        """Of config.json."""
        if not self.gated:
            return GPT2
        if self.experts:
            return QWEN3_MOE if self.qk_norm else MIXTRAL
        if self.qk_norm:
            return QWEN3
        return QWEN2 if self.qkv_bias and not self.linear_bias else LLAMA


def from_args(args: argparse.Namespace, *, vocab: int | None = None) -> Architecture:
    """The architecture of a run with these validated arguments; `vocab` tokens where the arguments do not say it.

    Raises:
        UserError: something of it has no counterpart among these model types, by the flag's name.
    """
    without = _given(args, _NEUTRAL)
    kinds = {"--normalization": args.normalization, "--position-embedding-type": args.position_embedding_type}
    kinds["--swiglu"] = bool(args.swiglu)
    if gated := kinds == dict(zip(kinds, ("RMSNorm", "rope", True), strict=True)):
        pass
    elif kinds != dict(zip(kinds, ("LayerNorm", "learned_absolute", False), strict=True)):
        without.append(" with ".join(f"{flag} {value}" for flag, value in kinds.items()))
    experts = args.num_experts or 0
    if experts and getattr(args, "moe_router_load_balancing_type", None) in ("sinkhorn", ["sinkhorn"]):
        without.append("--moe-router-load-balancing-type sinkhorn")
    architecture = Architecture(
        layers=args.num_layers,
        hidden=args.hidden_size,
        ffn=(getattr(args, "moe_ffn_hidden_size", None) if experts else None) or args.ffn_hidden_size,
        heads=args.num_attention_heads,
        groups=(args.num_query_groups if args.group_query_attention else None) or args.num_attention_heads,
        head_dim=args.kv_channels or args.hidden_size // args.num_attention_heads,
        vocab=vocab or getattr(args, "vocab_size", None) or args.padded_vocab_size,
        rows=args.padded_vocab_size,
        positions=args.max_position_embeddings,
        norm_eps=args.layernorm_epsilon,
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
        init_std=args.init_method_std,
        dropout=args.hidden_dropout,
        attention_dropout=args.attention_dropout,
    )
    without += _unsaid(architecture)
    if without:
        raise UserError(
            "no architecture of Hugging Face that export knows (GPT-2, Llama, Qwen 2 and 3, Mixtral, Qwen 3 MoE) has "
            + "; ".join(without)
        )
    return architecture


def check_named(args: argparse.Namespace) -> None:
    """Refuses, by the flag's name, a run's model whose weights have names in torch_dist that are not known here."""
    if given := _given(args, _OTHER_WEIGHTS):
        raise UserError(f"export to torch_dist does not know the weights of a model with {'; '.join(given)}")


def _given(args: argparse.Namespace, table: Mapping[str, tuple[Any, ...]]) -> list[str]:
    """The settings of a table that have none of its values, as flags."""
    return [
        f"{_FLAGS.get(name, '--' + name.replace('_', '-'))} {getattr(args, name)}"
        for name, neutral in table.items()
        if getattr(args, name, neutral[0]) not in neutral
    ]


def _unsaid(model: Architecture) -> list[str]:
    """What of an architecture its own config.json could not say, by Megatron's flags."""
    kind, is_gpt2 = model.model_type, model.model_type == GPT2
    biased = kind in (MIXTRAL, QWEN3_MOE, QWEN3) and (model.linear_bias or model.qkv_bias)
    width = model.head_dim * model.heads
    unsaid = {
        f"LayerNorm with --num-query-groups {model.groups}": is_gpt2 and model.groups != model.heads,
        "LayerNorm with --qk-layernorm": is_gpt2 and model.qk_norm,
        "LayerNorm with --num-experts": is_gpt2 and model.experts,
        "biases (--add-qkv-bias, or no --disable-bias-linear) with --num-experts or --qk-layernorm": biased,
        f"--kv-channels {model.head_dim} with {model.heads} heads of a hidden size of {model.hidden}": (
            (kind in (GPT2, QWEN2) and width != model.hidden)
            or (kind == LLAMA and model.hidden % model.heads)  # transformers refuses to load it
        ),
    }
    return [what for what, is_so in unsaid.items() if is_so]


def to_flags(model: Architecture) -> dict[str, Any]:
    """The flags of Megatron's command line that build it, as MODEL_ARGS of an experiment file."""
    flags: dict[str, Any] = {
        "--num-layers": model.layers,
        "--hidden-size": model.hidden,
        "--ffn-hidden-size": model.ffn,
        "--num-attention-heads": model.heads,
        "--kv-channels": model.head_dim,
        "--max-position-embeddings": model.positions,
        "--norm-epsilon": model.norm_eps,
        "--init-method-std": model.init_std,
        "--hidden-dropout": model.dropout,
        "--attention-dropout": model.attention_dropout,
        "--vocab-size": model.vocab,
    }
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
