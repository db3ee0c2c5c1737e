"""A model's sizes from the flags of an experiment file, without Megatron: what `megatron-muon plan` needs of them.

Flags that say nothing about matrices or ranks are passed over; those that make a model whose matrices are not known
here are refused. Defaults are Megatron's (megatron.training.arguments.validate_args).
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_muon.errors import UserError
from megatron_muon.megatron.flags.config_file import load_config
from megatron_muon.megatron.flags.refusals import check_heads
from megatron_muon.planning.model_layout import UNITS, ModelSizes, ParallelSizes

UNKNOWN_MODELS = (
    "--multi-latent-attention",
    "--experimental-attention-variant",
    "--hybrid-layer-pattern",
    "--hybrid-override-pattern",
    "--heterogeneous-layers-config-path",
    "--heterogeneous-layers-config-encoded-json",
    "--mtp-num-layers",
    "--spec",
    "--use-checkpoint-args",
    "--yaml-cfg",
)
"""Flags of models whose matrices cannot be listed from sizes alone, or not yet."""

_PATTERN_PART = re.compile(r"[\[\]()+*,\s0-9]+\Z")


@dataclass(frozen=True)
class Flags:
    """Flags and their values, and the file that they stand in."""

    path: Path
    values: Mapping[str, tuple[str, ...]]

    def has(self, *flags: str) -> bool:
        """Whether one of the flags is given."""
        return any(flag in self.values for flag in flags)

    def text(self, flag: str, default: str) -> str:
        """The one value of a flag."""
        if flag not in self.values:
            return default
        if len(self.values[flag]) != 1:
            raise UserError(f"{self.path}: {flag} needs one value, found {' '.join(self.values[flag]) or 'none'}")
        return self.values[flag][0]

    def number(self, flag: str, default: int | None = None) -> int:
        """The value of a flag as a positive whole number; `default` where it is missing.

        Raises:
            UserError: missing without default, or no positive whole number.
        """
        if flag not in self.values:
            if default is None:
                raise UserError(f"{self.path}: has no {flag}, which the matrices' shapes depend on; add it")
            return default
        text = self.text(flag, "")
        if not text.isdecimal() or int(text) < 1:
            raise UserError(f"{self.path}: {flag} must be a positive whole number, found {text!r}")
        return int(text)


def read_flags(path: str | Path) -> Flags:
    """The flags of an experiment file. Placeholders such as `${DATA_PATH}` may stay unset: paths do not matter here."""
    config = load_config(path, _Environment(os.environ))
    return Flags(config.path, dict(config.flags))


class _Environment(dict[str, str]):
    """An environment in which every variable exists; one that does not stands for itself."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> str:
        return f"${{{name}}}"


def model_sizes(flags: Flags) -> ModelSizes:
    """The sizes of the model that the flags describe.

    Raises:
        UserError: a size is missing or no number, or the model is of a kind that is not known here.
    """
    if unknown := next((flag for flag in UNKNOWN_MODELS if flags.has(flag)), None):
        raise UserError(
            f"{flags.path}: {unknown} makes a model whose matrices are not known on paper; capture a run's layout with "
            "--muon-dump-layout FILE.json and plan that with --layout FILE.json"
        )
    layers, hidden, heads = (flags.number(f"--{name}") for name in ("num-layers", "hidden-size", "num-attention-heads"))
    gated = flags.has("--swiglu", "--quick-geglu")
    ffn = flags.number("--ffn-hidden-size", int(4 * hidden * 2 / 3 / 64) * 64 if flags.has("--swiglu") else 4 * hidden)
    if not flags.has("--kv-channels") and hidden % heads:
        raise UserError(
            f"{flags.path}: --hidden-size {hidden} is no multiple of --num-attention-heads {heads}; set --kv-channels"
        )
    check_heads(split_qkv=not flags.has("--muon-no-split-qkv"), split_heads=flags.has("--muon-split-heads"))
    experts = flags.number("--num-experts", 0)
    biased = not flags.has("--disable-bias-linear")
    return ModelSizes(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=flags.number("--num-query-groups", 1) if flags.has("--group-query-attention") else heads,
        kv_channels=flags.number("--kv-channels", hidden // heads),
        swiglu=gated,
        bias=biased,
        qkv_bias=flags.has("--add-qkv-bias"),
        layer_norm_bias=flags.text("--normalization", "LayerNorm") == "LayerNorm",
        qk_layernorm=flags.has("--qk-layernorm"),
        attention_output_gate=flags.has("--attention-output-gate"),
        num_experts=experts,
        moe_layers=tuple(_moe_layers(flags, layers)) if experts else (),
        moe_ffn_hidden_size=flags.number("--moe-ffn-hidden-size", ffn) if experts else 0,
        moe_shared_expert_intermediate_size=flags.number("--moe-shared-expert-intermediate-size", 0),
        moe_shared_expert_gate=flags.has("--moe-shared-expert-gate"),
        moe_latent_size=flags.number("--moe-latent-size", 0),
        moe_grouped_gemm=flags.has("--moe-grouped-gemm"),
        padded_vocab_size=_padded_vocab_size(flags),
        untied_output=flags.has("--untie-embeddings-and-output-weights"),
        split_qkv=not flags.has("--muon-no-split-qkv"),
        split_gated_mlp=flags.has("--muon-split-gated-mlp"),
        split_heads=flags.has("--muon-split-heads"),
        exclude=tuple(flags.values.get("--muon-exclude", ())),
    )


def parallel_sizes(flags: Flags, world_size: int) -> ParallelSizes:
    """How the flags divide `world_size` ranks.

    Raises:
        UserError: the sizes do not divide the ranks, or are not supported under Megatron-FSDP.
    """
    if flags.number("--pipeline-model-parallel-size", 1) > 1:
        raise UserError(
            f"{flags.path}: --pipeline-model-parallel-size does not work under Megatron-FSDP; leave it at 1"
        )
    outer = flags.text("--outer-dp-sharding-strategy", "no_shard")
    if outer != "no_shard":
        raise UserError(f"{flags.path}: --outer-dp-sharding-strategy {outer} cannot be planned; use no_shard")
    tensor = flags.number("--tensor-model-parallel-size", 1)
    return ParallelSizes(
        world_size=world_size,
        tensor=tensor,
        expert=flags.number("--expert-model-parallel-size", 1),
        expert_tensor=flags.number("--expert-tensor-parallel-size", tensor),
        context=flags.number("--context-parallel-size", 1),
        instances=flags.number("--num-distributed-optimizer-instances", 1),
    )


def whole_over_tp(flags: Flags) -> bool:
    """Whether owners put matrices together over tensor-parallel ranks.

    Raises:
        UserError: a `--muon-tp-mode` that does not exist.
    """
    mode = flags.text("--muon-tp-mode", "blockwise")
    if mode not in ("blockwise", "duplicated", "distributed"):
        raise UserError(f"{flags.path}: --muon-tp-mode {mode} does not exist; use blockwise, duplicated or distributed")
    return mode != "blockwise"


def sharding_strategy(flags: Flags) -> str:
    """The data-parallel sharding strategy."""
    return flags.text("--data-parallel-sharding-strategy", UNITS)


def bucket_size(flags: Flags, dense_ranks: int) -> int | None:
    """Elements after which a bucket outside of layers ends; None for no limit.

    Source: megatron.training.training.resolve_ddp_bucket_size.
    """
    if not flags.has("--overlap-grad-reduce"):
        return None
    return flags.number("--ddp-bucket-size", max(40_000_000, 1_000_000 * dense_ranks))


def _padded_vocab_size(flags: Flags) -> int:
    size = flags.number("--vocab-size", 0)
    multiple = flags.number("--make-vocab-size-divisible-by", 128) * flags.number("--tensor-model-parallel-size", 1)
    return -(-size // multiple) * multiple


def _moe_layers(flags: Flags, layers: int) -> Iterator[bool]:
    """Which layers are mixtures of experts: every n-th from the first on, or a pattern such as ([0]*3+[1]*58)."""
    text = (
        flags.text("--moe-layer-freq", "1")
        if len(flags.values.get("--moe-layer-freq", ("1",))) == 1
        else (f"[{','.join(flags.values['--moe-layer-freq'])}]")
    )
    pattern: object = None
    if _PATTERN_PART.match(text):
        try:
            pattern = _evaluate(ast.parse(text.strip(), mode="eval").body)
        except (SyntaxError, ValueError):
            pattern = None
    if isinstance(pattern, int) and pattern > 0:
        yield from (layer % pattern == 0 for layer in range(layers))
    elif isinstance(pattern, list) and all(entry in (0, 1) for entry in pattern):
        yield from map(bool, pattern)
    else:
        raise UserError(f"{flags.path}: --moe-layer-freq must be a number or a pattern as [0]*1+[1]*3, found {text!r}")


def _evaluate(node: ast.expr) -> int | list[int]:
    """The value of an expression of whole numbers, lists, + and *."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.List):
        entries = [_evaluate(entry) for entry in node.elts]
        if all(isinstance(entry, int) for entry in entries):
            return [entry for entry in entries if isinstance(entry, int)]
    if isinstance(node, ast.BinOp):
        left, right = _evaluate(node.left), _evaluate(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Mult) and isinstance(left, list) and isinstance(right, int) and right < 10_000:
            return left * right
    raise ValueError("neither a number nor a pattern")
