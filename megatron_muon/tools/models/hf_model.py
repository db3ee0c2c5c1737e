"""A checkpoint of Megatron as a model and a tokenizer of Hugging Face."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers.convert_slow_tokenizer import bytes_to_unicode

from megatron_muon.errors import UserError, reason_of
from megatron_muon.megatron.data.tokenizers import BYTE_LEVEL_VOCAB_SIZE, HUGGING_FACE, IN_TRAINING
from megatron_muon.tools.models import mapping
from megatron_muon.tools.models.architecture import to_config
from megatron_muon.tools.models.weights import Weights

END_OF_DOCUMENT = "<eod>"


@dataclass(frozen=True)
class Counterpart:
    """A checkpoint as a model of Hugging Face.

    Attributes:
        weights: of the checkpoint.
        config: content of config.json, without the dtype.
        table: the weights' names and forms.
        tokenizer: one of transformers, or None.
    """

    weights: Weights
    config: dict[str, Any]
    table: list[mapping.WeightRow]
    tokenizer: Any

    def read(self, row: mapping.WeightRow) -> Tensor:
        """The weight of a row; zeros where Megatron has none."""
        return self.weights.read(row.megatron) if row.megatron else torch.zeros(row.shape)


def counterpart(weights: Weights, tokenizer: str | None) -> Counterpart:
    """A checkpoint as a model of Hugging Face, with this tokenizer or else the run's.

    Raises:
        UserError: a setting or a weight has no counterpart, or the tokenizer has too many tokens.
    """
    args = weights.args
    try:
        own = tokenizer_of(args)
    except UserError as error:
        own = None
        warning = f"without a tokenizer: {error}; give one with the same ids by --tokenizer DIR"
        if tokenizer is None:
            print(f"megatron-muon: warning: {warning}", file=sys.stderr)
    built = own if tokenizer is None else from_folder(transformers.AutoTokenizer, tokenizer)
    # With a tokenizer of Hugging Face Megatron saves only the padded size.
    config = to_config(args, vocab=args.vocab_size or (None if own is None else len(own)))
    check_tokens(built, config["vocab_size"])
    table = mapping.weight_table(config, args)
    wanted = {row.megatron: row.shape for row in table if row.megatron}
    mapping.check_shapes(weights.folder, weights.shapes, wanted)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        config[name] = getattr(built, name, None)
    return Counterpart(weights, config, table, built)


def check_tokens(tokenizer: Any, vocab: int) -> None:
    """Raise a UserError if a tokenizer has more tokens than the model."""
    if tokenizer is not None and len(tokenizer) > vocab:
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens, the model {vocab}; give its own by"
            " --tokenizer DIR"
        )


def from_folder(loader: Any, place: Path | str, **options: Any) -> Any:
    """An object that a class of transformers loads from a folder or by a name.

    Code in the folder is never run.
    """
    try:
        return loader.from_pretrained(str(place), trust_remote_code=False, **options)
    except Exception as error:  # damaged files raise anything
        version = transformers.__version__
        raise UserError(
            f"{place} cannot be loaded by transformers {version}: {reason_of(error)}"
        ) from error


def tokenizer_of(args: argparse.Namespace) -> Any:
    """A tokenizer of transformers with the ids of a run's.

    In training the byte-level one of `data prepare` is a NullTokenizer of its size.

    Raises:
        UserError: transformers has none, or cannot load it.
    """
    if args.tokenizer_type == HUGGING_FACE:
        return from_folder(transformers.AutoTokenizer, args.tokenizer_model)
    if args.tokenizer_type == IN_TRAINING and args.vocab_size == BYTE_LEVEL_VOCAB_SIZE:
        return _byte_tokenizer()
    raise UserError(
        f"transformers has no --tokenizer-type {args.tokenizer_type} with {args.vocab_size} tokens"
    )


def is_byte_level(tokenizer: Any) -> bool:
    """True for the byte-level tokenizer of this module, whose ids below 256 are bytes."""
    ids = tokenizer.convert_tokens_to_ids(["A", "z"])
    return bool(tokenizer.eos_token == END_OF_DOCUMENT) and ids == [65, 122]


def _byte_tokenizer() -> Any:
    """A tokenizer with the ids of megatron-core's `ByteLevelTokenizer`: bytes, and 256 as the end.

    It is a BPE without merges over the characters that stand for bytes. Text that looks like a
    special token is text.
    """
    vocab = {character: byte for byte, character in bytes_to_unicode().items()}
    vocab[END_OF_DOCUMENT] = 256
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_DOCUMENT,
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )
