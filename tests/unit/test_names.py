"""Patterns for parameter names: what they find, and what a user is told where they find nothing."""

from __future__ import annotations

import pytest

from megatron_muon.errors import UserError
from megatron_muon.megatron.model.names import matching, nearest

NAMES = [
    f"decoder.layers.{layer}.{part}.weight"
    for layer in (0, 1, 10)
    for part in ("self_attention.linear_proj", "self_attention.linear_qkv", "mlp.router", "mlp.experts.linear_fc1")
]


@pytest.mark.parametrize(
    ("patterns", "count"),
    [
        ((), 0),
        (("router",), 3),
        (("layers.1.",), 4),
        (("layers.1",), 8),  # found anywhere: layer 10 too
        (("layers.[01].*fc1",), 2),
        (("linear_?roj", "linear_qkv"), 6),
        (("decoder.layers.0.mlp.router.weight",), 1),
        (("*",), 12),
    ],
)
def test_a_pattern_is_found_anywhere_in_a_name(patterns: tuple[str, ...], count: int) -> None:
    found = matching(patterns, NAMES)
    assert len(found) == count
    assert found == [name for name in NAMES if name in found], "in their order, each once"


@pytest.mark.parametrize("pattern", ["ruoter", "Router", "mlp.route.weight", "*roter*"])
def test_a_pattern_that_finds_nothing_is_an_error_with_the_nearest_names(pattern: str) -> None:
    with pytest.raises(UserError) as caught:
        matching(["linear_qkv", pattern], NAMES)
    text = str(caught.value)
    assert text.startswith(f"--muon-exclude {pattern} matches none of Muon's 12 matrices; the nearest names are ")
    assert "names are decoder.layers.0.mlp.router.weight, " in text
    assert "layers.1." not in text, "one name for each kind"
    assert "\n" not in text


def test_what_goes_to_the_scalar_optimizer_anyway_is_an_error_too() -> None:
    others = ["embedding.word_embeddings.weight"]
    with pytest.raises(UserError, match=r"embedding matches none .* only parameters that Muon does not take \(embedd"):
        matching(["embedding"], NAMES, others=others)


@pytest.mark.parametrize("pattern", ["", "  "])
def test_nothing_is_no_pattern(pattern: str) -> None:
    with pytest.raises(UserError, match="would match every matrix"):
        matching([pattern], NAMES)


def test_the_nearest_come_first() -> None:
    assert nearest("linear_pro", NAMES, count=1) == ["decoder.layers.0.self_attention.linear_proj.weight"]
    assert nearest("fc11", NAMES, count=1) == ["decoder.layers.0.mlp.experts.linear_fc1.weight"]
    assert nearest("x", []) == []
