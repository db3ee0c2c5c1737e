"""Weights that hold several matrices, by family of models: which rows belong together, written out
by hand.

A Jamba's `in_proj` went to Muon whole, halves of GPT-OSS's `gate_up_proj` mixed gate and up, and so
on: one update for several matrices, without a message.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import megatron_muon
from megatron_muon.core.reference import SplitMuon
from megatron_muon.fsdp.selection import select
from megatron_muon.matrices.fused import FUSED
from megatron_muon.matrices.table import table
from tests.support.cli import sizes

Blocks = Callable[[torch.Tensor], list[torch.Tensor]]
"""From the numbers of all rows those of each matrix."""


def parts(*sizes: int) -> Blocks:
    """One matrix after the other."""
    return lambda rows: list(rows.split(sizes))


def heads(count: int, *sizes: int) -> Blocks:
    """In each of so many heads one matrix after the other."""

    def blocks(rows: torch.Tensor) -> list[torch.Tensor]:
        parts = rows.view(count, -1).split(sizes, dim=1)
        return [part.flatten() for part in parts]

    return blocks


def turns(rows: torch.Tensor) -> list[torch.Tensor]:
    """Even rows, and odd ones."""
    return [rows[0::2], rows[1::2]]


@dataclass(frozen=True)
class Family:
    config: dict[str, Any]  # `model_type` and sizes
    blocks: dict[str, Blocks]  # by the end of a weight's name
    kind: str = "AutoModelForCausalLM"
    transposed: tuple[str, ...] = ()


FALCON = sizes(
    "vocab_size 50 hidden_size 24 intermediate_size 20 num_hidden_layers 2 num_attention_heads 4"
    " num_key_value_heads 2 max_position_embeddings 32 pad_token_id 0 bos_token_id 1 eos_token_id 2"
)
TEXT = FALCON | {"head_dim": 6}
OLD = sizes(
    "vocab_size 50 n_embd 24 n_head 4 n_layer 2 n_positions 32 bos_token_id 1 eos_token_id 2"
)
EXPERTS = sizes("moe_intermediate_size 10 num_experts 3 num_local_experts 3 num_experts_per_tok 2")
LATENT = sizes(
    "q_lora_rank 12 kv_lora_rank 8 qk_rope_head_dim 4 qk_nope_head_dim 6 v_head_dim 5"
    " n_routed_experts 3 n_shared_experts 1 first_k_dense_replace 1 n_group 1 topk_group 1"
    " num_key_value_heads 4"
)
DELTA = sizes(
    "linear_num_value_heads 4 linear_num_key_heads 2 linear_key_head_dim 3 linear_value_head_dim 5"
    " shared_expert_intermediate_size 10"
)
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
HYBRID = sizes(
    "num_experts 2 attn_layer_period 2 attn_layer_offset 1 expert_layer_period 2"
    " expert_layer_offset 1 mamba_d_state 4 mamba_dt_rank 3"
)
STATES = sizes("state_size 4 num_heads 6 head_dim 8 n_groups 2")
GRANITE = sizes(
    "mamba_n_heads 6 mamba_d_head 8 mamba_n_groups 2 mamba_d_state 4 num_local_experts 2"
    " num_experts_per_tok 1 shared_intermediate_size 10"
)
MAMBA2 = {"in_proj.weight": parts(48, 48, 8, 8, 6)}

FAMILIES = {
    "phi3": Family(
        {"model_type": "phi3", **TEXT},
        {"qkv_proj.weight": parts(24, 12, 12), "gate_up_proj.weight": parts(20, 20)},
    ),
    "falcon, grouped": Family(
        {"model_type": "falcon", **FALCON, "new_decoder_architecture": True, "num_kv_heads": 2},
        {"query_key_value.weight": heads(2, 12, 6, 6)},
    ),
    "falcon, multi-query": Family(
        {"model_type": "falcon", **FALCON, "multi_query": True},
        {"query_key_value.weight": parts(24, 6, 6)},
    ),
    "falcon, by head": Family(
        {"model_type": "falcon", **FALCON, "multi_query": False},
        {"query_key_value.weight": heads(4, 6, 6, 6)},
    ),
    "gpt-neox": Family(
        {"model_type": "gpt_neox", **TEXT}, {"query_key_value.weight": heads(4, 6, 6, 6)}
    ),
    "codegen": Family(
        {"model_type": "codegen", **OLD, "n_embd": 32, "rotary_dim": 4},
        {"qkv_proj.weight": heads(4, 8, 8, 8)},
    ),
    "modernbert": Family(
        {"model_type": "modernbert", **TEXT, "cls_token_id": 1, "sep_token_id": 2},
        {"Wqkv.weight": parts(24, 24, 24), "Wi.weight": parts(20, 20)},
        kind="AutoModel",
    ),
    "gpt2": Family(
        {"model_type": "gpt2", **OLD},
        {"c_attn.weight": parts(24, 24, 24)},
        transposed=("c_attn", "c_proj", "c_fc"),
    ),
    "gpt-bigcode": Family(
        {"model_type": "gpt_bigcode", **OLD},
        {"c_attn.weight": parts(24, 6, 6)},
    ),
    "gpt-oss": Family(
        {"model_type": "gpt_oss", **TEXT, **EXPERTS},
        {"experts.gate_up_proj": turns},
        transposed=("gate_up_proj", "experts.down_proj"),
    ),
    "llama4": Family(
        {"model_type": "llama4_text", **TEXT, **EXPERTS, "intermediate_size_mlp": 20},
        {"experts.gate_up_proj": parts(20, 20)},
        transposed=("gate_up_proj", "experts.down_proj"),
    ),
    "deepseek-v3": Family(
        {"model_type": "deepseek_v3", **TEXT, **EXPERTS, **LATENT},
        {
            "kv_a_proj_with_mqa.weight": parts(8, 4),
            "kv_b_proj.weight": heads(4, 6, 5),
            "experts.gate_up_proj": parts(10, 10),
        },
    ),
    "qwen3-next": Family(
        {"model_type": "qwen3_next", **TEXT, **EXPERTS, **DELTA, **LINEAR},
        {
            "in_proj_qkvz.weight": heads(2, 3, 3, 10, 10),
            "in_proj_ba.weight": heads(2, 2, 2),
            "self_attn.q_proj.weight": heads(4, 6, 6),
            "experts.gate_up_proj": parts(10, 10),
        },
    ),
    "qwen3.5": Family(
        {"model_type": "qwen3_5_text", **TEXT, **DELTA, **LINEAR},
        {"in_proj_qkv.weight": parts(6, 6, 20)},
    ),
    "jamba": Family(
        {"model_type": "jamba", **TEXT, **HYBRID},
        {
            "mamba.in_proj.weight": parts(48, 48),
            "x_proj.weight": parts(3, 4, 4),
            "experts.gate_up_proj": parts(20, 20),
        },
    ),
    "mamba2": Family({"model_type": "mamba2", **TEXT, **STATES}, MAMBA2),
    "granite, hybrid": Family(
        {
            "model_type": "granitemoehybrid",
            **TEXT,
            **GRANITE,
            "layer_types": ["mamba", "attention"],
        },
        {**MAMBA2, "input_linear.weight": parts(10, 10), "experts.gate_up_proj": parts(20, 20)},
    ),
}


def built(family: Family) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**family.config)
    model: nn.Module = getattr(transformers, family.kind).from_config(config)
    return model


def largest_error(family: Family, **options: Any) -> float:
    """How far a step of Muon is from one in which each fused matrix is orthogonalized alone."""
    model = built(family)
    fused = {n: p for n, p in model.named_parameters() if n.endswith(tuple(family.blocks))}
    before = {n: p.detach().clone() for n, p in fused.items()}
    settings = {"lr": 0.02, "weight_decay": 0.0, "fp32_matmul_prec": "highest"}
    optimizer = megatron_muon.Muon(model, **settings, **options)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    errors = []
    found = set()
    for n, p in fused.items():
        assert p.grad is not None
        [end] = [end for end in family.blocks if n.endswith(end)]
        found.add(end)
        matrices = [p.detach(), before[n], p.grad]
        if any(part in n for part in family.transposed):
            matrices = [each.mT for each in matrices]
        stacks = [each.reshape(-1, *each.shape[-2:]) for each in matrices]
        for now, start, gradient in zip(*stacks, strict=True):
            weight = nn.Parameter(start.clone())
            blocks = family.blocks[end](torch.arange(len(weight)))
            weight.row_blocks = blocks  # type: ignore[attr-defined]
            weight.grad = gradient.contiguous()
            reference = SplitMuon(
                [weight],
                **settings,
                momentum=0.95,
                nesterov=True,
                coefficient_type="simple",
                scale_mode="shape_scaling",
            )
            reference.step()
            errors.append(float((now - weight.detach()).abs().max()))
    assert found == family.blocks.keys()
    return max(errors)


@pytest.mark.parametrize("name", FAMILIES)
def test_each_fused_matrix_of_a_family_is_orthogonalised_alone(name: str) -> None:
    assert largest_error(FAMILIES[name]) < 2e-6


def test_a_wrong_split_is_far_away() -> None:
    """The negative control: halves of rows that alternate."""
    assert largest_error(FAMILIES["gpt-oss"], split={"gate_up_proj": (20, 20)}) > 1e-3


def test_the_table_names_classes_of_transformers_and_their_weights() -> None:
    """A renamed class would be orthogonalized whole; families above have each kind of split."""
    transformers = pytest.importorskip("transformers")
    found: dict[str, str] = {}
    for file in (Path(transformers.__file__).parent / "models").rglob("modeling_*.py"):
        for text in re.split(
            r"^class ",
            file.read_text("utf-8"),
            flags=re.MULTILINE,
        )[1:]:
            name = re.split(r"\W", text, maxsplit=1)[0]
            found[name] = found.get(name, "") + text
    others = ("W_pack", "qkv_opreact")  # Baichuan's and NX-AI's own code
    for pattern in FUSED:
        kind, weight = pattern.split(":")
        if kind.startswith("*") and weight not in others:
            classes = fnmatch.filter(found, kind.removeprefix("*."))
            assert any(f"self.{weight}" in found[name] for name in classes), pattern


class Remote(nn.Module):
    """A model of somebody's own, with a config as transformers has them."""

    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        self.config = type(
            "Config", (), {"hidden_size": 24, "num_attention_heads": 4, "intermediate_size": 20}
        )
        self.layers = nn.ModuleList([nn.ModuleDict(layers)])


def table_of(params: Any) -> dict[str, str]:
    """The note of each weight of Muon's."""
    shown = table(select(params).rows(), full=True)
    rows = re.findall(r"^muon .* (\S+\.weight)(?: \((.*)\))?$", shown, re.MULTILINE)
    return dict(rows)


def test_what_looks_fused_by_its_name_is_noted() -> None:
    model = Remote(
        back=nn.Linear(40, 24),
        c_attn=nn.Linear(24, 36),
        W_pack=nn.Linear(24, 72),
    )
    assert table_of(model) == {
        "layers.0.back.weight": "",
        "layers.0.c_attn.weight": "looks fused, by its name: pass the model, or see split=",
        "layers.0.W_pack.weight": "blocks of 3 x 24 rows",
    }


def test_factors_of_an_adapter_are_matrices_of_their_own() -> None:
    """PEFT's names."""
    base, down, up = (
        nn.Linear(24, 24).requires_grad_(False),
        nn.Linear(24, 8, bias=False),
        nn.Linear(8, 24, bias=False),
    )
    factors = {
        "lora_A": nn.ModuleDict({"default": down}),
        "lora_B": nn.ModuleDict({"default": up}),
    }
    model = Remote(q_proj=nn.ModuleDict({"base_layer": base, **factors}))
    path = "layers.0.q_proj"
    assert table_of(model) == {
        f"{path}.lora_A.default.weight": "",
        f"{path}.lora_B.default.weight": "",
    }


def test_split_has_the_last_word() -> None:
    model = built(FAMILIES["phi3"])
    optimizer = megatron_muon.Muon(
        model, split={"qkv_proj": "whole", "layers.1.mlp.gate_up_proj": (10,)}
    )
    table = optimizer.table(full=True)
    assert re.search(r"layers\.0\.self_attn\.qkv_proj\.weight$", table, re.MULTILINE)
    assert "layers.0.mlp.gate_up_proj.weight (blocks of 2 x 20 rows)" in table
    assert "layers.1.mlp.gate_up_proj.weight (blocks of 4 x 10 rows)" in table


RECURRENT = {"lstm": (nn.LSTM, 4), "gru": (nn.GRU, 3)}


@pytest.mark.parametrize("kind", RECURRENT)
def test_gates_of_recurrent_layers_and_projections_of_multi_head_attention_are_blocks(
    kind: str,
) -> None:
    layer, gates = RECURRENT[kind]
    model = nn.ModuleDict(
        {
            "rnn": layer(8, 6),
            "attention": nn.MultiheadAttention(8, 2),
            "up": nn.Linear(8, 8),
        }
    )
    table = megatron_muon.Muon(model).table(full=True)
    assert f"rnn.weight_ih_l0 (blocks of {gates} x 6 rows)" in table
    assert f"rnn.weight_hh_l0 (blocks of {gates} x 6 rows)" in table
    assert "attention.in_proj_weight (blocks of 3 x 8 rows)" in table
