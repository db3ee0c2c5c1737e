"""Megatron's weights and Hugging Face's: every value comes back, and lands where Hugging Face looks
for it.
"""

from __future__ import annotations

import argparse
import functools
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_muon import cpu
from megatron_muon.errors import UserError, quiet_imports
from megatron_muon.tools.models.architecture import (
    NEUTRAL,
    check_nothing_is_lost,
    to_config,
    to_flags,
)
from megatron_muon.tools.models.mapping import WeightRow, hf_shapes, weight_table

with quiet_imports():
    import transformers

    from megatron_muon.megatron import prepare
    from megatron_muon.megatron.flags import command_line as arguments

PARSER = functools.cache(arguments.build_parser)
ROWS = 16
PLAIN = (
    "--num-layers 2 --hidden-size 12 --ffn-hidden-size 10 --num-attention-heads 6 --kv-channels 2"
    " --vocab-size 11 --max-position-embeddings 9 --norm-epsilon 1e-5 --init-method-std 0.02"
    " --hidden-dropout 0 --attention-dropout 0 "
)
LLAMA = PLAIN + "--normalization RMSNorm --swiglu --position-embedding-type rope "
GROUPED = "--group-query-attention --num-query-groups "
NO_BIAS, UNTIED = "--disable-bias-linear ", "--untie-embeddings-and-output-weights "
GPT2 = PLAIN + "--normalization LayerNorm --position-embedding-type learned_absolute "
MODELS = {
    "llama": f"{LLAMA}{NO_BIAS}{UNTIED}{GROUPED}2 --kv-channels 4 --rotary-base 500000",
    "llama tied, with biases": f"{LLAMA}{GROUPED}3",
    "llama 3.1": f"{LLAMA}{NO_BIAS}{UNTIED}--use-rope-scaling --rope-scaling-factor 8",
    "qwen2": f"{LLAMA}{NO_BIAS}{UNTIED}{GROUPED}2 --add-qkv-bias",
    "qwen3": f"{LLAMA}{NO_BIAS}{UNTIED}{GROUPED}2 --kv-channels 4 --qk-layernorm",
    "mixtral": f"{LLAMA}{NO_BIAS}{UNTIED}{GROUPED}2 --num-experts 4 --moe-router-topk 2",
    "qwen3_moe": (
        f"{LLAMA}{NO_BIAS}{UNTIED}{GROUPED}1 --kv-channels 4 --qk-layernorm --num-experts 3"
    ),
    "gpt2": GPT2,
    "gpt2 without fusion, untied": f"{GPT2}{UNTIED}--no-bias-gelu-fusion",
}


def args_of(name: str, **changed: Any) -> argparse.Namespace:
    """Megatron's arguments for a model's flags."""
    args = arguments.parse(PARSER(), MODELS[name].split())
    args.padded_vocab_size = ROWS
    assert vars(args).keys() >= changed.keys()
    vars(args).update(changed)
    return args


def rules(name: str, **changed: Any) -> list[WeightRow]:
    """Those of a model, with other arguments."""
    args = args_of(name, **changed)
    return weight_table(to_config(args), args)


def config_of(name: str) -> dict[str, Any]:
    """A config.json with every default, as transformers loads it."""
    content: dict[str, Any] = transformers.AutoConfig.for_model(
        **to_config(args_of(name))
    ).to_dict()
    return content


def imported(config: dict[str, Any]) -> dict[str, Any]:
    """What is left of a config.json that has become flags."""
    argv = [
        word
        for flag, value in to_flags(config).items()
        for word in ([flag] if value is True else [flag, str(value)])
    ]
    args = arguments.parse(PARSER(), argv)
    check_nothing_is_lost(config, args)
    return to_config(args)


@given(
    st.sampled_from(["llama", "llama tied, with biases", "qwen3_moe", "gpt2"]),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 9),
    st.integers(0, 4),
)
def test_what_is_exported_and_imported_is_what_it_was(
    name: str, groups: int, per_group: int, head: int, vocab: int, pad: int
) -> None:
    sizes = {
        "hidden_size": groups * per_group * head,
        "num_attention_heads": groups * per_group,
        "kv_channels": head,
    }
    sizes |= {"num_query_groups": groups, "vocab_size": vocab, "padded_vocab_size": vocab + pad}
    for rule in rules(name, **sizes):
        weight = torch.randn(rule.shape)
        parts = rule.to_hf(weight)
        assert [tuple(part.shape) for part in parts] == list(hf_shapes([rule]).values())
        assert len(parts) == len(rule.hf)
        back = rule.to_megatron(parts)
        assert back.shape == weight.shape
        is_padded = rule.megatron in ("embedding.word_embeddings.weight", "output_layer.weight")
        assert torch.equal(
            back[: vocab if is_padded else None], weight[: vocab if is_padded else None]
        )


@pytest.mark.parametrize("name", MODELS)
def test_transformers_finds_every_tensor_and_no_other(name: str) -> None:
    """The names are those of its own folders, before whatever it does to them in memory."""
    config = to_config(args_of(name))
    kind = getattr(transformers, config["architectures"][0])
    tensors = {name: torch.randn(shape) for name, shape in hf_shapes(rules(name)).items()}
    whole = transformers.AutoConfig.for_model(**config)
    _, told = kind.from_pretrained(None, config=whole, state_dict=tensors, output_loading_info=True)
    assert not any(told[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))


OTHERWISE = {
    "softmax_type": "learnable",
    "rotary_percent": 0.5,
    "glu_linear_offset": 1.0,
    "moe_layer_freq": [0, 1],
    "moe_router_score_function": "sigmoid",
}


@pytest.mark.parametrize(
    ("model", "changed", "named"),
    [
        *(
            (
                "mixtral",
                {name: (value := OTHERWISE.get(name, 7))},
                rf"has --[a-z0-9-]+ {re.escape(str(value))}$",
            )
            for name in NEUTRAL
        ),
        ("llama", {"swiglu": False}, "--swiglu False"),
        ("llama", {"position_embedding_type": "none"}, "--position-embedding-type none"),
        ("gpt2", {"normalization": "RMSNorm"}, "--normalization RMSNorm"),
        (
            "gpt2",
            {"group_query_attention": True, "num_query_groups": 2},
            "--group-query-attention True",
        ),
        ("gpt2", {"kv_channels": 5}, "--kv-channels 5"),
        ("qwen2", {"kv_channels": 5}, "--kv-channels 5"),
        ("llama", {"num_attention_heads": 8, "kv_channels": 3}, "--kv-channels 3"),
        ("mixtral", {"add_qkv_bias": True}, "--add-qkv-bias"),
        ("mixtral", {"moe_router_load_balancing_type": "sinkhorn"}, "sinkhorn"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_its_flag(
    model: str, changed: dict[str, Any], named: str
) -> None:
    with pytest.raises(UserError, match=rf"no architecture .*{named}"):
        to_config(args_of(model, **changed))


@pytest.mark.parametrize(
    ("model", "changed", "named"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act gelu"),
        ("llama", {"mlp_bias": True}, "mlp_bias True"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "rope_parameters",
        ),
        ("qwen3", {"attention_bias": True}, "attention_bias True"),
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window True"),
        ("mixtral", {"sliding_window": 4096}, "sliding_window 4096"),
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob False"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers \[0\]"),
        ("gpt2", {"activation_function": "relu"}, "activation_function relu"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights False"),
        ("llama", {"a_key_of_tomorrow": 3}, "a_key_of_tomorrow 3"),
        ("llama", {"model_type": "bert"}, "type bert"),
        ("llama", {"model_type": "mistral", "sliding_window": 4096}, "sliding_window 4096"),
    ],
)
def test_a_config_that_megatron_cannot_build_is_refused_by_its_key(
    model: str, changed: dict[str, Any], named: str
) -> None:
    with pytest.raises(UserError, match=named):
        imported(config_of(model) | changed)


@pytest.mark.parametrize(
    ("model", "published"),
    [
        *((name, {}) for name in MODELS),
        (
            "gpt2",
            {
                "n_ctx": 9,
                "id2label": {"0": "LABEL_0"},
                "label2id": {"LABEL_0": 0},
                "_num_labels": 1,
            },
        ),
        ("gpt2", {"activation_function": "gelu_pytorch_tanh", "summary_type": "last"}),
        ("qwen3_moe", {"intermediate_size": 6144}),
        ("llama", {"is_llama_config": True, "max_sequence_length": 9, "pretraining_tp": 2}),
        ("llama", {"model_type": "mistral", "sliding_window": None}),
    ],
)
def test_flags_and_config_say_the_same_model(model: str, published: dict[str, Any]) -> None:
    """With keys of published models that change nothing, too."""
    assert imported(config_of(model) | published) == to_config(args_of(model))


def test_positions_are_scaled_by_the_factor_of_the_flag() -> None:
    """megatron.training 0.19 passes --rope-scaling-factor over: each model had the factor 8."""
    cpu.install(force=True)
    from megatron_muon.tools.plan.planned_model import LOCAL, build_on_meta, groups_on_paper

    scaled = {
        "use_rope_scaling": True,
        "rope_scaling_factor": 32.0,
        "hidden_size": 48,
        "kv_channels": 8,
    }
    args = args_of("llama", **scaled, seq_length=9, micro_batch_size=1, no_persist_layer_norm=True)
    vars(args).update(LOCAL | {"rank": 0, "world_size": 1})
    prepare.complete(args)
    with groups_on_paper(args) as groups:
        found = build_on_meta(args, groups).rotary_pos_emb.inv_freq
    config = transformers.AutoConfig.for_model(**to_config(args))
    torch.testing.assert_close(
        found, transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config).inv_freq
    )
