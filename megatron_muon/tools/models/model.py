"""A checkpoint of Megatron as a model of Hugging Face: to write (`counterpart`) and in memory (`load`).

Its tokenizer is one of `transformers` with the same ids for every text.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers.convert_slow_tokenizer import bytes_to_unicode

from megatron_muon.errors import UserError, reason_of
from megatron_muon.megatron.data.tokenizers import BYTE_LEVEL_VOCAB_SIZE, HUGGING_FACE, IN_TRAINING
from megatron_muon.tools.models import mapping
from megatron_muon.tools.models.architecture import to_config
from megatron_muon.tools.models.checkpoint import Weights

_END_OF_DOCUMENT = "<eod>"

_LONGEST = 2048
"""Most tokens of a sample for an exported folder, which does not say how long training's were."""


class Source(NamedTuple):
    """A checkpoint that has a counterpart: config.json but for the dtype, and a tokenizer of transformers or None."""

    weights: Weights
    config: dict[str, Any]
    rules: list[mapping.Rule]
    tokenizer: Any

    def read(self, rule: mapping.Rule) -> Tensor:
        """The weight of a rule; zeros where Megatron has none."""
        return self.weights.read(rule.megatron) if rule.megatron else torch.zeros(rule.shape)


def counterpart(weights: Weights, tokenizer: str | None) -> Source:
    """A checkpoint as a model of Hugging Face, with this tokenizer, by default the run's if transformers has it.

    Raises:
        UserError: something of the model has no counterpart, or its tokenizer does not fit.
    """
    args, own, warning = weights.args, None, ""
    try:
        own = tokenizer_of(args)
    except UserError as error:
        warning = f"without a tokenizer: {error}; give one with the same ids by --tokenizer DIR"
    built = own if tokenizer is None else from_folder(transformers.AutoTokenizer, tokenizer)
    if built is None:
        print(f"megatron-muon: warning: {warning}", file=sys.stderr)
    # With a tokenizer of Hugging Face Megatron saves the padded size alone.
    config = to_config(args, vocab=args.vocab_size or (None if own is None else len(own)))
    _check_tokens(built, config["vocab_size"])
    rules = mapping.rules(config, args)
    mapping.check(weights.folder, weights.shapes, {rule.megatron: rule.shape for rule in rules if rule.megatron})
    config |= {name: getattr(built, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return Source(weights, config, rules, built)


def _check_tokens(tokenizer: Any, vocab: int) -> None:
    if tokenizer is not None and len(tokenizer) > vocab:
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens, the model {vocab}; give its own by --tokenizer DIR"
        )


class Loaded(NamedTuple):
    """A model of transformers; `sequence_length` is training's, or the most that an exported folder takes."""

    model: Any
    tokenizer: Any
    where: Path
    sequence_length: int


def load(args: argparse.Namespace, *, untrained: bool = False) -> Loaded:
    """Loads what a command's arguments name, to CUDA where it is there; `untrained`, with random weights instead.

    Raises:
        UserError: as `Weights` and `counterpart`; or there is no tokenizer.
    """
    transformers.utils.logging.set_verbosity_error()  # its warnings are about what nobody here has chosen
    transformers.utils.logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    directory: Path = args.checkpoint
    torch.manual_seed(0)  # of an untrained model
    source = None
    if (directory / "config.json").is_file():
        config, where = from_folder(transformers.AutoConfig, directory), directory
        length, trained_in = min(config.max_position_embeddings, _LONGEST), config.dtype or torch.float32
        tokenizer = from_folder(transformers.AutoTokenizer, args.tokenizer or directory)
        _check_tokens(tokenizer, config.vocab_size)
    else:
        source = counterpart(Weights(directory, verify=not args.no_verify_checkpoint), args.tokenizer)
        weights, tokenizer = source.weights, source.tokenizer
        where, length, trained_in = weights.folder, weights.args.seq_length, weights.trained_in
        config = transformers.AutoConfig.for_model(**source.config)
    if tokenizer is None:
        raise UserError(f"text needs a tokenizer, and {where} has none; give one by --tokenizer DIR")
    dtype = trained_in if device == "cuda" else torch.float32  # many CPUs multiply bfloat16 slowly
    if untrained:
        model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False).to(dtype)
    elif source is None:
        model = from_folder(transformers.AutoModelForCausalLM, directory, dtype=dtype)
    else:
        state = {name: part for rule in source.rules for name, part in rule.tensors(source.read(rule), dtype)}
        kind = getattr(transformers, source.config["architectures"][0])
        model = kind.from_pretrained(None, config=config, state_dict=state)
    return Loaded(model.to(device).eval(), tokenizer, where, length)


def from_folder(loader: Any, place: Path | str, **how: Any) -> Any:
    """What a class of transformers loads from a folder or by a name; code that lies there is never run."""
    try:
        return loader.from_pretrained(str(place), trust_remote_code=False, **how)
    except Exception as error:  # whatever damaged files lead to
        version = transformers.__version__
        raise UserError(f"{place} cannot be loaded by transformers {version}: {reason_of(error)}") from error


def tokenizer_of(args: argparse.Namespace) -> Any:
    """A tokenizer of transformers with the ids of a run's; a `UserError` where there is none, or it cannot be loaded.

    In training the byte-level one of `data prepare` is a NullTokenizer of its size.
    """
    if args.tokenizer_type == HUGGING_FACE:
        return from_folder(transformers.AutoTokenizer, args.tokenizer_model)
    if args.tokenizer_type == IN_TRAINING and args.vocab_size == BYTE_LEVEL_VOCAB_SIZE:
        return _of_bytes()
    raise UserError(f"transformers has no --tokenizer-type {args.tokenizer_type} with {args.vocab_size} tokens")


def is_of_bytes(tokenizer: Any) -> bool:
    """Whether a tokenizer is the byte-level one of this module: ids below 256 are bytes."""
    return bool(tokenizer.eos_token == _END_OF_DOCUMENT) and tokenizer.convert_tokens_to_ids(["A", "z"]) == [65, 122]


def _of_bytes() -> Any:
    """The ids of megatron-core's `ByteLevelTokenizer`: a byte is its own id, the last one ends a document.

    A BPE without merges over the characters that stand for bytes; what looks like a special token in a text is text.
    """
    vocab = {character: byte for byte, character in bytes_to_unicode().items()} | {_END_OF_DOCUMENT: 256}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=_END_OF_DOCUMENT,
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )
