"""QKClip on models of transformers, against logits that eager attention materialises.

Each attention is run on the inputs of the training step once more, with the clipped weights, and
what attention then gets is compared: queries, keys and values after rotary embeddings. So the
reference knows nothing of rows.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import megatron_muon
from megatron_muon import qk_clip
from megatron_muon.errors import UserError
from tests.support.small_transformers import CONFIGS, HEADS, SMALL, batch_of, model_of

ALPHA = 0.3


@contextmanager
def seen_by_attention(model: Any) -> Iterator[dict[Any, tuple[torch.Tensor, ...]]]:
    """What eager attention gets, by module: query, key, value, and logits from these and its
    additive mask.
    """
    found: dict[Any, tuple[torch.Tensor, ...]] = {}
    code = sys.modules[type(model).__module__]
    original = code.eager_attention_forward

    def spied(
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        mask: Any,
        **given: Any,
    ) -> Any:
        keys = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        logits = query @ keys.mT * module.scaling + mask
        found[module] = tuple(x.detach() for x in (query, key, value, logits))
        return original(module, query, key, value, mask, **given)

    code.eager_attention_forward = spied
    try:
        yield found
    finally:
        code.eager_attention_forward = original


def attentions_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__.endswith("Attention")]


@pytest.mark.parametrize("config", CONFIGS)
def test_clipped_heads_get_the_scaled_queries_and_keys_and_no_others(config: str) -> None:
    """Over two micro-batches; half of the groups pass the threshold. All other weights keep their
    bits.
    """
    reference, model = model_of(config, attention="eager"), model_of(config)
    inputs: dict[Any, Any] = {}
    for module in attentions_of(reference):
        module.register_forward_pre_hook(
            lambda module, args, kwargs: inputs.update({module: (args, kwargs)}), with_kwargs=True
        )
    largest: dict[Any, list[torch.Tensor]] = defaultdict(list)
    with seen_by_attention(reference) as before:
        for seed in (1, 2):
            reference(**batch_of(seed), use_cache=False)
            for module, (*_, logits) in before.items():
                largest[module].append(logits.amax((0, 2, 3)))
    of_layers = [torch.stack(each).amax(0) for each in largest.values()]
    groups = reference.config.num_attention_heads // getattr(
        attentions_of(model)[0], "num_key_value_groups", 1
    )
    of_groups = torch.stack(of_layers).view(2, groups, -1).amax(2)
    threshold = float(of_groups.flatten().sort().values[groups])  # one that is not passed

    clip = megatron_muon.QKClip(model, threshold=threshold, alpha=ALPHA)
    for seed in (1, 2):
        model(**batch_of(seed), use_cache=False).loss.backward()
    found = clip.step()
    assert found is not None
    torch.testing.assert_close(
        found,
        torch.stack(of_layers).max(),
        rtol=1e-5,
        atol=1e-5,
    )

    start = {name: p.clone() for name, p in reference.named_parameters()}
    reference.load_state_dict(model.state_dict())
    before = dict(before)
    with seen_by_attention(reference) as after, torch.no_grad():
        for module, (args, kwargs) in inputs.items():
            module(*args, **kwargs)
    for module, gammas in zip(
        before,
        (threshold / of_groups).clamp(max=1.0),
        strict=True,
    ):
        of_groups_, of_heads = (
            gammas.view(-1, 1, 1),
            gammas.repeat_interleave(HEADS // groups).view(-1, 1, 1),
        )
        query, key, value, logits = before[module]
        query, key = query * of_heads**ALPHA, key * of_groups_ ** (1 - ALPHA)
        if config.startswith("latent"):  # the rotary parts come last; keys share theirs
            query[..., 6:], key[..., 6:] = (
                before[module][0][..., 6:] * of_heads,
                before[module][1][..., 6:],
            )
        hidden = logits < -1e30
        expected = query, key, value, torch.where(hidden, logits, logits * of_heads)
        for got, wanted in zip(after[module], expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    scaled = {"q_proj", "k_proj", "qkv_proj", "q_b_proj", "kv_b_proj"}
    moved = {
        name.split(".")[-2]
        for name, p in model.named_parameters()
        if not torch.equal(p, start[name])
    }
    assert moved
    assert moved <= scaled


@pytest.mark.parametrize("mask", ["causal", "bool", "added"])
@pytest.mark.parametrize("chunk", [3, 128])
def test_chunks_find_what_whole_logits_hold(
    monkeypatch: pytest.MonkeyPatch, mask: str, chunk: int
) -> None:
    monkeypatch.setattr(qk_clip, "CHUNK", chunk)
    generator = torch.Generator().manual_seed(0)
    query, key = (
        torch.randn(
            2,
            heads,
            8,
            5,
            generator=generator,
        )
        for heads in (6, 2)
    )
    logits = query.unflatten(1, (2, 3)) @ key[:, :, None].mT * 0.7
    logits = logits.flatten(1, 2)
    shape = (2, 1, 8, 8)
    shown = torch.rand(shape, generator=generator) > 0.6
    shown[0, :, 0] = False  # a query that sees nothing
    given = None if mask == "causal" else shown
    if mask == "causal":
        shown = torch.ones(8, 8, dtype=torch.bool).tril()
    elif mask == "added":
        given = torch.where(shown, torch.randn(shape, generator=generator), -math.inf)
        logits = logits + given
    expected = logits.masked_fill(~shown, -math.inf).amax((0, 2, 3))
    found = qk_clip.largest_logits(query, key, given, 0.7, causal=mask == "causal")
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("again", [None, "reentrant", "not reentrant"])
def test_only_forward_passes_of_training_count_and_those_once(again: str | None) -> None:
    """Layers that run twice, by activation checkpointing, give the same; evaluations see larger
    logits here.
    """
    model = model_of("grouped")
    clip = megatron_muon.QKClip(model, threshold=1e6)
    kept = [module.largest_attention_logits for module in attentions_of(model)]
    model(**batch_of(1)).loss.backward()
    expected = torch.stack(kept)
    clip.step()
    if again is not None:
        model.activation_checkpointing_enable({"use_reentrant": again == "reentrant"})
    weight = model.model.layers[0].self_attn.q_proj.weight
    with torch.no_grad():
        weight.mul_(10)
        model(**batch_of(1))
        model.eval()(**batch_of(1))
        with torch.enable_grad():
            model(**batch_of(1))
        weight.div_(10)
    model.train()
    model(**batch_of(1)).loss.backward()
    torch.testing.assert_close(torch.stack(kept), expected, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        weight.mul_(10)
    model(**batch_of(1)).loss.backward()
    assert (kept[0] > 5 * expected[0]).all()  # what did not count above


def measured(*, compiled: bool) -> list[torch.Tensor | None]:
    """What four steps give, of which the first and the last measure; weights grow in between."""
    model = model_of("grouped", num_hidden_layers=1)
    forward = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    forward(**batch_of(1), use_cache=False)
    clip = megatron_muon.QKClip(model, threshold=1.0, interval=3)
    weight, found = attentions_of(model)[0].q_proj.weight, []
    for step in range(4):
        before = weight.detach().clone()
        forward(**batch_of(1), use_cache=False).loss.backward()
        found.append(clip.step())
        assert torch.equal(weight, before) == (step % 3 != 0)
        with torch.no_grad():
            weight.mul_(2)
    return found


def test_between_measured_steps_nothing_is_measured_or_scaled() -> None:
    first, *between, last = measured(compiled=False)
    assert between == [None, None]
    assert first is not None
    assert float(last) == pytest.approx(8.0)  # clipped to 1, and doubled three times


@pytest.mark.wide
def test_a_compiled_model_is_measured_in_one_graph() -> None:
    """Also where it has run before the clip was made."""
    torch.testing.assert_close(
        measured(compiled=True),
        measured(compiled=False),
        rtol=1e-5,
        atol=0,
    )


def test_logits_that_are_not_finite_leave_their_heads_alone() -> None:
    """The factor of an infinite logit would be zero, and the head's weights with it."""
    model = model_of("grouped")
    clip = megatron_muon.QKClip(model, threshold=1.0)
    model(**batch_of(1)).loss.backward()
    attention = attentions_of(model)[0]
    attention.largest_attention_logits[0] = math.inf
    before = attention.q_proj.weight.detach().clone()
    clip.step()
    of_group = before.shape[0] // 3
    assert torch.equal(attention.q_proj.weight[:of_group], before[:of_group])
    assert not torch.equal(attention.q_proj.weight[of_group:], before[of_group:])


def frozen(model: Any) -> Any:
    attentions_of(model)[1].k_proj.weight.requires_grad_(False)
    return model


def not_linear(model: Any) -> Any:
    attentions_of(model)[0].q_proj = nn.Sequential(nn.Linear(72, 72))
    return model


def of(kind: str, **settings: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, kind)(**{**SMALL, **settings})
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: of("Qwen3Config"),
            r"self_attn \(Qwen3Attention\) has q_norm and k_norm: its logits are bounded",
        ),
        (lambda: of("Gemma2Config"), "has attn_logit_softcapping: its logits are bounded"),
        (
            lambda: of("GPTNeoXConfig"),
            r"projections of gpt_neox.layers.0.attention \(GPTNeoXAttention\) are not known",
        ),
        (
            lambda: model_of("grouped", attention="eager"),
            r"attention by eager; call model.set_attn_implementation\('sd",
        ),
        (
            lambda: frozen(model_of("grouped")),
            r"would scale model.layers.1.self_attn.k_proj.weight, which is frozen",
        ),
        (lambda: not_linear(model_of("grouped")), "q_proj is a Sequential, not a linear layer"),
        (lambda: nn.Linear(2, 2), "Linear has no attention of transformers; leave QKClip out"),
    ],
)
def test_models_that_cannot_be_clipped_are_refused(make: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        megatron_muon.QKClip(make())


def test_a_number_out_of_range_is_refused() -> None:
    with pytest.raises(UserError, match="threshold 0 is out of range; choose more than 0"):
        megatron_muon.QKClip(nn.Linear(2, 2), threshold=0.0)


def test_a_step_without_logits_or_with_other_weights_is_refused() -> None:
    model = model_of("grouped")
    clip = megatron_muon.QKClip(model)
    model.eval()(**batch_of(1)).loss.backward()
    with pytest.raises(UserError, match="attention showed no logits before this step"):
        clip.step()
    projection = attentions_of(model)[0].q_proj
    projection.weight = nn.Parameter(projection.weight.detach().clone())
    with pytest.raises(
        UserError, match="the model has other weights now; make QKClip after fully_shard"
    ):
        clip.step()
