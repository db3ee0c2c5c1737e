"""A checkpoint of Megatron as a model of Hugging Face: to write (`counterpart`) and in memory (`load`)."""

from __future__ import annotations

import argparse
import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from megatron_muon.errors import UserError, reason_of
from megatron_muon.megatron.data.tokenizers import HUGGING_FACE, TokenizerSpec
from megatron_muon.tools.models import mapping
from megatron_muon.tools.models import tokenizer as tokenizers
from megatron_muon.tools.models.architecture import Architecture, to_config
from megatron_muon.tools.models.flags import from_args
from megatron_muon.tools.models.folder import converted
from megatron_muon.tools.models.weights import Weights

_LONGEST = 2048
"""Most tokens of a sample for an exported folder, which does not say how long training's were."""


@dataclass(frozen=True)
class Source:
    """A checkpoint that has a counterpart; `tokenizer` is one of transformers, None where none was asked for."""

    weights: Weights
    model: Architecture
    rules: list[mapping.Rule]
    tokenizer: Any

    def read(self, rule: mapping.Rule) -> Tensor:
        """The weight of a rule; zeros where Megatron has none."""
        return self.weights.read(rule.megatron) if rule.megatron else torch.zeros(rule.shape)

    def config(self, dtype: torch.dtype) -> dict[str, Any]:
        """The content of config.json."""
        ids = {name: getattr(self.tokenizer, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        return to_config(self.model) | ids | {"torch_dtype": str(dtype).removeprefix("torch.")}


def counterpart(weights: Weights, tokenizer: str | None) -> Source:
    """A checkpoint as a model of Hugging Face, with this tokenizer: by default the run's, or "none".

    Raises:
        UserError: something of the model or of its tokenizer has no counterpart.
    """
    args = weights.args
    spec = tokenizers.spec_of(args)
    vocab = args.vocab_size or spec.vocab_size
    if vocab is None and spec.tokenizer_type == HUGGING_FACE:  # Megatron saves the padded size alone
        with contextlib.suppress(UserError):
            vocab = len(tokenizers.build(spec))
    if vocab is None:
        print(
            f"megatron-muon: warning: how many tokens the vocabulary has is not known ({spec.tokenizer_type} "
            f"{spec.model} cannot be loaded): the rows that pad it to {args.padded_vocab_size} are kept",
            file=sys.stderr,
        )
    model = from_args(args, vocab=vocab)
    rules = mapping.rules(model)
    mapping.check(weights.folder, weights.shapes, {rule.megatron: rule.shape for rule in rules if rule.megatron})
    if tokenizer == "none":
        return Source(weights, model, rules, None)
    built = tokenizers.build(spec if tokenizer is None else TokenizerSpec(HUGGING_FACE, tokenizer))
    _check_tokens(built, model.vocab)
    return Source(weights, model, rules, built)


def _check_tokens(tokenizer: Any, vocab: int) -> None:
    if len(tokenizer) > vocab:
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens, the model {vocab}; give its own by --tokenizer DIR"
        )


def dtype_of(asked: str, auto: torch.dtype) -> torch.dtype:
    """The dtype of a `--dtype`."""
    named: torch.dtype = auto if asked == "auto" else getattr(torch, asked)
    return named


@dataclass(frozen=True)
class Loaded:
    """A model of transformers; `sequence_length` is training's, or the most that an exported folder takes."""

    model: Any
    tokenizer: Any
    where: Path
    sequence_length: int


def load(args: argparse.Namespace, *, untrained: bool = False) -> Loaded:
    """Loads what a command's arguments name; `untrained`, with random weights instead.

    Raises:
        UserError: as `Weights` and `counterpart`; or there is no tokenizer or no such device.
    """
    transformers.utils.logging.set_verbosity_error()  # its warnings are about what nobody here has chosen
    transformers.utils.logging.disable_progress_bar()
    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch finds no CUDA device here; use --device cpu")
    if args.tokenizer == "none":
        raise UserError("--tokenizer none: text needs one; give a folder that transformers loads")
    directory: Path = args.checkpoint
    torch.manual_seed(0)  # of an untrained model
    if not (directory / "config.json").is_file():
        source = counterpart(Weights(directory, verify=not args.no_verify_checkpoint), args.tokenizer)
        model = _in_memory(source, _dtype(args.dtype, source.weights.trained_in, device), untrained=untrained)
        where, length, tokenizer = source.weights.folder, source.weights.args.seq_length, source.tokenizer
    else:
        model, tokenizer = _exported(args, device, untrained=untrained)
        where, length = directory, min(model.config.max_position_embeddings, _LONGEST)
        _check_tokens(tokenizer, model.config.vocab_size)
    return Loaded(model.to(device).eval(), tokenizer, where, length)


def _in_memory(source: Source, dtype: torch.dtype, *, untrained: bool) -> Any:
    content = source.config(dtype)
    kind = getattr(transformers, content.pop("architectures")[0])
    config = transformers.AutoConfig.for_model(content.pop("model_type"), **content)
    if untrained:
        return kind(config).to(dtype)
    state = {name: part for rule in source.rules for name, part in converted(rule, source.read(rule), dtype)}
    return kind.from_pretrained(None, config=config, state_dict=state)


def _exported(args: argparse.Namespace, device: str, *, untrained: bool) -> tuple[Any, Any]:
    """The model and the tokenizer of a folder of Hugging Face, whose own code is never run."""
    place, auto = str(args.checkpoint), transformers.AutoModelForCausalLM
    try:
        config = transformers.AutoConfig.from_pretrained(place, trust_remote_code=False)
        dtype = _dtype(args.dtype, getattr(config, "dtype", None) or torch.float32, device)
        if untrained:
            model = auto.from_config(config, trust_remote_code=False).to(dtype)
        else:
            model = auto.from_pretrained(place, dtype=dtype, trust_remote_code=False)
        return model, transformers.AutoTokenizer.from_pretrained(args.tokenizer or place, trust_remote_code=False)
    except Exception as error:  # whatever a damaged folder leads to
        version = transformers.__version__
        raise UserError(f"{place} cannot be loaded by transformers {version}: {reason_of(error)}") from error


def _dtype(asked: str, trained_in: torch.dtype, device: str) -> torch.dtype:
    """On a CPU float32 unless asked otherwise: many multiply bfloat16 slowly."""
    return dtype_of(asked, torch.float32 if device == "cpu" else trained_in)
