"""The weights of a model in Megatron and in Hugging Face: one table for both directions.

`weight_table` lists a model's weights in the order in which they are written. A row names one
weight of Megatron, as in `weights`, and the tensors of Hugging Face that it becomes. No value
changes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_muon.checkpoint.content import some
from megatron_muon.errors import UserError
from megatron_muon.tools.models.architecture import GPT2, MIXTRAL


class Line(NamedTuple):
    """A module of a layer, `*` standing for "weight" or "bias".

    Attributes:
        megatron: its name; two for a gated projection.
        hf: the names that it has in Hugging Face.
        sizes: names of the sizes in Megatron's shape.
        bias: which setting adds a bias.
    """

    megatron: str
    hf: str
    sizes: str
    bias: str = "never"


_QKV = "self_attention.linear_qkv.*"
_QKV_PARTS = "self_attn.q_proj.* self_attn.k_proj.* self_attn.v_proj.*"
_LLAMA_LAYER = (
    Line("input_layernorm.*", "input_layernorm.*", "hidden"),
    Line(_QKV, _QKV_PARTS, "qkv hidden", "qkv"),
    Line("self_attention.q_layernorm.*", "self_attn.q_norm.*", "qk_norm"),
    Line("self_attention.k_layernorm.*", "self_attn.k_norm.*", "qk_norm"),
    Line("self_attention.linear_proj.*", "self_attn.o_proj.*", "hidden heads", "linear"),
    Line("pre_mlp_layernorm.*", "post_attention_layernorm.*", "hidden"),
)
_LLAMA_MLP = (
    Line("linear_fc1.*_w linear_fc1.*_v", "gate_proj.* up_proj.*", "ffn hidden", "linear"),
    Line("linear_fc2.*", "down_proj.*", "hidden ffn", "linear"),
)
_MIXTRAL_MLP = (
    Line("linear_fc1.*_w linear_fc1.*_v", "w1.* w3.*", "ffn hidden"),
    Line("linear_fc2.*", "w2.*", "hidden ffn"),
)
_GPT2_LAYER = (
    Line("input_layernorm.*", "ln_1.*", "hidden", "always"),
    Line(_QKV, "attn.c_attn.*", "qkv hidden", "qkv"),
    Line("self_attention.linear_proj.*", "attn.c_proj.*", "hidden hidden", "linear"),
    Line("pre_mlp_layernorm.*", "ln_2.*", "hidden", "always"),
    Line("mlp.linear_fc1.*", "mlp.c_fc.*", "ffn hidden", "linear"),
    Line("mlp.linear_fc2.*", "mlp.c_proj.*", "hidden ffn", "linear"),
)


class Heads(NamedTuple):
    """The fused projection: for each group its queries, key and value, one below the other.

    Hugging Face stores all queries, all keys and all values.
    """

    groups: int
    queries: int  # heads of queries in a group
    head_dim: int

    @property
    def sizes(self) -> list[int]:
        """Rows of a group's queries, key and value."""
        return [self.queries * self.head_dim, self.head_dim, self.head_dim]

    def split(self, fused: Tensor) -> list[Tensor]:
        """Queries, keys and values of a fused weight or bias."""
        grouped = fused.unflatten(0, (self.groups, sum(self.sizes)))
        return [part.flatten(0, 1) for part in grouped.split(self.sizes, dim=1)]

    def fuse(self, parts: Sequence[Tensor]) -> Tensor:
        """The inverse of `split`."""
        grouped = [part.unflatten(0, (self.groups, -1)) for part in parts]
        return torch.cat(grouped, dim=1).flatten(0, 1)


@dataclass(frozen=True)
class WeightRow:
    """One weight.

    Attributes:
        megatron: its name; "" where Megatron has none and Hugging Face needs zeros.
        hf: names of the tensors that it becomes.
        shape: in Megatron.
        tokens: rows without those that pad Megatron's vocabulary, which become zeros.
        heads: of the fused projection and its bias.
        transposed: stored as one transposed tensor.
    """

    megatron: str
    hf: tuple[str, ...]
    shape: tuple[int, ...]
    tokens: int | None = None
    heads: Heads | None = None
    transposed: bool = False

    def to_hf(self, weight: Tensor) -> list[Tensor]:
        """The tensors of Hugging Face, on the meta device too."""
        weight = weight[: self.tokens]
        parts = self.heads.split(weight) if self.heads else [weight]
        return [torch.cat(parts).t()] if self.transposed else parts

    def to_megatron(self, parts: Sequence[Tensor]) -> Tensor:
        """The inverse of `to_hf`."""
        weight = parts[0].t() if self.transposed else parts[0]
        if self.heads:
            if self.transposed:
                parts = weight.split([self.heads.groups * size for size in self.heads.sizes])
            weight = self.heads.fuse(parts)
        padding = self.shape[0] - len(weight)
        return pad(weight, (0, 0, 0, padding)) if padding else weight

    def tensors(self, weight: Tensor, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """The named tensors of a weight, each with memory of its own."""
        for name, part in zip(self.hf, self.to_hf(weight), strict=True):
            part = part.to(dtype).contiguous()
            if part.untyped_storage().nbytes() != part.nbytes:
                part = part.clone()
            yield name, part


def hf_shapes(rows: Iterable[WeightRow]) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of Hugging Face, by name."""
    shapes = {}
    for row in rows:
        parts = row.to_hf(torch.empty(row.shape, device="meta"))
        for name, part in zip(row.hf, parts, strict=True):
            shapes[name] = tuple(part.shape)
    return shapes


def weight_table(config: Mapping[str, Any], args: argparse.Namespace) -> list[WeightRow]:
    """All weights of a model, the embedding first.

    `args` are a run's arguments, `config` is what `to_config` returns for them.
    """
    is_gpt2 = config["model_type"] == GPT2
    tokens, vocabulary = config["vocab_size"], (args.padded_vocab_size, args.hidden_size)
    embedding = "transformer.wte.weight" if is_gpt2 else "model.embed_tokens.weight"
    table = [WeightRow("embedding.word_embeddings.weight", (embedding,), vocabulary, tokens)]
    table += _gpt2(config, args) if is_gpt2 else _llama_like(config, args)
    if not config["tie_word_embeddings"]:
        table.append(WeightRow("output_layer.weight", ("lm_head.weight",), vocabulary, tokens))
    return table


def _llama_like(config: Mapping[str, Any], args: argparse.Namespace) -> Iterator[WeightRow]:
    query_heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    sizes = {
        "hidden": hidden,
        "heads": query_heads * head_dim,
        "ffn": config["intermediate_size"],
        "qk_norm": head_dim,
    }
    layers = _Layers(sizes, Heads(groups, query_heads // groups, head_dim), args)
    is_mixtral = config["model_type"] == MIXTRAL
    block = "block_sparse_moe" if is_mixtral else "mlp"
    mlp = _MIXTRAL_MLP if is_mixtral else _LLAMA_MLP
    layer: Sequence[Line] = _LLAMA_LAYER
    if not args.qk_layernorm:
        layer = [line for line in layer if line.sizes != "qk_norm"]
    for number in range(config["num_hidden_layers"]):
        ours, theirs = f"decoder.layers.{number}.", f"model.layers.{number}."
        yield from layers.rows(layer, ours, theirs)
        if not args.num_experts:
            yield from layers.rows(mlp, f"{ours}mlp.", f"{theirs}mlp.")
            continue
        router = (args.num_experts, hidden)
        yield WeightRow(f"{ours}mlp.router.weight", (f"{theirs}{block}.gate.weight",), router)
        for expert in range(args.num_experts):
            local = f"{ours}mlp.experts.local_experts.{expert}."
            yield from layers.rows(mlp, local, f"{theirs}{block}.experts.{expert}.")
    yield WeightRow("decoder.final_layernorm.weight", ("model.norm.weight",), (hidden,))


def _gpt2(config: Mapping[str, Any], args: argparse.Namespace) -> Iterator[WeightRow]:
    hidden, heads = config["n_embd"], config["n_head"]
    sizes = {"hidden": hidden, "ffn": config["n_inner"]}
    layers = _Layers(sizes, Heads(heads, 1, hidden // heads), args, is_gpt2=True)
    positions = (config["n_positions"], hidden)
    yield WeightRow("embedding.position_embeddings.weight", ("transformer.wpe.weight",), positions)
    for number in range(config["n_layer"]):
        yield from layers.rows(_GPT2_LAYER, f"decoder.layers.{number}.", f"transformer.h.{number}.")
    last = Line("final_layernorm.*", "ln_f.*", "hidden", "always")
    yield from layers.rows([last], "decoder.", "transformer.")


class _Layers:
    """Rows of a model's layers, by its sizes."""

    def __init__(
        self,
        sizes: Mapping[str, int],
        heads: Heads,
        args: argparse.Namespace,
        *,
        is_gpt2: bool = False,
    ) -> None:
        self._sizes = {**sizes, "qkv": heads.groups * sum(heads.sizes)}
        self._heads = heads
        self._is_gpt2 = is_gpt2
        self._has_bias = {
            "never": False,
            "always": True,
            "linear": args.add_bias_linear,
            "qkv": args.add_bias_linear or args.add_qkv_bias,
        }

    def rows(self, table: Iterable[Line], megatron: str, hf: str) -> Iterator[WeightRow]:
        """The rows of a table's lines, whose names get these prefixes."""
        for line in table:
            shape = tuple(self._sizes[name] for name in line.sizes.split())
            yield from self._module(line, "weight", shape, megatron, hf)
            if self._has_bias[line.bias]:
                yield from self._module(line, "bias", shape[:1], megatron, hf)
            elif self._is_gpt2:  # all of its modules have a bias in Hugging Face
                for row in self._module(line, "bias", shape[:1], megatron, hf):
                    yield replace(row, megatron="")

    def _module(
        self, line: Line, kind: str, shape: tuple[int, ...], megatron: str, hf: str
    ) -> Iterator[WeightRow]:
        ours = [megatron + name for name in line.megatron.replace("*", kind).split()]
        theirs = [hf + name for name in line.hf.replace("*", kind).split()]
        if len(ours) == 1:
            yield WeightRow(
                ours[0],
                tuple(theirs),
                shape,
                heads=self._heads if line.megatron == _QKV else None,
                transposed=self._is_gpt2,
            )
            return
        for name, hf_name in zip(ours, theirs, strict=True):
            yield WeightRow(name, (hf_name,), shape)


def check_shapes(
    where: Path,
    found: Mapping[str, tuple[int, ...]],
    wanted: Mapping[str, tuple[int, ...]],
) -> None:
    """Raise a UserError unless exactly the wanted weights were found, in their shapes."""
    both = wanted.keys() & found.keys()
    wrong = {
        "lacks": wanted.keys() - found.keys(),
        "has another shape of": {name for name in both if found[name] != wanted[name]},
        "has, without a counterpart,": found.keys() - wanted.keys(),
    }
    for problem, names in wrong.items():
        if names:
            raise UserError(f"{where} {problem} {some(names, shown=3)}")
