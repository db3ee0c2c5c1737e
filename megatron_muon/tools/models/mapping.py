"""Which weight of Megatron becomes which tensors of Hugging Face, and how: one table for both ways.

`rules` lists a model's weights in the order in which they are written. A rule takes one weight of Megatron, named as in
`weights`, to one or more tensors, and back, without a change to any value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_muon.tools.models.architecture import GPT2, MIXTRAL, Architecture

Split = Callable[[Tensor], list[Tensor]]
Join = Callable[[Sequence[Tensor]], Tensor]


@dataclass(frozen=True)
class Rule:
    """One weight.

    Attributes:
        megatron: its name; "" where Megatron has none and Hugging Face needs zeros.
        hf: names of what it becomes.
        shape: in Megatron.
        split: to Hugging Face's tensors, by name in the order of `hf`; takes tensors on the meta device too.
        join: the inverse.
    """

    megatron: str
    hf: tuple[str, ...]
    shape: tuple[int, ...]
    split: Split
    join: Join

    def hf_shapes(self) -> list[torch.Size]:
        """Shapes of what it becomes."""
        return [part.shape for part in self.split(torch.empty(self.shape, device="meta"))]


def rules(model: Architecture) -> list[Rule]:
    """All weights of a model, the embedding first."""
    names = _gpt2(model) if model.model_type == GPT2 else _llama_like(model)
    return list(names)


def _llama_like(model: Architecture) -> Iterator[Rule]:
    hidden, width = model.hidden, model.heads * model.head_dim
    yield _vocabulary(model, "embedding.word_embeddings.weight", "model.embed_tokens.weight")
    for layer in range(model.layers):
        ours, theirs = f"decoder.layers.{layer}", f"model.layers.{layer}"
        attention = f"{ours}.self_attention", f"{theirs}.self_attn"
        yield _same(f"{ours}.input_layernorm.weight", f"{theirs}.input_layernorm.weight", hidden)
        for kind in ("weight", "bias") if model.qkv_bias else ("weight",):
            yield _qkv(model, f"{attention[0]}.linear_qkv.{kind}", [f"{attention[1]}.{p}_proj.{kind}" for p in "qkv"])
        if model.qk_norm:
            for part in "qk":
                yield _same(
                    f"{attention[0]}.{part}_layernorm.weight", f"{attention[1]}.{part}_norm.weight", model.head_dim
                )
        yield from _linear(model, f"{attention[0]}.linear_proj", f"{attention[1]}.o_proj", hidden, width)
        yield _same(f"{ours}.pre_mlp_layernorm.weight", f"{theirs}.post_attention_layernorm.weight", hidden)
        if not model.experts:
            yield from _gated(model, f"{ours}.mlp", f"{theirs}.mlp", ("gate_proj", "up_proj", "down_proj"))
            continue
        mixtral = model.model_type == MIXTRAL
        block = f"{theirs}.block_sparse_moe" if mixtral else f"{theirs}.mlp"
        parts = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
        yield _same(f"{ours}.mlp.router.weight", f"{block}.gate.weight", model.experts, hidden)
        for expert in range(model.experts):
            mlp = f"{ours}.mlp.experts.local_experts.{expert}"
            yield from _gated(model, mlp, f"{block}.experts.{expert}", parts)
    yield _same("decoder.final_layernorm.weight", "model.norm.weight", hidden)
    if not model.tied:
        yield _vocabulary(model, "output_layer.weight", "lm_head.weight")


def _gated(model: Architecture, ours: str, theirs: str, parts: tuple[str, str, str]) -> Iterator[Rule]:
    """The feed-forward block of a layer, or of an expert: gate, up, down."""
    for kind in ("weight", "bias") if model.linear_bias else ("weight",):
        shape = (model.ffn, model.hidden)[: 2 if kind == "weight" else 1]
        yield _same(f"{ours}.linear_fc1.{kind}_w", f"{theirs}.{parts[0]}.{kind}", *shape)
        yield _same(f"{ours}.linear_fc1.{kind}_v", f"{theirs}.{parts[1]}.{kind}", *shape)
    yield from _linear(model, f"{ours}.linear_fc2", f"{theirs}.{parts[2]}", model.hidden, model.ffn)


def _gpt2(model: Architecture) -> Iterator[Rule]:
    hidden = model.hidden
    yield _vocabulary(model, "embedding.word_embeddings.weight", "transformer.wte.weight")
    yield _same("embedding.position_embeddings.weight", "transformer.wpe.weight", model.positions, hidden)
    for layer in range(model.layers):
        ours, theirs = f"decoder.layers.{layer}", f"transformer.h.{layer}"
        yield from _norm(f"{ours}.input_layernorm", f"{theirs}.ln_1", hidden)
        yield _qkv(model, f"{ours}.self_attention.linear_qkv.weight", [f"{theirs}.attn.c_attn.weight"])
        name = f"{theirs}.attn.c_attn.bias"
        yield (
            _qkv(model, f"{ours}.self_attention.linear_qkv.bias", [name])
            if model.qkv_bias
            else _zeros(name, 3 * hidden)
        )
        yield from _conv1d(model, f"{ours}.self_attention.linear_proj", f"{theirs}.attn.c_proj", hidden, hidden)
        yield from _norm(f"{ours}.pre_mlp_layernorm", f"{theirs}.ln_2", hidden)
        yield from _conv1d(model, f"{ours}.mlp.linear_fc1", f"{theirs}.mlp.c_fc", model.ffn, hidden)
        yield from _conv1d(model, f"{ours}.mlp.linear_fc2", f"{theirs}.mlp.c_proj", hidden, model.ffn)
    yield from _norm("decoder.final_layernorm", "transformer.ln_f", hidden)
    if not model.tied:
        yield _vocabulary(model, "output_layer.weight", "lm_head.weight")


def _same(ours: str, theirs: str, *shape: int) -> Rule:
    return Rule(ours, (theirs,), shape, lambda weight: [weight], lambda parts: parts[0])


def _zeros(theirs: str, length: int) -> Rule:
    return _same("", theirs, length)


def _norm(ours: str, theirs: str, width: int) -> Iterator[Rule]:
    for kind in ("weight", "bias"):
        yield _same(f"{ours}.{kind}", f"{theirs}.{kind}", width)


def _linear(model: Architecture, ours: str, theirs: str, rows: int, columns: int) -> Iterator[Rule]:
    yield _same(f"{ours}.weight", f"{theirs}.weight", rows, columns)
    if model.linear_bias:
        yield _same(f"{ours}.bias", f"{theirs}.bias", rows)


def _conv1d(model: Architecture, ours: str, theirs: str, rows: int, columns: int) -> Iterator[Rule]:
    """A linear layer that GPT-2 has transposed."""
    yield Rule(f"{ours}.weight", (f"{theirs}.weight",), (rows, columns), lambda w: [w.T], lambda parts: parts[0].T)
    yield _same(f"{ours}.bias", f"{theirs}.bias", rows) if model.linear_bias else _zeros(f"{theirs}.bias", rows)


def _vocabulary(model: Architecture, ours: str, theirs: str) -> Rule:
    """An embedding, without the rows that pad Megatron's; they come back as zeros."""

    def join(parts: Sequence[Tensor]) -> Tensor:
        return torch.nn.functional.pad(parts[0], (0, 0, 0, model.rows - model.vocab))

    return Rule(ours, (theirs,), (model.rows, model.hidden), lambda weight: [weight[: model.vocab]], join)


def _qkv(model: Architecture, ours: str, theirs: Sequence[str]) -> Rule:
    """The fused projection: for each group its queries, key and value, one below the other.

    Hugging Face has all queries, all keys, all values: three tensors, or (GPT-2) one that is transposed.
    """
    per_group = model.heads // model.groups
    sizes = [per_group * model.head_dim, model.head_dim, model.head_dim]
    rows = model.groups * sum(sizes)
    fused = len(theirs) == 1

    def split(weight: Tensor) -> list[Tensor]:
        groups = weight.view(model.groups, sum(sizes), *weight.shape[1:])
        parts = [part.flatten(0, 1) for part in groups.split(sizes, dim=1)]
        return [torch.cat(parts).T if weight.ndim == 2 else torch.cat(parts)] if fused else parts

    def join(parts: Sequence[Tensor]) -> Tensor:
        if fused:
            whole = parts[0].T if parts[0].ndim == 2 else parts[0]
            parts = whole.split([model.groups * size for size in sizes])
        groups = [part.reshape(model.groups, size, *part.shape[1:]) for part, size in zip(parts, sizes, strict=True)]
        return torch.cat(groups, dim=1).flatten(0, 1)

    shape = (rows,) if ours.endswith("bias") else (rows, model.hidden)
    return Rule(ours, tuple(theirs), shape, split, join)
