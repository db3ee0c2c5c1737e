"""Small models of transformers with every kind of attention that `QKClip` knows."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig

from tests.support.cli import sizes

HEADS = 9
TOKENS = sizes("vocab_size 32 bos_token_id 0 eos_token_id 0 pad_token_id 0")
SMALL: dict[str, Any] = {
    **TOKENS,
    **sizes("hidden_size 72 intermediate_size 40 num_hidden_layers 2"),
    **sizes(f"num_attention_heads {HEADS} num_key_value_heads 3"),
    "initializer_range": 0.3,
}
LATENT = SMALL | sizes(
    f"num_key_value_heads {HEADS} moe_intermediate_size 16 n_routed_experts 4 num_experts_per_tok 2"
    " n_group 2 topk_group 1 first_k_dense_replace 1 kv_lora_rank 12 qk_rope_head_dim 4"
    " qk_nope_head_dim 6 v_head_dim 5"
)
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "grouped": ("LlamaConfig", SMALL),
    "biases": ("LlamaConfig", {**SMALL, "attention_bias": True, "num_key_value_heads": HEADS}),
    "a window": ("MistralConfig", {**SMALL, "sliding_window": 4}),
    "fused": ("Phi3Config", SMALL),
    "latent": ("DeepseekV3Config", {**LATENT, "q_lora_rank": 10}),
    "latent, whole queries": ("DeepseekV3Config", {**LATENT, "q_lora_rank": None}),
}


def model_of(config: str, *, attention: str = "sdpa", **changes: Any) -> Any:
    kind, settings = CONFIGS[config]
    torch.manual_seed(0)
    made: PretrainedConfig = getattr(transformers, kind)(**{**settings, **changes})
    model = transformers.AutoModelForCausalLM.from_config(
        made, attn_implementation=attention
    ).train()
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(p, std=0.3)
    return model


def batch_of(seed: int, *, length: int = 11) -> dict[str, torch.Tensor]:
    """Two texts; the first has padding on its left."""
    tokens = torch.randint(
        1,
        32,
        (2, length),
        generator=torch.Generator().manual_seed(seed),
    )
    seen = torch.ones_like(tokens)
    seen[0, :3] = 0
    return {"input_ids": tokens, "attention_mask": seen, "labels": tokens}
