"""A checkpoint of Megatron as a model of Hugging Face: its architecture, its weights by rule, its tokenizer."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_muon.checkpoint import files
from megatron_muon.errors import UserError
from megatron_muon.megatron.data.tokenizers import HUGGING_FACE, TokenizerSpec
from megatron_muon.tools.models import tokenizer as tokenizers
from megatron_muon.tools.models.architecture import Architecture, from_args
from megatron_muon.tools.models.folder import converted
from megatron_muon.tools.models.hf_config import to_config
from megatron_muon.tools.models.mapping import Rule, rules
from megatron_muon.tools.models.weights import Weights

_SHOWN = 4


@dataclass(frozen=True)
class Source:
    """A checkpoint that has a counterpart.

    Attributes:
        tokenizer: which one; see `models.tokenizer`.
    """

    weights: Weights
    model: Architecture
    rules: list[Rule]
    tokenizer: TokenizerSpec

    def read(self, rule: Rule) -> Tensor:
        """The weight of a rule; zeros where Megatron has none."""
        return self.weights[rule.megatron] if rule.megatron else torch.zeros(rule.shape)

    def state_dict(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """All tensors, by the names of Hugging Face."""
        return {name: part for rule in self.rules for name, part in converted(rule, self.read(rule), dtype)}

    def config(self, dtype: torch.dtype, tokenizer: Any = None) -> dict[str, Any]:
        """The content of config.json."""
        ids = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id", None) for kind in ("bos", "eos", "pad")}
        return to_config(self.model) | ids | {"torch_dtype": str(dtype).removeprefix("torch.")}


def open_weights(directory: Path, *, verify: bool) -> Weights:
    """Opens a checkpoint, `verify` with its checksums; no tensor is read.

    Raises:
        UserError: it cannot be read.
    """
    import megatron.core  # noqa: F401  # tells torch which of its classes a checkpoint may hold

    if (directory / "config.json").is_file():
        raise UserError(f"{directory} is a folder of Hugging Face already; give a checkpoint, or import it first")
    return Weights(files.find(directory), verify=verify)


def counterpart(weights: Weights) -> Source:
    """A checkpoint as a model of Hugging Face.

    Raises:
        UserError: something of the model has no counterpart.
    """
    args = weights.args
    spec = tokenizers.spec_of(args)
    vocab = getattr(args, "vocab_size", None) or tokenizers.size_of(spec)
    if vocab is None:
        print(
            f"megatron-muon: warning: how many tokens the vocabulary has is not known ({spec.tokenizer_type} "
            f"{spec.model} cannot be loaded): the rows that pad it to {args.padded_vocab_size} are kept",
            file=sys.stderr,
        )
    model = from_args(args, vocab=vocab)
    table = rules(model)
    _check(weights, table)
    return Source(weights, model, table, spec)


def tokenizer_of(source: Source, asked: str | None) -> Any:
    """The tokenizer that was asked for, by default the run's; None for "none"."""
    if asked == "none":
        return None
    spec = source.tokenizer if asked is None else TokenizerSpec(HUGGING_FACE, asked)
    built = tokenizers.build(spec)
    check_tokens(built, source.model.vocab)
    return built


def check_tokens(tokenizer: Any, vocab: int) -> None:
    """Refuses a tokenizer with more tokens than a model has."""
    if len(tokenizer) > vocab:
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens, the model {vocab}; give its own by --tokenizer DIR"
        )


def _check(weights: Weights, table: list[Rule]) -> None:
    """Refuses weights that no rule takes, that a rule misses, or of another shape."""
    wanted = {rule.megatron: rule.shape for rule in table if rule.megatron}
    found = {
        "has weights without a counterpart": sorted(weights.keys() - wanted.keys()),
        "lacks weights": sorted(wanted.keys() - weights.keys()),
        "has weights of another shape than its arguments say": sorted(
            name for name, shape in wanted.items() if name in weights and weights.shape(name) != shape
        ),
    }
    for what, names in found.items():
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            raise UserError(f"{weights.folder} {what}: {', '.join(names[:_SHOWN])}{more}")


def dtype_of(asked: str, auto: torch.dtype) -> torch.dtype:
    """The dtype of a `--dtype`."""
    named: torch.dtype = auto if asked == "auto" else getattr(torch, asked)
    return named
