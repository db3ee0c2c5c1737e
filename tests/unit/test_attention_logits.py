"""Factors of QK-clip, the rows they are for, and the logits that local attention keeps, against
plain loops.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.fusions import fused_softmax
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

from megatron_muon.errors import UserError
from megatron_muon.megatron.attention_logits import AttentionLogits, projections, record_max_logits
from megatron_muon.qk_clip import KEY, OTHER, QUERY, ROTARY, HeadScaling

ALONE = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1))


@given(
    groups=st.integers(1, 5),
    in_group=st.integers(1, 3),
    logits=st.lists(
        st.floats(-200, 1e6, width=32),
        min_size=15,
        max_size=15,
    ),
    alpha=st.floats(0.05, 0.95),
)
def test_a_group_is_scaled_by_its_largest_logit(groups, in_group, logits, alpha):
    """Whatever the number of heads; logits at most at the threshold, negative ones too, change no
    bit.
    """
    logits = logits[: groups * in_group]
    layer = groups * in_group, groups
    scaling = HeadScaling([layer], alpha=alpha, threshold=100.0, device=torch.device("cpu"))
    scaling.largest.copy_(torch.tensor(logits))
    found = scaling.factors()
    for group in range(groups):
        largest = max(logits[group * in_group : (group + 1) * in_group])
        gamma = 100.0 / largest if largest > 100.0 else 1.0
        expected = {
            OTHER: 1.0,
            QUERY: gamma**alpha,
            KEY: gamma ** (1.0 - alpha),
            ROTARY: gamma,
        }
        for kind, factor in expected.items():
            assert math.isclose(found[kind, group].item(), factor, rel_tol=2e-6)
            assert (found[kind, group] == 1.0) == (
                kind == OTHER or gamma == 1.0 or math.isclose(factor, 1, rel_tol=1e-6)
            )


def test_rows_of_projections_are_those_of_the_attention():
    common = {"num_layers": 1, "hidden_size": 30, "num_attention_heads": 6}
    grouped = TransformerConfig(**common, num_query_groups=3)
    assert projections(grouped) == {
        "linear_qkv": [(QUERY, 10), (KEY, 5), (OTHER, 5)],
    }
    grouped.attention_output_gate = True
    gated = [(QUERY, 10), (OTHER, 10), (KEY, 5), (OTHER, 5)]
    assert projections(grouped) == {"linear_qkv": gated}
    latent = {"kv_lora_rank": 6, "qk_head_dim": 4, "qk_pos_emb_head_dim": 2, "v_head_dim": 3}
    keys = {"linear_kv_up_proj": [(KEY, 4), (OTHER, 3)]}
    for rank, queries in ((None, "linear_q_proj"), (10, "linear_q_up_proj")):
        config = MLATransformerConfig(**common, **latent, q_lora_rank=rank)
        assert projections(config) == {queries: [(QUERY, 4), (ROTARY, 2)]} | keys


def local_attention(**changes):
    settings = {
        "num_layers": 1,
        "hidden_size": 6,
        "num_attention_heads": 3,
        "masked_softmax_fusion": False,
        **changes,
    }
    return DotProductAttention(
        TransformerConfig(**settings), 1, AttnMaskType.causal, "self", pg_collection=ALONE
    )


@pytest.mark.parametrize("mask", ["given", "made by the softmax"])
@pytest.mark.parametrize(
    "changes", [{}, {"apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": True}]
)
def test_local_attention_keeps_the_largest_logit_of_each_head(monkeypatch, mask, changes):
    """Over micro-batches, without those that the mask hides, and without those of an evaluation."""
    attention = local_attention(**changes)
    attention.scale_mask_softmax.scale = 3 if changes else None  # as in a third layer
    record_max_logits(attention)
    record_max_logits(attention)
    assert attention.current_max_attn_logits is None
    generator = torch.Generator().manual_seed(1)
    batches = [
        torch.randn(
            2,
            3,
            4,
            4,
            generator=generator,
        )
        for _ in range(2)
    ]
    for scores in batches:
        scores[:, :, 0, -1] = 1e3  # in the future
    future = torch.ones(1, 1, 4, 4).tril().logical_not()
    if mask != "given":  # made on a GPU
        monkeypatch.setattr(
            fused_softmax, "get_default_causal_mask", lambda _size, mask=future[0, 0]: mask
        )
        future = None
    visible = torch.ones(4, 4).tril().bool()
    expected = torch.stack(
        [scores[..., visible].amax((0, 2)) for scores in batches],
    ).amax(0)
    for scores in batches:
        probabilities = attention.scale_mask_softmax(
            scores.clone().requires_grad_().clone(), future
        )
        assert probabilities.requires_grad
    found = attention.current_max_attn_logits
    assert not found.requires_grad
    torch.testing.assert_close(found, expected * (3 if changes else 1), rtol=0, atol=0)
    attention.eval()
    attention.scale_mask_softmax(batches[0] + 1e4, future)
    assert attention.current_max_attn_logits is found


class Attention(SelfAttention):
    def __init__(self, core):
        torch.nn.Module.__init__(self)
        self.config = TransformerConfig(
            num_layers=1, hidden_size=8, num_attention_heads=4, qk_clip=True
        )
        self.core_attention = core


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        (torch.nn.Linear(2, 2), "--qk-clip: the model has no attention; leave --qk-clip out"),
        (
            Attention(torch.nn.Identity()),
            "is a Attention with Identity, which keeps no logits; use megatron-core's",
        ),
    ],
)
def test_attention_that_cannot_be_clipped_is_refused(attention, message):
    chunk = torch.nn.Module()
    chunk.layers, chunk.config = torch.nn.ModuleList([attention]), Attention(None).config
    with pytest.raises(UserError, match=message):
        AttentionLogits([chunk], ALONE.tp)
