"""Which 2D weights of a plain nn.Module are no matrices of Muon's, what patterns find, and how the
table says so.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from torch import nn

from megatron_muon.core.layout import RowSplit
from megatron_muon.errors import UserError
from megatron_muon.matrices.table import Row, doubt, table
from megatron_muon.matrices.views import Matrices
from megatron_muon.megatron.model import matrices as mp
from megatron_muon.megatron.muon_config import MuonOptimizerConfig
from megatron_muon.patterns import matching

WORDS, POSITIONS, WIDTH = 64, 32, 16


class Plain(nn.Module):
    """A language model as people write them: no name holds "embedding"."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.wte = nn.Embedding(WORDS, WIDTH)
        self.wpe = nn.Embedding(POSITIONS, WIDTH)
        widths = ((WIDTH, 48), (48, POSITIONS), (POSITIONS, WIDTH))
        self.blocks = nn.ModuleList(nn.Linear(a, b) for a, b in widths)
        self.norm = nn.LayerNorm(WIDTH)
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
    matrices = []
    others = {}
    for p, name in mp.parameter_names([Wrapped(model)]).items():
        if mp.is_muon_matrix(p):
            matrices.append(name)
        elif p.ndim == 2:
            others[name] = getattr(p, "why_not_muon", "")
    return matrices, others


BLOCKS = [f"blocks.{number}.weight" for number in range(3)]


def test_a_plain_models_embeddings_and_output_layer_are_left_out():
    """They went to Muon without a word unless their names held "embedding"."""
    matrices, others = tagged(Plain())
    assert matrices == BLOCKS
    expected = {"wte.weight": "embedding", "wpe.weight": "embedding"}
    assert others == {**expected, "lm_head.weight": "output layer"}
    matrices, others = tagged(Plain(tied=True))
    assert matrices == BLOCKS
    assert others == expected


def test_names_decide_for_tables_outside_of_modules_and_for_linear_layers_only_as_outputs():
    model = Plain()
    model.positional_embedding = nn.Parameter(torch.zeros(POSITIONS, WIDTH))
    model.embedding_projection = nn.Linear(WIDTH, WIDTH)
    model.unembed, model.embed_out = nn.Linear(WIDTH, WORDS), nn.Linear(WIDTH, WORDS)
    matrices, others = tagged(model)
    assert "embedding_projection.weight" in matrices
    assert others["positional_embedding"] == "embedding"
    assert others["unembed.weight"] == others["embed_out.weight"] == "output layer"


def test_marks_of_megatron_and_of_scripts_decide_where_they_are():
    model = Plain()
    model.blocks[0].weight.is_embedding_or_output_parameter = True
    model.blocks[1].weight.use_muon = False
    model.lm_head.weight.use_muon = True
    matrices, others = tagged(model)
    assert matrices == ["blocks.2.weight", "lm_head.weight"]
    assert others["blocks.0.weight"] == "output layer"


class MambaMixer(nn.Module):
    """megatron-core 0.20 marks its projection by the class's name."""

    def __init__(self, **marks: Any) -> None:
        super().__init__()
        self.in_proj = nn.Linear(WIDTH, 48, bias=False)
        vars(self.in_proj.weight).update(partition_sizes=(16, 32), **marks)


class Layer(nn.Module):
    """A layer whose weights megatron-core's own Muon treats otherwise, but for two."""

    def __init__(self, **marks: Any) -> None:
        super().__init__()
        self.linear_qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.linear_proj = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, 1)
        self.mixer = MambaMixer(**marks)
        self.experts = nn.Module()
        self.experts.stack = nn.Parameter(torch.zeros(4, 8, WIDTH))
        self.excluded = nn.Linear(WIDTH, WIDTH, bias=False)
        self.marked = nn.Linear(WIDTH, WIDTH, bias=False)
        self.marked.weight.use_muon = False


class Stack(nn.Module):
    """Two layers, and tables of which megatron-core marks one."""

    def __init__(self, **marks: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.words.weight.is_embedding_or_output_parameter = True
        self.positions = nn.Embedding(POSITIONS, WIDTH)
        self.layers = nn.ModuleList(Layer(**marks) for _ in range(2))


@pytest.mark.parametrize("heeds", [False, True], ids=["0.19", "0.20"])
def test_differences_from_megatrons_own_muon_are_listed(
    monkeypatch: pytest.MonkeyPatch, heeds: bool
) -> None:
    """0.20's leaves out what is marked: it was listed as taken, and Mamba's as taken whole."""

    def is_left_out(parameter: Any) -> bool:
        is_table = hasattr(parameter, "is_embedding_or_output_parameter")
        is_marked = heeds and not getattr(parameter, "use_muon", True)
        return parameter.ndim != 2 or is_table or is_marked

    version = SimpleNamespace(
        IS_LEFT_OUT=is_left_out,
        has_marked=lambda module: heeds and isinstance(module, MambaMixer),
    )
    monkeypatch.setattr(mp, "installed", lambda: version)

    def differences(**settings: Any) -> set[str]:
        chunk = Wrapped(Stack(**marks), exclude=["excluded"], **settings)
        mp.tag_for_muon([chunk], **settings)  # again, after its own marks
        return set(mp.unlike_upstream([chunk], MuonOptimizerConfig()))

    marks = {"use_muon": False} if heeds else {}
    marked = set() if heeds else {"layers.*.marked.weight (Muon there, not here)"}
    expected = {
        "positions.weight (Muon there, not here)",
        "layers.*.gate.weight (Muon there, not here)",
        "layers.*.excluded.weight (Muon there, not here)",
        "layers.*.experts.stack (Muon here, not there)",
        f"layers.*.mixer.in_proj.weight ({'Muon here, not there' if heeds else 'one block there'})",
    }
    assert differences() == expected | marked
    assert (
        differences(like_upstream=True)
        == {"layers.*.excluded.weight (Muon there, not here)"} | marked
    )


def test_the_table_says_why_and_what_is_split() -> None:
    model = Plain()
    names = mp.parameter_names([Wrapped(model, exclude=["blocks.0"])])
    chosen = [[p for p in names if mp.is_muon_matrix(p) is ours] for ours in (True, False)]
    groups = [{"params": chosen[0]}, {"params": chosen[1], "optimizer": "adam"}]
    splits = (RowSplit(1, (8,) * 4), RowSplit(2, (4, 4)))
    rows = mp.parameter_rows(
        groups,
        names,
        {
            p: Matrices(name=names[p], view=mp.view_of(p), split=split)
            for p, split in zip(chosen[0], splits, strict=True)
        },
    )
    shown = table(rows)
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    for line in (
        "muon 1 32 x 48 blocks.1.weight (blocks of 4 x 8 rows)",
        "muon 1 16 x 32 blocks.2.weight (blocks of 2 x 8 rows, interleaved)",
        "adam 1 64 x 16 wte.weight (embedding)",
        "adam 1 64 x 16 lm_head.weight (output layer)",
        "adam 1 48 x 16 blocks.0.weight (--muon-exclude)",
        "adam 1 16 norm.weight",
    ):
        assert line in lines, shown
    assert doubt(rows, "muon") == ""  # the table, the output layer and the excluded are larger
    stack = Row("adam", "decoder.layers.0.moe.w13", (4, 32, 48))
    expected = (
        "muon takes 25.0% of 8,192 parameters in weights shaped like matrices; the largest that it"
        " leaves is decoder.layers.0.moe.w13 (3D)"
    )
    assert doubt([*rows, stack], "muon") == expected


PARTS = ("self_attention.linear_proj", "self_attention.linear_qkv", "mlp.router", "mlp.linear_fc1")
NAMES = [f"decoder.layers.{layer}.{part}.weight" for layer in (0, 1, 10) for part in PARTS]


@pytest.mark.parametrize(
    ("patterns", "count"),
    [
        ("router", 3),
        ("layers.1.", 4),
        ("layers.1", 4),  # not layer 10
        ("layers.1*", 8),
        ("layers.[01].*fc1", 2),
        ("linear_?roj linear_qkv", 6),
        ("*", 12),
    ],
)
def test_a_pattern_matches_whole_components_anywhere_in_a_name(patterns: str, count: int) -> None:
    found = matching("--muon-exclude", patterns.split(), NAMES)
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
    nothing = f"--muon-exclude {pattern} matches none of Muon's 12 matrices by whole components of"
    with pytest.raises(
        UserError,
        match=re.escape(nothing) + f".*{re.escape(near)}$",
    ):
        matching("--muon-exclude", ["linear_qkv", pattern], NAMES)


def test_other_patterns_of_nothing_are_errors_too() -> None:
    others = ["embedding.word_embeddings.weight"]
    with pytest.raises(UserError, match=r"only parameters that are not among these \(embedd"):
        matching("--muon-exclude", ["embedding"], NAMES, others=others)
    with pytest.raises(UserError, match="would match every matrix"):
        matching("--muon-exclude", ["  "], NAMES)
