"""The weights of a model in Megatron and in Hugging Face: one table for both directions.

`weight_table` lists a model's weights in the order in which they are written. A row names one
weight of Megatron, as in `weights`, and the tensors of Hugging Face that it becomes. No value
changes.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
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
        bias: which setting adds a bias.
    """

    megatron: str
    hf: str
    bias: str = "never"


_QKV = "self_attention.linear_qkv.*"
_QKV_PARTS = "self_attn.q_proj.* self_attn.k_proj.* self_attn.v_proj.*"
_LLAMA_LAYER = (
    Line("input_layernorm.*", "input_layernorm.*"),
    Line(_QKV, _QKV_PARTS, "qkv"),
    Line("self_attention.q_layernorm.*", "self_attn.q_norm.*"),
    Line("self_attention.k_layernorm.*", "self_attn.k_norm.*"),
    Line("self_attention.linear_proj.*", "self_attn.o_proj.*", "linear"),
    Line("pre_mlp_layernorm.*", "post_attention_layernorm.*"),
)
_LLAMA_MLP = (
    Line("linear_fc1.*_w linear_fc1.*_v", "gate_proj.* up_proj.*", "linear"),
    Line("linear_fc2.*", "down_proj.*", "linear"),
)
_MIXTRAL_MLP = (
    Line("linear_fc1.*_w linear_fc1.*_v", "w1.* w3.*"),
    Line("linear_fc2.*", "w2.*"),
)
_GPT2_LAYER = (
    Line("input_layernorm.*", "ln_1.*", "always"),
    Line(_QKV, "attn.c_attn.*", "always"),
    Line("self_attention.linear_proj.*", "attn.c_proj.*", "always"),
    Line("pre_mlp_layernorm.*", "ln_2.*", "always"),
    Line("mlp.linear_fc1.*", "mlp.c_fc.*", "always"),
    Line("mlp.linear_fc2.*", "mlp.c_proj.*", "always"),
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
        megatron: its name.
        hf: names of the tensors that it becomes.
        tokens: rows without those that pad Megatron's vocabulary, which become zeros.
        padded: rows with them.
        heads: of the fused projection and its bias.
        transposed: stored as one transposed tensor.
    """

    megatron: str
    hf: tuple[str, ...]
    tokens: int | None = None
    padded: int = 0
    heads: Heads | None = None
    transposed: bool = False

    def to_hf(self, weight: Tensor) -> list[Tensor]:
        """The tensors of Hugging Face."""
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
        return pad(weight, (0, 0, 0, self.padded - len(weight))) if self.padded else weight


def weight_table(config: Mapping[str, Any], args: argparse.Namespace) -> list[WeightRow]:
    """All weights of a model, the embedding first.

    `args` are a run's arguments, `config` is what `to_config` returns for them.
    """
    is_gpt2 = config["model_type"] == GPT2
    vocabulary = (config["vocab_size"], args.padded_vocab_size)
    embedding = "transformer.wte.weight" if is_gpt2 else "model.embed_tokens.weight"
    table = [WeightRow("embedding.word_embeddings.weight", (embedding,), *vocabulary)]
    table += _gpt2(config) if is_gpt2 else _llama_like(config, args)
    if not config["tie_word_embeddings"]:
        table.append(WeightRow("output_layer.weight", ("lm_head.weight",), *vocabulary))
    return table


def _llama_like(config: Mapping[str, Any], args: argparse.Namespace) -> Iterator[WeightRow]:
    groups = config["num_key_value_heads"]
    heads = Heads(groups, config["num_attention_heads"] // groups, config["head_dim"])
    biases: Collection[str] = ("qkv",) if args.add_qkv_bias else ()
    if args.add_bias_linear:
        biases = ("qkv", "linear")
    rows = functools.partial(_rows, heads, biases)
    is_mixtral = config["model_type"] == MIXTRAL
    block = "block_sparse_moe" if is_mixtral else "mlp"
    mlp = _MIXTRAL_MLP if is_mixtral else _LLAMA_MLP
    layer = [line for line in _LLAMA_LAYER if args.qk_layernorm or "_norm" not in line.hf]
    for number in range(config["num_hidden_layers"]):
        ours, theirs = f"decoder.layers.{number}.", f"model.layers.{number}."
        yield from rows(layer, ours, theirs)
        if not args.num_experts:
            yield from rows(mlp, f"{ours}mlp.", f"{theirs}mlp.")
            continue
        yield WeightRow(f"{ours}mlp.router.weight", (f"{theirs}{block}.gate.weight",))
        for expert in range(args.num_experts):
            local = f"{ours}mlp.experts.local_experts.{expert}."
            yield from rows(mlp, local, f"{theirs}{block}.experts.{expert}.")
    yield WeightRow("decoder.final_layernorm.weight", ("model.norm.weight",))


def _gpt2(config: Mapping[str, Any]) -> Iterator[WeightRow]:
    heads = Heads(config["n_head"], 1, config["n_embd"] // config["n_head"])
    rows = functools.partial(_rows, heads, ("always",), transposed=True)
    yield WeightRow("embedding.position_embeddings.weight", ("transformer.wpe.weight",))
    for number in range(config["n_layer"]):
        yield from rows(_GPT2_LAYER, f"decoder.layers.{number}.", f"transformer.h.{number}.")
    for kind in ("weight", "bias"):
        yield WeightRow(f"decoder.final_layernorm.{kind}", (f"transformer.ln_f.{kind}",))


def _rows(
    heads: Heads,
    biases: Collection[str],
    lines: Iterable[Line],
    megatron: str,
    hf: str,
    *,
    transposed: bool = False,
) -> Iterator[WeightRow]:
    """The rows of a table's lines, whose names get these prefixes.

    `biases` are the settings of `Line.bias` that are on.
    """
    for line in lines:
        for kind in ("weight", "bias") if line.bias in biases else ("weight",):
            ours = [megatron + name for name in line.megatron.replace("*", kind).split()]
            theirs = [hf + name for name in line.hf.replace("*", kind).split()]
            if line.megatron == _QKV:
                yield WeightRow(ours[0], tuple(theirs), heads=heads, transposed=transposed)
                continue
            for name, hf_name in zip(ours, theirs, strict=True):
                yield WeightRow(name, (hf_name,), transposed=transposed)


def check_names(where: Path, found: Set[str], wanted: Set[str]) -> None:
    """Raise a UserError unless exactly the wanted weights were found."""
    if lacking := wanted - found:
        raise UserError(f"{where} lacks {some(lacking, shown=3)}")
    if others := found - wanted:
        raise UserError(f"{where} has, without a counterpart, {some(others, shown=3)}")
