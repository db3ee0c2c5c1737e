"""A checkpoint of Megatron as a model of Hugging Face: to write (`counterpart`) and in memory (`load`).

Its tokenizer is one of `transformers` with the same ids for every text.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers.convert_slow_tokenizer import bytes_to_unicode

from megatron_muon.errors import UserError, reason_of
from megatron_muon.megatron.data.corpus import OutputPaths
from megatron_muon.megatron.data.tokenizers import (
    BYTE_LEVEL,
    BYTE_LEVEL_VOCAB_SIZE,
    HUGGING_FACE,
    IN_TRAINING,
    TokenizerSpec,
)
from megatron_muon.tools.models import mapping
from megatron_muon.tools.models.architecture import Architecture, from_args, to_config
from megatron_muon.tools.models.checkpoint import Weights

_END_OF_DOCUMENT = "<eod>"

_REMEDY = "give one with the same ids, a folder or name that transformers loads: --tokenizer DIR"

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
    spec = spec_of(args)
    vocab = args.vocab_size or spec.vocab_size
    if vocab is None and spec.tokenizer_type == HUGGING_FACE:  # Megatron saves the padded size alone
        with contextlib.suppress(UserError):
            vocab = len(build_tokenizer(spec))
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
    built = build_tokenizer(spec if tokenizer is None else TokenizerSpec(HUGGING_FACE, tokenizer))
    _check_tokens(built, model.vocab)
    return Source(weights, model, rules, built)


def _check_tokens(tokenizer: Any, vocab: int) -> None:
    if len(tokenizer) > vocab:
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens, the model {vocab}; give its own by --tokenizer DIR"
        )


def dtype_of(asked: str, trained_in: torch.dtype, device: str = "") -> torch.dtype:
    """The dtype of a `--dtype`. On a CPU "auto" is float32: many multiply bfloat16 slowly."""
    auto = torch.float32 if device == "cpu" else trained_in
    named: torch.dtype = auto if asked == "auto" else getattr(torch, asked)
    return named


class Loaded(NamedTuple):
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
        model = _in_memory(source, dtype_of(args.dtype, source.weights.trained_in, device), untrained=untrained)
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
    state = {name: part for rule in source.rules for name, part in rule.tensors(source.read(rule), dtype)}
    return kind.from_pretrained(None, config=config, state_dict=state)


def _exported(args: argparse.Namespace, device: str, *, untrained: bool) -> tuple[Any, Any]:
    """The model and the tokenizer of a folder of Hugging Face, whose own code is never run."""
    place, auto = str(args.checkpoint), transformers.AutoModelForCausalLM
    try:
        config = transformers.AutoConfig.from_pretrained(place, trust_remote_code=False)
        dtype = dtype_of(args.dtype, getattr(config, "dtype", None) or torch.float32, device)
        if untrained:
            model = auto.from_config(config, trust_remote_code=False).to(dtype)
        else:
            model = auto.from_pretrained(place, dtype=dtype, trust_remote_code=False)
        return model, transformers.AutoTokenizer.from_pretrained(args.tokenizer or place, trust_remote_code=False)
    except Exception as error:  # whatever a damaged folder leads to
        version = transformers.__version__
        raise UserError(f"{place} cannot be loaded by transformers {version}: {reason_of(error)}") from error


def spec_of(args: argparse.Namespace) -> TokenizerSpec:
    """The tokenizer that made a run's data: of a NullTokenizer the manifest's, else by its size the byte-level one."""
    spec = TokenizerSpec(args.tokenizer_type, args.tokenizer_model, args.vocab_size)
    if spec.tokenizer_type != IN_TRAINING:
        return spec
    for prefix in args.data_path or []:  # and weights of a blend, of which there is no manifest
        if manifest := OutputPaths(Path(prefix)).read_manifest():
            return manifest.settings.tokenizer
    return TokenizerSpec(BYTE_LEVEL, vocab_size=args.vocab_size) if args.vocab_size == BYTE_LEVEL_VOCAB_SIZE else spec


def build_tokenizer(spec: TokenizerSpec) -> Any:
    """A tokenizer of `transformers`; a `UserError` where there is none for this one, or it cannot be loaded."""
    if spec.tokenizer_type == BYTE_LEVEL:
        return _of_bytes(spec.vocab_size or BYTE_LEVEL_VOCAB_SIZE)
    if spec.tokenizer_type != HUGGING_FACE:
        raise UserError(f"--tokenizer-type {spec.tokenizer_type} has no counterpart in transformers; {_REMEDY}")
    try:
        return transformers.AutoTokenizer.from_pretrained(spec.model, trust_remote_code=False)
    except Exception as error:  # each kind of tokenizer has exceptions of its own
        raise UserError(f"the tokenizer {spec.model} cannot be loaded ({reason_of(error)}); {_REMEDY}") from error


def is_of_bytes(tokenizer: Any) -> bool:
    """Whether a tokenizer is the byte-level one of this module: ids below 256 are bytes."""
    return bool(tokenizer.eos_token == _END_OF_DOCUMENT) and tokenizer.convert_tokens_to_ids(["A", "z"]) == [65, 122]


def _of_bytes(vocabulary: int) -> Any:
    """The ids of megatron-core's `ByteLevelTokenizer`: a byte is its own id, the last one ends a document.

    A BPE without merges over the characters that stand for bytes; what looks like a special token in a text is text.
    """
    vocab = {character: byte for byte, character in bytes_to_unicode().items()}
    vocab |= {f"<unused{number}>": number for number in range(256, vocabulary - 1)}
    vocab[_END_OF_DOCUMENT] = vocabulary - 1
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=_END_OF_DOCUMENT,
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )
