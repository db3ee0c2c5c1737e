"""Which weight of Megatron becomes which tensors of Hugging Face, and how: one table for both ways.

`rules` lists a model's weights in the order in which they are written. A rule takes one weight of Megatron, named as in
`weights`, to one or more tensors, and back, without a change to any value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_muon.errors import UserError
from megatron_muon.tools.models.architecture import GPT2, MIXTRAL, Architecture


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
    split: Callable[[Tensor], list[Tensor]] = lambda weight: [weight]
    join: Callable[[Sequence[Tensor]], Tensor] = lambda parts: parts[0]

    def tensors(self, weight: Tensor, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """What it makes of a weight, by name: tensors with memory of their own."""
        for name, part in zip(self.hf, self.split(weight), strict=True):
            part = part.to(dtype)
            yield name, part.clone() if part.untyped_storage().nbytes() != part.nbytes else part.contiguous()


def hf_shapes(rules: Sequence[Rule]) -> dict[str, tuple[int, ...]]:
    """Shapes of what rules make, by name."""
    split = [(rule.hf, rule.split(torch.empty(rule.shape, device="meta"))) for rule in rules]
    return {name: tuple(part.shape) for hf, parts in split for name, part in zip(hf, parts, strict=True)}


def rules(model: Architecture) -> list[Rule]:
    """All weights of a model, the embedding first."""
    return list(_gpt2(model) if model.model_type == GPT2 else _llama_like(model))


def _llama_like(model: Architecture) -> Iterator[Rule]:
    hidden, width, bias = model.hidden, model.heads * model.head_dim, model.linear_bias
    is_mixtral = model.model_type == MIXTRAL
    gate, up, down = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    yield _vocabulary(model, "embedding.word_embeddings.weight", "model.embed_tokens.weight")
    for layer in range(model.layers):
        ours, theirs = f"decoder.layers.{layer}", f"model.layers.{layer}"
        attention, self_attn = f"{ours}.self_attention", f"{theirs}.self_attn"
        yield from _module(f"{ours}.input_layernorm", f"{theirs}.input_layernorm", hidden)
        for kind in ("weight", "bias") if model.qkv_bias else ("weight",):
            yield _qkv(model, f"{attention}.linear_qkv.{kind}", *(f"{self_attn}.{part}_proj.{kind}" for part in "qkv"))
        for part in "qk" if model.qk_norm else "":
            yield from _module(f"{attention}.{part}_layernorm", f"{self_attn}.{part}_norm", model.head_dim)
        yield from _module(f"{attention}.linear_proj", f"{self_attn}.o_proj", hidden, width, bias=bias)
        yield from _module(f"{ours}.pre_mlp_layernorm", f"{theirs}.post_attention_layernorm", hidden)
        block = f"{theirs}.block_sparse_moe" if is_mixtral else f"{theirs}.mlp"
        if model.experts:
            yield from _module(f"{ours}.mlp.router", f"{block}.gate", model.experts, hidden)
        experts = [(f"{ours}.mlp.experts.local_experts.{n}", f"{block}.experts.{n}") for n in range(model.experts)]
        for mlp, their_mlp in experts or [(f"{ours}.mlp", block)]:
            shapes: dict[str, tuple[int, ...]] = {"weight": (model.ffn, hidden)}
            if bias:
                shapes["bias"] = (model.ffn,)
            for kind, shape in shapes.items():
                for half, name in (("w", gate), ("v", up)):
                    yield Rule(f"{mlp}.linear_fc1.{kind}_{half}", (f"{their_mlp}.{name}.{kind}",), shape)
            yield from _module(f"{mlp}.linear_fc2", f"{their_mlp}.{down}", hidden, model.ffn, bias=bias)
    yield from _module("decoder.final_layernorm", "model.norm", hidden)
    if not model.tied:
        yield _vocabulary(model, "output_layer.weight", "lm_head.weight")


def _gpt2(model: Architecture) -> Iterator[Rule]:
    hidden = model.hidden
    yield _vocabulary(model, "embedding.word_embeddings.weight", "transformer.wte.weight")
    yield from _module("embedding.position_embeddings", "transformer.wpe", model.positions, hidden)
    for layer in range(model.layers):
        ours, theirs = f"decoder.layers.{layer}", f"transformer.h.{layer}"
        qkv, c_attn = f"{ours}.self_attention.linear_qkv", f"{theirs}.attn.c_attn"
        yield from _module(f"{ours}.input_layernorm", f"{theirs}.ln_1", hidden, bias=True)
        yield _qkv(model, f"{qkv}.weight", f"{c_attn}.weight")
        yield _qkv(model, f"{qkv}.bias", f"{c_attn}.bias") if model.qkv_bias else _zeros(f"{c_attn}.bias", 3 * hidden)
        yield from _conv1d(model, f"{ours}.self_attention.linear_proj", f"{theirs}.attn.c_proj", hidden, hidden)
        yield from _module(f"{ours}.pre_mlp_layernorm", f"{theirs}.ln_2", hidden, bias=True)
        yield from _conv1d(model, f"{ours}.mlp.linear_fc1", f"{theirs}.mlp.c_fc", model.ffn, hidden)
        yield from _conv1d(model, f"{ours}.mlp.linear_fc2", f"{theirs}.mlp.c_proj", hidden, model.ffn)
    yield from _module("decoder.final_layernorm", "transformer.ln_f", hidden, bias=True)
    if not model.tied:
        yield _vocabulary(model, "output_layer.weight", "lm_head.weight")


def _module(ours: str, theirs: str, *shape: int, bias: bool = False) -> Iterator[Rule]:
    """A weight that both have alike, and its bias."""
    yield Rule(f"{ours}.weight", (f"{theirs}.weight",), shape)
    if bias:
        yield Rule(f"{ours}.bias", (f"{theirs}.bias",), shape[:1])


def _zeros(theirs: str, length: int) -> Rule:
    return Rule("", (theirs,), (length,))


def _conv1d(model: Architecture, ours: str, theirs: str, rows: int, columns: int) -> Iterator[Rule]:
    """A linear layer that GPT-2 has transposed."""
    yield Rule(f"{ours}.weight", (f"{theirs}.weight",), (rows, columns), lambda w: [w.T], lambda parts: parts[0].T)
    yield Rule(f"{ours}.bias", (f"{theirs}.bias",), (rows,)) if model.linear_bias else _zeros(f"{theirs}.bias", rows)


def _vocabulary(model: Architecture, ours: str, theirs: str) -> Rule:
    """An embedding, without the rows that pad Megatron's; they come back as zeros."""

    def join(parts: Sequence[Tensor]) -> Tensor:
        return torch.nn.functional.pad(parts[0], (0, 0, 0, model.rows - model.vocab))

    return Rule(ours, (theirs,), (model.rows, model.hidden), lambda weight: [weight[: model.vocab]], join)


def _qkv(model: Architecture, ours: str, *theirs: str) -> Rule:
    """The fused projection: for each group its queries, key and value, one below the other.

    Hugging Face has all queries, all keys, all values: three tensors, or (GPT-2) one that is transposed.
    """
    sizes = [model.heads // model.groups * model.head_dim, model.head_dim, model.head_dim]
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

    rows = model.groups * sum(sizes)
    return Rule(ours, theirs, (rows,) if ours.endswith("bias") else (rows, model.hidden), split, join)


def check(where: Path, found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Refuses weights that lack one that is wanted, have one of another shape, or one without a counterpart."""
    both = wanted.keys() & found.keys()
    wrong = {
        "lacks": wanted.keys() - found.keys(),
        "has another shape of": {name for name in both if tuple(found[name]) != tuple(wanted[name])},
        "has, without a counterpart,": found.keys() - wanted.keys(),
    }
    for what, names in wrong.items():
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise UserError(f"{where} {what} {', '.join(sorted(names)[:3])}{more}")
