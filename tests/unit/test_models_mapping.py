"""Megatron's weights and Hugging Face's: every value comes back, and lands where Hugging Face looks for it."""

from __future__ import annotations

import argparse
import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_muon import cpu
from megatron_muon.errors import UserError, quiet_imports
from megatron_muon.tools.models.architecture import (
    NEUTRAL,
    Architecture,
    from_args,
    from_config,
    to_config,
    to_flags,
)
from megatron_muon.tools.models.mapping import hf_shapes, rules

with quiet_imports():
    import transformers

    from megatron_muon.megatron import validation
    from megatron_muon.megatron.flags import arguments

PLAIN = Architecture(
    layers=2, hidden=12, ffn=10, heads=6, groups=6, head_dim=2, vocab=11, rows=16, positions=9, norm_eps=1e-5,
    tied=False, gated=True,
)  # fmt: skip
MODELS = {
    "llama": replace(PLAIN, groups=2, head_dim=4, rope_base=500000.0),
    "llama tied, with biases": replace(PLAIN, groups=3, tied=True, linear_bias=True, qkv_bias=True),
    "llama 3.1": replace(PLAIN, rope_scaling=8.0),
    "qwen2": replace(PLAIN, groups=2, qkv_bias=True),
    "qwen3": replace(PLAIN, groups=2, head_dim=4, qk_norm=True),
    "mixtral": replace(PLAIN, groups=2, experts=4, topk=2),
    "qwen3_moe": replace(PLAIN, groups=1, head_dim=4, qk_norm=True, experts=3, topk=2),
    "gpt2": replace(PLAIN, gated=False, linear_bias=True, qkv_bias=True, tied=True, tanh_gelu=True),
    "gpt2 without fusion, untied": replace(PLAIN, gated=False, linear_bias=True, qkv_bias=True),
}
every_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)


@st.composite
def architectures(draw: st.DrawFn) -> Architecture:
    groups, per_group, head = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4]))
    gated = draw(st.booleans())
    heads = groups * per_group if gated else groups
    experts = draw(st.integers(0, 3)) if gated else 0
    vocab = draw(st.integers(1, 9))
    return replace(
        PLAIN, layers=draw(st.integers(1, 2)), hidden=heads * head, ffn=draw(st.integers(1, 5)), heads=heads,
        groups=groups, head_dim=head, vocab=vocab, rows=vocab + draw(st.integers(0, 4)), tied=draw(st.booleans()),
        gated=gated, linear_bias=(bias := not experts and draw(st.booleans())), qkv_bias=bias,
        experts=experts, topk=min(experts, 1),
    )  # fmt: skip


@given(architectures())
def test_what_is_exported_and_imported_is_what_it_was(model: Architecture) -> None:
    for rule in rules(model):
        weight = torch.randn(rule.shape)
        parts = rule.split(weight)
        assert [tuple(part.shape) for part in parts] == list(hf_shapes([rule]).values())
        assert len(parts) == len(rule.hf)
        back = rule.join(parts)
        assert back.shape == weight.shape
        kept = slice(None, model.vocab) if rule.shape[:1] == (model.rows,) and "weight" in rule.hf[0] else slice(None)
        assert torch.equal(back[kept], weight[kept])


@every_model
def test_transformers_finds_every_tensor_and_no_other(model: Architecture) -> None:
    """The names are those of its own folders, before whatever it does to them in memory."""
    config = to_config(model)
    kind = getattr(transformers, config["architectures"][0])
    tensors = {name: torch.randn(shape) for name, shape in hf_shapes(rules(model)).items()}
    whole = transformers.AutoConfig.for_model(**settled(model))
    _, told = kind.from_pretrained(None, config=whole, state_dict=tensors, output_loading_info=True)
    assert not any(told[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_queries_keys_and_values_are_those_of_their_heads() -> None:
    """Row by row, written out: two groups of three queries, heads of two rows.

    In megatron-core's order (`SelfAttention.get_query_key_value_tensors`): a group's queries, its key, its value.
    """
    model = replace(PLAIN, heads=6, groups=2, head_dim=2)
    rule = next(rule for rule in rules(model) if "linear_qkv" in rule.megatron)
    heads = ["q0", "q1", "q2", "k0", "v0", "q3", "q4", "q5", "k1", "v1"]
    named = [f"{head}.{row}" for head in heads for row in range(2)]
    weight = torch.arange(len(named))[:, None].expand(-1, model.hidden)
    split = [[named[int(row[0])] for row in part] for part in rule.split(weight)]
    assert split == [
        [f"q{head}.{row}" for head in range(6) for row in range(2)],
        [f"k{group}.{row}" for group in range(2) for row in range(2)],
        [f"v{group}.{row}" for group in range(2) for row in range(2)],
    ]


def settled(model: Architecture) -> dict[str, Any]:
    """A config.json with every default, as transformers loads it."""
    config = {key: value for key, value in to_config(model).items() if key != "architectures"}
    content: dict[str, Any] = transformers.AutoConfig.for_model(**config).to_dict()
    return content


PARSER = functools.cache(arguments.build_parser)


def args_of(model: Architecture, **changed: Any) -> argparse.Namespace:
    """Megatron's arguments for a model's flags."""
    flags = to_flags(model)
    argv = [word for flag, value in flags.items() for word in ([flag] if value is True else [flag, str(value)])]
    args = arguments.parse(PARSER(), argv)
    args.padded_vocab_size = model.rows
    assert vars(args).keys() >= changed.keys()
    vars(args).update(changed)
    return args


@every_model
def test_flags_and_config_say_the_same_model(model: Architecture) -> None:
    assert from_args(args_of(model)) == model
    assert from_config(settled(model), rows=model.rows) == model


OTHERWISE = {
    "softmax_type": "learnable", "rotary_percent": 0.5, "glu_linear_offset": 1.0, "moe_layer_freq": [0, 1],
    "moe_router_score_function": "sigmoid",
}  # fmt: skip


@pytest.mark.parametrize("setting", NEUTRAL)
def test_a_setting_without_a_counterpart_is_refused_by_name(setting: str) -> None:
    value = OTHERWISE.get(setting, 7)
    with pytest.raises(UserError, match=r"no architecture .* has --[a-z0-9-]+ ") as caught:
        from_args(args_of(MODELS["mixtral"], **{setting: value}))
    assert str(caught.value).endswith(f" {value}")


@pytest.mark.parametrize(
    ("model", "changed", "named"),
    [
        ("llama", {"swiglu": False}, "--swiglu False"),
        ("llama", {"position_embedding_type": "none"}, "--position-embedding-type none"),
        ("gpt2", {"normalization": "RMSNorm"}, "--normalization RMSNorm"),
        ("gpt2", {"group_query_attention": True, "num_query_groups": 2}, "--num-query-groups 2"),
        ("gpt2", {"kv_channels": 5}, "--kv-channels 5"),
        ("qwen2", {"kv_channels": 5}, "--kv-channels 5"),
        ("llama", {"num_attention_heads": 8, "kv_channels": 3}, "--kv-channels 3 with 8 heads"),
        ("mixtral", {"add_qkv_bias": True}, "biases"),
        ("mixtral", {"moe_router_load_balancing_type": "sinkhorn"}, "sinkhorn"),
    ],
)
def test_a_combination_without_a_counterpart_is_refused(model: str, changed: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        from_args(args_of(MODELS[model], **changed))


@pytest.mark.parametrize(
    ("model", "changed", "named"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act gelu"),
        ("llama", {"mlp_bias": True}, "mlp_bias True"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope_parameters"),
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
        ("mixtral", {"num_experts_per_tok": 1}, "num_experts_per_tok 1"),  # softmax over one is 1, without a gradient
    ],
)
def test_a_config_that_megatron_cannot_build_is_refused_by_its_key(
    model: str, changed: dict[str, Any], named: str
) -> None:
    with pytest.raises(UserError, match=named):
        from_config(settled(MODELS[model]) | changed, rows=16)


@pytest.mark.parametrize(
    ("model", "published"),
    [
        ("gpt2", {"n_ctx": 9, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "_num_labels": 1}),
        ("gpt2", {"activation_function": "gelu_pytorch_tanh", "summary_type": "last"}),
        ("qwen3_moe", {"intermediate_size": 6144}),
        ("llama", {"is_llama_config": True, "max_sequence_length": 9, "pretraining_tp": 2}),
        ("llama", {"model_type": "mistral", "sliding_window": None}),
    ],
)
def test_keys_of_published_models_that_change_nothing_are_taken(model: str, published: dict[str, Any]) -> None:
    assert from_config(settled(MODELS[model]) | published, rows=16) == MODELS[model]


def test_positions_are_scaled_by_the_factor_of_the_flag() -> None:
    """megatron.training 0.19 passes --rope-scaling-factor over: each model had the factor 8."""
    cpu.install(force=True)
    from megatron_muon.megatron.model import on_meta
    from megatron_muon.tools.plan.matrices import LOCAL

    model = replace(MODELS["llama"], hidden=48, head_dim=8, rope_scaling=32.0)
    args = args_of(model, seq_length=9, micro_batch_size=1, no_persist_layer_norm=True)
    vars(args).update(LOCAL | {"rank": 0, "world_size": 1})
    assert from_args(args) == from_config(settled(model), rows=model.rows) == model
    validation.complete(args)
    with on_meta.process_groups(args) as groups:
        found = on_meta.build_model(args, groups).rotary_pos_emb.inv_freq
    config = transformers.AutoConfig.for_model(**settled(model))
    torch.testing.assert_close(found, transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config).inv_freq)
