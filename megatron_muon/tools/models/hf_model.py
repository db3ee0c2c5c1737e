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
        config: content of config.json, without the dtype.
        tensors: its weights by name, each with memory of its own.
        tokenizer: one of transformers, or None.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    tokenizer: Any


def counterpart(checkpoint: Weights, tokenizer: str | None, dtype: torch.dtype) -> Counterpart:
    """A checkpoint as a model of Hugging Face, with this tokenizer or else the run's.

    Takes the weights out of `checkpoint`, so that both need little more memory than one.

    Raises:
        UserError: a setting or a weight has no counterpart, or the tokenizer has too many tokens.
    """
    args = checkpoint.args
    built = tokenizer_of(args, given=tokenizer)
    # With a tokenizer of Hugging Face Megatron saves only the padded size.
    size = None if built is None else len(built)
    config = to_config(args, vocab=args.vocab_size or size)
    if size is not None and size > config["vocab_size"]:
        raise UserError(
            f"the tokenizer has {size} tokens, the model {config['vocab_size']}; give its own by"
            " --tokenizer DIR"
        )
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        config[name] = getattr(built, name, None)
    table = mapping.weight_table(config, args)
    weights = checkpoint.tensors
    mapping.check_names(checkpoint.folder, weights.keys(), {row.megatron for row in table})
    tensors = {}
    for row in table:
        parts = row.to_hf(weights.pop(row.megatron))
        for name, part in zip(row.hf, parts, strict=True):
            tensors[name] = part.to(dtype, copy=True, memory_format=torch.contiguous_format)
    return Counterpart(config, tensors, built)


def from_folder(loader: Any, place: Path | str) -> Any:
    """An object that a class of transformers loads from a folder or by a name.

    Code in the folder is never run.
    """
    try:
        return loader.from_pretrained(str(place), trust_remote_code=False)
    except Exception as error:  # damaged files raise anything
        version = transformers.__version__
        raise UserError(
            f"{place} cannot be loaded by transformers {version}: {reason_of(error)}"
        ) from error


def tokenizer_of(args: argparse.Namespace, *, given: str | None = None) -> Any:
    """The given tokenizer, or one with the ids of a run's; None, with a warning, if none has them.

    In training the byte-level one of `data prepare` is a NullTokenizer of its size.
    """
    kind, size = args.tokenizer_type, args.vocab_size
    if given is None and kind == HUGGING_FACE:
        given = args.tokenizer_model
    if given is not None:
        return from_folder(transformers.AutoTokenizer, given)
    if (kind, size) == (IN_TRAINING, BYTE_LEVEL_VOCAB_SIZE):
        return _byte_tokenizer()
    print(
        f"megatron-muon: warning: transformers has no --tokenizer-type {kind} with {size} tokens;"
        " give one with the same ids by --tokenizer DIR",
        file=sys.stderr,
    )
    return None


def is_byte_level(tokenizer: Any) -> bool:
    """True for the byte-level tokenizer of this module."""
    return (tokenizer.eos_token, tokenizer.eos_token_id) == (END_OF_DOCUMENT, 256)


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
