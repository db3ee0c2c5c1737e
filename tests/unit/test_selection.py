"""Which 2D weights of a plain nn.Module are no matrices of Muon's, what patterns find, and how the
table says so.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from torch import nn

from megatron_muon.core.layout import RowSplit
from megatron_muon.errors import UserError
from megatron_muon.megatron.model import matrices as mp
from megatron_muon.patterns import matching

WORDS, POSITIONS, WIDTH = 64, 32, 16


class Plain(nn.Module):
    """A language model as people write them: no name holds "embedding"."""

    def __init__(self, *, head: bool = True, tied: bool = False, wide: int = 48) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, WIDTH), nn.Embedding(POSITIONS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Linear(a, b)
            for a, b in (
                (WIDTH, wide),
                (wide, POSITIONS),
                (POSITIONS, WIDTH),
            )
        )
        self.norm = nn.LayerNorm(WIDTH)
        if head:
            self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
            if tied:
                self.lm_head.weight = self.wte.weight


class Wrapped(nn.Module):
    """A model as Megatron-FSDP's wrapper has it, which alone has a config."""

    config = TransformerConfig(num_layers=1, hidden_size=WIDTH, num_attention_heads=1)

    def __init__(self, module: nn.Module, **settings: Any) -> None:
        super().__init__()
        self.module = module
        mp.tag_for_muon([self], **settings)


def tagged(model: nn.Module) -> tuple[list[str], dict[str, str]]:
    """Names of the matrices, and of the other 2D weights with their reasons."""
    names = mp.parameter_names([Wrapped(model)])
    return [name for p, name in names.items() if mp.is_muon_matrix(p)], {
        name: getattr(p, "why_not_muon", "")
        for p, name in names.items()
        if p.ndim == 2 and not mp.is_muon_matrix(p)
    }


BLOCKS = [f"blocks.{number}.weight" for number in range(3)]


@pytest.mark.parametrize(
    ("model", "output"),
    [
        (Plain(), {"lm_head.weight": "output layer"}),
        (Plain(tied=True, wide=WORDS), {}),
        (Plain(head=False), {}),
    ],
)
def test_a_plain_models_embeddings_and_output_layer_are_left_out(model, output):
    """They went to Muon without a word unless their names held "embedding"."""
    matrices, others = tagged(model)
    assert matrices == BLOCKS
    assert others == {"wte.weight": "embedding", "wpe.weight": "embedding", **output}


def test_names_decide_for_tables_outside_of_modules_and_for_linear_layers_only_as_outputs():
    model = Plain()
    model.positional_embedding = nn.Parameter(torch.zeros(POSITIONS, WIDTH))
    model.embedding_projection = nn.Linear(WIDTH, WIDTH)
    model.unembed, model.embed_out = nn.Linear(WIDTH, WORDS), nn.Linear(WIDTH, WORDS)
    matrices, others = tagged(model)
    assert "embedding_projection.weight" in matrices
    assert others["positional_embedding"] == "embedding"
    assert others["unembed.weight"] == others["embed_out.weight"] == "output layer"


def test_megatrons_own_marks_decide_where_they_are():
    model = Plain()
    model.blocks[0].weight.is_embedding_or_output_parameter = True
    matrices, others = tagged(model)
    assert matrices == BLOCKS[1:]
    assert others["blocks.0.weight"] == "output layer"


def test_a_script_has_the_last_word():
    model = Plain()
    model.lm_head.weight.use_muon = True
    model.blocks[0].weight.use_muon = False
    assert tagged(model)[0] == [*BLOCKS[1:], "lm_head.weight"]


def test_the_table_says_why_and_what_is_split() -> None:
    model = Plain()
    names = mp.parameter_names([Wrapped(model, exclude=["blocks.0"])])
    chosen = [[p for p in names if mp.is_muon_matrix(p) is ours] for ours in (True, False)]
    groups = [{"params": chosen[0]}, {"params": chosen[1], "optimizer": "adam"}]
    splits = (RowSplit(1, (8,) * 4), RowSplit(2, (4, 4)))
    table = mp.parameter_table(groups, names, dict(zip(chosen[0], splits, strict=True)))
    lines = [" ".join(line.split()) for line in table.splitlines()]
    for line in (
        "muon 1 32 x 48 blocks.1.weight (blocks of 4 x 8 rows)",
        "muon 1 16 x 32 blocks.2.weight (blocks of 2 x 8 rows, interleaved)",
        "adam 1 64 x 16 wte.weight (embedding)",
        "adam 1 64 x 16 lm_head.weight (output layer)",
        "adam 1 48 x 16 blocks.0.weight (--muon-exclude)",
        "adam 1 16 norm.weight",
    ):
        assert line in lines, table


NAMES = [
    f"decoder.layers.{layer}.{part}.weight"
    for layer in (0, 1, 10)
    for part in (
        "self_attention.linear_proj",
        "self_attention.linear_qkv",
        "mlp.router",
        "mlp.experts.linear_fc1",
    )
]


@pytest.mark.parametrize(
    ("patterns", "count"),
    [
        ((), 0),
        (("router",), 3),
        (("layers.1.",), 4),
        (("layers.1",), 4),  # not layer 10
        (("layers.1*",), 8),
        (("layers.[01].*fc1",), 2),
        (("linear_?roj", "linear_qkv"), 6),
        (("decoder.layers.0.mlp.router.weight",), 1),
        (("*",), 12),
    ],
)
def test_a_pattern_matches_whole_components_anywhere_in_a_name(
    patterns: tuple[str, ...], count: int
) -> None:
    found = matching("--muon-exclude", patterns, NAMES)
    assert len(found) == count
    assert found == [name for name in NAMES if name in found], "in their order, each once"


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("linear_fc", "; did you mean linear_fc*?"),  # a part of a component: it was found once
        ("ruoter", "; did you mean router?"),
        ("mlp.route.weight", "; did you mean mlp.router.weight?"),
        ("qqq", f"; one of them is {NAMES[0]}"),
    ],
)
def test_a_pattern_that_finds_nothing_is_an_error_with_the_nearest_component(
    pattern: str, near: str
) -> None:
    with pytest.raises(UserError) as caught:
        matching("--muon-exclude", ["linear_qkv", pattern], NAMES)
    nothing = (
        f"--muon-exclude {pattern} matches none of Muon's 12 matrices by whole components of their"
        " names"
    )
    assert str(caught.value) == nothing + near


def test_what_goes_to_the_scalar_optimizer_anyway_is_an_error_too() -> None:
    others = ["embedding.word_embeddings.weight"]
    with pytest.raises(
        UserError,
        match=r"embedding matches none .* only parameters that are not among these \(embedd",
    ):
        matching("--muon-exclude", ["embedding"], NAMES, others=others)


def test_nothing_is_no_pattern() -> None:
    for pattern in ("", "  "):
        with pytest.raises(UserError, match="would match every matrix"):
            matching("--muon-exclude", [pattern], NAMES)
