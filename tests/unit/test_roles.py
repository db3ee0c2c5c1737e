"""Embeddings and output layers that modules show and names do not, and a warning of stacks."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)

import megatron_muon
from megatron_muon.fsdp.selection import select
from megatron_muon.megatron.model import matrices as mp
from tests.unit.test_selection import Wrapped

WORDS, WIDTH = 40, 8


class Language(nn.Module):
    """A model whose names say nothing; `rows` is the width of its output layer."""

    def __init__(
        self,
        rows: int = WORDS,
        *,
        tied: bool = False,
        config: Any = None,
    ) -> None:
        super().__init__()
        self.tok = nn.Embedding(WORDS, WIDTH)
        self.mix = nn.Linear(WIDTH, WORDS)  # as wide as the vocabulary, and not the last
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, WORDS),
                nn.Linear(WORDS, WIDTH),
            )
            for _ in range(2)
        )
        self.read = nn.Linear(WIDTH, rows, bias=False)
        self.config = config
        if tied:
            self.read.weight = self.tok.weight


def left_of(model: Any, **given: Any) -> dict[str, str]:
    """The matrices that go to AdamW, with their reasons."""
    selection = select(model, **given)
    chosen = selection.choices.items()
    return {each.name: each.why for p, each in chosen if each.why and p.ndim == 2}


LLAMA = {
    "vocab_size": 48,
    "hidden_size": 8,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
}
T5_SIZES = {
    "vocab_size": 40,
    "d_model": 8,
    "d_kv": 8,
    "d_ff": 40,
    "num_layers": 1,
    "num_heads": 1,
}
MODELS: dict[str, tuple[Any, dict[str, str]]] = {
    "tied": (lambda: Language(tied=True), {"tok.weight": "embedding"}),
    "as wide as the vocabulary": (
        lambda: Language(),
        {"tok.weight": "embedding", "read.weight": "output layer"},
    ),
    "as wide as the config's vocabulary": (
        lambda: Language(56, config=SimpleNamespace(vocab_size=56)),
        {"tok.weight": "embedding", "read.weight": "output layer"},
    ),
    "numbers alone": (
        lambda: nn.Sequential(
            nn.Embedding(WORDS, WIDTH),
            nn.Linear(WIDTH, 5),
            nn.Linear(5, WIDTH),
            nn.Linear(WIDTH, WORDS),
        ),
        {"0.weight": "embedding", "3.weight": "output layer"},
    ),
    "one output": (
        lambda: nn.Sequential(nn.Linear(WIDTH, 5), nn.Linear(5, 1)),
        {"1.weight": "vector"},
    ),
    "Llama that classifies": (
        lambda: LlamaForSequenceClassification(LlamaConfig(**LLAMA, num_labels=3)),
        {"model.embed_tokens.weight": "embedding", "score.weight": "output layer"},
    ),
    "T5": (
        lambda: T5ForConditionalGeneration(T5Config(**T5_SIZES)),
        {
            "shared.weight": "embedding",
            "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": "embedding",
            "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": "embedding",
        },
    ),
}


@pytest.mark.parametrize("kind", MODELS)
def test_modules_show_embeddings_and_output_layers(kind: str) -> None:
    make, expected = MODELS[kind]
    found = left_of(make())
    assert found == expected


def test_an_output_layer_that_its_model_returns_is_one_whatever_its_width() -> None:
    model = Language(7)
    model.get_output_embeddings = lambda: model.read  # type: ignore[assignment]
    assert left_of(model)["read.weight"] == "output layer"


def test_a_linear_layer_is_no_table_whatever_its_name() -> None:
    """Story: under Megatron projections of embeddings were matrices, under FSDP2 they were
    tables.
    """
    model = nn.ModuleDict(
        {
            "embedder": nn.ModuleList([nn.Linear(WIDTH, 5)]),
            "layers": nn.ModuleList([nn.Linear(5, 6)]),
        }
    )
    assert left_of(model) == {}
    assert left_of(model.named_parameters()) == {"embedder.0.weight": "embedding"}


def test_a_gate_of_one_row_is_a_vector_on_both_paths() -> None:
    """Story: the gate of shared experts went to Muon in any model and to Adam under Megatron."""
    model = nn.Sequential()
    model.layers = nn.ModuleList([nn.Linear(WIDTH, 6, bias=False)])
    model.shared_expert_gate = nn.Linear(WIDTH, 1, bias=False)
    expected = {"shared_expert_gate.weight": "vector"}
    assert left_of(model) == left_of(model.named_parameters()) == expected
    names = mp.parameter_names([Wrapped(model)])
    assert {n: p.why_not_muon for p, n in names.items() if not mp.is_muon_matrix(p)} == expected


def warned(act: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    return [str(each.message) for each in caught if "shaped like matrices" in str(each.message)]


def stack_beside_matrix() -> list[tuple[str, nn.Parameter]]:
    matrix = nn.Parameter(torch.ones(20, 20))
    stack = nn.Parameter(torch.ones(3, 20, 20))
    return [
        ("layers.0.up.weight", matrix),
        ("layers.0.moe.w13", stack),
        ("wte.weight", nn.Parameter(torch.ones(90, 20))),
    ]


def test_a_warning_names_stacks_that_adamw_takes() -> None:
    """Story: beside one matrix, stacks without a known name trained with AdamW."""
    given = stack_beside_matrix()
    (text,) = warned(lambda: megatron_muon.Muon(given))
    expected = (
        "muon takes 25.0% of 1,600 parameters in weights shaped like matrices; the largest that it"
        " leaves is layers.0.moe.w13 (3D). If it is a matrix or stack, name it in matrices= or"
        " stacks=; if not, put it in a group with optimizer='adamw'"
    )
    assert text == expected


@pytest.mark.parametrize(
    "settings",
    [
        {"stacks": ["w13"]},
        {"exclude": ["up"], "stacks": ["w13"]},
        {"group": True},
    ],
)
def test_no_warning_for_what_users_chose_themselves(settings: dict[str, Any]) -> None:
    given: Any = stack_beside_matrix()
    if settings.pop("group", False):
        given = [
            {"params": given[::2]},
            {
                "params": given[1:2],
                "optimizer": "adamw",
            },
        ]
    assert warned(lambda: megatron_muon.Muon(given, **settings)) == []


def with_names(*names: str) -> list[tuple[str, nn.Parameter]]:
    """A matrix for Muon, and larger weights of these names."""
    named = [("layers.0.up.weight", nn.Parameter(torch.ones(20, 20)))]
    return named + [(name, nn.Parameter(torch.ones(900, 20))) for name in names]


def test_a_warning_names_a_network_whose_name_says_embedding() -> None:
    """Story: names of modules decide, so one called `embedder` trained with AdamW, all of it."""
    (text,) = warned(lambda: megatron_muon.Muon(with_names("embedder.layers.0.up.weight")))
    assert text.startswith("muon takes 2.2% of 18,400 parameters")
    assert "leaves is embedder.layers.0.up.weight (embedding)" in text
    (text,) = warned(
        lambda: megatron_muon.Muon(with_names("layers.1.up.weight"), matrices=["layers.0"])
    )
    assert "leaves is layers.1.up.weight (not among matrices)" in text


def test_no_warning_for_large_embeddings_and_output_layers() -> None:
    """In a small model most elements are theirs."""
    given = with_names("wte.weight", "embed_tokens.0.weight", "lm_head.weight")
    assert warned(lambda: megatron_muon.Muon(given)) == []
    half = [*with_names(), ("layers.0.bias_table", nn.Parameter(torch.ones(20, 20)))]
    assert warned(lambda: megatron_muon.Muon(half)) == []
    given = with_names("layers.1.up.weight")
    assert warned(lambda: megatron_muon.Muon(given, exclude=["layers.1"])) == []


def test_a_line_at_the_start_says_how_many_parameters_each_takes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the first rank alone, as the warning."""
    given = with_names("wte.weight", "embedder.layers.0.up.weight")
    assert len(warned(lambda: megatron_muon.Muon(given))) == 1
    expected = "megatron-muon: parameters: 400 to muon, 36,000 to adamw\n"
    assert capsys.readouterr().out == expected
    monkeypatch.setenv("RANK", "1")
    assert warned(lambda: megatron_muon.Muon(given)) == []
    assert capsys.readouterr().out == ""


def test_no_warning_for_convolutions() -> None:
    model = nn.Sequential(
        nn.Conv1d(40, 40, 20),
        nn.Conv2d(40, 40, 3),
        nn.Linear(20, 20),
        nn.Linear(20, 3),
    )
    assert warned(lambda: megatron_muon.Muon(model)) == []
