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
from megatron_muon.tools.models.mapping import Heads

with quiet_imports():
    import transformers

    from megatron_muon.megatron import prepare
    from megatron_muon.megatron.flags import command_line as arguments
    from megatron_muon.tools.models.convert import args_of_flags

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


def config_of(name: str) -> dict[str, Any]:
    """A config.json with every default, as transformers loads it."""
    content: dict[str, Any] = transformers.AutoConfig.for_model(
        **to_config(args_of(name))
    ).to_dict()
    return content


def imported(config: dict[str, Any]) -> dict[str, Any]:
    """What is left of a config.json that has become flags."""
    args = args_of_flags(to_flags(config))
    check_nothing_is_lost(config, args)
    return to_config(args)


@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([1, 2, 4]),
)
def test_a_fused_projection_is_cut_by_group(groups: int, queries: int, head_dim: int) -> None:
    """Rows are numbered as Megatron orders them: in each group queries, then key, then value."""
    heads = Heads(groups, queries, head_dim)
    rows = torch.arange(groups * sum(heads.sizes))
    of_group = rows.view(groups, queries + 2, head_dim)
    wanted = [of_group[:, :-2], of_group[:, -2], of_group[:, -1]]
    found = heads.split(rows)
    assert [part.tolist() for part in found] == [part.flatten().tolist() for part in wanted]
    assert torch.equal(heads.fuse(found), rows)


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
        ("gpt2", {"normalization": "RMSNorm"}, "--normalization RMSNorm"),
        (
            "gpt2",
            {"group_query_attention": True, "num_query_groups": 2},
            "--group-query-attention True",
        ),
        ("gpt2", {"add_bias_linear": False}, "--add-bias-linear False"),
        ("qwen2", {"kv_channels": 5}, "--kv-channels 5"),
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
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "rope_parameters",
        ),
        ("mixtral", {"sliding_window": 4096}, "sliding_window 4096"),
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob False"),
        ("gpt2", {"activation_function": "relu"}, "activation_function relu"),
        ("llama", {"a_key_of_tomorrow": 3}, "a_key_of_tomorrow 3"),
        ("llama", {"model_type": "bert"}, "type bert"),
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
        ("gpt2", {"n_ctx": 9, "summary_type": "last", "id2label": {"0": "LABEL_0"}}),
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
    from megatron_muon.megatron.model.gpt import LOCAL_LAYERS
    from megatron_muon.tools.plan.planned_model import build_on_meta, groups_on_paper

    scaled = {
        "use_rope_scaling": True,
        "rope_scaling_factor": 32.0,
        "hidden_size": 48,
        "kv_channels": 8,
    }
    args = args_of("llama", **scaled, seq_length=9, micro_batch_size=1)
    vars(args).update(LOCAL_LAYERS | {"rank": 0, "world_size": 1})
    prepare.complete(args)
    with groups_on_paper(args) as groups:
        found = build_on_meta(args, groups).rotary_pos_emb.inv_freq
    config = transformers.AutoConfig.for_model(**to_config(args))
    torch.testing.assert_close(
        found, transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config).inv_freq
    )
