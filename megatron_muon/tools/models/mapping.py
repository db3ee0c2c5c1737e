"""Which weight of Megatron becomes which tensors of Hugging Face, and how: one table for both ways.

`rules` lists a model's weights in the order in which they are written. A rule takes one weight of
Megatron, named as in `checkpoint`, to one or more tensors, and back, without a change to any value.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_muon.checkpoint.content import some
from megatron_muon.errors import UserError
from megatron_muon.tools.models.architecture import GPT2, MIXTRAL


@dataclass(frozen=True)
class Rule:
    """One weight.

    Attributes:
        megatron: its name; "" where Megatron has none and Hugging Face needs zeros.
        hf: names of what it becomes.
        shape: in Megatron.
        split: to Hugging Face's tensors, by name in the order of `hf`; takes tensors on the meta
            device too.
        join: the inverse.
    """

    megatron: str
    hf: tuple[str, ...]
    shape: tuple[int, ...]
    split: Callable[[Tensor], list[Tensor]] = lambda weight: [weight]
    join: Callable[[Sequence[Tensor]], Tensor] = lambda parts: parts[0]

    def tensors(self, weight: Tensor, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """What it makes of a weight, by name: tensors with memory of their own."""
        for name, part in zip(self.hf, self.split(weight), strict=True):
            part = part.to(dtype)
            yield (
                name,
                (
                    part.clone()
                    if part.untyped_storage().nbytes() != part.nbytes
                    else part.contiguous()
                ),
            )


def hf_shapes(rules: Sequence[Rule]) -> dict[str, tuple[int, ...]]:
    """Shapes of what rules make, by name."""
    split = [(rule.hf, rule.split(torch.empty(rule.shape, device="meta"))) for rule in rules]
    return {
        name: tuple(part.shape) for hf, parts in split for name, part in zip(hf, parts, strict=True)
    }


def rules(config: Mapping[str, Any], args: argparse.Namespace) -> list[Rule]:
    """All weights of a model, the embedding first: of a run's arguments and what `to_config` has made of them."""
    if config["model_type"] == GPT2:
        embedding, between = "transformer.wte.weight", _gpt2(config, args)
    else:
        embedding, between = "model.embed_tokens.weight", _llama_like(config, args)
    hidden, rows, vocab = args.hidden_size, args.padded_vocab_size, config["vocab_size"]

    def vocabulary(ours: str, theirs: str) -> Rule:
        """Without the rows that pad Megatron's; they come back as zeros."""
        shape, padding = (rows, hidden), (0, 0, 0, rows - vocab)
        return Rule(
            ours,
            (theirs,),
            shape,
            lambda weight: [weight[:vocab]],
            lambda parts: pad(parts[0], padding),
        )

    found = [vocabulary("embedding.word_embeddings.weight", embedding), *between]
    return (
        found
        if config["tie_word_embeddings"]
        else [*found, vocabulary("output_layer.weight", "lm_head.weight")]
    )


def _llama_like(config: Mapping[str, Any], args: argparse.Namespace) -> Iterator[Rule]:
    hidden, head_dim, bias = config["hidden_size"], config["head_dim"], args.add_bias_linear
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    ffn, experts = config["intermediate_size"], args.num_experts or 0
    is_mixtral = config["model_type"] == MIXTRAL
    gate, up, down = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    for layer in range(config["num_hidden_layers"]):
        ours, theirs = f"decoder.layers.{layer}", f"model.layers.{layer}"
        attention, self_attn = f"{ours}.self_attention", f"{theirs}.self_attn"
        yield from _module(f"{ours}.input_layernorm", f"{theirs}.input_layernorm", hidden)
        for kind in ("weight", "bias") if bias or args.add_qkv_bias else ("weight",):
            parts = tuple(f"{self_attn}.{part}_proj.{kind}" for part in "qkv")
            yield _qkv(
                f"{attention}.linear_qkv.{kind}", parts, (groups, heads // groups, head_dim), hidden
            )
        for part in "qk" if args.qk_layernorm else "":
            yield from _module(
                f"{attention}.{part}_layernorm", f"{self_attn}.{part}_norm", head_dim
            )
        yield from _module(
            f"{attention}.linear_proj", f"{self_attn}.o_proj", hidden, heads * head_dim, bias=bias
        )
        yield from _module(
            f"{ours}.pre_mlp_layernorm", f"{theirs}.post_attention_layernorm", hidden
        )
        block = f"{theirs}.block_sparse_moe" if is_mixtral else f"{theirs}.mlp"
        if experts:
            yield from _module(f"{ours}.mlp.router", f"{block}.gate", experts, hidden)
        each = [
            (f"{ours}.mlp.experts.local_experts.{n}", f"{block}.experts.{n}")
            for n in range(experts)
        ]
        for mlp, their_mlp in each or [(f"{ours}.mlp", block)]:
            for kind, shape in (("weight", (ffn, hidden)), ("bias", (ffn,)))[: 1 + bias]:
                yield Rule(f"{mlp}.linear_fc1.{kind}_w", (f"{their_mlp}.{gate}.{kind}",), shape)
                yield Rule(f"{mlp}.linear_fc1.{kind}_v", (f"{their_mlp}.{up}.{kind}",), shape)
            yield from _module(f"{mlp}.linear_fc2", f"{their_mlp}.{down}", hidden, ffn, bias=bias)
    yield from _module("decoder.final_layernorm", "model.norm", hidden)


def _gpt2(config: Mapping[str, Any], args: argparse.Namespace) -> Iterator[Rule]:
    hidden, heads, ffn, bias = (
        config["n_embd"],
        config["n_head"],
        config["n_inner"],
        args.add_bias_linear,
    )
    cut = (heads, 1, hidden // heads)
    yield from _module(
        "embedding.position_embeddings", "transformer.wpe", config["n_positions"], hidden
    )
    for layer in range(config["n_layer"]):
        ours, theirs = f"decoder.layers.{layer}", f"transformer.h.{layer}"
        qkv, c_attn = f"{ours}.self_attention.linear_qkv", f"{theirs}.attn.c_attn"
        yield from _module(f"{ours}.input_layernorm", f"{theirs}.ln_1", hidden, bias=True)
        yield _qkv(f"{qkv}.weight", (f"{c_attn}.weight",), cut, hidden)
        has_bias = bias or args.add_qkv_bias
        yield _qkv(f"{qkv}.bias" if has_bias else "", (f"{c_attn}.bias",), cut, hidden)
        yield from _conv1d(
            f"{ours}.self_attention.linear_proj", f"{theirs}.attn.c_proj", hidden, hidden, bias=bias
        )
        yield from _module(f"{ours}.pre_mlp_layernorm", f"{theirs}.ln_2", hidden, bias=True)
        yield from _conv1d(f"{ours}.mlp.linear_fc1", f"{theirs}.mlp.c_fc", ffn, hidden, bias=bias)
        yield from _conv1d(f"{ours}.mlp.linear_fc2", f"{theirs}.mlp.c_proj", hidden, ffn, bias=bias)
    yield from _module("decoder.final_layernorm", "transformer.ln_f", hidden, bias=True)


def _module(ours: str, theirs: str, *shape: int, bias: bool = False) -> Iterator[Rule]:
    """A weight that both have alike, and its bias."""
    yield Rule(f"{ours}.weight", (f"{theirs}.weight",), shape)
    if bias:
        yield Rule(f"{ours}.bias", (f"{theirs}.bias",), shape[:1])


def _conv1d(ours: str, theirs: str, rows: int, columns: int, *, bias: bool) -> Iterator[Rule]:
    """A linear layer that GPT-2 has transposed, and always with a bias."""
    yield Rule(
        f"{ours}.weight",
        (f"{theirs}.weight",),
        (rows, columns),
        lambda w: [w.T],
        lambda parts: parts[0].T,
    )
    yield Rule(f"{ours}.bias" if bias else "", (f"{theirs}.bias",), (rows,))


def _qkv(ours: str, theirs: tuple[str, ...], cut: tuple[int, int, int], hidden: int) -> Rule:
    """The fused projection, or its bias: for each group its queries, key and value, one below the other.

    Hugging Face has all queries, all keys, all values: three tensors, or (GPT-2) one that is
    transposed. `cut` are the groups, the heads of queries in each, and the rows of a head.
    """
    groups, heads, head_dim = cut
    sizes = [heads * head_dim, head_dim, head_dim]
    fused = len(theirs) == 1

    def split(weight: Tensor) -> list[Tensor]:
        whole = weight.view(groups, sum(sizes), *weight.shape[1:])
        parts = [part.flatten(0, 1) for part in whole.split(sizes, dim=1)]
        return [torch.cat(parts).T if weight.ndim == 2 else torch.cat(parts)] if fused else parts

    def join(parts: Sequence[Tensor]) -> Tensor:
        if fused:
            parts = (parts[0].T if parts[0].ndim == 2 else parts[0]).split(
                [groups * size for size in sizes]
            )
        each = [
            part.reshape(groups, size, *part.shape[1:])
            for part, size in zip(parts, sizes, strict=True)
        ]
        return torch.cat(each, dim=1).flatten(0, 1)

    rows = groups * sum(sizes)
    return Rule(
        ours, theirs, (rows,) if theirs[0].endswith("bias") else (rows, hidden), split, join
    )


def check(
    where: Path, found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]
) -> None:
    """Refuses weights that lack one that is wanted, have one of another shape, or one without a counterpart."""
    wrong = {
        "lacks": wanted.keys() - found.keys(),
        "has another shape of": {
            name for name in wanted.keys() & found.keys() if found[name] != wanted[name]
        },
        "has, without a counterpart,": found.keys() - wanted.keys(),
    }
    for what, names in wrong.items():
        if names:
            raise UserError(f"{where} {what} {some(names, shown=3)}")
