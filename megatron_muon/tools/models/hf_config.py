"""An `Architecture` in the words of Hugging Face's config.json, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_muon.errors import UserError
from megatron_muon.tools.models.architecture import GPT2, LLAMA, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE, Architecture

CLASSES = {
    GPT2: "GPT2LMHeadModel",
    LLAMA: "LlamaForCausalLM",
    QWEN2: "Qwen2ForCausalLM",
    QWEN3: "Qwen3ForCausalLM",
    MIXTRAL: "MixtralForCausalLM",
    QWEN3_MOE: "Qwen3MoeForCausalLM",
}

_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The constants of megatron-core's `RotaryEmbedding._apply_scaling`."""

MISTRAL = "mistral"
"""Llama under another name, but for a sliding window."""

_SAYS_NOTHING = {
    *("architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "use_cache", "pretraining_tp"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "_name_or_path", "task_specific_params"),
    *("router_aux_loss_coef", "output_router_logits", "layer_types", "max_window_layers"),
    *(
        "n_ctx",
        "id2label",
        "label2id",
        "_num_labels",
        "is_llama_config",
        "max_sequence_length",
    ),
    *("summary_type", "summary_use_proj", "summary_activation", "summary_first_dropout", "summary_proj_to_labels"),
}
"""Keys of config.json that do not change what a model computes, or that others say again."""

_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh")
"""One function under two names."""

_FOLLOW = ("n_inner", "head_dim")
"""Keys that follow from others where they are null."""


def to_config(model: Architecture) -> dict[str, Any]:
    """The content of config.json but for dtype and token ids; keys are those that transformers 4 and 5 read."""
    kind = model.model_type
    common = {
        "architectures": [CLASSES[kind]],
        "model_type": kind,
        "vocab_size": model.vocab,
        "tie_word_embeddings": model.tied,
        "initializer_range": model.init_std,
    }
    if kind == GPT2:
        return common | {
            "n_positions": model.positions,
            "n_embd": model.hidden,
            "n_layer": model.layers,
            "n_head": model.heads,
            "n_inner": model.ffn,
            "activation_function": "gelu_new" if model.tanh_gelu else "gelu",
            "layer_norm_epsilon": model.norm_eps,
            "resid_pdrop": model.dropout,
            "embd_pdrop": model.dropout,
            "attn_pdrop": model.attention_dropout,
        }
    config = common | {
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.groups,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": model.positions,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_base,
        "rope_scaling": None,
        "attention_dropout": model.attention_dropout,
    }
    if model.rope_scaling is not None:
        config["rope_scaling"] = {"rope_type": "llama3", "factor": model.rope_scaling, **_LLAMA3_ROPE}
    own: dict[str, dict[str, Any]] = {
        LLAMA: {"attention_bias": model.linear_bias, "mlp_bias": model.linear_bias},
        QWEN2: {"use_sliding_window": False},
        QWEN3: {"attention_bias": False, "use_sliding_window": False},
        MIXTRAL: {"num_local_experts": model.experts, "num_experts_per_tok": model.topk, "sliding_window": None},
        QWEN3_MOE: {
            "num_experts": model.experts,
            "num_experts_per_tok": model.topk,
            "moe_intermediate_size": model.ffn,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "attention_bias": False,
            "use_sliding_window": False,
        },
    }
    return config | own[kind]


def from_config(config: Mapping[str, Any], *, rows: int) -> Architecture:
    """The architecture that a config.json describes, with `rows` rows of the embedding.

    Args:
        config: as `transformers` has it, with its defaults: `PretrainedConfig.to_dict()`.

    Raises:
        UserError: Megatron has no flag for something of it, by its key.
    """
    kind = LLAMA if config["model_type"] == MISTRAL else config["model_type"]
    if kind not in CLASSES:
        known = ", ".join([*CLASSES, MISTRAL])
        raise UserError(f"config.json describes a model of type {config['model_type']}; import knows {known}")
    model = _gpt2(config, rows) if kind == GPT2 else _llama_like(kind, config, rows)
    _refuse_what_is_lost(config, model)
    if model.topk == 1:
        raise UserError("config.json has num_experts_per_tok 1; megatron-core's router needs 2 or more here")
    return model


def _gpt2(config: Mapping[str, Any], rows: int) -> Architecture:
    return Architecture(
        layers=config["n_layer"],
        hidden=config["n_embd"],
        ffn=config["n_inner"] or 4 * config["n_embd"],
        heads=config["n_head"],
        groups=config["n_head"],
        head_dim=config["n_embd"] // config["n_head"],
        vocab=config["vocab_size"],
        rows=rows,
        positions=config["n_positions"],
        norm_eps=config["layer_norm_epsilon"],
        tied=config["tie_word_embeddings"],
        gated=False,
        linear_bias=True,
        qkv_bias=True,
        tanh_gelu=config["activation_function"] in _TANH_GELU,
        init_std=config["initializer_range"],
        dropout=config["resid_pdrop"],
        attention_dropout=config["attn_pdrop"],
    )


def _llama_like(kind: str, config: Mapping[str, Any], rows: int) -> Architecture:
    bias = kind == LLAMA and bool(config.get("attention_bias"))
    experts = config.get("num_local_experts") or config.get("num_experts") or 0
    rope = config.get("rope_parameters") or {**config, **(config.get("rope_scaling") or {})}
    return Architecture(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        ffn=config["moe_intermediate_size" if kind == QWEN3_MOE else "intermediate_size"],
        heads=config["num_attention_heads"],
        groups=config["num_key_value_heads"],
        head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        vocab=config["vocab_size"],
        rows=rows,
        positions=config["max_position_embeddings"],
        norm_eps=config["rms_norm_eps"],
        tied=config["tie_word_embeddings"],
        gated=True,
        linear_bias=bias,
        qkv_bias=bias or kind == QWEN2,
        qk_norm=kind in (QWEN3, QWEN3_MOE),
        experts=experts,
        topk=config["num_experts_per_tok"] if experts else 0,
        rope_base=float(rope["rope_theta"]),
        rope_scaling=rope.get("factor"),
        init_std=config["initializer_range"],
        attention_dropout=config["attention_dropout"],
    )


def _refuse_what_is_lost(config: Mapping[str, Any], model: Architecture) -> None:
    """Refuse a config.json that says more than an `Architecture` can: the two are compared key by key."""
    from transformers import AutoConfig

    ours = to_config(model)
    kept = AutoConfig.for_model(ours["model_type"], **{k: v for k, v in ours.items() if k != "model_type"}).to_dict()
    nothing: tuple[Any, ...] = (None, False, 0, [])
    told = {key: value for key, value in config.items() if key not in _SAYS_NOTHING}
    if config["model_type"] == QWEN3_MOE:
        told.pop("intermediate_size", None)  # of dense layers, of which there are none
    if told.get("activation_function") in _TANH_GELU:
        told["activation_function"] = kept["activation_function"]
    lost = [
        f"{key} {value}"
        for key, value in told.items()
        if value != kept.get(key) and (value not in nothing or (kept.get(key) not in nothing and key not in _FOLLOW))
    ]
    if lost:
        raise UserError(f"config.json describes what Megatron has no flag for: {', '.join(lost)}")
