"""Which rows of a fused parameter make a block: by megatron-core's names and sizes, for every
setting.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import megatron.core
import pytest
import torch
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from megatron_muon.core.layout import RowSplit, whole
from megatron_muon.errors import UserError
from megatron_muon.megatron.model import matrices as mp
from megatron_muon.megatron.model.matrices import Fused, fused_rows
from megatron_muon.megatron.muon_config import MuonOptimizerConfig

LAYER = "decoder.layers.0."
GPT: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_query_groups": 2,
}
LATENT: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "q_lora_rank": 5,
    "kv_lora_rank": 6,
    "qk_head_dim": 4,
    "qk_pos_emb_head_dim": 2,
    "v_head_dim": 3,
    "rope_type": "rope",
}
GATED: dict[str, Any] = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
PLAIN = MuonOptimizerConfig()
HEADS = MuonOptimizerConfig(muon_split_heads=True)
WHOLE = MuonOptimizerConfig(muon_split_qkv=False)
SPLIT = MuonOptimizerConfig(muon_split_gated_mlp=True)


class Chunk(torch.nn.Module):
    """A model chunk with one parameter of a given name."""

    def __init__(self, config: TransformerConfig, name: str, parameter: torch.nn.Parameter) -> None:
        super().__init__()
        self.config = config
        *path, leaf = name.split(".")
        module: torch.nn.Module = self
        for part in path:
            module.add_module(part, torch.nn.Module())
            module = module._modules[part]  # type: ignore[assignment]
        module.register_parameter(leaf, parameter)


def tagged(
    config: TransformerConfig, name: str, shape: tuple[int, ...], **marks: Any
) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.zeros(shape))
    vars(parameter).update(marks)
    mp.tag_for_muon([Chunk(config, name, parameter)])
    return parameter


def split(
    config: TransformerConfig, name: str, shape: tuple[int, ...], settings: MuonOptimizerConfig
) -> Any:
    parameter = tagged(config, name, shape)
    return mp.block_split(parameter, settings) if mp.is_muon_matrix(parameter) else None


QKV = f"{LAYER}self_attention.linear_qkv.weight"
FC1 = f"{LAYER}mlp.linear_fc1.weight"


ATTENTION = f"{LAYER}self_attention."
GROUPS, GATED_GROUPS = (2, (8, 4, 4)), (2, (8, 8, 4, 4))
EIGHT_HEADS, GATED_HEADS = (1, (4,) * 8), (1, (4,) * 12)
BLOCKS: dict[str, tuple[dict[str, Any], str, int, list[Any]]] = {
    "query, key and value": (
        GPT,
        QKV,
        32,
        [GROUPS, GROUPS, EIGHT_HEADS, (1, (32,))],
    ),
    "gate between query and key": (
        GPT | {"attention_output_gate": True},
        QKV,
        48,
        [GATED_GROUPS, GATED_GROUPS, GATED_HEADS, (1, (48,))],
    ),
    "heads that are columns": (
        GPT | GATED,
        f"{ATTENTION}linear_proj.weight",
        16,
        [(1, (16,))] * 4,
    ),
    "no gate in this model": (GPT, FC1, 20, [(1, (20,))] * 4),
}
"""Sizes, a parameter's name and rows, and its blocks with PLAIN, SPLIT, HEADS and WHOLE."""

for name in (
    "linear_fc1.weight",
    "shared_experts.linear_fc1.weight",
    "experts.linear_fc1.weight3",
    "experts.local_experts.1.linear_fc1.weight",
):
    one = 1, (20,)
    gate_and_up = [one, (1, (10, 10)), one, one]
    BLOCKS[f"gate and up of {name}"] = GPT | GATED, f"{LAYER}mlp.{name}", 20, gate_and_up
for name, rows, plain, heads in (
    ("linear_q_proj", 24, (1, (24,)), (1, (6,) * 4)),
    ("linear_q_up_proj", 24, (1, (24,)), (1, (6,) * 4)),
    ("linear_q_down_proj", 5, (1, (5,)), (1, (5,))),
    ("linear_kv_down_proj", 8, (1, (6, 2)), (1, (6, 2))),
    (
        "linear_qkv_down_proj",
        13,
        (1, (5, 6, 2)),
        (1, (5, 6, 2)),
    ),
    (
        "linear_kv_up_proj",
        28,
        (4, (4, 3)),
        (1, (4, 3) * 4),
    ),
):
    splits = [plain, plain, heads, (1, (rows,))]
    BLOCKS[name] = LATENT, f"{ATTENTION}{name}.weight", rows, splits


@pytest.mark.parametrize("case", BLOCKS)
def test_each_setting_splits_what_it_names(case: str) -> None:
    sizes, name, rows, expected = BLOCKS[case]
    config = (MLATransformerConfig if sizes is LATENT else TransformerConfig)(**sizes)
    found = [
        split(
            config,
            name,
            (rows, 16),
            settings,
        )
        for settings in (PLAIN, SPLIT, HEADS, WHOLE)
    ]
    assert found == [RowSplit(*each) for each in expected]


IN_PROJ = f"{LAYER}mixer.in_proj.weight"
MAMBA = (5, 5, 2, 2, 2)
PAIR = (4, 4)


@pytest.mark.parametrize(
    ("name", "rows", "settings", "over_tp", "on_one"),
    [
        (FC1, (24, 8), SPLIT, RowSplit(3, PAIR), RowSplit(1, PAIR)),
        (
            QKV,
            (32, 8),
            PLAIN,
            RowSplit(*GROUPS),
            RowSplit(1, (8,)),
        ),
        # Mamba's z, x, B, C and dt went to Muon as one matrix.
        (IN_PROJ, (32, 16), PLAIN, RowSplit(2, MAMBA), RowSplit(1, MAMBA)),
        (IN_PROJ, (32, 16), WHOLE, whole(32), whole(16)),
    ],
)
def test_blocks_over_tensor_parallel_ranks_and_on_one(name, rows, settings, over_tp, on_one):
    """A gate and an up of each of three ranks; half a query group, which is one block; sizes that a
    layer states.
    """
    all_rows, part = rows
    config = TransformerConfig(**GPT, **GATED)
    marks: dict[str, Any] = {"orig_param": torch.zeros(part, 16)}
    if name == IN_PROJ:
        marks["partition_sizes"] = list(MAMBA)
    parameter = tagged(config, name, (all_rows, 16), **marks)
    assert mp.block_split(parameter, settings) == over_tp
    assert mp.block_split(parameter, settings, over_tp=False) == on_one


@pytest.mark.parametrize("over_tp", [True, False])
def test_latents_that_every_tensor_parallel_rank_has_a_part_of_are_refused(over_tp: bool) -> None:
    """The first rows of the matrix counted as the query's latent; rank 0's part of the other lies
    among them.
    """
    config = MLATransformerConfig(**LATENT | {"q_lora_rank": 4})
    name = f"{LAYER}self_attention.linear_qkv_down_proj.weight"
    cut = tagged(config, name, (12, 16), orig_param=torch.zeros(6, 16))
    with pytest.raises(
        UserError, match=r"leave --mla-down-proj-fusion out, or use --muon-no-split-qkv$"
    ):
        mp.block_split(cut, PLAIN, over_tp=over_tp)
    assert mp.block_split(cut, WHOLE) == RowSplit(1, (12,))
    duplicated = tagged(config, name, (12, 16), orig_param=torch.zeros(12, 16))  # by TELinear
    assert mp.block_split(duplicated, PLAIN) == RowSplit(1, (4, 6, 2))


def test_interleaved_gates() -> None:
    config = TransformerConfig(**GPT, **GATED)
    config.moe_mlp_glu_interleave_size = 2
    fused = fused_rows(f"{LAYER}mlp.experts.linear_fc1.weight0", config)
    assert fused.split(16, SPLIT, tensor_parallel=1) == RowSplit(4, (2, 2))
    assert not fused.fits(18)
    assert fused_rows(FC1, config) == Fused(gated=True)


def test_qkv_is_split_beside_latent_attention() -> None:
    """The branch for latent attention left a `linear_qkv` of the same model whole."""
    config = MLATransformerConfig(**LATENT, num_query_groups=2, kv_channels=4)
    assert split(
        config,
        QKV,
        (32, 16),
        PLAIN,
    ) == RowSplit(2, (8, 4, 4))


def test_a_layers_own_config_gives_its_sizes() -> None:
    """Layers of a heterogeneous model have query groups of their own."""
    parameter = torch.nn.Parameter(torch.zeros(24, 16))
    chunk = Chunk(TransformerConfig(**GPT), QKV, parameter)
    chunk.get_submodule(f"{LAYER}self_attention").config = TransformerConfig(
        **GPT | {"num_query_groups": 1}
    )
    mp.tag_for_muon([chunk])
    assert mp.block_split(parameter, PLAIN) == RowSplit(1, (16, 4, 4))


@pytest.mark.parametrize(
    ("name", "shape", "why"),
    [
        (IN_PROJ, (32, 16), mp.UNKNOWN),
        (f"{LAYER}attention.qkv_proj.weight", (32, 16), mp.UNKNOWN),
        (QKV, (30, 16), mp.UNKNOWN),  # no multiple of a query group's rows
        (f"{LAYER}mixer.A_log", (32, 4), "table"),  # Mamba 1
        (f"{LAYER}mlp.shared_experts.gate_weight", (1, 16), "vector"),
        (f"{LAYER}attention.linear_proj.weight", (16, 16), ""),
    ],
)
def test_what_may_hold_several_matrices_and_what_is_none_goes_to_the_scalar_optimizer(
    name: str, shape: tuple[int, ...], why: str
) -> None:
    config = TransformerConfig(**GPT)
    parameter = tagged(config, name, shape)
    assert ("" if mp.is_muon_matrix(parameter) else parameter.why_not_muon) == why  # type: ignore[attr-defined]
    assert mp.is_muon_matrix(tagged(config, name, shape, use_muon=True)), (
        "a script has the last word"
    )


PROJECTIONS = (
    "in_proj linear_qkv linear_kv linear_kv_up_proj linear_kv_down_proj linear_qkv_down_proj"
    " linear_q_proj linear_q_up_proj linear_fc1"
)
WHOLE_ONES = (
    "linear_proj linear_fc2 out_proj eh_proj linear_q linear_q_down_proj linear_wk linear_wq_b"
    " linear_weights_proj fc1_latent_proj fc2_latent_proj"
)


def test_every_projection_of_the_installed_megatron_core_is_known() -> None:
    """A new one is either fused, and then split or sent to Adam, or one matrix; docs/parameters.md
    lists them.
    """
    core = Path(megatron.core.__file__ or "").parent
    sources = [path for folder in ("ssm", "transformer") for path in (core / folder).rglob("*.py")]
    found = {
        name
        for path in sources
        for name in re.findall(
            r"self\.(\w*(?:linear|proj|fc\d)\w*)(?:: [^=]*)? = (?!None)\w", path.read_text()
        )
        # sizes, classes, what is kept
        if not re.search(r"_(size|dim|impl|input|output|linear)$|^offload_", name)
    }
    of_20 = {"mapping_proj"} & found  # of hyper-connections
    assert found == {*PROJECTIONS.split(), *WHOLE_ONES.split(), *of_20}
    page = Path("docs/parameters.md").read_text("utf-8")
    assert not {name for name in found if f"`{name}`" not in page}


@pytest.mark.parametrize(
    ("settings", "parts"),
    [(PLAIN, (8,)), (SPLIT, (4, 4))],
)
def test_the_matrix_of_each_expert_of_a_stack_is_split(
    settings: MuonOptimizerConfig, parts: tuple[int, ...]
) -> None:
    config = TransformerConfig(**GPT, **GATED)
    assert split(config, f"{LAYER}mlp.experts.linear_fc1.weight", (3, 8, 5), settings) == RowSplit(
        1, parts
    )
